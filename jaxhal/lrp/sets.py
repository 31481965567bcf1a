"""The published rules and the sets they come in.

References:
  Bach et al. 2015, On Pixel-Wise Explanations by Layer-Wise Relevance Propagation;
  Ali et al. 2022, XAI for Transformers (CP-LRP); Achtibat et al. 2024, AttnLRP;
  Hu et al. 2024, `LRP4RAG <https://arxiv.org/abs/2408.15533>`_.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array

from jaxhal.lrp.rules import FLOWS, Rule, RuleSet, parts, rule_set, rules_of
from jaxhal.models import ops as primitives
from jaxhal.models.ops import Ops


def _gain(output: Array, eps: float) -> Array:
    """z / (z + eps sign z): what a stabiliser leaves of a sum's relevance, 0 of 0."""
    size = jnp.abs(output)
    return size / jnp.maximum(size + eps, jnp.finfo(size.dtype).tiny)


@functools.cache  # so that equal rules are the same, and compile once
def _ordinary(primitive: str) -> Rule:
    """The rule that is a primitive's own derivative."""
    function = getattr(primitives.STANDARD, primitive)

    def tangent(args, output, tangents):
        moving, arrays, together = parts(args, FLOWS[primitive])

        def passing(*some):
            return function(*together(some, arrays))

        moved = jax.linearize(passing, *moving)[1](*tangents)
        return moved[0] if isinstance(moved, tuple) else moved

    return Rule(function, tangent)


def epsilon_linear(eps: float) -> Rule:
    r"""Epsilon rule: :math:`R_i = \sum_o x_i W_{io} R_o / (z_o + \epsilon\,sign z_o)`.

    The bias takes its share of relevance and keeps it.
    """
    return _stabilised(_ordinary("linear"), eps)


def _probs(scores, bias, value, sink=None):
    """Of the keys of a row; a sink is one more, a constant whose value is 0."""
    if sink is None:
        return jax.nn.softmax(scores + bias, axis=-1)
    return primitives.attend(scores, bias, value, sink)[1]


def _attend_tangent(args, output, tangents):
    """Of the values mixed by softmax: ordinary, as the deep Taylor rule has it.

    The softmax's own term, probs * sum(probs * d_scores), is taken after the values are
    mixed, so that going back it is a product of rows with the output and not one more
    pass over all probabilities.
    """
    value, (d_scores, d_value) = args[2], tangents
    probs = _probs(*args)
    moved = probs * d_scores
    common = moved.sum(-1, keepdims=True) * output
    return _mixed(moved, value) - common.astype(value.dtype) + _mixed(probs, d_value)


def _mixed(probs, value):
    return primitives.mixed(probs, value).astype(value.dtype)


# Pulled back together, slots stand side by side before the last axis: each product is
# then one for all of them, and the largest array, of scores, is used as it lies.


def _scores_pullbacks(args, output, slots):
    del output
    (query, key), slots = args, jnp.moveaxis(slots, 0, 4)
    queries = _dot(slots, key, (5,), (2,), query.dtype)  # [b n g q slot d]
    keys = _dot(query, slots, (2, 3), (2, 3), key.dtype)  # [b n d slot k]
    return jnp.moveaxis(queries, 4, 0), keys.transpose(3, 0, 1, 4, 2)


def _attend_pullbacks(args, output, slots):
    (scores, _, value, *_), slots = args, jnp.moveaxis(slots, 0, 4)
    probs = _probs(*args)
    output = output.astype(scores.dtype)
    common = jnp.sum(slots * output[..., None, :], axis=-1, keepdims=True)
    moved = _dot(slots, value, (5,), (3,), scores.dtype) - common
    moved = probs[..., None, :] * moved  # [b n g q slot k]
    values = _dot(probs.astype(value.dtype), slots, (2, 3), (2, 3), value.dtype)
    return jnp.moveaxis(moved, 4, 0), values.transpose(3, 0, 1, 2, 4)


def _dot(left, right, over_left, over_right, dtype):
    """A product per row and key head, its operands in the order given."""
    both = jnp.result_type(left, right)
    exact = primitives.precision(left.dtype, right.dtype)
    left, right = left.astype(both), right.astype(both)
    dims = ((over_left, over_right), ((0, 1), (0, 1)))
    wide = primitives.wide(left.dtype)
    return jax.lax.dot_general(left, right, dims, exact, wide).astype(dtype)


SCORES = _ordinary("scores")._replace(pullbacks=_scores_pullbacks)
ATTEND = Rule(primitives.attend, _attend_tangent, pullbacks=_attend_pullbacks)


def _identity_norm(args, output, tangents):
    """The scale is a constant; of LayerNorm the mean is subtracted as it is."""
    (x, eps, center), (moved,) = args, tangents
    x, moved = x.astype(output.dtype), moved.astype(output.dtype)
    if center:
        x = x - jnp.mean(x, axis=-1, keepdims=True)
        moved = moved - jnp.mean(moved, axis=-1, keepdims=True)
    return moved * jax.lax.rsqrt(jnp.mean(x * x, axis=-1, keepdims=True) + eps)


def _identity_activation(args, output, tangents):
    """The slope of the line from the origin, 1/2 at the origin for SiLU and GELU."""
    x = args[0]
    slope = jnp.where(x == 0, 0.5, output / jnp.where(x == 0, 1, x))
    return slope * tangents[0]


# The first factor is a constant.
_WEIGHED = Rule(jnp.multiply, lambda args, z, moved: args[0] * moved[1])


def _only_values(args, output, tangents):
    del output
    return _mixed(_probs(*args), tangents[1])


def _weighed(rule: Rule, weight: Callable[[Array], Array | float]) -> Rule:
    """A rule that passes on a share of relevance, by what its sums came out as."""
    tangent, pullbacks = rule.tangent, rule.pullbacks
    assert tangent is not None

    def weighed(args, output, tangents):
        moved = tangent(args, output, tangents)
        return (weight(output) * moved).astype(moved.dtype)

    def together(args, output, slots):
        assert pullbacks is not None
        slots = (weight(output) * slots).astype(slots.dtype)
        return pullbacks(args, output, slots)

    return Rule(rule.function, weighed, pullbacks=pullbacks and together)


def _delta_values(args, output, tangents):
    """Queries, keys, decay and what is written are constants: all else is linear."""
    query, key, _, decay, beta, state = args
    parts = query, key, tangents[2], decay, beta, jnp.zeros_like(state)
    del output
    return primitives.STANDARD.delta(*parts)[0]


def _half(rule: Rule) -> Rule:
    return _weighed(rule, lambda output: 0.5)


@functools.cache
def _stabilised(rule: Rule, eps: float) -> Rule:
    """A rule whose relevance is divided by output + eps instead of by output."""
    return _weighed(rule, lambda output: _gain(output, eps))


@functools.cache
def gradient_x_input() -> RuleSet:
    """No rule at all: the input times its ordinary derivative."""
    rules = {name: Rule(getattr(primitives.STANDARD, name)) for name in Ops._fields}
    rules |= {"scores": SCORES, "attend": ATTEND}
    return rule_set("gradient_x_input", rules)


@functools.cache
def attnlrp() -> RuleSet:
    """AttnLRP: what the published LRP4RAG code ran, its stabilisers taken to 0.

    Softmax and biases absorb relevance, so the sum over input tokens is not the seed.
    The weights that a router gives to experts are constants, and so are the gates of a
    shared expert and of what attention gives and, of linear attention, all but the
    values.
    """
    rules = rules_of(gradient_x_input())
    rules |= {
        "scores": _half(SCORES),
        "attend": _half(ATTEND),
        "normalize": Rule(primitives.normalize, _identity_norm),
        "activate": Rule(primitives.activate, _identity_activation),
        "multiply": _half(_ordinary("multiply")),
        "route": _WEIGHED,
        "delta": Rule(primitives.STANDARD.delta, _delta_values),
    }
    return rule_set("attnlrp", rules)


@functools.cache
def cp_lrp() -> RuleSet:
    """CP-LRP: weights of attention, linear or not, and of experts and gates are
    constants, all else is linear.

    Nothing is absorbed but by biases: without them the relevance of all input tokens
    adds up to the seed.
    """
    rules = rules_of(attnlrp())
    rules |= {
        "scores": Rule(primitives.scores, lambda args, z, moved: jnp.zeros_like(z)),
        "attend": Rule(primitives.attend, _only_values),
        "multiply": _WEIGHED,
    }
    return rule_set("cp_lrp", rules)


@functools.cache
def epsilon(eps: float = 1e-6) -> RuleSet:
    """AttnLRP with a stabiliser in every sum, as its explicit rules are written.

    It has the sign of the sum; the published code adds it to negative sums as well,
    which divides by zero at ``-eps``.
    """
    if eps < 0:
        raise ValueError(f"eps is {eps}; a stabiliser is at least 0")
    rules = rules_of(attnlrp())
    rules |= {
        "linear": epsilon_linear(eps),
        "scores": _stabilised(rules["scores"], eps),
        "attend": _stabilised(rules["attend"], eps),
        "add": _stabilised(_ordinary("add"), eps),
        "delta": _stabilised(rules["delta"], eps),
    }
    return rule_set("epsilon", rules)


@functools.cache
def lrp4rag() -> RuleSet:
    """Equations 1 to 4 of the LRP4RAG paper, relevance normalised with its 1e-6.

    ``R_A = R_C B^T * A`` for both operands of a product, each of which takes all of it
    (eq. 1), ``R_I = R_O W^T * I`` for linear layers (eq. 2), and the Jacobian in place
    of ``W`` for softmax, norms and activations (eq. 3, 4).  As printed they lack the
    division by the output that makes relevance of a product: taken literally, every
    step multiplies relevance by activations, and through 30 layers hardly any of it
    stays a finite number.  Section 4.2 speaks of an epsilon of 1e-6 when relevance is
    normalised, so ``R`` on their right-hand sides is read as ``R / (output + 1e-6)``.
    What that gives is gradient x input up to the stabiliser; nothing is conserved,
    since every product counts twice.
    """
    rules = {name: _ordinary(name) for name in Ops._fields}
    rules |= {"scores": SCORES, "attend": ATTEND}
    rules = {name: _stabilised(rule, 1e-6) for name, rule in rules.items()}
    return rule_set("lrp4rag", rules)


RULE_SETS: dict[str, Callable[[], RuleSet]] = {
    "lrp4rag": lrp4rag,
    "attnlrp": attnlrp,
    "cp_lrp": cp_lrp,
    "epsilon": epsilon,
    "gradient_x_input": gradient_x_input,
}


def resolve(rules: Any) -> RuleSet:
    """A rule set by name, or the one given.

    Raises:
      ValueError: on an unknown name.
      TypeError: on anything else.

    Example:
      >>> resolve("cp_lrp").name
      'cp_lrp'
    """
    if isinstance(rules, RuleSet):
        return rules
    if not isinstance(rules, str):
        raise TypeError(
            f"rules are {rules!r}; give a name ({', '.join(RULE_SETS)}) or a RuleSet "
            "of jaxhal.lrp.rule_set"
        )
    if rules not in RULE_SETS:
        raise ValueError(
            f"unknown rules {rules!r}; known are {', '.join(RULE_SETS)}, and "
            "jaxhal.lrp.rule_set composes others"
        )
    return RULE_SETS[rules]()
