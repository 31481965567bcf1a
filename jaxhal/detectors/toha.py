"""TOHA: topological divergence of attention graphs, and heads that tell it best.

Bazarova et al., Hallucination Detection in LLMs via Topological Divergence on Attention
Graphs, 2025.
"""

import functools
from typing import Any, Literal, NamedTuple

import jax.numpy as jnp
import numpy as np
from jaxtyping import Float

from jaxhal.classifiers import heads
from jaxhal.detectors import base
from jaxhal.features.base import Reducer
from jaxhal.features.forest import SinkShare
from jaxhal.features.graphs import Barcode, VertexDegree
from jaxhal.features.topology import MTopDiv
from jaxhal.io.checks import at_least, one_of


@base.factory
def _head_mean(
    of: str, reducer: Reducer, summary: str, unit: str, section: int
) -> base.Detector:
    """A number a head, mean of all of them; nothing is trained."""
    return base.Detector(
        of,
        f"{summary}, mean of all heads",
        unit,
        f"Bazarova et al. 2025 (TOHA), section {section}",
        features=((of, reducer),),
        inputs=lambda f: f[of].mean((0, 2)),
    )


mtop_div = functools.partial(
    _head_mean,
    "mtop_div",
    MTopDiv(),
    "topological divergence of response and prompt",
    "mean edge weight, 0 to 1",
    4,
)
sink_share = functools.partial(
    _head_mean,
    "sink_share",
    SinkShare(),
    "forest edges that end in the prompt's first token",
    "share of edges, 0 to 1",
    5,
)


class Heads(NamedTuple):
    """Which heads count."""

    weights: Float[Any, " heads"]  # one over the count for a chosen head, else 0
    separation: Float[Any, " heads"]  # mean score of hallucinated minus grounded


@base.factory
def toha(
    max_heads: int = 6, probe: Literal["split", "shared"] = "split"
) -> base.Detector:
    """MTop-Div averaged over the few heads that tell hallucinations apart best.

    ``probe`` ``"split"`` ranks heads on one half of the training part (by source) and
    counts them on the other, up to ``max_heads`` or all there are, as in the paper;
    ``"shared"`` uses all of it for both, as in the published code.
    """
    one_of(("split", "shared"), probe=probe)
    at_least(1, max_heads=max_heads)

    def fit(inputs: Any, targets: base.Targets) -> Heads:
        scores, labels = np.asarray(inputs), np.asarray(targets.labels)
        first = second = targets.rows
        if probe == "split":
            first, second = base.split_rows(targets, 0.5)
        most = min(max_heads, scores.shape[1])
        choice = heads.choose_heads(
            scores[first], labels[first], scores[second], labels[second], most
        )
        weights, count = np.zeros(scores.shape[1], np.float32), int(choice.number)
        weights[np.asarray(choice.heads)[:count]] = 1 / count
        return Heads(jnp.asarray(weights), jnp.asarray(choice.separation))

    return base.Detector(
        "toha",
        "topological divergence, mean of the heads chosen on the training part",
        "mean edge weight, 0 to 1",
        "Bazarova et al. 2025 (TOHA), algorithm 1",
        features=(("mtop_div", MTopDiv()),),
        inputs=lambda f: base.flat_heads(f["mtop_div"]),
        # No matrix product: on an accelerator that would round to a few digits.
        decide=lambda params, inputs: (inputs * params.weights).sum(-1),
        fit=fit,
    )


@base.factory
def toha_supervised() -> base.Detector:
    """Logistic regression on the MTop-Div of all heads."""
    return base.logistic(
        "toha_supervised",
        "logistic regression on the topological divergence of all heads",
        "Bazarova et al. 2025 (TOHA), supervised variant",
        lambda f: base.flat_heads(f["mtop_div"]),
        ("mtop_div", MTopDiv()),
    )


@base.factory
def topology_probe() -> base.Detector:
    """Logistic regression on barcodes and vertex degrees of all heads' graphs."""
    return base.logistic(
        "topology_probe",
        "logistic regression on barcodes and vertex degrees of all heads",
        "Bazarova et al. 2025 (TOHA), appendix D.3; Kushnareva et al. 2021",
        lambda f: jnp.concatenate(
            [base.flat_heads(f["barcode"]), base.flat_heads(f["degree"])], 1
        ),
        ("barcode", Barcode()),
        ("degree", VertexDegree()),
    )
