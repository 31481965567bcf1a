"""What does a grid of linear probes cost beside scikit-learn, and is it the same grid?

All layers, folds and strengths of a probe on SmolLM2-135M's hidden states, against
``StandardScaler`` and ``LogisticRegression`` in a loop over some of them.  The hidden
states are random: features correlated along a falling spectrum, with a class signal.
"""

import time
from collections.abc import Iterator

import jax
import numpy as np
from jaxtyping import Float, Int

from jaxhal.bench import interleave, row
from jaxhal.classifiers.linear import fit_grid, grid_logits

LAYERS, ROWS, WIDTH, FOLDS = 30, 839, 576, 5
STRENGTHS = np.logspace(-5, 1, 8)
_ROUNDS = 5
_FITS = 2  # of each strength in a round, at random layers and folds
_SIGNAL = 2.0  # gives the best strengths an AUROC of about 0.75


def hidden_states(
    seed: int = 0,
) -> tuple[Float[np.ndarray, "layers rows width"], Int[np.ndarray, " rows"]]:
    """Features and labels, 55 % of them hallucinated."""
    rng = np.random.default_rng(seed)
    y = (rng.random(ROWS) < 0.55).astype(int)
    spread = 1 / np.sqrt(np.arange(1, WIDTH + 1))
    layers = []
    for _ in range(LAYERS):
        mix = spread[:, None] * rng.normal(size=(WIDTH, WIDTH))
        signal = rng.normal(size=WIDTH)
        factors = rng.normal(size=(ROWS, WIDTH))
        factors += _SIGNAL * (y[:, None] - 0.55) * signal / np.linalg.norm(signal)
        scale = np.exp(0.5 * rng.normal(size=WIDTH))
        layers.append((factors @ mix) * scale + 2 * rng.normal(size=WIDTH))
    return np.stack(layers).astype(np.float32), y


def rows() -> Iterator[dict]:
    x, y = hidden_states()
    fold = np.random.default_rng(1).integers(FOLDS, size=ROWS)
    train = (fold != np.arange(FOLDS)[:, None]).astype(np.float32)
    rounds, compared = _cells(), []

    def ours():
        return fit_grid(x, y, train, STRENGTHS)

    def sklearn():
        for cell in next(rounds):
            compared.append((cell, _sklearn(x, y, train, cell)))

    case = f"{LAYERS}x{FOLDS}x{len(STRENGTHS)}"
    begin = time.perf_counter()
    logits = np.asarray(grid_logits(jax.block_until_ready(ours()), x))
    yield row("probes", case, "first call, seconds", time.perf_counter() - begin)
    both = {"ours": ours, "sklearn": sklearn}
    times = interleave("probes", case, both, _ROUNDS, warm_up=False)
    later = np.median(times.seconds["ours"])
    yield row("probes", case, "later calls, seconds", later)
    fits = len(STRENGTHS) * _FITS
    share = LAYERS * FOLDS * len(STRENGTHS) / fits
    metric = f"scikit-learn (from {_ROUNDS} x {fits} fits) / one program"
    yield times.ratio(metric, "sklearn", "ours", 10.0, "higher", share)
    yield from _agreement(case, x, y, train, logits, compared)


def _cells() -> Iterator[list[tuple[int, int, int]]]:
    """Rounds of (layer, fold, strength), every strength equally often."""
    rng = np.random.default_rng(2)
    while True:
        yield [
            (int(rng.integers(LAYERS)), int(rng.integers(FOLDS)), strength)
            for strength in np.repeat(np.arange(len(STRENGTHS)), _FITS).tolist()
        ]


def _sklearn(x, y, train, cell, **settings) -> Float[np.ndarray, " rows"]:
    from sklearn.linear_model import LogisticRegression
    from sklearn.pipeline import make_pipeline
    from sklearn.preprocessing import StandardScaler

    layer, fold, strength = cell
    kept = train[fold] > 0
    settings = {"C": STRENGTHS[strength], "max_iter": 1000} | settings
    probe = make_pipeline(StandardScaler(), LogisticRegression(**settings))
    return probe.fit(x[layer, kept], y[kept]).decision_function(x[layer])


def _agreement(case, x, y, train, logits, compared) -> Iterator[dict]:
    """Held-out AUROC beside scikit-learn, as it stops by default and once converged."""
    from jaxhal.evaluation import auroc

    default, converged, found = [], [], {}
    for cell, theirs in compared:
        out = train[cell[1]] == 0
        value = auroc(logits[cell][out], y[out])
        default.append(abs(value - auroc(theirs[out], y[out])))
        theirs = _sklearn(x, y, train, cell, tol=1e-8, max_iter=10_000)
        converged.append(abs(value - auroc(theirs[out], y[out])))
        found.setdefault(cell[2], []).append(value)
    best = max(np.mean(values) for values in found.values())
    yield row("probes", case, "held-out AUROC at the best strength", best)
    metric = "largest AUROC difference from scikit-learn"
    yield row("probes", case, f"{metric}, converged", max(converged), 0.005)
    yield row("probes", case, f"{metric}, default tol", max(default))
