"""From features to reports: detectors judge a batch, each answer gets its page."""

import dataclasses
import functools
import itertools
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
from jaxtyping import Array

from jaxhal import detectors as catalogue
from jaxhal.detectors import Detector
from jaxhal.features.base import Reducer
from jaxhal.models.batching import Encoded
from jaxhal.reporting.report import Report, Span, Token
from jaxhal.scoring.fitting import Fitted
from jaxhal.types import Example

# The first of these among the detectors asked for colours tokens and finds spans, from
# this score of a token on: where the token probe's F1 is best on RAGTruth QA, and where
# the reader gave the token less than 1 % probability.
PREFERRED = {"token_probe": 0.25, "predictive_probability": 0.99}
_OTHERWISE = 0.5


@functools.partial(jax.jit, static_argnums=0)
def response_scores(
    detectors: tuple[Detector, ...], params: tuple[Any, ...], features: dict[str, Any]
) -> dict[str, Array]:
    """Detector -> ``Float[batch]``."""
    pairs = zip(detectors, params, strict=True)
    return {d.name: d.score(p, features) for d, p in pairs}


@functools.partial(jax.jit, static_argnums=0)
def token_scores(
    detectors: tuple[Detector, ...], params: tuple[Any, ...], features: dict[str, Any]
) -> dict[str, Array]:
    """Detector -> ``Float[batch response]``, for those that score tokens."""
    pairs = zip(detectors, params, strict=True)
    return {d.name: d.tokens(p, features) for d, p in pairs if d.tokens is not None}


@functools.partial(jax.jit, static_argnums=0)
def head_maps(
    detectors: tuple[Detector, ...], features: dict[str, Any]
) -> dict[str, Array]:
    """Feature -> ``Float[layer batch heads]``, for what is one number a head."""
    maps = {}
    for name, feature in catalogue.features_of(detectors).items():
        if not isinstance(feature, Reducer):
            continue
        if feature.axes == ("layer", "heads", "response"):
            maps[name] = catalogue.response_mean(features[name], features)
        elif feature.axes == ("layer", "heads"):
            maps[name] = features[name]
    return maps


class Judged(NamedTuple):
    """What detectors say of a batch, as NumPy arrays."""

    scores: dict[str, np.ndarray]
    tokens: dict[str, np.ndarray]
    heads: dict[str, np.ndarray]


def judge(
    chosen: Sequence[Fitted],
    features: dict[str, Any],
    scores: dict[str, np.ndarray] | None = None,
) -> Judged:
    """Lets every detector judge a batch.

    Args:
      chosen: the detectors with their parameters.
      features: what they read, as :func:`jaxhal.read` gives it, with ``"valid"``,
        ``"text"``, ``"marked"`` and numbers computed from the example.
      scores: of the responses, where they are known.
    """
    params = tuple(one.params for one in chosen)
    detectors = tuple(one.detector for one in chosen)
    known = response_scores(detectors, params, features) if scores is None else scores
    tokens = token_scores(detectors, params, features)
    maps = head_maps(detectors, features)
    return Judged(*jax.device_get((known, tokens, maps)))


def report(
    chosen: Sequence[Fitted],
    model: str,
    example: Example,
    row: Encoded,
    judged: Judged,
    at: int,
    threshold: float | None = None,
) -> Report:
    """The report of one answer.

    Args:
      chosen: the detectors that judged it.
      model: name of the reader.
      example: the answer.
      row: the same as tokens.
      judged: what the detectors say of its batch.
      at: its row in the batch.
      threshold: token score from which on a token belongs to a span; by default that
        of :data:`PREFERRED`, 0.5 for other detectors.
    """
    names = [one.detector.name for one in chosen]
    with_tokens = [name for name in names if name in judged.tokens]
    blank = empty(model, example, [one.detector for one in chosen])
    listed = []
    for number, (start, end) in enumerate(row.offsets.tolist()):
        if start < end:  # the end-of-sequence token has no text
            values = {n: float(judged.tokens[n][at, number]) for n in with_tokens}
            listed.append(Token(example.response[start:end], start, end, values))
    if threshold is None:
        threshold = PREFERRED.get(blank.detector, _OTHERWISE)
    scores = {name: float(judged.scores[name][at]) for name in names}
    known = {d.detector.name: d for d in chosen if d.calibration is not None}
    return dataclasses.replace(
        blank,
        scores=scores,
        probabilities={
            name: float(one.probabilities([scores[name]])[0])
            for name, one in known.items()
        },
        flagged=[name for name, one in known.items() if one.flags([scores[name]])[0]],
        tokens=listed,
        spans=find_spans(example.response, listed, blank.detector, threshold),
        heads={name: value[:, at] for name, value in judged.heads.items()},
    )


def empty(
    model: str,
    example: Example,
    detectors: Sequence[Detector],
    error: str | None = None,
) -> Report:
    """A report without a verdict."""
    with_tokens = [d.name for d in detectors if d.tokens is not None]
    order = [*(name for name in PREFERRED if name in with_tokens), *with_tokens, ""]
    return Report(
        id=example.id,
        model=model,
        response=example.response,
        scores={},
        tokens=[],
        spans=[],
        heads={},
        detector=order[0],
        context=example.context,
        question=example.question,
        prompt=example.prompt,
        label=example.label,
        labels=example.labels,
        error=error,
        by={one.name: one.by for one in detectors if one.by},
    )


def find_spans(
    response: str, tokens: Sequence[Token], detector: str, threshold: float
) -> list[Span]:
    """Runs of tokens whose score reaches the threshold, without outer white space.

    A character cut into several tokens has the highest of their scores.  The confidence
    of a span is the mean score of its tokens.
    """
    scored = [
        (place, max(token.scores.get(detector, 0.0) for token in same))
        for place, same in itertools.groupby(tokens, lambda t: (t.start, t.end))
    ]
    spans: list[Span] = []
    for high, run in itertools.groupby(scored, lambda one: one[1] >= threshold):
        if high:
            places, scores = zip(*run, strict=True)
            start, end = places[0][0], places[-1][1]
            text = response[start:end]
            start += len(text) - len(text.lstrip())
            end -= len(text) - len(text.rstrip())
            if start < end:
                confidence = float(np.mean(scores))
                spans.append(Span(start, end, response[start:end], confidence))
    return spans
