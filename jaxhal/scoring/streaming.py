"""Scores of a response while it is written."""

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
from jaxtyping import PRNGKeyArray

from jaxhal import detectors as catalogue
from jaxhal.detectors import Detector
from jaxhal.features.base import Reducer
from jaxhal.generation import Sampling, Token, stream
from jaxhal.generation.decoding import QUERY, with_text
from jaxhal.models.lm import LM
from jaxhal.scoring.detection import judge, resolve
from jaxhal.scoring.fitting import Fitted
from jaxhal.types import Example


class Scored(NamedTuple):
    """A token of a response, its scores, and scores of the response so far, by
    detector.
    """

    token: Token
    tokens: dict[str, float]
    scores: dict[str, float]


def stream_scores(
    lm: LM,
    prompt: str | Example,
    detectors: Sequence[str | Detector | Fitted],
    *,
    max_new_tokens: int = 256,
    sampling: Sampling = Sampling(),  # noqa: B008  (an immutable default)
    key: PRNGKeyArray | None = None,
    stop: Sequence[str] = (),
) -> Iterator[Scored]:
    """A response token by token, judged as it grows.

    The last scores are those of all tokens that came, a stop string's among them.  They
    are what :func:`jaxhal.score` gives the finished text if that makes the same tokens
    again; not if it was cut off, where an end is judged too, or a stop string ended it.

    Args:
      prompt: as :func:`jaxhal.stream` takes it, and so are those not named here.
      detectors: as :func:`jaxhal.score` takes them, of those that need a row of each
        token and nothing else.

    Raises:
      ValueError: as :func:`jaxhal.stream`; on no detector, two of one name, an unknown
        one, or one that must be fitted first or reads more than rows of tokens.
    """
    chosen = resolve(lm.name, detectors)
    named = [one.detector for one in chosen]
    for detector in named:
        if not detector.reads_rows:
            raise ValueError(
                f"detector {detector.name!r} reads more than the rows of new tokens, "
                "or nothing of the model; score(...) the finished response instead"
            )
    reducers: dict[str, Any] = catalogue.features_of(named)
    written = stream(
        lm,
        prompt,
        max_new_tokens=max_new_tokens,
        sampling=sampling,
        key=key,
        stop=stop,
        reducers=reducers,
    )
    return _scored(lm, chosen, reducers, written, max_new_tokens)


def _scored(
    lm: LM,
    chosen: Sequence[Fitted],
    reducers: dict[str, Reducer],
    written: Iterator[Token],
    limit: int,
) -> Iterator[Scored]:
    stop_ids = lm.require_tokenizer().stop_ids
    tokens, valid = np.zeros((1, limit), np.int32), np.zeros((1, limit), bool)
    rows: dict[str, Any] = {}
    for at, token in enumerate(written):
        tokens[0, at], valid[0, at] = token.id, True
        for name, reducer in reducers.items():
            new = token.features[name]
            if not at:
                rows[name] = jax.tree.map(lambda x, r=reducer: _room(r, x, limit), new)
            jax.tree.map(
                lambda kept, x, r=reducer, at=at: _put(r, kept, x, at), rows[name], new
            )
        features = {
            "valid": valid,
            "text": np.asarray(with_text(tokens, valid, stop_ids)),
            "marked": np.zeros_like(valid),
        }
        judged = judge(chosen, features | rows)
        yield Scored(
            token,
            {name: float(some[0, at]) for name, some in judged.tokens.items()},
            {name: float(some[0]) for name, some in judged.scores.items()},
        )


def _room(reducer: Reducer, value: np.ndarray, limit: int) -> np.ndarray:
    """A feature of one response and so many tokens, where one token's has a shape."""
    shape = list(value.shape)
    shape.insert(reducer.batch_axis, 1)
    shape.insert(QUERY[reducer.reads], limit)
    return np.zeros(shape, value.dtype)


def _put(reducer: Reducer, kept: np.ndarray, value: np.ndarray, at: int) -> None:
    where: list[Any] = [slice(None)] * kept.ndim
    where[reducer.batch_axis], where[QUERY[reducer.reads]] = 0, at
    kept[tuple(where)] = value
