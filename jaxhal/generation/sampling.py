"""From next-token logits to a token: what may be chosen, and the choice."""

import dataclasses
import math

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, Key

from jaxhal.io.checks import at_least

# Width of the blocks in which a token is looked up by its cumulative probability.
_BLOCK = 256


@dataclasses.dataclass(frozen=True)
class Sampling:
    """How the next token is chosen; applied in the order of the arguments.

    Raises ValueError on a value outside its range.

    Args:
      repetition_penalty: divides positive logits of tokens that the row holds already
        and multiplies negative ones (Keskar et al. 2019); 1 leaves them.
      temperature: divides the logits; 0 takes the likeliest token, whatever follows.
      top_k: keep the ``k`` likeliest tokens, and those as likely as the last of them.
      top_p: keep the likeliest tokens until their probabilities add up to it.
      min_p: keep tokens at least this share as likely as the likeliest.
    """

    repetition_penalty: float = 1.0
    temperature: float = 1.0
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None

    def __post_init__(self):
        at_least(1, top_k=self.top_k)
        if not 0 <= self.temperature < math.inf:
            raise ValueError(
                f"temperature is {self.temperature}; give a number at least 0"
            )
        most = {"repetition_penalty": math.inf, "top_p": 1.0, "min_p": 1.0}
        for name, end in most.items():
            value = getattr(self, name)
            if value is not None and not 0 < value <= end or value == math.inf:
                raise ValueError(
                    f"{name} is {value}; give a number above 0"
                    + (f" and at most {end:g}" if end < math.inf else "")
                )


GREEDY = Sampling(temperature=0.0)


def warp(
    logits: Float[Array, "batch vocab"],
    sampling: Sampling,
    seen: Bool[Array, "batch vocab"] | None = None,
) -> Float[Array, "batch vocab"]:
    """Logits of the distribution that is drawn from; ``-inf`` where nothing may be.

    The highest of a row is 0.  The temperature must be positive; ``seen`` are tokens
    that each row holds.
    """
    logits = _warmed(_penalised(logits, sampling, seen), sampling.temperature)
    if sampling.top_k is not None and sampling.top_k < logits.shape[-1]:
        least = jax.lax.top_k(logits, sampling.top_k)[0][:, -1:]
        logits = jnp.where(logits < least, -jnp.inf, logits)
    if sampling.top_p is not None and sampling.top_p < 1.0:
        p = jax.nn.softmax(logits)
        logits = jnp.where(p < _nucleus(p, sampling.top_p), -jnp.inf, logits)
    if sampling.min_p is not None:
        p = jax.nn.softmax(logits)
        least = sampling.min_p * p.max(-1, keepdims=True)
        logits = jnp.where(p < least, -jnp.inf, logits)
    return logits


def _warmed(logits: Array, temperature: float | Array) -> Array:
    """Logits by a temperature, the highest 0: no temperature is too low for that."""
    least = jnp.finfo(logits.dtype).tiny
    highest = logits.max(-1, keepdims=True)
    return (logits - highest) / jnp.maximum(temperature, least)


def choose(
    logits: Float[Array, "batch vocab"],
    keys: Key[Array, " batch"],
    sampling: Sampling,
    seen: Bool[Array, "batch vocab"] | None = None,
) -> Int[Array, " batch"]:
    """The next token of each row, by its own key whatever the other rows draw."""
    if sampling.temperature == 0.0:
        return jnp.argmax(_penalised(logits, sampling, seen), -1).astype(jnp.int32)
    uniform = jax.vmap(lambda key: jax.random.uniform(key))(keys)
    return _inverse(jax.nn.softmax(warp(logits, sampling, seen)), uniform)


def choose_each(
    logits: Float[Array, "batch vocab"],
    keys: Key[Array, " batch"],
    temperature: Float[Array, " batch"],
    top_p: Float[Array, " batch"],
) -> Int[Array, " batch"]:
    """:func:`choose` where each row has settings of its own; a ``top_p`` of 1 keeps
    all.
    """
    likeliest = jnp.argmax(logits, -1).astype(jnp.int32)
    some, all_of_it = temperature > 0, top_p >= 1

    def cut(warm: Array) -> Array:
        p = jax.nn.softmax(warm)
        out = (p < _nucleus(p, top_p)) & ~all_of_it[:, None]
        return jnp.where(out, -jnp.inf, warm)

    def draw() -> Array:
        warm = _warmed(logits, jnp.where(some, temperature, 1.0)[:, None])
        warm = jax.lax.cond((some & ~all_of_it).any(), cut, lambda same: same, warm)
        uniform = jax.vmap(lambda key: jax.random.uniform(key))(keys)
        return jnp.where(some, _inverse(jax.nn.softmax(warm), uniform), likeliest)

    return jax.lax.cond(some.any(), draw, lambda: likeliest)


def _penalised(logits: Array, sampling: Sampling, seen: Array | None) -> Array:
    if seen is None or sampling.repetition_penalty == 1.0:
        return logits
    by = sampling.repetition_penalty
    return jnp.where(seen, jnp.where(logits > 0, logits / by, logits * by), logits)


def _nucleus(
    p: Float[Array, "batch vocab"], mass: float | Float[Array, " batch"]
) -> Float[Array, "batch 1"]:
    """The largest probability from which on tokens hold at least ``mass``."""
    # Found by halving the range of a float's bits, which order like the floats: exact,
    # and on CPU a twentieth of the time of sorting the vocabulary.
    bits = jax.lax.bitcast_convert_type(p, jnp.int32)

    def halve(_, bounds: tuple[Array, Array]) -> tuple[Array, Array]:
        low, high = bounds
        middle = (low + high + 1) // 2
        enough = jnp.where(bits >= middle[:, None], p, 0.0).sum(-1) >= mass
        return jnp.where(enough, middle, low), jnp.where(enough, high, middle - 1)

    low = jnp.zeros(p.shape[0], jnp.int32)
    one = jax.lax.bitcast_convert_type(jnp.float32(1.0), jnp.int32)
    low, _ = jax.lax.fori_loop(0, 31, halve, (low, jnp.full_like(low, one)))
    return jax.lax.bitcast_convert_type(low, jnp.float32)[:, None]


def _inverse(
    p: Float[Array, "batch vocab"], uniform: Float[Array, " batch"]
) -> Int[Array, " batch"]:
    """The token at which cumulative probability passes a number in ``[0, 1)``.

    The block is found first, then the token in it; rounding never gives a token of
    probability 0.
    """
    p = jnp.pad(p, ((0, 0), (0, -p.shape[1] % _BLOCK)))
    p = p.reshape(p.shape[0], -1, _BLOCK)
    masses = p.sum(-1)
    block, left = _passes(masses, uniform * masses.sum(-1))
    inside = jnp.take_along_axis(p, block[:, None, None], axis=1)[:, 0]
    return (block * _BLOCK + _passes(inside, left)[0]).astype(jnp.int32)


def _passes(mass: Array, target: Array) -> tuple[Array, Array]:
    """Where the running sum first exceeds the target, and what is left of it there."""
    total = jnp.cumsum(mass, -1)
    target = jnp.clip(target, 0.0, total[:, -1] * (1 - 2.0**-23))
    # Sums made in different orders need not rise with their index.
    possible, place = mass > 0, jnp.arange(mass.shape[-1])
    passed = possible & (total > target[:, None])
    last = jnp.where(possible, place, 0).max(-1)
    at = jnp.where(passed.any(-1), jnp.argmax(passed, -1), last)
    before = jnp.take_along_axis(total - mass, at[:, None], -1)[:, 0]
    return at, target - before
