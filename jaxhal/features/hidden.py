"""The residual stream itself, as probes read it."""

import dataclasses
import math
from typing import Literal

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from jaxhal.features.base import Reducer
from jaxhal.io.checks import one_of
from jaxhal.types import View

# A hidden state by its number, or by a share of the reader's layers.
Layer = int | float


def state_number(layer: Layer, layers: int) -> int:
    """Number of a hidden state of a reader with so many ``layers``, from 0 on.

    0 is the embeddings, the last of all comes after the final norm, and negative
    numbers count from the end, as in Hugging Face's ``hidden_states``.  A share of the
    layers is the nearest of them, halves up, and never the embeddings.

    Raises ValueError on a number that the reader does not have, or another share.

    Example:
      >>> [state_number(0.67, layers) for layers in (4, 12, 30, 80)]
      [3, 8, 20, 54]
      >>> state_number(-1, 30)
      30
    """
    check_layer(layer)
    if isinstance(layer, float):
        return max(1, math.floor(layer * layers + 0.5))
    if not -layers - 1 <= layer <= layers:
        raise ValueError(
            f"layer {layer} is outside the {layers + 1} hidden states of this reader, "
            f"which has {layers} layers; use {-layers - 1}..{layers} (0 = embeddings, "
            f"{layers} = last), or a share of its layers such as 0.67"
        )
    return int(layer) % (layers + 1)


def check_layer(layer: Layer) -> None:
    """ValueError on what is neither an integer nor a share, above 0 and below 1.

    1.0 is none: Python takes it for 1, the number of the first layer.
    """
    share = isinstance(layer, float) and 0 < layer < 1
    if not share and not isinstance(layer, int | np.integer):
        raise ValueError(
            f"layer is {layer!r}; give a share of the layers above 0 and below 1, or "
            "the number of a hidden state (0 = embeddings, -1 = last)"
        )


@dataclasses.dataclass(frozen=True)
class HiddenStates(Reducer):
    """Hidden states of the response tokens, in the residual stream's own unit.

    ``[response width]`` per layer for ``tokens="response"``, else ``[width]``, which is
    zero for an empty response.

    Args:
      layers: which to keep, as :func:`state_number` has them: numbers, or shares of
        the reader's layers; ``None`` keeps all.
      tokens: ``"response"`` keeps every response token, ``"last"`` the last one,
        ``"before_last"`` the one before it (the last word, where the end of the
        sequence comes last), ``"mean"`` averages them.

    Raises ValueError on no layers at all, another share, or another ``tokens``.
    """

    reads = "hidden"
    values = ("width",)

    layers: tuple[Layer, ...] | None = None
    tokens: Literal["response", "last", "before_last", "mean"] = "response"

    def __post_init__(self):
        if self.layers is not None and not self.layers:
            raise ValueError(f"layers is {self.layers!r}; name some, or None for all")
        for layer in self.layers or ():
            check_layer(layer)
        one_of(("response", "last", "before_last", "mean"), tokens=self.tokens)

    @property
    def rowwise(self) -> bool:
        """True when every token is kept."""
        return self.tokens == "response"

    def rows(
        self, rows: Float[Array, "query width"], view: View
    ) -> Float[Array, "query width"]:
        return rows.astype(jnp.float32)

    def finish(
        self, rows: Float[Array, "response width"], view: View
    ) -> Float[Array, "*response width"]:
        valid = view.valid[view.prompt_length :]
        # Rows of padding are zero: they add nothing, and so does an empty response.
        last = jnp.where(valid, jnp.arange(len(valid)), 0).max()
        match self.tokens:
            case "last":
                return rows[last]
            case "before_last":
                return rows[jnp.maximum(last - 1, 0)]
            case "mean":
                return rows.sum(0) / jnp.maximum(valid.sum(), 1)
        return rows
