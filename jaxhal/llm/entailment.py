"""Does one text follow from another?  Backends that say so, behind one protocol.

A backend is any callable from pairs (premise, hypothesis) to probabilities of
contradiction, neutral and entailment, ``Float[pairs 3]``, with a ``name``.
"""

import dataclasses
import re
from collections.abc import Mapping, Sequence
from typing import Any, Protocol, runtime_checkable

import jax
import numpy as np
from jaxtyping import Float

from jaxhal import texts
from jaxhal.capture.forward import read_rows
from jaxhal.features.consistency import selfcheck_prompt
from jaxhal.features.uncertainty import TextLogprob
from jaxhal.io.checks import at_least
from jaxhal.llm.endpoint import Endpoint, json_object
from jaxhal.models.encoders.encoding import classify, embed, kept_encoder
from jaxhal.models.lm import LM
from jaxhal.types import Example

Pair = tuple[str, str]

_CLASSES = ("contradiction", "neutral", "entailment")
# Rows that a reader reads together, two for each question.
_BATCH = 16
ASK = """\
First text: {premise}

Second text: {hypothesis}

If the first text is true, is the second text true as well? Reply with one word, Yes \
or No.
"""
CLASSIFY = """\
First text: {premise}

Second text: {hypothesis}

What does the first text say of the second? Reply with nothing but a JSON object of \
this form:
{{"relation": "entailment"}}
where the relation is "entailment" if the second text follows from the first, \
"contradiction" if both cannot be true, and "neutral" otherwise.
"""


@dataclasses.dataclass(frozen=True)
class Similarity:
    """Likeness of embeddings in place of entailment: it knows no negation.

    The mean over one text's sentences of the highest cosine with one of the other's, of
    both directions the higher; it becomes a probability that is a half at
    ``threshold``.  ``source`` is an encoder, as
    :func:`jaxhal.models.encoders.load_encoder` takes it.
    """

    source: str = "all-minilm-l6-v2"
    threshold: float = 0.8

    def __post_init__(self):
        if not 0 < self.threshold < 1:
            raise ValueError(f"threshold is {self.threshold}; give one in (0, 1)")

    @property
    def name(self) -> str:
        return f"similarity of embeddings ({self.source})"

    @property
    def settings(self) -> dict[str, Any]:
        """What it depends on besides."""
        return {"threshold": self.threshold}

    def __call__(self, pairs: Sequence[Pair], /) -> Float[np.ndarray, "pairs 3"]:
        parts = {
            text: [s.text for s in texts.sentences(text)] or [text]
            for pair in pairs
            for text in pair
        }
        every = list(dict.fromkeys(s for some in parts.values() for s in some))
        vectors = embed(kept_encoder(self.source), every, progress=False)
        place = {sentence: at for at, sentence in enumerate(every)}
        rows = {text: [place[s] for s in some] for text, some in parts.items()}
        alike = np.array(
            [_likeness(vectors[rows[a]], vectors[rows[b]]) for a, b in pairs]
        )
        high = 0.5 + 0.5 * (alike - self.threshold) / (1 - self.threshold)
        low = 0.5 * np.maximum(alike, 0.0) / self.threshold
        return _or_not(np.clip(np.where(alike >= self.threshold, high, low), 0.0, 1.0))


def _likeness(first: np.ndarray, second: np.ndarray) -> float:
    cosine = first @ second.T
    return float(max(cosine.max(1).mean(), cosine.max(0).mean()))


FACTCG = """\
{premise}

Choose your answer: based on the paragraph above can we conclude that "{hypothesis}"?

OPTIONS:
- Yes
- No
I think the answer is """


@dataclasses.dataclass(frozen=True)
class Inference:
    """A classifier trained for natural language inference, or to grade claims.

    What its configuration does not tell is known of :data:`PUBLISHED` ones.  One of two
    classes, ``entailment`` and another, counts all that is not entailed as a
    contradiction.

    Args:
      source: an encoder, as :func:`jaxhal.models.encoders.load_encoder` takes it.
      labels: its classes in order; by default those that its configuration names.
      template: the one text that it reads in place of a pair, with ``{premise}`` and
        ``{hypothesis}`` in it; by default that of its configuration, if it has one.
      length: tokens that it reads together, by default all that it can.
    """

    source: str
    labels: tuple[str, ...] | None = None
    template: str | None = None
    length: int | None = None

    def __post_init__(self):
        at_least(1, length=self.length)
        for name in ("{premise}", "{hypothesis}"):
            if self.template is not None and name not in self.template:
                raise ValueError(f"template {self.template!r} lacks {name}; put it in")

    @property
    def name(self) -> str:
        return f"natural language inference ({self.source})"

    def __call__(self, pairs: Sequence[Pair], /) -> Float[np.ndarray, "pairs 3"]:
        known = PUBLISHED.get(self.source, self)
        encoder = kept_encoder(self.source)
        if length := self.length or known.length:
            encoder = encoder.reading(length)
        named = self.labels or known.labels or encoder.labels
        labels = _classes(self.source, named, len(encoder.labels))
        template = self.template or known.template
        found = classify(encoder, pairs, labels=labels, template=template)
        # Some are trained without a neutral class.
        columns = [
            found[:, labels.index(name)] if name in labels else np.zeros(len(found))
            for name in _CLASSES
        ]
        return np.stack(columns, 1).astype(np.float32)


# Two classes, of which the second is support.
_GRADES = ("contradiction", "entailment")
#: Encoders whose configuration does not tell how they are used, by source.  FactCG
#: reads 550 words of a source together, which are about as many tokens as here.
PUBLISHED = {
    one.source: one
    for one in (
        Inference(
            "potsawee/deberta-v3-large-mnli", labels=("entailment", "contradiction")
        ),
        Inference("lytang/MiniCheck-DeBERTa-v3-Large", _GRADES, length=2048),
        Inference("yaxili96/FactCG-DeBERTa-v3-Large", _GRADES, FACTCG, length=800),
    )
}


def _classes(source: str, named: Sequence[str], count: int) -> list[str]:
    """Names of an encoder's classes in small letters, if two are those needed."""
    labels = [label.lower() for label in named]
    if len(labels) != count:
        raise ValueError(
            f"labels is {tuple(named)}, but encoder {source!r} has {count} classes; "
            "name each of them"
        )
    if count == 2 and "entailment" in labels:
        labels[1 - labels.index("entailment")] = "contradiction"
    missing = {"entailment", "contradiction"} - set(labels)
    if missing:
        raise ValueError(
            f"encoder {source!r} has the labels {', '.join(named)}, none of them "
            f"{' or '.join(sorted(missing))}; use a model of natural language "
            "inference, and name its classes by labels=(...) or in its config.json "
            "where they are LABEL_0 and so on"
        )
    return labels


@dataclasses.dataclass(frozen=True, eq=False)
class Reader:
    """A language model asked whether a text follows, by its odds of Yes and No.

    Nothing is generated.  What is not entailed counts as a contradiction.  ``ask`` is
    the question, with ``{premise}``, put on one line, and ``{hypothesis}`` in it.
    """

    lm: LM
    ask: str = ASK

    @property
    def name(self) -> str:
        return f"{self.lm.name} asked yes or no"

    def __call__(self, pairs: Sequence[Pair], /) -> Float[np.ndarray, "pairs 3"]:
        tokenizer = self.lm.require_tokenizer()
        rows = [
            tokenizer.encode_example(Example(reply, prompt=_filled(self.ask, pair)))
            for pair in pairs
            for reply in ("Yes", "No")
        ]
        said = read_rows(self.lm, rows, TextLogprob(), batch_size=_BATCH)
        odds = np.reshape(said, (-1, 2))
        return _or_not(np.asarray(jax.nn.sigmoid(odds[:, 0] - odds[:, 1])))


@dataclasses.dataclass(frozen=True)
class EndpointInference:
    """A model behind an OpenAI-compatible endpoint names the relation."""

    endpoint: Endpoint

    @property
    def name(self) -> str:
        return self.endpoint.name

    def __call__(self, pairs: Sequence[Pair], /) -> Float[np.ndarray, "pairs 3"]:
        asked = [CLASSIFY.format(premise=a, hypothesis=b) for a, b in pairs]
        said = map(_relation, self.endpoint.ask_all(asked, accept=_relation))
        return np.eye(3, dtype=np.float32)[[*map(_CLASSES.index, said)]]


@dataclasses.dataclass(frozen=True)
class YesNo:
    """A model behind an OpenAI-compatible endpoint is asked whether a text follows.

    What its reply begins with decides: Yes is entailment, No contradiction, anything
    else half of each (Manakul et al., SelfCheckGPT, 2023, section 5.5).
    """

    endpoint: Endpoint
    ask: str = ASK

    @property
    def name(self) -> str:
        return f"{self.endpoint.name} asked yes or no"

    def __call__(self, pairs: Sequence[Pair], /) -> Float[np.ndarray, "pairs 3"]:
        asked = [_filled(self.ask, pair) for pair in pairs]
        said = [selfcheck_prompt([one]) for one in self.endpoint.ask_all(asked)]
        return _or_not(1 - np.array(said))


def _or_not(entailed: np.ndarray) -> Float[np.ndarray, "pairs 3"]:
    """What is not entailed counts as a contradiction."""
    zero = np.zeros_like(entailed)
    return np.stack([1 - entailed, zero, entailed], 1).astype(np.float32)


def _filled(ask: str, pair: Pair) -> str:
    premise, hypothesis = pair
    return ask.format(premise=" ".join(premise.split()), hypothesis=hypothesis)


def _relation(reply: str) -> str:
    found = json_object(reply).get("relation")
    if found not in _CLASSES:
        raise ValueError(f"the relation is {found!r}, not one of {', '.join(_CLASSES)}")
    return found


_ENDPOINT = re.compile(r"endpoint:(.+)@(https?://.+)")


@runtime_checkable
class Entailment(Protocol):
    """What a backend offers; its ``name`` is part of results."""

    @property
    def name(self) -> str: ...

    def __call__(self, pairs: Sequence[Pair], /) -> Float[np.ndarray, "pairs 3"]: ...


class Remembered:
    """A backend that is asked about each pair once, as long as this lives."""

    def __init__(self, backend: Entailment, known: Mapping[Pair, Any] | None = None):
        self.backend, self.name, self._known = backend, backend.name, {**(known or {})}

    def __call__(self, pairs: Sequence[Pair], /) -> Float[np.ndarray, "pairs 3"]:
        if fresh := [one for one in dict.fromkeys(pairs) if one not in self._known]:
            self._known |= zip(fresh, np.asarray(self.backend(fresh)), strict=True)
        found = [self._known[pair] for pair in pairs]
        return np.reshape(np.array(found, np.float32), (-1, 3))


def resolve(backend: Any, lm: LM | None = None) -> Entailment:
    """A backend by how configurations name it, or the one given.

    That is ``"similarity"``, ``"nli:SOURCE"`` with an encoder, ``"reader"``, which asks
    ``lm``, if there is one, or ``"endpoint:MODEL@URL"`` with an OpenAI-compatible one.
    """
    if not isinstance(backend, str):
        if not isinstance(backend, Entailment):
            raise TypeError(
                f"entailment is {backend!r}; give a callable with a 'name', or a text"
            )
        return backend
    kind, _, source = backend.partition(":")
    if backend == "similarity":
        return Similarity()
    if backend == "reader" and lm is not None:
        return Reader(lm)
    if kind == "nli" and source:
        return Inference(source)
    if there := _ENDPOINT.fullmatch(backend):
        return EndpointInference(Endpoint(there[2], there[1]))
    reader = "" if lm is None else "'reader', "
    why = ", and no model reads here" * (backend == "reader")
    raise ValueError(
        f"entailment is {backend!r}{why}; use 'similarity', {reader}'nli:' and an "
        "encoder's folder or hub id, or 'endpoint:MODEL@URL'"
    )


def named(backend: Any) -> str:
    """What decides, in words; a reader's name is known only once it reads."""
    if backend == "reader":
        return "the reader asked yes or no"
    return resolve(backend).name


def answering(backend: Entailment, question: str | None, text: str) -> str:
    """A text as an answer to a question, as a backend should see it.

    The published code puts the question before each answer, in which likeness of
    embeddings would find all answers alike; it gets the text alone.
    """
    while isinstance(backend, Remembered):
        backend = backend.backend
    alone = not question or not text or isinstance(backend, Similarity)
    return text if alone else f"{question} {text}"


def of_each(
    backend: Entailment, lists: Sequence[Sequence[Pair]]
) -> list[Float[np.ndarray, "pairs 3"]]:
    """What a backend says of each list of pairs, asked once about each, in one call."""
    found = Remembered(backend)([pair for some in lists for pair in some])
    return np.split(found, np.cumsum([len(some) for some in lists]))[:-1]


def both_ways(
    backend: Entailment, samples: Sequence[Sequence[str]]
) -> list[Float[np.ndarray, "samples samples 3"]]:
    """Between all samples of each list, both directions, in one call of the backend.

    ``[i, j]`` has sample ``i`` as the premise.  Equal texts are not asked about.
    """
    known = Remembered(backend, {(a, a): (0, 0, 1) for some in samples for a in some})
    found = of_each(known, [[(a, b) for a in some for b in some] for some in samples])
    return [
        one.reshape(len(some), len(some), 3)
        for one, some in zip(found, samples, strict=True)
    ]
