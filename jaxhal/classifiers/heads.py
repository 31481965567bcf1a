"""Which attention heads tell hallucinated answers apart, and in another model?

Bazarova et al., `TOHA <https://arxiv.org/abs/2504.10063>`_, 2025, section 4.2; Chuang
et al., `Lookback Lens <https://arxiv.org/abs/2407.07071>`_, 2024, for the transfer.
"""

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jaxtyping import Array, Float, Int

from jaxhal.classifiers.data import Values, auroc, check


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class HeadChoice:
    """Heads in order of separation, and how many of them to average; a pytree."""

    heads: Int[Array, "*lead max_heads"]
    count: Int[Array, "*lead"]
    separation: Float[Array, "*lead heads"]
    # Of the mean over the first 1, 2, ... heads.
    aurocs: Float[Array, "*lead max_heads"]

    @property
    def chosen(self) -> Int[Array, " chosen"]:
        """The first ``count`` heads; not under ``jit``, where ``count`` is unknown."""
        return self.heads[: int(self.count)]


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
      >>> print(choice.chosen, choice.aurocs)
      [0] [1.   0.75]
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


class Transfer(NamedTuple):
    """Linear maps from the heads of one model to each head of another; a pytree."""

    weights: Float[Array, "target source"]
    intercepts: Float[Array, " target"]

    def apply(
        self, scores: Float[Values, "*rows source"]
    ) -> Float[Array, "*rows target"]:
        """Scores the target model's heads would have given, of the source's."""
        with jax.default_matmul_precision("highest"):
            return jnp.asarray(scores) @ self.weights.T + self.intercepts


def per_head_transfer(source: Any, target: Any, ridge: float = 1e-4) -> Transfer:
    """A ridge regression for every target head from all source heads, by QR.

    With it a classifier fitted on the target model's heads judges the source model, of
    whose heads there are ``[rows, heads]`` on the same responses.  The fitting code of
    the paper is not published; a small ``ridge`` (scikit-learn's ``alpha``) only keeps
    the solution finite where heads are collinear or outnumber responses.
    """
    source, target = (jnp.asarray(a, jnp.float32) for a in (source, target))
    if source.ndim != 2 or target.ndim != 2 or len(source) != len(target):
        raise ValueError(
            f"source has shape {source.shape} and target {target.shape}; pass "
            "[rows, heads] of the same responses"
        )
    if len(source) < 2:
        raise ValueError(f"got {len(source)} responses; a regression needs more")
    if not 0 < ridge < np.inf:
        raise ValueError(f"ridge is {ridge}; give a small number above 0")
    for name, scores in (("source", source), ("target", target)):
        if not isinstance(scores, Tracer) and not jnp.isfinite(scores).all():
            row, head = np.argwhere(~np.isfinite(scores))[0].tolist()
            raise ValueError(
                f"{name}[{row}, {head}] is {scores[row, head]}; drop that response"
            )
    return _transfer(source, target, jnp.float32(ridge))


@jax.jit
def _transfer(
    source: Float[Array, "rows source"],
    target: Float[Array, "rows target"],
    ridge: Float[Array, ""],
) -> Transfer:
    with jax.default_matmul_precision("highest"):
        middle, offset = source.mean(0), target.mean(0)
        heads = source.shape[1]
        # QR of the rows with the ridge below them: the normal equations would square
        # the condition number, which float32 cannot afford.
        tall = jnp.concatenate([source - middle, jnp.sqrt(ridge) * jnp.eye(heads)])
        q, r = jnp.linalg.qr(tall)
        right = q[: len(source)].T @ (target - offset)
        weights = jax.scipy.linalg.solve_triangular(r, right).T
        return Transfer(weights, offset - weights @ middle)


def _check(
    scores: Any, labels: Any
) -> tuple[Float[Array, "rows heads"], Float[Array, " rows"]]:
    scores = jnp.asarray(scores, jnp.float32)
    if scores.ndim != 2:
        raise ValueError(f"scores have shape {scores.shape}; pass [rows, heads]")
    scores, labels, _ = check(scores, labels, weight=np.ones(np.shape(labels)))
    return scores, labels
