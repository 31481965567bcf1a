"""Writing: prefill and decode on the seam cache; row-wise reducers ride along."""

from jaxhal.generation.requests import Generated as Generated
from jaxhal.generation.requests import StreamedToken as StreamedToken
from jaxhal.generation.requests import generate as generate
from jaxhal.generation.requests import stream as stream
from jaxhal.generation.sampling import GREEDY as GREEDY
from jaxhal.generation.sampling import Sampling as Sampling
from jaxhal.generation.steps import prefill as prefill
from jaxhal.generation.steps import step as step
