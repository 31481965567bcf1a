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
    size = min(CHUNK, seq)

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
    if size > 1:
        overlap = _product("bhcid,bhcjd->bhcij", k, k) * between * beta[..., None]
        solve = functools.partial(
            jax.lax.linalg.triangular_solve,
            overlap,
            left_side=True,
            lower=True,
            unit_diagonal=True,
        )
        v, read = solve(v), solve(read)
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

    along = (q, k, v, read, within, kept)
    along = tuple(jnp.moveaxis(x, 2, 0) for x in along)
    if len(along[0]) == 1:
        state, out = step(state, tuple(x[0] for x in along))
    else:
        state, out = jax.lax.scan(step, state, along)
        out = jnp.moveaxis(out, 0, 2).reshape(batch, heads, -1, out.shape[-1])
    return out[:, :, :seq], state
