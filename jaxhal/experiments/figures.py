"""The figures of a run."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from jaxhal import plotting
from jaxhal.capture.forward import read
from jaxhal.detectors.toha import Heads
from jaxhal.experiments import relevance
from jaxhal.experiments.config import UNITS
from jaxhal.experiments.running import Result
from jaxhal.features.forest import Forest
from jaxhal.models.config import ATTENTION
from jaxhal.models.lm import LM
from jaxhal.reporting import results
from jaxhal.scoring.fitting import Fitted
from jaxhal.scoring.inputs import Inputs

if TYPE_CHECKING:
    from matplotlib.figure import Figure

# Curves of more methods than this cannot be told apart.
_CURVES = 8
# Of a character, and so the most tokens that one takes.
_BYTES = 4
# The forest of an answer of more tokens is longer than a page.
_DRAWN = 100


def figures(found: Result, lm: LM) -> Iterator[tuple[str, "Figure"]]:
    """Name and figure: transfer, curves of each data set, relevance, heads, forests.

    The curves show what the table ranks by; parts that are judged apart have none, as
    scores of their fits are not comparable.  Names end in the data set's label where
    there are several.
    """
    unit, several = found.config.unit, len(found.data) > 1
    for name, matrix in results.matrices(found.rows).items() if several else ():
        labels = [str(label) for label in matrix.index]
        figure = plotting.transfer_map(matrix.to_numpy(), labels, [*matrix.columns])
        figure.suptitle(name)
        yield f"transfer_{name}", figure
    for label in found.data:
        end = f"_{label}" if several else ""
        judged = [part for part in found.judged if part.train == part.test == label]
        own = results.own(found.rows, label)
        areas = {row["method"]: (row["AUROC"], row["low"], row["high"]) for row in own}
        controls = [row["method"] for row in own if row["control"]]
        yield f"auroc{end}", plotting.auroc_intervals(areas, controls)
        if not any(part.apart for part in judged):
            pooled = results.pooled(judged, found.methods)
            for name, figure in _curves(areas, controls, pooled, UNITS[unit]):
                yield f"{name}{end}", figure
        if unit == "response":
            for name, figure in relevance.figures(found.data[label]):
                yield f"{name}{end}", figure
    for label, fitted in found.fitted.items():
        chosen = [one for one in fitted.values() if isinstance(one.params, Heads)]
        for one in chosen:
            yield f"heads_{one.detector.name}_{label}", _head_map(one, lm)
        if chosen and unit == "response":
            test = found.splits[label][0].test
            for kind, figure in forests(lm, found.data[label], test, chosen[0]):
                yield f"forest_{label}_{kind}", figure


def _curves(
    areas: Mapping[str, tuple[float, float, float]],
    controls: Sequence[str],
    pooled: results.Pooled,
    unit: str,
) -> Iterator[tuple[str, "Figure"]]:
    methods = [name for name in areas if name not in controls]
    best = [*methods[: _CURVES - 2], *controls[:2]]
    scores = {name: pooled.scores[name] for name in best}
    shown = [name for name in controls if name in best]
    known = {name: areas[name] for name in best}
    labels = pooled.labels
    yield "roc", plotting.roc_curves(scores, labels, known, shown)
    yield "pr", plotting.precision_recall_curves(scores, labels, shown)
    yield "scores", plotting.score_histograms(scores, labels, unit=unit)
    # Some have one probability for all.
    told = [name for name in best if np.ptp(pooled.probabilities[name]) > 0]
    first = (told or best)[0]
    figure = plotting.calibration_curve(pooled.probabilities[first], labels, unit=unit)
    figure.suptitle(first)
    yield "calibration", figure


def _grid(values: Any, lm: LM) -> np.ndarray:
    """Numbers of all heads, ``[layer heads]`` of the layers with attention."""
    return np.asarray(values).reshape(-1, lm.config.num_attention_heads)


def _head_map(toha: Fitted, lm: LM) -> "Figure":
    """The separation of every head, the chosen ones framed."""
    chosen = np.argwhere(_grid(toha.params.weights, lm) > 0)
    return plotting.head_map(
        _grid(toha.params.separation, lm),
        f"{toha.detector.name}: MTop-Div, hallucinated minus grounded",
        "difference",
        framed=[(int(layer), int(head)) for layer, head in chosen],
        layers=lm.config.layers_with(*ATTENTION),
    )


def forests(
    lm: LM, data: Inputs, test: np.ndarray, toha: Fitted
) -> Iterator[tuple[str, "Figure"]]:
    """The forests of a hallucinated and a grounded answer, as in the paper's figure 5.

    It is that of the chosen head that separates best, drawn for the hallucinated answer
    of the highest and the grounded one of the lowest score; a kind whose answers are
    all too long to be drawn is left out.
    """
    score = toha.score(data.inputs[toha.detector.name])
    length = np.array([len(row.response_ids) for row in data.rows])
    short = test[length[test] <= _DRAWN]
    chosen = {}
    for kind, label in (("hallucinated", 1), ("grounded", 0)):
        some = short[data.labels[short] == label]
        if len(some):
            chosen[kind] = some[np.argmax(score[some] if label else -score[some])]
    if not chosen:
        return
    params = toha.params
    best = np.where(np.asarray(params.weights) > 0, params.separation, -np.inf)
    layer, head = np.unravel_index(np.argmax(best), _grid(best, lm).shape)
    number = lm.config.layers_with(*ATTENTION)[layer]
    batch = lm.encode([data.examples[row] for row in chosen.values()])
    edges = read(lm, batch, {"forest": Forest()})["forest"]
    decode = lm.require_tokenizer().decode
    for at, (kind, row) in enumerate(chosen.items()):
        valid = np.asarray(batch.valid[at])
        pad = int((~valid[: batch.prompt_length]).sum())
        count = int(length[row])
        figure = plotting.forest_drawing(
            np.asarray(edges.parents[layer, at, head, :count]) - pad,
            edges.weights[layer, at, head, :count],
            texts_of(decode, np.asarray(batch.tokens[at])[valid].tolist()),
            batch.prompt_length - pad,
            hallucinated=data.marked[row],
            title=f"{data.examples[row].id}: layer {number}, head {head}",
        )
        yield kind, figure


def texts_of(decode: Callable[[list[int]], str], tokens: Sequence[int]) -> list[str]:
    """Of each token; a character of several tokens stands with its first one."""
    found: list[str] = []
    while rest := tokens[len(found) :]:
        each = [decode([*rest[:size]]) for size in range(1, _BYTES + 1)]
        whole = [size for size, text in enumerate(each, 1) if "\ufffd" not in text]
        size = whole[0] if whole else 1
        found += [each[size - 1], *[""] * (size - 1)]
    return found
