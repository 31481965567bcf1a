"""Relevance as features, to be read beside those of attention and logits."""

import dataclasses
import functools
from collections.abc import Mapping
from typing import Any, ClassVar, Literal

import jax
import jax.numpy as jnp
from jaxtyping import Array

from jaxhal.features.base import Reducer
from jaxhal.features.relevance import resample
from jaxhal.io.checks import one_of
from jaxhal.lrp import programs
from jaxhal.lrp.passes import SEEDS
from jaxhal.lrp.sets import resolve
from jaxhal.models.lm import LM
from jaxhal.types import Batch


@dataclasses.dataclass(frozen=True)
class _Relevance(Reducer):
    """Features that share rules and seed share their passes."""

    reads: ClassVar[Literal["probs", "hidden", "logits", "relevance"]] = "relevance"
    rules: str = "attnlrp"  # a name of :data:`jaxhal.lrp.RULE_SETS`
    seed: str = "logit"  # as :func:`jaxhal.relevance` takes it

    def __post_init__(self):
        resolve(self.rules)
        one_of(SEEDS, seed=self.seed)

    @property
    def rowwise(self) -> bool:
        """False: relevance is read backwards, from the whole response."""
        return False


@dataclasses.dataclass(frozen=True)
class ResponseRelevance(_Relevance):
    """``R_response``: relevance behind each response token, mean over prompt tokens.

    ``[batch, response]``, in units of the seed, zero on padding.

    References:
      Hu et al., `LRP4RAG <https://arxiv.org/abs/2408.15533>`_, 2024, equation 6.
    """

    values = ("response",)


@dataclasses.dataclass(frozen=True)
class PromptRelevance(_Relevance):
    """``R_prompt``: relevance of the prompt's tokens, mean over response tokens.

    ``[batch, bins]``: prompts differ in length, so the profile comes mean-resampled.

    References:
      Hu et al., 2024, equations 5 and 7-9.
    """

    values = ("bins",)
    bins: int = 500


@dataclasses.dataclass(frozen=True)
class RelevanceMap(_Relevance):
    """``R*`` of the prompt, mean-resampled along both axes.

    ``[batch, response_bins, prompt_bins]``; as many passes as the fewer of the two.

    References:
      Hu et al., 2024, section 3.3; the published LSTM reads 300 x 800 with zeros.
    """

    values = ("response_bins", "prompt_bins")
    response_bins: int = 64
    prompt_bins: int = 16
    padding: str = "last"  # of bins without a token, as `resample` has it


def features(lm: LM, batch: Batch, reducers: Mapping[str, Any]) -> dict[str, Array]:
    """Every relevance feature of a batch, by name; ``reducers`` are those above."""
    out: dict[str, Array] = {}
    means: dict[tuple[str, str], programs.Means] = {}
    valid = jnp.asarray(batch.valid)[:, : batch.prompt_length]
    for name, reducer in reducers.items():
        key = (reducer.rules, reducer.seed)
        flow = (resolve(reducer.rules), reducer.seed)
        if isinstance(reducer, RelevanceMap):
            shape = (reducer.response_bins, reducer.prompt_bins)
            bins = programs.bins_of(batch, shape, reducer.padding)
            out[name] = programs.resampled(lm, batch, bins, *flow)
            continue
        if key not in means:
            means[key] = programs.means(lm, batch, *flow)
        out[name] = means[key].response
        if isinstance(reducer, PromptRelevance):
            each = jax.vmap(functools.partial(resample, length=reducer.bins))
            out[name] = each(means[key].prompt, valid=valid)
    return out
