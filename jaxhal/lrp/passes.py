"""Reading backwards: which tokens does each token of a response rest on?

The forward pass of a batch gives one number for every response token, its seed.  The
relevance of the tokens before it is the input times what the rules make of the seed's
derivative.  All of ``R*`` is one pull-back per response token, in blocks that share the
forward pass; a mean over response tokens is one pull-back, and a mean over prompt
tokens one push forward.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jaxtyping import Array, Bool, Float

from jaxhal.io.checks import one_of
from jaxhal.lrp import programs
from jaxhal.lrp.programs import share
from jaxhal.lrp.rules import RuleSet
from jaxhal.lrp.sets import resolve
from jaxhal.models.batching import check_rows
from jaxhal.models.lm import LM
from jaxhal.models.mesh import spread
from jaxhal.models.ops import EXACT
from jaxhal.types import Batch

SEEDS = ("logit", "max_logit", "logprob")


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Relevance:
    """What the tokens of a response rest on, signed and not normalised; a pytree.

    Row ``t`` of ``matrix``, ``R*``, holds what the prompt and the earlier response
    tokens add to the seed of response token ``t``, and zeros on padding and later ones.
    """

    matrix: Float[Array, "batch response seq"]
    valid: Bool[Array, "batch seq"]  # False on padding
    prompt_length: int = dataclasses.field(metadata={"static": True})

    @property
    def to_prompt(self) -> Float[Array, "batch response prompt"]:
        """The columns of the prompt."""
        return self.matrix[..., : self.prompt_length]

    @property
    def prompt(self) -> Float[Array, "batch prompt"]:
        """Relevance of each prompt token, mean over response tokens (eq. 5)."""
        rows = self.valid[:, self.prompt_length :]
        return jnp.einsum("brp,br->bp", self.to_prompt, share(rows), precision=EXACT)

    @property
    def response(self) -> Float[Array, "batch response"]:
        """Relevance behind each response token, mean over prompt tokens (eq. 6)."""
        columns = self.valid[:, : self.prompt_length]
        return jnp.einsum("brp,bp->br", self.to_prompt, share(columns), precision=EXACT)


def relevance(
    lm: LM,
    batch: Batch,
    rules: str | RuleSet = "attnlrp",
    *,
    seed: str = "logit",
    temperature: Any = 1.0,
) -> Relevance:
    """``R*``: what every response token rests on, token by token.

    Args:
      lm: its parameters should be float32.
      batch: from ``lm.encode``.
      rules: how relevance flows, a name of :data:`jaxhal.lrp.RULE_SETS` or a set of
        one's own.
      seed: what is explained: ``"logit"`` of the response token, its ``"logprob"``,
        ``"max_logit"`` of whatever token the model would have chosen (the paper), or,
        here alone, ``"logit_over_t2"`` (the published code, which divides the logit by
        the temperature twice).
      temperature: the answer's sampling temperature, one or one per row; used by
        ``"logit_over_t2"`` alone.

    Raises:
      TypeError, ValueError: on what is none of these, on a row without a prompt or
        response token, on rows longer than the model's context.
    """
    over: Any = 1.0
    if seed == "logit_over_t2":  # relevance of what is divided is divided itself
        seed, over = "logit", np.asarray(temperature, np.float32).reshape(-1, 1, 1)
        if not (np.isfinite(over) & (over > 0)).all():
            raise ValueError(f"temperature is {temperature}; give positive numbers")
        if over.size not in (1, rows := len(batch.tokens)):
            raise ValueError(f"{over.size} temperatures for {rows} rows; give one each")
    flow = _check(lm, batch, rules, seed)
    matrix = programs.matrix(lm.bare, spread(batch, lm.params), flow, seed)
    return Relevance(matrix / over**2, jnp.asarray(batch.valid), batch.prompt_length)


def relevance_sums(
    lm: LM,
    batch: Batch,
    weights: Float[Any, "batch count response"],
    rules: str | RuleSet = "attnlrp",
    *,
    seed: str = "logit",
) -> Float[Array, "batch count seq"]:
    """Weighted sums of the rows of ``R*``, a pull-back each, without ``R*``.

    What several tokens rest on together: their weights are 1 and those of others 0.
    Other arguments and errors as :func:`relevance`; weights of another shape, or of no
    sum, are one as well.
    """
    flow = _check(lm, batch, rules, seed)
    rows, seq = batch.tokens.shape
    response, shape = seq - batch.prompt_length, np.shape(weights)
    if len(shape) != 3 or shape != (rows, max(shape[1], 1), response):
        raise ValueError(
            f"weights have shape {shape}; give those of a sum or more for each of "
            f"{rows} rows, as [{rows}, sums, {response}]"
        )
    spread_out = spread(batch, lm.params)
    return programs.sums(lm.bare, spread_out, jnp.asarray(weights), flow, seed)


def relevance_means(
    lm: LM, batch: Batch, rules: str | RuleSet = "attnlrp", *, seed: str = "logit"
) -> programs.Means:
    """Both means of ``R*`` without ``R*``: a push and a pull-back that share a forward.

    Arguments and errors as :func:`relevance`; a rule set that is not linear in the seed
    is one as well.
    """
    flow = _check(lm, batch, rules, seed)
    flow.ops(forward=True)  # raises where there is none
    return programs.means(lm.bare, spread(batch, lm.params), flow, seed)


def relevance_resampled(
    lm: LM,
    batch: Batch,
    shape: tuple[int, int],
    rules: str | RuleSet = "attnlrp",
    *,
    seed: str = "logit",
    padding: str = "last",
) -> Float[Array, "batch rows columns"]:
    """``R*`` of the prompt, mean-resampled along both axes, without ``R*``.

    Means of pull-backs are pull-backs of means: it takes as many passes as there are
    bins or tokens along the response, or along the prompt, whichever are fewest.

    ``shape`` are the bins along the response and along the prompt, ``padding`` is of
    bins without a token, as :func:`jaxhal.features.relevance.resample` has it.  Other
    arguments and errors as :func:`relevance`; a shape below 1 is one as well.
    """
    flow = _check(lm, batch, rules, seed)
    if min(shape) < 1:
        raise ValueError(f"shape is {tuple(shape)}; ask for at least 1 bin each way")
    bins = programs.bins_of(batch, shape, padding)
    return programs.resampled(lm.bare, spread(batch, lm.params), bins, flow, seed)


def _check(lm: LM, batch: Batch, rules: str | RuleSet, seed: str) -> RuleSet:
    """The rule set; errors before tracing."""
    one_of(SEEDS, seed=seed)
    check_rows(batch.valid, lm.config.context_length)
    if not isinstance(batch.valid, Tracer):
        prompt, response = np.split(np.asarray(batch.valid), [batch.prompt_length], 1)
        for name, part in (("prompt", prompt), ("response", response)):
            empty = np.flatnonzero(~part.any(1))
            if empty.size:
                raise ValueError(
                    f"row {empty[0]} of the batch has no {name} token, only padding; "
                    "relevance is between a prompt and its response"
                )
    return resolve(rules)
