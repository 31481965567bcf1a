"""The residual stream itself, as probes read it."""

import dataclasses
from typing import Literal

import jax.numpy as jnp
from jaxtyping import Array, Float

from jaxhal.features.base import Reducer
from jaxhal.io.checks import one_of
from jaxhal.types import View


@dataclasses.dataclass(frozen=True)
class HiddenStates(Reducer):
    """Hidden states of the response tokens, in the residual stream's own unit.

    ``[response width]`` per layer for ``tokens="response"``, else ``[width]``, which is
    zero for an empty response.

    Args:
      layers: which to keep, numbered as Hugging Face's ``hidden_states``: 0 is the
        embeddings, the last of all comes after the final norm; negative numbers count
        from the end and ``None`` keeps all.
      tokens: ``"response"`` keeps every response token, ``"last"`` the last one,
        ``"before_last"`` the one before it (the last word, where the end of the
        sequence comes last), ``"mean"`` averages them.

    Raises ValueError on no layers at all, or another ``tokens``.
    """

    reads = "hidden"
    values = ("width",)

    layers: tuple[int, ...] | None = None
    tokens: Literal["response", "last", "before_last", "mean"] = "response"

    def __post_init__(self):
        if self.layers is not None and not self.layers:
            raise ValueError(f"layers is {self.layers!r}; name some, or None for all")
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
