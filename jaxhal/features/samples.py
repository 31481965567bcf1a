"""What features of several sampled answers ask of their input, checked once."""

from typing import Any

import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jaxtyping import Array, Bool, Float


def present(
    name: str, array: Any, valid: Any = None, axes: int = 1, least: int = 1
) -> tuple[Float[Array, "..."], Bool[Array, "..."]]:
    """Values in float32 or wider, zero where missing, and their mask.

    The mask covers the first ``axes`` axes, and ``least`` entries of the first must
    hold something.  ValueError, with ``name``, on a mask of another shape, on too few
    entries, on a number that is not finite; what is traced is not looked at.
    """
    array = jnp.asarray(array)
    lead = array.shape[:axes]
    mask = jnp.ones(lead, bool) if valid is None else jnp.asarray(valid, bool)
    if len(lead) < axes or mask.shape != lead:
        raise ValueError(
            f"{name} has shape {array.shape} and its mask {mask.shape}; the mask must "
            f"cover the first {'axis' if axes == 1 else f'{axes} axes'}"
        )
    if not isinstance(mask, Tracer):
        found = int(mask.any(tuple(range(1, axes))).sum())
        if found < least:
            raise ValueError(
                f"{name} holds {found} that are valid, of shape {array.shape}; at "
                f"least {least} must be there: sample more or mask fewer"
            )
    spread = mask.reshape(lead + (1,) * (array.ndim - axes))
    values = array.astype(jnp.promote_types(array.dtype, jnp.float32))
    values = jnp.where(spread, values, 0.0)
    if not isinstance(values, Tracer) and not (finite := np.isfinite(values)).all():
        where = np.argwhere(~finite)[0].tolist()
        raise ValueError(
            f"{name}{where} is {values[tuple(where)]}; give a finite number, or mask it"
        )
    return values, mask
