"""Fine-tuning the reader itself to tell hallucinated from grounded answers.

The last token's hidden state goes through a linear head; what is learned beside the
head is a low-rank addition to some projections, or every weight.  Unlike a detector,
which decides on what a frozen reader shows, this costs a forward and a backward pass an
answer and epoch.

References:
  Hu et al., "LRP4RAG: Detecting Hallucinations in Retrieval-Augmented Generation via
  Layer-wise Relevance Propagation", 2024, section 4.3, baseline "LLM fine-tuning".
"""

from jaxhal.tuning.settings import PUBLISHED as PUBLISHED
from jaxhal.tuning.settings import Tuning as Tuning
from jaxhal.tuning.training import fit as fit
from jaxhal.tuning.tuned import Tuned as Tuned
from jaxhal.tuning.tuned import load as load
