"""What fitted detectors say of the tokens of labelled answers, and of their spans."""

import functools
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jaxtyping import Array, Bool, Float

from jaxhal.detectors import Detector
from jaxhal.evaluation.checks import group_codes
from jaxhal.evaluation.guarantees import highlighted, highlighted_means
from jaxhal.reading.units import has_text
from jaxhal.reporting.report import Token
from jaxhal.scoring.fitting import Fitted
from jaxhal.scoring.inputs import Inputs
from jaxhal.scoring.spans import span_levels
from jaxhal.scoring.verdicts import verdict

# Detector -> answer -> scores of the tokens that have text.
_Scores = dict[str, dict[int, np.ndarray]]


@functools.partial(jax.jit, static_argnums=0)
def token_scores(
    detectors: tuple[Detector, ...], params: tuple[Any, ...], features: dict[str, Any]
) -> dict[str, Array]:
    """Detector -> ``Float[batch response]``, for those that score tokens."""
    pairs = zip(detectors, params, strict=True)
    return {d.name: d.tokens(p, features) for d, p in pairs if d.tokens is not None}


def highlights(
    data: Inputs, fitted: Mapping[str, Fitted], rows: Sequence[int]
) -> dict[str, Float[np.ndarray, "answers steps"]]:
    """Per detector that scores tokens, :func:`jaxhal.evaluation.highlighted`.

    Of the spans that a report shows where that detector decides.  A hallucinated answer
    without annotated spans has no character that is known to be supported.
    """
    made = {}
    for name, scores in scores_of_tokens(data, fitted, rows).items():
        levels, labels = [], []
        for n, supported in zip(
            rows, are_supported(data, fitted[name], rows), strict=True
        ):
            one = data.examples[n]
            level = span_levels(*tokens_of(data, n, name, scores[n]))
            levels.append(np.full_like(level, -1.0) if supported else level)
            unknown = one.labels is None and one.label == 1
            labels.append(characters_of(data, n, one.labels or ()) | unknown)
        made[name] = highlighted(
            levels, labels, [np.ones_like(each) for each in levels]
        )
    return made


def unseen_highlights(
    data: Inputs,
    judged: Sequence[tuple[Sequence[int], Mapping[str, Fitted]]],
    names: Sequence[str],
) -> dict[str, Float[np.ndarray, "sources steps"]]:
    """Per detector that scores tokens, the mean of :func:`highlights` in each source.

    Sources without a supported character are left out.

    Args:
      judged: rows of answers, and what was fitted to others.
      names: of detectors.
    """
    with_tokens = [n for n in names if judged[0][1][n].detector.tokens is not None]
    if not with_tokens:
        return {}
    found = [
        highlights(data, {n: fitted[n] for n in with_tokens}, rows)
        for rows, fitted in judged
    ]
    rows = np.concatenate([rows for rows, _ in judged])
    codes = group_codes(data.groups[rows].tolist(), len(rows))
    shares = {
        name: np.concatenate([each[name] for each in found]) for name in with_tokens
    }
    return {
        name: highlighted_means(each, codes).astype(np.float32)
        for name, each in shares.items()
    }


def scores_of_tokens(
    data: Inputs, fitted: Mapping[str, Fitted], rows: Sequence[int]
) -> _Scores:
    """Those of some answers, of the detectors that give them."""
    chosen = [one for one in fitted.values() if one.detector.tokens is not None]
    detectors = tuple(one.detector for one in chosen)
    params = tuple(one.params for one in chosen)
    out: _Scores = {one.name: {} for one in detectors}
    for numbers, features in data.source.batches(set(rows)):
        for name, scores in token_scores(detectors, params, features).items():
            values = np.asarray(scores)
            for at, number in enumerate(numbers):
                text = with_text(data, number)
                out[name][number] = values[at, : len(text)][text]
    return out


def with_text(data: Inputs, row: int) -> Bool[np.ndarray, " response"]:
    """Which tokens of an answer have text."""
    return np.asarray(has_text(data.rows[row].offsets))


def tokens_of(
    data: Inputs, row: int, name: str, scores: np.ndarray
) -> tuple[str, list[Token], str]:
    """What :func:`~jaxhal.scoring.spans.find_spans` takes."""
    response = data.examples[row].response
    places = data.rows[row].offsets[with_text(data, row)].tolist()
    pairs = zip(places, scores.tolist(), strict=True)
    tokens = [Token(response[a:b], a, b, {name: score}) for (a, b), score in pairs]
    return response, tokens, name


def are_supported(data: Inputs, one: Fitted, rows: Sequence[int]) -> list[bool]:
    """Whether the verdict is that, and a report shows no span."""
    scores = one.score(data.inputs[one.detector.name])[list(rows)]
    return [verdict(one, score)[0] == "supported" for score in scores.tolist()]


def characters_of(
    data: Inputs, row: int, spans: Sequence[Any]
) -> Bool[np.ndarray, " characters"]:
    """Which characters of an answer lie in spans."""
    held = np.zeros(len(data.examples[row].response), bool)
    for start, end, *_ in spans:
        held[start:end] = True
    return held
