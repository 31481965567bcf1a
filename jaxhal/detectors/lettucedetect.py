"""Classifiers of an answer's tokens that others trained: LettuceDetect and its kin.

Kovács and Recski, `LettuceDetect <https://arxiv.org/abs/2502.17125>`_, 2025.
"""

import dataclasses
from typing import Any

import numpy as np
from jaxtyping import Float, Int

from jaxhal.detectors.base import Detector, Features, factory, measured, on_tokens
from jaxhal.io.checks import at_least
from jaxhal.models.encoders.encoding import kept_encoder, token_probabilities
from jaxhal.models.encoders.text_encoder import Framed
from jaxhal.reading.bulk import Bulk, OfTokens
from jaxhal.types import Example

# The longest texts that LettuceDetect's models were trained on, in tokens.
TRAINED = 4096
# As its models read a question with one passage, and a text that was summarised.
ANSWERED = """\
Briefly answer the following question:
{question}
Bear in mind that your response should be strictly based on the following 1 passages:
passage 1: {context}
In case the passages do not contain the necessary information to answer the question, \
please reply with: "Unable to answer based on given passages."
output:"""
SUMMARISED = """\
Summarize the following text:
passage 1: {context}
output:"""


@dataclasses.dataclass(frozen=True)
class TokenProbability(OfTokens):
    """That each token of an answer is made up, by a classifier of its own tokens.

    A token of the reader has the highest probability of those it shares characters
    with, so no character loses its own.
    """

    source: str
    length: int | None

    @property
    def by(self) -> str:
        return f"token classifier ({self.source})"

    @property
    def reads(self) -> bool:
        return False

    def __call__(self, bulk: Bulk) -> Float[np.ndarray, "examples response"]:
        encoder = kept_encoder(self.source)
        length = self.length or min(TRAINED, encoder.config.context_length)
        encoder = encoder.reading(length)
        asked = [(framed(example), example.response) for example in bulk.examples]
        found = bulk.judged(
            lambda some: token_probabilities(encoder, some, progress=bulk.progress),
            asked,
        )
        rows, tokenizer = [], bulk.lm.require_tokenizer()
        for (_, answer), values in zip(asked, found, strict=True):
            _, spans = tokenizer.encode_with_offsets(answer)
            if values is None:
                rows.append(np.zeros(len(spans)))
            else:
                _, own = encoder.tokenizer.encode_with_offsets(answer)
                rows.append(highest(spans, own, values))
        return self.padded(rows, max(map(len, rows)))


def framed(example: Example) -> Framed:
    """What is read before the answer, in the form that the models were trained on.

    A prompt is read as it is, and its context may be cut, or all of it where that is
    not known; a context alone is put into one of the forms above.
    """
    context, prompt = example.context, example.prompt
    if prompt is not None and (context is None or not example.templated):
        before, middle, after = prompt.partition(context or prompt)
        return Framed(before, middle, after)
    form = ANSWERED if example.question else SUMMARISED
    before, _, after = form.partition("{context}")
    asked = before.replace("{question}", example.question or "")
    return Framed(asked, context or "", after)


def highest(
    spans: Int[np.ndarray, "spans 2"],
    others: Int[np.ndarray, "others 2"],
    values: Float[np.ndarray, " others"],
) -> Float[np.ndarray, " spans"]:
    """Of each span of characters the highest value of those that reach into it.

    >>> others = np.array([[0, 3], [3, 6], [6, 9]])
    >>> highest(np.array([[0, 2], [2, 7], [9, 9]]), others, np.array([0.1, 0.9, 0.5]))
    array([0.1, 0.9, 0. ])
    """
    shared = np.minimum(spans[:, None, 1], others[:, 1]) > np.maximum(
        spans[:, None, 0], others[:, 0]
    )
    return np.max(np.where(shared, values, 0.0), axis=1, initial=0.0)


@factory
def token_classifier(
    source: str = "KRLabsOrg/lettucedect-base-modernbert-en-v1",
    length: int | None = None,
) -> Detector:
    """The highest probability of a token to be made up, by a trained token classifier.

    Context, question and answer are read in one pass.  Where they are longer than the
    classifier reads, the context is cut into windows that overlap by a quarter, each
    with the question and the whole answer, and a token that one window supports is
    supported: it has the lowest of their probabilities.

    Args:
      source: an encoder with a classifier of tokens into supported and made up, as
        :func:`jaxhal.models.encoders.load_encoder` takes it: a ModernBERT, EuroBERT,
        mmBERT, DeBERTa, RoBERTa or BERT.
      length: tokens that it reads together; by default what LettuceDetect was trained
        on, 4,096, or the encoder's context where that is less.
    """
    at_least(1, length=length)
    measure = TokenProbability(source, length)

    def inputs(features: Features) -> Any:
        return features[measure.feature].max(1)

    def tokens(params: Any, features: Features) -> Any:
        del params
        return on_tokens(measure.along(features), features)

    return Detector(
        "token_classifier",
        f"the token most likely made up; {measure.by}",
        "probability, 0 to 1",
        "Kovács and Recski, LettuceDetect, 2025",
        measured(measure),
        inputs,
        tokens=tokens,
    )
