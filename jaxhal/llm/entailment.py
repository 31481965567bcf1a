"""Does one text follow from another?  Backends that say so, behind one protocol.

A backend is any callable from pairs (premise, hypothesis) to probabilities of
contradiction, neutral and entailment, ``Float[pairs 3]``, with a ``name`` that goes
into every result.
"""

import re
from collections.abc import Sequence
from typing import Any, Protocol, runtime_checkable

import numpy as np
from jaxtyping import Float

from jaxhal.llm.backends import EndpointInference as EndpointInference
from jaxhal.llm.backends import Inference as Inference
from jaxhal.llm.backends import Pair as Pair
from jaxhal.llm.backends import Reader as Reader
from jaxhal.llm.backends import Similarity as Similarity
from jaxhal.llm.backends import YesNo as YesNo
from jaxhal.llm.endpoint import Endpoint
from jaxhal.models.lm import LM

_ENDPOINT = re.compile(r"endpoint:(.+)@(https?://.+)")


@runtime_checkable
class Entailment(Protocol):
    """What a backend offers; ``name`` says what it is, and is part of results."""

    @property
    def name(self) -> str: ...

    def __call__(self, pairs: Sequence[Pair], /) -> Float[np.ndarray, "pairs 3"]: ...


class Remembered:
    """A backend that is asked about each pair once, as long as this lives.

    Args:
      backend: what is asked.
    """

    def __init__(self, backend: Entailment):
        self._backend = backend
        self._known: dict[Pair, np.ndarray] = {}

    @property
    def name(self) -> str:
        return self._backend.name

    def __call__(self, pairs: Sequence[Pair], /) -> Float[np.ndarray, "pairs 3"]:
        fresh = [pair for pair in dict.fromkeys(pairs) if pair not in self._known]
        if fresh:
            self._known |= zip(fresh, np.asarray(self._backend(fresh)), strict=True)
        return np.array([self._known[pair] for pair in pairs], np.float32)


def resolve(backend: Any, lm: LM | None = None) -> Entailment:
    """A backend by how configurations name it, or the one given.

    Args:
      backend: ``"similarity"``, ``"nli:SOURCE"`` with an encoder, ``"reader"``,
        ``"endpoint:MODEL@URL"`` with an OpenAI-compatible one, or a callable with a
        ``name``.
      lm: the reader, for a backend that asks it.

    Raises:
      ValueError: on another text.
      TypeError: on anything else.

    Example:
      >>> resolve("similarity").name
      'similarity of embeddings (all-minilm-l6-v2)'
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
    raise ValueError(
        f"entailment is {backend!r}; use 'similarity', 'reader', 'nli:' and an "
        "encoder's folder or hub id, or 'endpoint:MODEL@URL'"
    )


def named(backend: Any) -> str:
    """What decides, in words; a reader's name is known only once it reads.

    Raises:
      ValueError, TypeError: as :func:`resolve`.
    """
    if backend == "reader":
        return "the reader asked yes or no"
    return resolve(backend).name


def answering(backend: Entailment, question: str | None, text: str) -> str:
    """A text as an answer to a question, as a backend should see it.

    The published code puts the question before each answer.  Likeness of embeddings
    would then find the question in both texts, so that any two answers look alike; it
    gets the text alone.

    Example:
      >>> answering(Similarity(), "Who?", "Ann.")
      'Ann.'
    """
    alone = not question or not text or isinstance(backend, Similarity)
    return text if alone else f"{question} {text}"


def of_each(
    backend: Entailment, lists: Sequence[Sequence[Pair]]
) -> list[Float[np.ndarray, "pairs 3"]]:
    """What a backend says of each list of pairs, in one call of it.

    Example:
      >>> class Never:
      ...     name = "never"
      ...     def __call__(self, pairs):
      ...         return np.tile([1.0, 0.0, 0.0], (len(pairs), 1))
      >>> [len(found) for found in of_each(Never(), [[("a", "b")], [], [("a", "c")]])]
      [1, 0, 1]
    """
    pairs = [pair for some in lists for pair in some]
    found = np.asarray(backend(pairs)) if pairs else np.zeros((0, 3))
    return np.split(found, np.cumsum([len(some) for some in lists])[:-1])


def both_ways(
    backend: Entailment, samples: Sequence[Sequence[str]]
) -> list[Float[np.ndarray, "samples samples 3"]]:
    """Between all samples of each list, both directions, in one call of the backend.

    Equal texts entail each other and are not asked about.

    Args:
      backend: what decides.
      samples: lists of texts.

    Returns:
      ``[i, j]``: sample ``i`` as the premise, ``j`` as the hypothesis.
    """
    pairs = {(a, b): None for some in samples for a in some for b in some if a != b}
    known: dict[Pair, np.ndarray] = {}
    if pairs:
        known = dict(zip(pairs, np.asarray(backend(list(pairs))), strict=True))
    same = np.array([0.0, 0.0, 1.0], np.float32)
    return [
        np.array(
            [known.get((a, b), same) for a in some for b in some], np.float32
        ).reshape(len(some), len(some), 3)
        for some in samples
    ]
