"""Scores of a response while it is written."""

from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
from jaxtyping import PRNGKeyArray

from jaxhal import detectors as catalogue
from jaxhal.features.base import Reducer
from jaxhal.generation import Sampling, StreamedToken, stream
from jaxhal.generation.decoding import QUERY, with_text
from jaxhal.models.lm import LM
from jaxhal.scoring.collection import Asked
from jaxhal.scoring.detection import judge, resolve_for
from jaxhal.types import Example


class Scored(NamedTuple):
    """A token of a response, its scores, and scores of the response so far, by
    detector.
    """

    token: StreamedToken
    tokens: dict[str, float]
    scores: dict[str, float]


def stream_scores(
    lm: LM,
    prompt: str | Example,
    detectors: Sequence[Asked],
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
    A token's own score is that of the moment: where it is a mean of the tokens around
    it, as of the ``token_probe`` that ships, of those before it.

    Args:
      prompt: as :func:`jaxhal.stream` takes it, and so are those not named here.
      detectors: as :func:`jaxhal.score` takes them, of those that need a row of each
        token and nothing else.

    Raises:
      ValueError: as :func:`jaxhal.stream`; on no detector, two of one name, an unknown
        one, or one that must be fitted first or reads more than rows of tokens.
    """
    chosen = resolve_for(lm, detectors)
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
    stop_ids, shape = lm.require_tokenizer().stop_ids, (1, max_new_tokens)

    def scored() -> Iterator[Scored]:
        tokens, valid = np.zeros(shape, np.int32), np.zeros(shape, bool)
        rows: dict[str, Any] = {}
        for at, token in enumerate(written):
            tokens[0, at], valid[0, at] = token.id, True
            if not at:
                rows = jax.tree.map(
                    lambda x: np.zeros((*shape, *x.shape), x.dtype), token.features
                )
            jax.tree.map(
                lambda kept, x, at=at: np.copyto(kept[0, at, ...], x),
                *(rows, token.features),
            )
            features = {
                "valid": valid,
                "text": np.asarray(with_text(tokens, valid, stop_ids)),
                "marked": np.zeros_like(valid),
            }
            for name, reducer in reducers.items():
                features[name] = jax.tree.map(_axes_of(reducer), rows[name])
            judged = judge(chosen, features)
            yield Scored(
                token,
                {name: float(some[0, at]) for name, some in judged.tokens.items()},
                {name: float(some[0]) for name, some in judged.scores.items()},
            )

    return scored()


def _axes_of(reducer: Reducer) -> Callable[[np.ndarray], np.ndarray]:
    """Brings the axes of answers and tokens, which lead, to where a batch has them."""
    there = reducer.batch_axis, QUERY[reducer.reads]
    return lambda kept: np.moveaxis(kept, (0, 1), there)
