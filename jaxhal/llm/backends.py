"""What can say whether one text follows from another."""

import dataclasses
from collections.abc import Sequence

import jax
import numpy as np
from jaxtyping import Float

from jaxhal import texts
from jaxhal.capture.forward import read_rows
from jaxhal.features.consistency import selfcheck_prompt
from jaxhal.features.uncertainty import TextLogprob
from jaxhal.llm.endpoint import Endpoint, json_object
from jaxhal.models.encoders.encoding import classify, embed, kept_encoder
from jaxhal.models.lm import LM
from jaxhal.types import Example

Pair = tuple[str, str]

_CLASSES = ("contradiction", "neutral", "entailment")
# Classes of published encoders whose configuration does not name them.
_UNNAMED = {"potsawee/deberta-v3-large-mnli": ("entailment", "contradiction")}
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

    The likeness of two texts is, for the sentences of one, the mean of the highest
    cosine with a sentence of the other; of the two directions the higher.  It becomes a
    probability of entailment that passes a half at ``threshold``, linear on both sides;
    the rest is contradiction.

    Args:
      source: of the encoder, as :func:`jaxhal.models.encoders.load_encoder` takes it.
      threshold: the cosine from which on two texts count as saying the same.

    Raises:
      ValueError: on a threshold outside (0, 1).
    """

    source: str = "all-minilm-l6-v2"
    threshold: float = 0.8

    def __post_init__(self):
        if not 0 < self.threshold < 1:
            raise ValueError(f"threshold is {self.threshold}; give one in (0, 1)")

    @property
    def name(self) -> str:
        return f"similarity of embeddings ({self.source})"

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
        entailed = np.clip(np.where(alike >= self.threshold, high, low), 0.0, 1.0)
        zero = np.zeros_like(entailed)
        return np.stack([1 - entailed, zero, entailed], 1).astype(np.float32)


def _likeness(first: np.ndarray, second: np.ndarray) -> float:
    cosine = first @ second.T
    return float(max(cosine.max(1).mean(), cosine.max(0).mean()))


@dataclasses.dataclass(frozen=True)
class Inference:
    """A classifier trained for natural language inference.

    Args:
      source: of the encoder, as :func:`jaxhal.models.encoders.load_encoder` takes it.
      labels: its classes in order, entailment and contradiction among them; by default
        those that its configuration names, or that are known of the published one of
        SelfCheckGPT, whose configuration names none.

    Raises on a call:
      ValueError: when the classes are not as many as the encoder's, or entailment or
        contradiction is missing.
    """

    source: str
    labels: tuple[str, ...] | None = None

    @property
    def name(self) -> str:
        return f"natural language inference ({self.source})"

    def __call__(self, pairs: Sequence[Pair], /) -> Float[np.ndarray, "pairs 3"]:
        encoder = kept_encoder(self.source)
        named = self.labels or _UNNAMED.get(self.source, encoder.labels)
        labels = [label.lower() for label in named]
        if len(labels) != len(encoder.labels):
            raise ValueError(
                f"labels is {tuple(named)}, but encoder {self.source!r} has "
                f"{len(encoder.labels)} classes; name each of them"
            )
        missing = {"entailment", "contradiction"} - set(labels)
        if missing:
            raise ValueError(
                f"encoder {self.source!r} has the labels {', '.join(named)}, "
                f"none of them {' or '.join(sorted(missing))}; use a model of natural "
                "language inference, and name its classes by labels=(...) or in its "
                "config.json where they are LABEL_0 and so on"
            )
        found = classify(encoder, pairs, labels=labels, progress=False)
        # Some are trained without a neutral class.
        columns = [
            found[:, labels.index(name)] if name in labels else np.zeros(len(found))
            for name in _CLASSES
        ]
        return np.stack(columns, 1).astype(np.float32)


@dataclasses.dataclass(frozen=True, eq=False)
class Reader:
    """A language model asked whether a text follows, by its odds of Yes and No.

    Nothing is generated.  What is not entailed counts as a contradiction.

    Args:
      lm: the model.
      ask: the question, with ``{premise}`` and ``{hypothesis}`` in it; a premise is put
        on one line, as in the published SelfCheckGPT.
      batch_size: rows read together, two for each question.

    Raises:
      ValueError: on a ``batch_size`` below 2.
    """

    lm: LM
    ask: str = ASK
    batch_size: int = 16

    def __post_init__(self):
        if self.batch_size < 2:
            raise ValueError(
                f"batch_size is {self.batch_size}; give at least 2, as a question is "
                "read with both replies"
            )

    @property
    def name(self) -> str:
        return f"{self.lm.name} asked yes or no"

    def __call__(self, pairs: Sequence[Pair], /) -> Float[np.ndarray, "pairs 3"]:
        distinct = list(dict.fromkeys(pairs))
        tokenizer = self.lm.require_tokenizer()
        rows = [
            tokenizer.encode_example(Example(reply, prompt=_filled(self.ask, pair)))
            for pair in distinct
            for reply in ("Yes", "No")
        ]
        said = read_rows(
            self.lm, rows, TextLogprob(), batch_size=self.batch_size, copies=2
        )
        odds = np.reshape(said, (-1, 2))
        entailed = np.asarray(jax.nn.sigmoid(odds[:, 0] - odds[:, 1]))
        known = dict(zip(distinct, entailed, strict=True))
        yes = np.array([known[pair] for pair in pairs], np.float32)
        return np.stack([1 - yes, np.zeros_like(yes), yes], 1)


@dataclasses.dataclass(frozen=True)
class EndpointInference:
    """A model behind an OpenAI-compatible endpoint names the relation.

    Replies are kept, so that no pair is asked twice; one that names no relation is
    asked again.

    Raises on a call:
      NoReply: as :meth:`jaxhal.llm.endpoint.Endpoint.ask`.
    """

    endpoint: Endpoint

    @property
    def name(self) -> str:
        return self.endpoint.name

    def __call__(self, pairs: Sequence[Pair], /) -> Float[np.ndarray, "pairs 3"]:
        found = []
        for premise, hypothesis in pairs:
            question = CLASSIFY.format(premise=premise, hypothesis=hypothesis)
            reply = self.endpoint.ask(question, accept=_relation)
            found.append(_CLASSES.index(_relation(reply)))
        return np.eye(3, dtype=np.float32)[found]


@dataclasses.dataclass(frozen=True)
class YesNo:
    """A model behind an OpenAI-compatible endpoint is asked whether a text follows.

    What its reply begins with decides, as in the published SelfCheckGPT: Yes is
    entailment, No contradiction, anything else half of each.  Replies are kept.

    Args:
      endpoint: the model.
      ask: the question, with ``{premise}`` and ``{hypothesis}`` in it; a premise is put
        on one line.

    Raises on a call:
      NoReply: as :meth:`jaxhal.llm.endpoint.Endpoint.ask`.

    References:
      Manakul et al., SelfCheckGPT, 2023, section 5.5.
    """

    endpoint: Endpoint
    ask: str = ASK

    @property
    def name(self) -> str:
        return f"{self.endpoint.name} asked yes or no"

    def __call__(self, pairs: Sequence[Pair], /) -> Float[np.ndarray, "pairs 3"]:
        replies = [self.endpoint.ask(_filled(self.ask, pair)) for pair in pairs]
        no = np.array([selfcheck_prompt([reply]) for reply in replies], np.float32)
        return np.stack([no, np.zeros_like(no), 1 - no], 1)


def _filled(ask: str, pair: Pair) -> str:
    premise, hypothesis = pair
    return ask.format(premise=" ".join(premise.split()), hypothesis=hypothesis)


def _relation(reply: str) -> str:
    found = json_object(reply).get("relation")
    if found not in _CLASSES:
        raise ValueError(f"the relation is {found!r}, not one of {', '.join(_CLASSES)}")
    return found
