"""What is computed of the sentences of an answer, or of how samples support them."""

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any, Literal

import jax
import numpy as np

from jaxhal.features import consistency, ngrams
from jaxhal.llm import entailment
from jaxhal.llm.entailment import Entailment, Pair, Reader
from jaxhal.models.encoders import encoding
from jaxhal.reading.bulk import Bulk, Measure
from jaxhal.reading.samples import Draw
from jaxhal.reading.units import Part, sentence_numbers
from jaxhal.texts import sentences_of

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

    Attributes:
      entailment: what decides; ``"reader"`` asks it with :data:`SUPPORT`, much as the
        published code asks.
      draw: whose samples are to support a sentence; ``None`` for the source text.
      order: ``"published"`` gives the sentence as the premise, as SelfCheckGPT does;
        ``"ordinary"`` as the hypothesis.
    """

    entailment: str | Entailment
    draw: Draw | None
    order: Literal["published", "ordinary"]

    @property
    def by(self) -> str:
        return entailment.named(self.entailment)

    def __call__(self, bulk: Bulk) -> dict[str, np.ndarray]:
        backend = (
            Reader(bulk.lm, SUPPORT)
            if self.entailment == "reader"
            else entailment.resolve(self.entailment, bulk.lm)
        )
        supports = [
            [example.context or example.source_text] for example in bulk.examples
        ]
        if self.draw is not None:
            supports = [
                [s.text.strip() for s in some if s.text.strip()]
                for some in bulk.samples(self.draw)
            ]
        said = [sentences_of(example.response) for example in bulk.examples]
        pairs = [
            [self._pair(sentence, support) for sentence in some for support in against]
            for some, against in zip(said, supports, strict=True)
        ]
        found = bulk.judged(functools.partial(entailment.of_each, backend), pairs)
        most = max(map(len, supports))
        rows = [
            len(against)
            for some, against in zip(said, supports, strict=True)
            for _ in some
        ]
        valid = np.arange(most) < np.array(rows)[:, None]
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
        return padded(np.split(each, np.cumsum([len(some) for some in said])[:-1]))

    def _pair(self, sentence: str, support: str) -> Pair:
        published = self.order == "published"
        return (sentence, support) if published else (support, sentence)


@dataclasses.dataclass(frozen=True)
class Ngrams(OfSentences):
    """Surprise of each sentence under the samples, ``{"values": ..., "valid": ...}``.

    Of means there is a ``"weight"``, how many n-grams a sentence has: that of an answer
    is the mean over all of them.

    Attributes:
      draw: how samples are drawn.
      n: words in an n-gram.
      over: of a sentence's n-grams, the ``"mean"`` or the ``"max"``.
    """

    draw: Draw
    n: int
    over: Literal["mean", "max"]

    def __call__(self, bulk: Bulk) -> dict[str, np.ndarray]:
        scores, sizes = [], []
        for example, some in zip(bulk.examples, bulk.samples(self.draw), strict=True):
            said = sentences_of(example.response)
            heard = [sample.text for sample in some]
            if self.n > 1:
                heard = [s for text in heard for s in sentences_of(text)]
            found = ngrams.selfcheck_ngram(said, heard or [""], self.n)
            scores.append(found.max if self.over == "max" else found.mean)
            sizes.append(np.array([len(ngrams.tokenize(text)) for text in said]))
        weight = {} if self.over == "max" else {"weight": padded(sizes)["values"]}
        return padded(scores) | weight


@dataclasses.dataclass(frozen=True)
class Unmatched(OfSentences):
    """How far each sentence is from the samples, ``{"values": [examples sentences]}``.

    By BERTScore's F1 with the nearest sentence of each sample.  Sentences of three
    tokens or fewer count only where no sample of an answer has a longer one.

    Attributes:
      encoder: whose token embeddings are compared.
      layer: of the encoder, the last for ``None``.
      baseline: F1 of unrelated sentences, which becomes 0.
      draw: how samples are drawn.
    """

    encoder: str
    layer: int | None
    baseline: float
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
        counts = np.repeat(
            [[len(sample) for sample in samples] for samples in heard],
            [len(some) for some in said],
            axis=0,
        )
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
        return padded(np.split(each, np.cumsum([len(some) for some in said])[:-1]))


def _heard(samples: Sequence[str]) -> list[list[str]]:
    """The sentences of each sample that are worth comparing."""
    every = [sentences_of(text.strip()) if text.strip() else [] for text in samples]
    long = [[s for s in some if len(ngrams.tokenize(s)) > 3] for some in every]
    return long if any(long) else every


@dataclasses.dataclass(frozen=True)
class Places(Measure):
    """Which sentence each token is in, ``Int[examples response]``, -1 for none.

    As :func:`jaxhal.reading.units.sentence_numbers` has it.
    """

    of_sentences = True

    @property
    def axes(self) -> tuple[str, ...]:
        return ("response",)

    def __call__(self, bulk: Bulk) -> np.ndarray:
        tokenizer = bulk.lm.require_tokenizer()
        found = []
        for example in bulk.examples:
            _, offsets = tokenizer.encode_with_offsets(example.response)
            found.append(sentence_numbers(example.response, offsets))
        places = np.full((len(found), max(map(len, found))), -1, np.int32)
        for row, some in zip(places, found, strict=True):
            row[: len(some)] = some
        return places

    def cut(self, values: Any, parts: Sequence[Part]) -> np.ndarray:
        found = np.full((len(parts), values.shape[1]), -1, np.int32)
        for row, part in zip(found, parts, strict=True):
            where = np.flatnonzero(part.tokens)
            some = values[part.row, where[where < values.shape[1]]]
            row[: len(some)] = some
        return found


@jax.jit
def _unmatched(f1: Any, valid: Any) -> Any:
    return jax.vmap(consistency.selfcheck_bertscore)(f1, valid)


@jax.jit
def _contradicted(probabilities: Any, valid: Any) -> Any:
    return jax.vmap(consistency.selfcheck_nli)(probabilities, valid)


def padded(scores: Sequence[np.ndarray]) -> dict[str, Any]:
    """Scores of the sentences of each example, with a mask."""
    longest = max(map(len, scores))
    values = np.zeros((len(scores), longest), np.float32)
    valid = np.zeros(values.shape, bool)
    for row, some in enumerate(scores):
        values[row, : len(some)], valid[row, : len(some)] = some, True
    return {"values": values, "valid": valid}
