"""A random forest: fitted by scikit-learn, decided here on arrays."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from jaxhal.classifiers.data import Values, weighted_rows
from jaxhal.io.checks import at_least

# To choose from: the shallowest trees, then the largest leaves, first.
GRID = {"max_depth": (2, 3, 5), "min_samples_leaf": (5, 1)}
_SEED = 42  # of LRP4RAG's released code

_DEEPEST = 10  # of 2047 nodes a tree

# Mean probabilities nearer to 0 or 1 have the log odds of this; a float32 holds both
# it and its distance from 1.
_NEAREST = 2.0**-20


class Forest(NamedTuple):
    """Trees of one depth as tables of nodes; a pytree.

    From a node with ``x[feature] <= threshold`` a row goes ``left``, else ``right``; a
    leaf leads to itself.  Every tree has the ``2 ** (depth + 1) - 1`` nodes of a full
    one, so that every fold has one shape; nodes that it does not need are not reached.
    ``probability`` is the share of class 1 among the training rows of a node.
    """

    feature: Int[Array, "trees nodes"]
    threshold: Float[Array, "trees nodes"]
    left: Int[Array, "trees nodes"]
    right: Int[Array, "trees nodes"]
    probability: Float[Array, "trees nodes"]


def fit_forest(
    x: Any,
    labels: Any,
    weight: Any,
    max_depth: int = 3,
    min_samples_leaf: int = 1,
    trees: int = 200,
) -> Forest:
    """scikit-learn's ``RandomForestClassifier``, as arrays; by default that of LRP4RAG.

    A row of weight 0 is left out; the depth is 1 to 10.
    """
    from sklearn.ensemble import RandomForestClassifier

    if not 1 <= max_depth <= _DEEPEST:
        raise ValueError(f"max_depth is {max_depth}; use 1 to {_DEEPEST}")
    at_least(1, min_samples_leaf=min_samples_leaf, trees=trees)
    rows = weighted_rows(x, labels, weight)
    forest = RandomForestClassifier(
        trees,
        max_depth=max_depth,
        min_samples_leaf=min_samples_leaf,
        random_state=_SEED,
    )
    nodes = 2 ** (max_depth + 1) - 1
    tables = [_table(one.tree_, nodes) for one in rows.fit(forest).estimators_]
    return Forest(*jax.device_put([*map(np.stack, zip(*tables, strict=True))]))


def _table(tree: Any, nodes: int) -> tuple[np.ndarray, ...]:
    """One fitted tree in so many nodes."""
    at = np.arange(tree.node_count)
    leaf = tree.children_left < 0
    # A float32 is at most a float64 when it is at most the float32 below that.
    below = tree.threshold.astype(np.float32)
    below = np.where(
        below > tree.threshold, np.nextafter(below, np.float32(-np.inf)), below
    )
    columns = (
        np.where(leaf, 0, tree.feature).astype(np.int32),
        below,
        np.where(leaf, at, tree.children_left).astype(np.int32),
        np.where(leaf, at, tree.children_right).astype(np.int32),
        tree.value[:, 0, 1].astype(np.float32),
    )
    return tuple(np.pad(column, (0, nodes - len(at))) for column in columns)


@jax.jit
def forest_logits(
    params: Forest, x: Float[Values, "*rows width"]
) -> Float[Array, "*rows"]:
    r"""Log odds of the mean probability of all trees, -13.9 to 13.9.

    .. math:: \log \frac{p}{1 - p}, \quad
      p = \operatorname{clip}(\overline{p_t(x)}, 2^{-20}, 1 - 2^{-20})
    """
    x = jnp.asarray(x)
    depth = params.feature.shape[-1].bit_length() - 1

    def probability(tree: Forest) -> Float[Array, "*rows"]:
        def ask(_, node):
            value = jnp.take_along_axis(x, tree.feature[node][..., None], -1)[..., 0]
            low = value <= tree.threshold[node]
            return jnp.where(low, tree.left[node], tree.right[node])

        root = jnp.zeros(x.shape[:-1], jnp.int32)
        return tree.probability[jax.lax.fori_loop(0, depth, ask, root)]

    mean = jax.vmap(probability)(params).mean(0)
    return jax.scipy.special.logit(jnp.clip(mean, _NEAREST, 1 - _NEAREST))
