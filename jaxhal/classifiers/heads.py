"""Which attention heads tell hallucinated answers apart?

Bazarova et al., `TOHA <https://arxiv.org/abs/2504.10063>`_, 2025, section 4.2.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from jaxhal.classifiers.data import auroc, check


class HeadChoice(NamedTuple):
    """Heads in order of separation, and how many of them to average."""

    heads: Int[Array, "*lead max_heads"]
    number: Int[Array, "*lead"]
    separation: Float[Array, "*lead heads"]
    # Of the mean over the first 1, 2, ... heads.
    aurocs: Float[Array, "*lead max_heads"]


def separation(scores: Any, labels: Any) -> Float[Array, " heads"]:
    """Mean score ``[rows, heads]`` of hallucinated minus grounded answers, per head.

    Example:
      >>> separation([[1.0, 5.0], [3.0, 5.0], [0.0, 6.0]], [1, 1, 0])
      Array([ 2., -1.], dtype=float32)
    """
    scores, labels = _check(scores, labels)
    with jax.default_matmul_precision("highest"):
        high = labels @ scores / labels.sum()
        return high - (1 - labels) @ scores / (1 - labels).sum()


def choose_heads(
    probe_scores: Any,
    probe_labels: Any,
    validation_scores: Any,
    validation_labels: Any,
    max_heads: int = 6,
) -> HeadChoice:
    """Few heads whose mean score ranks the validation answers best.

    Heads of ``[rows, heads]`` are sorted by falling :func:`separation` on the probe
    set, equal ones in their own order.  Of the means over the first 1 to ``max_heads``
    (the paper's :math:`N_{max}`), the one with the best AUROC on the validation set
    wins, the shortest where several are best.  The paper keeps the two sets apart; its
    published code uses one labelled sample for both.

    Example:
      >>> labels = [0, 0, 1, 1]
      >>> scores = [[0.2, 0.9], [0.1, 0.1], [0.6, 0.3], [0.5, 0.8]]
      >>> choice = choose_heads(scores, labels, scores, labels, max_heads=2)
      >>> print(choice.heads, choice.number, choice.aurocs)
      [0 1] 1 [1.   0.75]
    """
    delta = separation(probe_scores, probe_labels)
    scores, labels = _check(validation_scores, validation_labels)
    if scores.shape[1] != len(delta):
        raise ValueError(
            f"validation scores cover {scores.shape[1]} heads, probe scores "
            f"{len(delta)}; read both with one model"
        )
    if not 1 <= max_heads <= len(delta):
        raise ValueError(f"max_heads is {max_heads}; choose 1..{len(delta)}")
    heads = jnp.argsort(-delta, stable=True)[:max_heads]
    # Sums rank as means do.
    sums = jnp.cumsum(scores[:, heads], 1)
    aurocs = jax.vmap(auroc, (1, None, None))(sums, labels == 1, labels == 0)
    return HeadChoice(heads, jnp.argmax(aurocs) + 1, delta, aurocs)


def _check(
    scores: Any, labels: Any
) -> tuple[Float[Array, "rows heads"], Float[Array, " rows"]]:
    scores = jnp.asarray(scores, jnp.float32)
    if scores.ndim != 2:
        raise ValueError(f"scores have shape {scores.shape}; pass [rows, heads]")
    scores, labels, _ = check(scores, labels, weight=np.ones(np.shape(labels)))
    return scores, labels
