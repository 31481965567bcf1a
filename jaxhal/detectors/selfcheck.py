"""SelfCheckGPT: do sampled answers support the sentences of the answer?

Manakul et al., `SelfCheckGPT <https://arxiv.org/abs/2303.08896>`_, EMNLP 2023.
"""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np

from jaxhal.detectors.base import Detector, Features, factory, measured, on_tokens
from jaxhal.detectors.settings import Settings, draw_of
from jaxhal.features import consistency
from jaxhal.io.checks import at_least
from jaxhal.llm import entailment as nli
from jaxhal.llm.endpoint import Endpoint, endpoint_of
from jaxhal.llm.entailment import Entailment, Reader, YesNo, named
from jaxhal.models.encoders import encoding
from jaxhal.reading.bulk import Bulk, Measure, OfTokens
from jaxhal.reading.samples import Draw
from jaxhal.reading.units import Part, sentence_numbers
from jaxhal.texts import sentences_of

_PUBLISHED = Draw(n=20, max_new_tokens=256)
_SELFCHECK = "Manakul et al., SelfCheckGPT, EMNLP 2023"

SUPPORT = """\
Here is a text:
{premise}

Here is a statement:
{hypothesis}

Does the text bear out the statement? Reply with one word, Yes or No.
"""


class OfSentences(Measure):
    """Numbers of the sentences of each answer, ``{"values": ..., "valid": ...}``."""

    of_sentences = True

    @property
    def extra(self) -> str:
        return "sentences"

    @property
    def axes(self) -> dict[str, tuple[str, ...]]:
        return {"values": ("sentences",), "valid": ("sentences",)}

    def cut(self, values: Any, parts: Sequence[Part]) -> dict[str, np.ndarray]:
        found = super().cut(values, parts)
        for valid, part in zip(found["valid"], parts, strict=True):
            if part.sentence is not None:
                valid[:] &= np.arange(len(valid)) == part.sentence
        return found


@dataclasses.dataclass(frozen=True)
class SentenceSupport(OfSentences):
    """How little each sentence is supported, ``{"values": [examples sentences], ...}``.

    ``"reader"`` is asked with :data:`SUPPORT`, much as the published code asks.  In the
    ``"published"`` order the sentence is the premise, else the hypothesis.
    """

    entailment: str | Entailment
    draw: Draw | None  # None: the source text is to support a sentence
    order: Literal["published", "ordinary"]

    @property
    def by(self) -> str:
        return named(self.entailment)

    @property
    def reads(self) -> bool:
        return self.draw is not None or self.entailment == "reader"

    def __call__(self, bulk: Bulk) -> dict[str, np.ndarray]:
        backend = nli.resolve(self.entailment, bulk.lm)
        if self.entailment == "reader":
            backend = Reader(bulk.lm, SUPPORT)
        if self.draw is None:
            supports = [[one.context or one.source_text] for one in bulk.examples]
        else:
            supports = [
                [s.text.strip() for s in some if s.text.strip()]
                for some in bulk.samples(self.draw)
            ]
        said = [sentences_of(example.response) for example in bulk.examples]
        step = 1 if self.order == "published" else -1
        pairs = [
            [(one, support)[::step] for one in some for support in against]
            for some, against in zip(said, supports, strict=True)
        ]
        found = bulk.judged(functools.partial(nli.of_each, backend), pairs)
        most = max(map(len, supports))
        rows = np.repeat(list(map(len, supports)), list(map(len, said)))
        valid = np.arange(most) < rows[:, None]
        probabilities = np.zeros((*valid.shape, 3), np.float32)
        probabilities[valid] = np.concatenate(
            [
                np.zeros((len(asked), 3)) if some is None else some
                for asked, some in zip(pairs, found, strict=True)
            ]
        )
        if self.draw is None:
            # What the source leaves open it does not support.
            each = 1 - probabilities[:, 0, 2]
        else:
            # Where no sample holds text nothing is known: a half.
            each = np.where(valid.any(1), _contradicted(probabilities, valid), 0.5)
        return _of_answers(each, said)


@dataclasses.dataclass(frozen=True)
class Ngrams(OfSentences):
    """Surprise of each sentence under the samples, ``{"values": ..., "valid": ...}``.

    Of means there is a ``"weight"``, how many n-grams a sentence has: that of an answer
    is the mean over all of them.
    """

    draw: Draw
    n: int
    over: Literal["mean", "max"]

    def __call__(self, bulk: Bulk) -> dict[str, np.ndarray]:
        surprise = []
        for example, some in zip(bulk.examples, bulk.samples(self.draw), strict=True):
            said = sentences_of(example.response)
            heard = [sample.text for sample in some]
            if self.n > 1:
                heard = [s for text in heard for s in sentences_of(text)]
            surprise.append(consistency.selfcheck_ngram(said, heard or [""], self.n))
        if self.over == "max":
            return _padded([[one.max() for one in some] for some in surprise])
        sizes = _padded([[len(one) for one in some] for some in surprise])
        means = _padded([[one.mean() for one in some] for some in surprise])
        return means | {"weight": sizes["values"]}


@dataclasses.dataclass(frozen=True)
class Unmatched(OfSentences):
    """How far each sentence is from the samples, ``{"values": [examples sentences]}``.

    By BERTScore's F1 with the nearest sentence of each sample.  Sentences of three
    tokens or fewer count only where no sample of an answer has a longer one.
    """

    encoder: str
    layer: int | None  # None: the last one
    baseline: float  # F1 of unrelated sentences, which becomes 0
    draw: Draw

    @property
    def by(self) -> str:
        return f"embeddings of tokens ({self.encoder})"

    def __call__(self, bulk: Bulk) -> dict[str, np.ndarray]:
        said = [sentences_of(example.response) for example in bulk.examples]
        heard = [_heard([s.text for s in some]) for some in bulk.samples(self.draw)]
        pairs = [
            (sentence, other)
            for some, samples in zip(said, heard, strict=True)
            for sentence in some
            for sample in samples
            for other in sample
        ]
        sizes = [[len(sample) for sample in samples] for samples in heard]
        counts = np.repeat(sizes, list(map(len, said)), axis=0)
        valid = np.arange(max(1, counts.max())) < counts[..., None]
        f1 = np.zeros(valid.shape, np.float32)
        if pairs:
            encoder = encoding.kept_encoder(self.encoder)
            found = encoding.bertscores(
                encoder, pairs, layer=self.layer, progress=bulk.progress
            )
            f1[valid] = (found[:, 2] - self.baseline) / (1 - self.baseline)
        # Where no sample holds text nothing is known: a half.
        each = np.where(valid.any((1, 2)), _unmatched(f1, valid), 0.5)
        return _of_answers(each, said)


def _heard(samples: Sequence[str]) -> list[list[str]]:
    """The sentences of each sample that are worth comparing."""
    every = [sentences_of(text.strip()) if text.strip() else [] for text in samples]
    long = [[s for s in some if len(consistency.tokenize(s)) > 3] for some in every]
    return long if any(long) else every


@dataclasses.dataclass(frozen=True)
class Places(OfTokens):
    """Which sentence each token is in, -1 for none."""

    dtype, beyond = np.int32, -1

    @property
    def extra(self) -> str:
        return "sentences"

    @property
    def reads(self) -> bool:
        return False

    def __call__(self, bulk: Bulk) -> np.ndarray:
        tokenizer = bulk.lm.require_tokenizer()
        found = []
        for example in bulk.examples:
            _, offsets = tokenizer.encode_with_offsets(example.response)
            found.append(sentence_numbers(example.response, offsets))
        return self.padded(found, max(map(len, found)))


_unmatched = jax.jit(jax.vmap(consistency.selfcheck_bertscore))
_contradicted = jax.jit(jax.vmap(consistency.selfcheck_nli))


def _of_answers(
    each: np.ndarray, said: Sequence[Sequence[str]]
) -> dict[str, np.ndarray]:
    """Scores of all sentences, told apart by the answers that hold them."""
    return _padded(np.split(each, np.cumsum([len(some) for some in said])[:-1]))


def _padded(scores: Sequence[Any]) -> dict[str, np.ndarray]:
    """Scores of the sentences of each example, with a mask."""
    longest = max(map(len, scores))
    values = np.zeros((len(scores), longest), np.float32)
    valid = np.zeros(values.shape, bool)
    for row, some in enumerate(scores):
        values[row, : len(some)], valid[row, : len(some)] = some, True
    return {"values": values, "valid": valid}


_PLACES = Places()


@factory
def selfcheck_nli(
    entailment: str | Entailment = "similarity",
    draw: Settings = None,
    how: Literal["mean", "max"] = "mean",
) -> Detector:
    """SelfCheckGPT: how much the samples contradict the answer (section 5.4).

    Args:
      entailment: as :func:`semantic_entropy` takes it; the published model is
        ``"nli:potsawee/deberta-v3-large-mnli"``.
      draw: how to sample, see :func:`jaxhal.detectors.settings.draw_of`.
      how: of its sentences, what an answer scores: the ``"mean"`` or the ``"max"``.
    """
    drawn = draw_of(draw, _PUBLISHED)
    support = SentenceSupport(entailment, drawn, "published")
    summary = f"contradiction by {drawn}; {named(entailment)}"
    return over_sentences("selfcheck_nli", summary, "0 to 1", _SELFCHECK, support, how)


def selfcheck_prompt(
    endpoint: str | None = None,
    model: str | None = None,
    draw: Settings = None,
    how: Literal["mean", "max"] = "mean",
    name: str | None = None,
) -> Detector:
    """SelfCheckGPT: a model is asked whether each sample supports each sentence (5.5).

    The reader by its odds of Yes and No; a model behind an OpenAI-compatible endpoint
    by what its reply begins with, though the question is put in other words.

    Args:
      endpoint, model: as :func:`jaxhal.detectors.detection_prompt` takes them.
      draw, how: as :func:`selfcheck_nli` takes them.
    """
    return _selfcheck_prompt(endpoint_of(endpoint, model), draw, how, name=name)


@factory
def _selfcheck_prompt(
    there: Endpoint | None, draw: Settings, how: Literal["mean", "max"]
) -> Detector:
    drawn = draw_of(draw, _PUBLISHED)
    judge = "reader" if there is None else YesNo(there, SUPPORT)
    support = SentenceSupport(judge, drawn, "ordinary")
    who = "the reader" if there is None else there.name
    summary = f"{who} asked whether each of {drawn} supports a sentence"
    return over_sentences(
        "selfcheck_prompt", summary, "0 to 1", _SELFCHECK, support, how
    )


@factory
def selfcheck_ngram(
    n: int = 1,
    over: Literal["mean", "max"] = "max",
    draw: Settings = None,
) -> Detector:
    """SelfCheckGPT: surprise of the answer's words under the samples (section 5.3).

    Args:
      n: words in an n-gram.
      over: the mean of all the answer's n-grams, or, averaged over its sentences, the
        least likely one of each.
      draw: as :func:`selfcheck_nli` takes it.
    """
    at_least(1, n=n)
    drawn = draw_of(draw, _PUBLISHED)
    surprise = Ngrams(drawn, n, over)
    summary = f"surprise of words under {drawn}"
    return over_sentences(
        *("selfcheck_ngram", summary, "nats", _SELFCHECK, surprise, "mean"),
        to_share=lambda nats: -jnp.expm1(-nats),
    )


@factory
def selfcheck_bertscore(
    encoder: str = "all-minilm-l6-v2",
    layer: int | None = None,
    baseline: float = 0.0,
    draw: Settings = None,
    how: Literal["mean", "max"] = "mean",
) -> Detector:
    """SelfCheckGPT: how far the answer's sentences are from those of the samples (5.1).

    The published code takes RoBERTa large, ``"FacebookAI/roberta-large"``, its layer 17
    and, rescaled, the baseline 0.83122575.

    Args:
      encoder: whose token embeddings are compared, see
        :func:`jaxhal.models.encoders.load_encoder`.
      layer: of the encoder, the last for ``None``.
      baseline: F1 of unrelated sentences, which becomes 0; no ranking changes.
      draw, how: as :func:`selfcheck_nli` takes them.
    """
    if not baseline < 1:
        raise ValueError(f"baseline is {baseline}; give a number below 1")
    drawn = draw_of(draw, _PUBLISHED)
    measure = Unmatched(encoder, layer, baseline, drawn)
    where = "its last layer" if layer is None else f"layer {layer}"
    summary = f"BERTScore's distance from {drawn}; {where} of {encoder}"
    name = "selfcheck_bertscore"
    return over_sentences(name, summary, "1 - F1", _SELFCHECK, measure, how)


def over_sentences(
    name: str,
    summary: str,
    unit: str,
    reference: str,
    measure: Measure,
    how: Literal["mean", "max"],
    to_share: Callable[[Any], Any] = lambda values: values,
) -> Detector:
    """Of an answer from a measure of its sentences; each token has its sentence's.

    A token's score is cut to [0, 1]; ``to_share`` brings other units there.
    """

    def inputs(features: Features) -> Any:
        found = features[measure.feature]
        score = functools.partial(consistency.passage_score, how=how)
        weight = {"weight": found["weight"]} if "weight" in found else {}
        return jax.vmap(score)(found["values"], found["valid"], **weight)

    def tokens(params: Any, features: Features) -> Any:
        del params
        values = jnp.clip(to_share(features[measure.feature]["values"]), 0.0, 1.0)
        place = _PLACES.along(features)
        scores = jnp.take_along_axis(values, jnp.maximum(place, 0), 1)
        return on_tokens(jnp.where(place >= 0, scores, 0.0), features)

    summary = f"{summary}, the worst sentence" if how == "max" else summary
    about = (name, summary, unit, reference)
    return Detector(*about, measured(measure, _PLACES), inputs, tokens=tokens)
