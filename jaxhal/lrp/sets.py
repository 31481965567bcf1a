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

from jaxhal.lrp.rules import Rule, RuleSet, rule_set, rules_of
from jaxhal.models import ops as primitives
from jaxhal.models.ops import Ops


def _gain(output: Array, eps: float) -> Array:
    """z / (z + eps sign z): what a stabiliser leaves of a sum's relevance."""
    size = jnp.abs(output)
    return size / (size + eps)


@functools.cache
def epsilon_linear(eps: float) -> Rule:
    r"""Epsilon rule: :math:`R_i = \sum_o x_i W_{io} R_o / (z_o + \epsilon\,sign z_o)`.

    The bias takes its share of relevance and keeps it.
    """

    def tangent(args, output, tangents):
        moved = primitives.linear(tangents[0], args[1], None, output.dtype)
        return _gain(output, eps) * moved

    return Rule(primitives.linear, tangent)


def _scores_tangent(args, output, tangents):
    query, key = args
    d_query, d_key = tangents
    return primitives.scores(d_query, key) + primitives.scores(query, d_key)


def _attend_tangent(args, output, tangents):
    """Of the values mixed by softmax: ordinary, as the deep Taylor rule has it."""
    # The softmax's own term is taken after the values are mixed, so that going back it
    # is a product of rows with the output, not one more pass over all probabilities.
    (scores, bias, value), (d_scores, d_value) = args, tangents
    probs = jax.nn.softmax(scores + bias, axis=-1)
    moved = probs * d_scores
    common = moved.sum(-1, keepdims=True) * output
    return _mixed(moved, value) - common.astype(value.dtype) + _mixed(probs, d_value)


def _mixed(probs, value):
    return primitives.mix(probs, value).astype(value.dtype)


SCORES = Rule(primitives.scores, _scores_tangent)
ATTEND = Rule(primitives.attend, _attend_tangent)


def _product(args, output, tangents):
    return tangents[0] * args[1] + args[0] * tangents[1]


def _sum(args, output, tangents):
    return tangents[0] + tangents[1]


MULTIPLY = Rule(jnp.multiply, _product)
ADD = Rule(jnp.add, _sum)


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


def _only_values(args, output, tangents):
    scores, bias, _ = args
    return _mixed(jax.nn.softmax(scores + bias, axis=-1), tangents[1])


def _only_second(args, output, tangents):
    return args[0] * tangents[1]


def _nothing(args, output, tangents):
    return jnp.zeros_like(output)


def _weighed(rule: Rule, weight: Callable[[Array], Array | float]) -> Rule:
    """A rule that passes on a share of relevance, by what its sums came out as."""
    assert rule.tangent is not None
    tangent = rule.tangent

    def weighed(args, output, tangents):
        moved = tangent(args, output, tangents)
        return (weight(output) * moved).astype(moved.dtype)

    return Rule(rule.function, weighed)


def _half(rule: Rule) -> Rule:
    return _weighed(rule, lambda output: 0.5)


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
    """
    rules = rules_of(gradient_x_input())
    rules |= {
        "scores": _half(SCORES),
        "attend": _half(ATTEND),
        "normalize": Rule(primitives.normalize, _identity_norm),
        "activate": Rule(primitives.activate, _identity_activation),
        "multiply": _half(MULTIPLY),
    }
    return rule_set("attnlrp", rules)


@functools.cache
def cp_lrp() -> RuleSet:
    """CP-LRP: attention weights and gates are constants, all else is linear.

    Nothing is absorbed but by biases: without them the relevance of all input tokens
    adds up to the seed.
    """
    rules = rules_of(attnlrp())
    rules |= {
        "scores": Rule(primitives.scores, _nothing),
        "attend": Rule(primitives.attend, _only_values),
        "multiply": Rule(jnp.multiply, _only_second),
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
        "add": _stabilised(ADD, eps),
    }
    return rule_set("epsilon", rules)


@functools.cache
def _jacobian(function: Callable) -> Callable:
    """The derivative as it is, by forward mode, of a function of one stream."""

    def tangent(args, output, tangents):
        del output
        return jax.jvp(lambda x: function(x, *args[1:]), args[:1], tangents)[1]

    return tangent


@functools.cache
def lrp4rag() -> RuleSet:
    """Equations 1 to 4 of the LRP4RAG paper, relevance normalised with its 1e-6.

    Both operands of a product take all of it (eq. 1), linear layers pass ``R_O W^T *
    I`` (eq. 2), softmax, norms and activations their Jacobian (eq. 3, 4).  As printed
    they lack the division by the output, without which hardly any relevance stays
    finite through 30 layers; section 4.2 normalises with an epsilon of 1e-6, so ``R``
    on their right-hand sides is read as ``R / (output + 1e-6)``.  That is gradient x
    input up to the stabiliser; nothing is conserved, since every product counts twice.
    """
    eps = 1e-6
    rules = {
        "normalize": Rule(primitives.normalize, _jacobian(primitives.normalize)),
        "activate": Rule(primitives.activate, _jacobian(primitives.activate)),
        "scores": SCORES,
        "attend": ATTEND,
        "multiply": MULTIPLY,
        "add": ADD,
    }
    rules = {name: _stabilised(rule, eps) for name, rule in rules.items()}
    return rule_set("lrp4rag", rules | {"linear": epsilon_linear(eps)})


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
