"""What do two commands, from labelled answers to verdicts, cost beside reading alone?

SmolLM2-135M in float32 reads the bundled answers of several sentences, which detectors
and all controls are fitted to, and then judges as many of the bundled short ones.
Nothing that was read is kept from round to round; programs were compiled before.
"""

import tempfile
from collections.abc import Iterator, Sequence
from typing import Any

import jaxhal
from jaxhal.bench import interleave
from jaxhal.datasets import bundled, bundled_answers
from jaxhal.detectors import build, features_of
from jaxhal.models.lm import LM
from jaxhal.reading.extract import extract
from jaxhal.scoring.collection import beside_controls
from jaxhal.types import Example

ROWS, DETECTORS = 60, ("linear_probe", "lookback_lens", "toha")
_ROUNDS = 3


def rows() -> Iterator[dict]:
    lm = jaxhal.load("smollm2-135m", mesh="data=1")
    labelled, new = bundled_answers()[:ROWS], bundled()[:ROWS]
    ready = _fitted(lm, labelled)
    functions = {
        "fit": lambda: _fitted(lm, labelled),
        "read labelled": lambda: _read(lm, labelled),
        "judge": lambda: jaxhal.score(lm, new, ready, progress=False),
        "read new": lambda: _read(lm, new),
    }
    case = f"{ROWS} rows, {len(DETECTORS)} detectors"
    times = interleave("fit", case, functions, _ROUNDS)
    yield times.ratio("jaxhal.fit / reading the same rows", "fit", "read labelled")
    yield times.ratio("jaxhal.score / reading the same rows", "judge", "read new")


def _fitted(lm: LM, examples: Sequence[Example]) -> jaxhal.FittedDetectors:
    with tempfile.TemporaryDirectory() as store:
        return jaxhal.fit(lm, examples, DETECTORS, store=store, progress=False)


def _read(lm: LM, examples: Sequence[Example]) -> list[Any]:
    detectors = map(build, beside_controls(DETECTORS, lm).values())
    features = features_of(detectors, fitting=True)
    found = extract(lm, examples, features, progress=False)
    return [features for _, features in found.batches()]
