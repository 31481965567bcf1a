"""Low-rank additions to the projections of a frozen model.

A projection multiplies by ``W + (alpha / rank) A B``, which is never formed; as ``W``
is not differentiated, no gradient of its size is computed (Hu et al., `LoRA
<https://arxiv.org/abs/2106.09685>`_, 2021, section 4.1).
"""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from jaxhal.models import quantized
from jaxhal.models.config import STACKS
from jaxhal.models.ops import STANDARD, wide
from jaxhal.models.weights import paths


class Pair(NamedTuple):
    """``A`` and ``B`` of one projection in every layer that has it."""

    down: Float[Array, "layer width_in rank"]
    up: Float[Array, "layer rank width_out"]

    @property
    def shape(self) -> tuple[int, ...]:
        """Of the kernel that it is added to."""
        return (*self.down.shape[:2], self.up.shape[2])


class Adapted(NamedTuple):
    """Stands in a model for the kernel of a projection; ``up`` holds the scale."""

    kernel: Any
    down: Any
    up: Any


def linear(x: Array, kernel: Any, bias: Any, dtype: Any = None) -> Array:
    """``x W + b``, and ``(x A) B`` more for an adapted kernel."""
    if not isinstance(kernel, Adapted):
        return STANDARD.linear(x, kernel, bias, dtype)
    y = STANDARD.linear(x, quantized.dense(kernel.kernel), bias, dtype)
    low = STANDARD.linear(x, kernel.down.astype(x.dtype), None)
    return y + STANDARD.linear(low, kernel.up.astype(x.dtype), None, dtype)


OPS = STANDARD._replace(linear=linear)


def pairs(
    params: Any, targets: Sequence[str], rank: int, key: Array
) -> dict[str, Pair]:
    """Pairs to start from, by the name of their kernel.

    They change nothing yet: ``B`` is zero, ``A`` Gaussian of variance ``1 / width_in``.

    Raises:
      ValueError: when the model has no projection of that name, or one an expert.
    """
    kernels: dict[str, list[tuple[str, Any]]] = {}
    for name, leaf in paths(params):
        stacked = name.startswith(STACKS) and name.endswith(".kernel")
        if stacked and len(leaf.shape) == 3:  # not of experts
            kernels.setdefault(name.split(".")[-2], []).append((name, leaf))
    if unknown := [name for name in targets if name not in kernels]:
        raise ValueError(
            f"tuning targets {', '.join(unknown)} are no projections of the model, or "
            f"are those of experts; use some of {', '.join(sorted(kernels))}"
        )
    made, chosen = {}, [kernel for name in targets for kernel in kernels[name]]
    keys = jax.random.split(key, len(chosen))
    for (name, kernel), part in zip(chosen, keys, strict=True):
        layers, width_in, width_out = kernel.shape
        dtype = wide(kernel.dtype)
        down = jax.random.normal(part, (layers, width_in, rank), dtype)
        up = jnp.zeros((layers, rank, width_out), dtype)
        made[name] = Pair(down / width_in**0.5, up)
    return made


def insert(params: Any, learned: Mapping[str, Any], scale: Any) -> Any:
    """The model's parameters with what was learned, for a forward with :data:`OPS`.

    ``learned`` has by parameter name a :class:`Pair` to add or an array to put there.
    """

    def put(name: str, leaf: Any) -> Any:
        if name not in learned:
            return leaf
        value = learned[name]
        if isinstance(value, Pair):
            return Adapted(leaf, value.down, scale * value.up)
        return value.astype(leaf.dtype)

    leaves = [put(name, leaf) for name, leaf in paths(params)]
    tree = jax.tree.structure(params, is_leaf=quantized.is_stored)
    return jax.tree.unflatten(tree, leaves)
