"""One text encoder for every family: stacked blocks, scanned over layers.

Padding is on the right.

References:
  Devlin et al. 2019, BERT; Liu et al. 2019, RoBERTa; He et al. 2021, DeBERTa and
  DeBERTaV3; Warner et al. 2024, ModernBERT; Boizard et al. 2025, EuroBERT; Raffel et
  al. 2020, T5.
"""

import functools
from typing import Any, Literal

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Bool, Float, Int

from jaxhal.models import rope
from jaxhal.models.cache import positions
from jaxhal.models.encoders.config import EncoderConfig
from jaxhal.models.encoders.layers import (
    Block,
    Convolution,
    Head,
    Relative,
    bias_rows,
    relative_rows,
)
from jaxhal.models.layers import Geometry, LayerIndex
from jaxhal.models.norm import Norm
from jaxhal.models.ops import wide


class Encoder(nnx.Module):
    """Parameters and static structure; the functions below are its forward passes."""

    def __init__(self, config: EncoderConfig, dtype: Any, rngs: nnx.Rngs):
        self.config = config

        def table(rows: int, width: int = config.hidden_size) -> Any:
            if not rows:
                return None
            return nnx.Embed(rows, width, param_dtype=dtype, rngs=rngs)

        self.embed_tokens = table(config.vocab_size)
        self.embed_positions = table(config.position_rows)
        self.embed_types = table(config.token_types)
        self.embed_norm = Norm(config, config.hidden_size, dtype)
        self.embed_relative = table(2 * config.relative_span)
        buckets = config.relative_buckets if config.relative_bias else 0
        self.relative_bias = table(buckets, config.num_attention_heads)
        normed = config.relative_norm
        self.relative_norm = Norm(config, config.hidden_size, dtype) if normed else None
        self.conv = Convolution(config, dtype) if config.conv_size else None
        make = nnx.vmap(lambda keys: Block(config, dtype, keys))
        self.blocks = make(rngs.split(config.num_hidden_layers))
        self.head = Head(config, dtype, rngs) if config.labels else None


def embed(
    model: Encoder,
    tokens: Int[Array, "batch seq"],
    types: Int[Array, "batch seq"],
    valid: Bool[Array, "batch seq"],
) -> Float[Array, "batch seq width"]:
    """Embeddings of tokens, positions and token types, 0 on padding.

    They are normalised, but in EuroBERT and T5.
    """
    x = model.embed_tokens.embedding[...][tokens]
    if model.embed_positions is not None:
        at = positions(valid) + model.config.position_offset
        x = x + model.embed_positions.embedding[...][at]
    if model.embed_types is not None:
        rows = model.config.token_types
        x = x + model.embed_types.embedding[...][jnp.minimum(types, rows - 1)]
    x = model.embed_norm(x) if model.config.embeds_normed else x
    return jnp.where(valid[..., None], x, 0)


def run(
    model: Encoder,
    x: Float[Array, "batch seq width"],
    valid: Bool[Array, "batch seq"],
    layers: int | None = None,
) -> Float[Array, "batch seq width"]:
    """Hidden states after all layers, or after the first ``layers`` of them.

    After fewer than all they are the residual stream: the norm at the end belongs to
    the last.
    """
    config, at = model.config, positions(valid)
    cos = sin = None
    if config.positions == "rope":
        length = jnp.sum(valid, axis=1, dtype=jnp.int32)
        cos, sin = rope.tables(config.ropes, config.head_dim, at, length)
    by_distance = relative = None
    if model.relative_bias is not None:
        rows = bias_rows(config, x.shape[1])
        by_distance = model.relative_bias.embedding[...][rows].T
    geo = Geometry(at, at, valid, cos, sin, by_distance)
    if model.embed_relative is not None:
        embedding = model.embed_relative.embedding[...]
        if model.relative_norm is not None:
            embedding = model.relative_norm(embedding)
        relative = Relative(embedding, relative_rows(config, x.shape[1]))
    definition, weights = nnx.split(model.blocks)
    index = LayerIndex.of(config)
    embedded, conv = x, model.conv

    def body(carry, scanned):
        (x, read), (weights, at) = carry, scanned
        x, read = nnx.merge(definition, weights)(x, read, geo, at, relative)
        if conv is not None:
            beside = functools.partial(conv, embedded)
            x = read = jax.lax.cond(at.layer == 0, beside, lambda x: x, x)
        return (x, read), None

    first = jax.tree.map(lambda leaf: leaf[:layers], (weights, index))
    read = x if config.embeds_normed else model.embed_norm(x)
    (x, read), _ = jax.lax.scan(body, (x, read), first)
    whole = layers in (None, config.num_hidden_layers)
    return read if whole else x


def pool(
    hidden: Float[Array, "batch seq width"],
    valid: Bool[Array, "batch seq"],
    how: Literal["cls", "mean"],
) -> Float[Array, "batch width"]:
    """The first token's hidden state, or the mean over tokens."""
    if how == "cls":
        return hidden[:, 0]
    mask = valid[..., None]
    total = jnp.sum(jnp.where(mask, hidden, 0), axis=1, dtype=wide(hidden.dtype))
    return (total / jnp.sum(mask, axis=1)).astype(hidden.dtype)


def logits(
    model: Encoder,
    hidden: Float[Array, "batch seq width"],
    valid: Bool[Array, "batch seq"],
) -> Float[Array, "batch *seq labels"]:
    """What the classifier says of each text, or of each token, float32."""
    assert model.head is not None
    how = model.config.head_pooling
    if model.config.labelled == "tokens":
        return model.head(hidden)
    if how == "late":
        return pool(model.head(hidden), valid, "mean")
    return model.head(pool(hidden, valid, how))
