"""What each layer gets of a token beside the residual."""

from typing import Any

import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int

from jaxhal.models import quantized
from jaxhal.models.config import Config
from jaxhal.models.feedforward import apply, linear
from jaxhal.models.norm import Norm
from jaxhal.models.ops import STANDARD


class LayerInputs(nnx.Module):
    """A second table of embeddings, of all layers side by side, and a projection of the
    first.

    To relevance both are constants.
    """

    def __init__(self, config: Config, dtype: Any, rngs: nnx.Rngs):
        assert config.layer_inputs is not None
        vocabulary, self.width = config.layer_inputs
        every, width = config.num_hidden_layers * self.width, config.hidden_size
        self.embed_layers = nnx.Embed(vocabulary, every, param_dtype=dtype, rngs=rngs)
        self.proj = linear(width, every, False, dtype, rngs)
        self.norm = Norm(config, self.width, dtype)

    def __call__(
        self, tokens: Int[Array, "batch query"], x: Float[Array, "batch query width"]
    ) -> Float[Array, "layer batch query part"]:
        """Of tokens and their embeddings."""

        def layers(parts: Array) -> Array:
            return parts.reshape(*parts.shape[:2], -1, self.width)

        table = self.embed_layers.embedding.get_value()
        own = quantized.rows_of(table, tokens)
        own = layers(own * jnp.asarray(self.width**0.5, table.dtype))
        read = layers(apply(self.proj, x, STANDARD) * x.shape[-1] ** -0.5)
        return jnp.moveaxis((self.norm(read) + own) * 2**-0.5, 2, 0)
