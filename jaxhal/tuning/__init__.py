"""Fine-tuning the reader itself to tell hallucinated from grounded answers.

The last token's hidden state goes through a linear head; what is learned beside the
head is a low-rank addition to some projections, or every weight.  The baseline "LLM
fine-tuning" of Hu et al., LRP4RAG, 2024, section 4.3.
"""

from jaxhal.tuning.settings import PUBLISHED as PUBLISHED
from jaxhal.tuning.settings import Tuning as Tuning
from jaxhal.tuning.training import fit as fit
from jaxhal.tuning.tuned import Tuned as Tuned
from jaxhal.tuning.tuned import load as load
