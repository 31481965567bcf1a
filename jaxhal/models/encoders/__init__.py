"""Text encoders: embeddings, classes and token states of texts of any length."""

from jaxhal.models.encoders.encoding import bertscores as bertscores
from jaxhal.models.encoders.encoding import classify as classify
from jaxhal.models.encoders.encoding import embed as embed
from jaxhal.models.encoders.encoding import kept_encoder as kept_encoder
from jaxhal.models.encoders.encoding import token_states as token_states
from jaxhal.models.encoders.text_encoder import load_encoder as load_encoder
