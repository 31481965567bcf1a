"""The parts of an encoder: parameter containers, batches of right-padded rows.

References:
  He et al., `DeBERTa <https://arxiv.org/abs/2006.03654>`_, 2021, equation 4; Raffel et
  al., `T5 <https://arxiv.org/abs/1910.10683>`_, 2020, section 2.1.
"""

from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Float, Int

from jaxhal.models import kernels
from jaxhal.models.encoders.config import EncoderConfig
from jaxhal.models.feedforward import MLP, apply, linear
from jaxhal.models.layers import Attention, Geometry, LayerIndex, Norm
from jaxhal.models.ops import STANDARD, precision, wide


def _activate(x: Array, kind: str) -> Array:
    return jnp.tanh(x) if kind == "tanh" else STANDARD.activate(x, kind)


class Relative(NamedTuple):
    """What disentangled attention knows of distances, shared by all layers."""

    embedding: Float[Array, "distance width"]
    # The row of it of `query - key`, from `1 - columns` on.
    row: Int[np.ndarray, " difference"]


class SelfAttention(Attention):
    """Attention to all tokens or to those near, by content and relative position."""

    config: EncoderConfig

    def __init__(self, config: EncoderConfig, dtype: Any, rngs: nnx.Rngs):
        super().__init__(config, dtype, rngs)

        def project(kind: Literal["c2p", "p2c"]) -> Any:
            if kind not in config.relative or config.relative_shared:
                return None
            width = config.hidden_size
            return linear(width, width, True, dtype, rngs)

        self.relative_k_proj = project("c2p")
        self.relative_q_proj = project("p2c")

    def __call__(
        self,
        x: Float[Array, "batch seq width"],
        geo: Geometry,
        at: LayerIndex,
        relative: Relative | None,
    ) -> Float[Array, "batch seq width"]:
        """The output of every row, in blocks of rows, or of samples with distances."""
        q = self.queries(x, geo, at, STANDARD)
        k, v = self.keys(x, geo, at, STANDARD)
        if relative is None:
            mixed, _ = self.mix(q, k, v, geo, at, None, STANDARD)
            return self.output(mixed, x, STANDARD)
        heads, rows = q.shape[1], q.shape[3]
        add = self._distances(relative)

        def sample(one):
            q, k, v, valid = one
            scores = STANDARD.scores(q[None], k[None]) + add(q[:, 0], k)[:, None]
            bias = jnp.broadcast_to(jnp.where(valid, 0.0, -1e30), (1, 1, 1, rows, rows))
            return STANDARD.attend(scores, bias, v[None])[0][0]

        size = max(1, kernels.CPU.plain // (4 * heads * rows * rows))
        out = jax.lax.map(sample, (q, k, v, geo.key_valid), batch_size=size)
        out = out.transpose(0, 3, 1, 2, 4)  # of [batch heads 1 seq head]
        return self.output(out.reshape(*x.shape[:2], -1), x, STANDARD)

    def _distances(self, relative: Relative) -> Any:
        """What distances add to the scores of one sample, ``[heads query key]``."""
        config = self.config
        kinds = {
            "c2p": (self.k_proj, self.relative_k_proj, relative.row[::-1], 1.0),
            "p2c": (self.q_proj, self.relative_q_proj, relative.row, config.scale),
        }
        tables = {}
        for kind in config.relative:
            shared, own, rows, scale = kinds[kind]
            layer = shared if config.relative_shared else own
            # From the longest distance forward to the longest back, and one to fill up.
            some = relative.embedding[np.append(rows, 0)]
            table = apply(layer, some, STANDARD) * scale
            tables[kind] = table.reshape(len(some), -1, config.head_dim).swapaxes(0, 1)

        def add(q: Array, k: Array) -> Any:
            total = 0.0
            if "c2p" in tables:
                total += _shifted(q, tables["c2p"])
            if "p2c" in tables:
                total += _shifted(k, tables["p2c"]).swapaxes(1, 2)
            return total

        return add


def _shifted(
    x: Float[Array, "heads seq head"], table: Float[Array, "heads distance head"]
) -> Float[Array, "heads seq seq"]:
    """Of row ``i`` of the ``2 n`` products ``n``, without the first ``n - 1 - i``."""
    heads, n, _ = x.shape
    products = jnp.einsum(
        "nqd,nrd->nqr",
        x,
        table,
        precision=precision(x.dtype),
        preferred_element_type=wide(x.dtype),
    )
    flat = products.reshape(heads, -1)[:, n - 1 : n - 1 + n * (2 * n - 1)]
    return flat.reshape(heads, n, 2 * n - 1)[..., :n]


def relative_rows(config: EncoderConfig, columns: int) -> Int[np.ndarray, " distance"]:
    """The embedding's row of each distance from ``1 - columns`` to ``columns - 1``.

    Distances up to half the buckets have their own row, longer ones share rows on a
    logarithmic scale up to ``relative_longest``.
    """
    distance = np.arange(1 - columns, columns)
    if config.relative_buckets:
        half = config.relative_buckets // 2
        # In float32 as the checkpoints were trained, so that rounding up agrees.
        far = np.maximum(np.abs(distance), half).astype(np.float32) / np.float32(half)
        most = np.log(np.float32((config.relative_longest - 1) / half))
        bucket = np.ceil(np.log(far) / most * np.float32(half - 1)) + half
        near = np.abs(distance) <= half
        distance = np.where(near, distance, np.sign(distance) * bucket)
    span = config.relative_span
    return np.clip(distance + span, 0, 2 * span - 1).astype(np.int32)


def bias_rows(config: EncoderConfig, columns: int) -> Int[np.ndarray, " distance"]:
    """T5's bucket of each ``key - query`` from ``1 - columns`` to ``columns - 1``.

    Half of the buckets are for keys behind the query.  Of either half the first half
    has one distance each, the others share on a logarithmic scale up to
    ``relative_longest``, the last with all beyond.
    """
    distance = np.arange(1 - columns, columns)
    half = config.relative_buckets // 2
    near = half // 2
    # In float32 as the checkpoints were trained, so that rounding down agrees.
    far = np.maximum(np.abs(distance), near).astype(np.float32) / np.float32(near)
    most = np.float32(np.log(config.relative_longest / near))
    bucket = near + (np.log(far) / most * np.float32(half - near)).astype(np.int32)
    bucket = np.minimum(bucket, half - 1)
    bucket = np.where(np.abs(distance) < near, np.abs(distance), bucket)
    return (bucket + half * (distance > 0)).astype(np.int32)


class Block(nnx.Module):
    """One layer, from the residual stream and what is read of it to the next two."""

    def __init__(self, config: EncoderConfig, dtype: Any, rngs: nnx.Rngs):
        self.self_attn = SelfAttention(config, dtype, rngs)
        self.attention_norm = Norm(config, config.hidden_size, dtype)
        self.mlp = MLP(config, dtype, rngs)
        # With norms before the parts, that of the next layer's attention.
        self.output_norm = Norm(config, config.hidden_size, dtype)
        self.pre_norm = config.pre_norm

    def __call__(
        self, x: Array, read: Array, geo: Geometry, at: LayerIndex, relative: Any
    ) -> tuple[Array, Array]:
        x = x + self.self_attn(read, geo, at, relative)
        read = self.attention_norm(x)
        x = (x if self.pre_norm else read) + self.mlp(read, STANDARD)
        read = self.output_norm(x)
        return x if self.pre_norm else read, read


class Convolution(nnx.Module):
    """Over the embeddings, added to what comes out of the first layer."""

    def __init__(self, config: EncoderConfig, dtype: Any):
        width = config.hidden_size
        shape = (config.conv_size, width // config.conv_groups, width)
        self.kernel = nnx.Param(jnp.zeros(shape, dtype))
        self.bias = nnx.Param(jnp.zeros(width, dtype))
        self.norm = Norm(config, config.hidden_size, dtype)
        self.groups, self.activation = config.conv_groups, config.conv_activation

    def __call__(
        self,
        embedded: Float[Array, "batch seq width"],
        x: Float[Array, "batch seq width"],
    ) -> Float[Array, "batch seq width"]:
        y = jax.lax.conv_general_dilated(
            embedded,
            self.kernel[...],
            window_strides=(1,),
            padding="SAME",
            dimension_numbers=("NWC", "WIO", "NWC"),
            feature_group_count=self.groups,
            precision=precision(x.dtype),
        )
        return self.norm(x + _activate(y + self.bias[...], self.activation))


class Head(nnx.Module):
    """From tokens, or what is pooled of them, to one logit a label."""

    def __init__(self, config: EncoderConfig, dtype: Any, rngs: nnx.Rngs):
        width, rows, bias = config.hidden_size, len(config.labels), config.head_bias
        dense = config.head_dense
        self.dense = linear(width, width, bias, dtype, rngs) if dense else None
        self.norm = Norm(config, width, dtype) if config.head_norm else None
        self.out_proj = linear(width, rows, True, dtype, rngs)
        self.activation = config.head_activation

    def features(self, x: Array) -> Array:
        """What the last layer reads."""
        if self.dense is not None:
            x = _activate(apply(self.dense, x, STANDARD), self.activation)
        return x if self.norm is None else self.norm(x)

    def __call__(
        self, x: Float[Array, "batch *seq width"]
    ) -> Float[Array, "batch *seq labels"]:
        logits = apply(self.out_proj, self.features(x), STANDARD)
        return logits.astype(jnp.float32)
