"""What does the context offer in the place of each token of an answer?

A token contradicts its context where the context says something else at that place.
The place is found in two ways, both by the tokens alone: by what the answer last wrote
(the longest run of tokens that the context has too), and by what stands around (how
many of the tokens near by have a like nearby).
"""

import dataclasses
import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from jaxhal.features.base import Attention, OfRows, Reducer
from jaxhal.features.uncertainty import Logits, token_entropy, token_logprob
from jaxhal.types import View

# Tokens that a run is followed back for, and that count as near on each side.
RUN, NEAR = 8, 10
# Shares of the same tokens may differ by rounding.
_TIE = 1e-4
# Log probability of what no token of the context is.
FLOOR = -20.0
COLUMNS = (
    "logprob",
    "entropy",
    "copied",
    "present",
    "run",
    "other_run",
    "after_run",
    "near",
    "nearest",
    "there",
    "count",
)


class Offers(NamedTuple):
    """Of each row: its token, and each token of the context in its place, in nats."""

    logprob: OfRows
    entropy: OfRows
    context: Float[Array, "query key"]


@dataclasses.dataclass(frozen=True)
class ContextSupport(Reducer):
    """How well each response token fits the context: :data:`COLUMNS`.

    With the token's own log probability and the entropy it was drawn with, in nats:

    * ``copied``: log probability of the likeliest other token that the context has;
    * ``present``: 1 where the context has the token;
    * ``run``: how many tokens before it (0 to 8) also stand before it in the context,
      at best, or -1 where the context lacks it; ``other_run``: the same of any other
      token; ``after_run``: log probability of the likeliest token that followed then;
    * ``near``: share of the tokens around it, ten on each side, that stand within ten
      of one place where the context has it, rarer tokens counting more; ``nearest``:
      the same of any place of the context; ``there``: log probability of the likeliest
      other token within ten of that place;
    * ``count``: how often the context has it, ``log(1 + n)``.

    Log probabilities of no token at all are -20.  Tokens after it count as near, so all
    of a response is needed at once.
    """

    reads = "logits"
    row = "predictor"
    reads_target = True
    values = ("response", "column")

    def rows(self, rows: Logits, view: View) -> Offers:
        rows = rows.astype(jnp.float32)
        total = jax.nn.logsumexp(rows, axis=-1, keepdims=True)
        offered = rows[:, view.tokens[: view.prompt_length]] - total
        return Offers(token_logprob(rows, view.target), token_entropy(rows), offered)

    def finish(self, rows: Offers, view: View) -> Float[Array, "response column"]:
        prompt, own = jnp.split(view.tokens, [view.prompt_length])
        document = (view.document & view.valid)[: view.prompt_length]
        valid = view.valid[view.prompt_length :]
        same = (own[:, None] == prompt) & document & valid[:, None]
        other = ~same & document
        run = runs(same)
        near = overlap(same, valid)
        nearest = _highest(near, same | other, 0.0)
        place = within(document & (near >= nearest[:, None] - _TIE))
        other_run = _highest(run, other, -1.0)
        followed = other & (run == other_run[:, None]) & (run > 0)
        count = same.sum(-1)
        columns = (
            rows.logprob,
            rows.entropy,
            _highest(rows.context, other, FLOOR),
            count > 0,
            _highest(run, same, -1.0),
            other_run,
            _highest(rows.context, followed, FLOOR),
            _highest(near, same, 0.0),
            nearest,
            _highest(rows.context, other & place, FLOOR),
            jnp.log1p(count),
        )
        return jnp.where(valid[:, None], jnp.stack(columns, -1), 0.0)


def _highest(
    values: Float[Array, "query key"], mask: Bool[Array, "query key"], none: float
) -> OfRows:
    """The highest of some values, at least ``none``."""
    return jnp.max(jnp.where(mask, values, none), -1, initial=none)


def runs(same: Bool[Array, "response key"]) -> Float[Array, "response key"]:
    """How many tokens before each response token stand before each column, 0 to 8."""
    total, alive = jnp.zeros(same.shape), jnp.ones(same.shape, bool)
    for back in range(1, RUN + 1):
        before = jnp.pad(same, ((back, 0), (back, 0)))
        alive &= before[: same.shape[0], : same.shape[1]]
        total += alive
    return total


def overlap(
    same: Bool[Array, "response key"], valid: Bool[Array, " response"]
) -> Float[Array, "response key"]:
    r"""Share of the tokens near each response token that have a like near each column.

    A token counts :math:`1/\sqrt{n}` where the context has it n times, and 1 where it
    lacks it; the token itself does not count.
    """
    count = same.sum(-1)
    weight = jnp.where(valid, 1 / jnp.sqrt(jnp.maximum(count, 1)), 0.0)[:, None]
    there = weight * within(same)
    shared, near = (_near(one.T).T - one for one in (there, weight))
    return shared / jnp.maximum(near, 1e-6)


def within(mask: Bool[Array, "response key"]) -> Bool[Array, "response key"]:
    """Columns that have a marked one within ten on either side."""
    return _near(mask.astype(jnp.float32)) > 0.5


def _near(values: Float[Array, "rows axis"]) -> Float[Array, "rows axis"]:
    """Sums over ten neighbours on each side and itself, along the last axis."""
    size, padded = values.shape[1], jnp.pad(values, ((0, 0), (NEAR, NEAR)))
    # One after the other, as cumulative sums depend on the length of the padding.
    return functools.reduce(
        jnp.add, (padded[:, at : at + size] for at in range(2 * NEAR + 1))
    )


@dataclasses.dataclass(frozen=True)
class CopiedAttention(Reducer):
    """Share of a head's attention on the context that is on the token that follows.

    Of the row that predicts a token: what induction heads look at before they copy.  In
    [0, 1], 0 where the context lacks the token.
    """

    row = "predictor"
    reads_target = True

    def rows(self, rows: Attention, view: View) -> OfRows:
        document = jnp.where(view.document & view.valid, rows, 0.0)
        same = view.tokens == view.target[:, None]
        copied = jnp.where(same, document, 0.0).sum(-1)
        return copied / jnp.maximum(document.sum(-1), 1e-9)
