"""The gated delta rule: attention that keeps one matrix a head instead of all keys.

References:
  Yang et al. 2024, Parallelizing Linear Transformers with the Delta Rule over Sequence
  Length, section 3; Yang et al. 2025, Gated Delta Networks, equations 10 and 13.
"""

import functools

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

# Tokens that are computed with together.
CHUNK = 64

_product = functools.partial(jnp.einsum, precision=jax.lax.Precision.HIGHEST)


def delta(
    query: Float[Array, "batch heads seq key_dim"],
    key: Float[Array, "batch heads seq key_dim"],
    value: Float[Array, "batch heads seq value_dim"],
    decay: Float[Array, "batch heads seq"],
    beta: Float[Array, "batch heads seq"],
    state: Float[Array, "batch heads key_dim value_dim"],
) -> tuple[
    Float[Array, "batch heads seq value_dim"],
    Float[Array, "batch heads key_dim value_dim"],
]:
    r"""What every token reads of a state, and the state after the last.

    .. math:: S_t = e^{g_t} S_{t-1}
              + k_t \beta_t (v_t - (e^{g_t} S_{t-1})^T k_t)^T, \quad o_t = S_t^T q_t

    with the decay :math:`g_t \le 0`.  A token of decay and beta 0 leaves the state as
    it is.  In chunks, of which each is a triangular system and a few products; a single
    token is one step of the sum above.
    """
    batch, heads, seq, _ = query.shape
    size = min(CHUNK, 1 << (seq - 1).bit_length())

    def chunks(x: Array) -> Array:  # [batch heads chunk size ...]
        pad = [(0, 0), (0, 0), (0, -seq % size)] + [(0, 0)] * (x.ndim - 3)
        return jnp.pad(x, pad).reshape(batch, heads, -1, size, *x.shape[3:])

    q, k, v, decay, beta = map(chunks, (query, key, value, decay, beta))
    total = jnp.cumsum(decay, axis=-1)
    # From token j to token i; masked before, as what is not needed may overflow.
    between = total[..., :, None] - total[..., None, :]
    earlier = jnp.tril(jnp.ones((size, size), bool))
    between = jnp.exp(jnp.where(earlier, between, -jnp.inf))
    # What a token writes, less what those before it in its chunk have written there.
    v, read = v * beta[..., None], k * (beta * jnp.exp(total))[..., None]
    overlap = _product("bhcid,bhcjd->bhcij", k, k) * between * beta[..., None]
    apart = _inverse(overlap)
    v, read = (_product("bhcij,bhcje->bhcie", apart, x) for x in (v, read))
    within = _product("bhcid,bhcjd->bhcij", q, k) * between
    q = q * jnp.exp(total)[..., None]
    k = k * jnp.exp(total[..., -1:] - total)[..., None]
    kept = jnp.exp(total[..., -1])[..., None, None]

    def step(state: Array, chunk: tuple[Array, ...]) -> tuple[Array, Array]:
        q, k, v, read, within, kept = chunk
        new = v - _product("bhid,bhde->bhie", read, state)
        out = _product("bhid,bhde->bhie", q, state)
        out = out + _product("bhij,bhje->bhie", within, new)
        return kept * state + _product("bhid,bhie->bhde", k, new), out

    along = tuple(jnp.moveaxis(x, 2, 0) for x in (q, k, v, read, within, kept))
    if len(along[0]) == 1:
        state, out = step(state, tuple(x[0] for x in along))
    else:
        state, out = jax.lax.scan(step, state, along)
        out = jnp.moveaxis(out, 0, 2).reshape(batch, heads, -1, out.shape[-1])
    return out[:, :, :seq], state


def _inverse(lower: Float[Array, "*lead size size"]) -> Float[Array, "*lead size size"]:
    """Of a triangular matrix whose diagonal is taken for ones; a power of 2 of rows.

    Blocks of one row are doubled until they are the whole.  As exact as substitution,
    and products alone: on CPU batches of ``jax.lax.linalg.triangular_solve`` may wait
    for each other forever (jaxlib 0.10.1).
    """
    *lead, size, _ = lower.shape
    found = jnp.ones((*lead, size, 1, 1), lower.dtype)
    for width in (1 << n for n in range(size.bit_length() - 1)):
        count = size // (2 * width)
        blocks = lower.reshape(*lead, count, 2, width, count, 2, width)
        below = jnp.diagonal(blocks[..., 1, :, :, 0, :], axis1=-4, axis2=-2)
        below = jnp.moveaxis(below, -1, -3)
        first, last = found[..., ::2, :, :], found[..., 1::2, :, :]
        below = -_product("...ij,...jk,...kl->...il", last, below, first)
        upper = jnp.concatenate([first, jnp.zeros_like(first)], axis=-1)
        found = jnp.concatenate([upper, jnp.concatenate([below, last], -1)], axis=-2)
    return found[..., 0, :, :]
