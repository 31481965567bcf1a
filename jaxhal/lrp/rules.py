"""How relevance flows back through each primitive of a decoder.

Every rule has the form :math:`R_{in} = x \\odot g_{in}`, with a slot :math:`g` of the
input that is linear in that of the output.  It is written once, as the linear map that
stands in for the primitive's derivative (a ``custom_jvp``): the transpose of it carries
relevance back, and the map itself carries a direction forward.

Layer-wise relevance propagation may be covered by patents in some countries; see the
notice in the README.
"""

import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array

from jaxhal.models.ops import Ops

# Which arguments of a primitive pass relevance on; the others are constants.
FLOWS = {
    "linear": (0,),
    "scores": (0, 1),
    "attend": (0, 2),
    "normalize": (0,),
    "activate": (0,),
    "multiply": (0, 1),
    "add": (0, 1),
}


class Rule(NamedTuple):
    """One primitive, as :mod:`jaxhal.models.ops` has it, and its derivative's stand-in.

    ``tangent(arguments, output, tangents)`` is the output's tangent, linear in
    ``tangents``, which hold one for each argument in :data:`FLOWS`; for ``attend``
    output and tangent are those of the mixed values.  ``None`` takes the derivative
    itself.
    """

    function: Callable[..., Any]
    tangent: Callable[[tuple, Any, tuple], Array] | None = None


@dataclasses.dataclass(frozen=True)
class RuleSet:
    """A rule for every primitive, in the order of ``Ops``; see :func:`rule_set`."""

    name: str
    rules: tuple[Rule, ...]

    def ops(self) -> Ops:
        """The primitives to give to the decoder, for forward and reverse mode."""
        return _ops(self)


def rule_set(name: str, rules: Mapping[str, Rule]) -> RuleSet:
    """A rule set of one's own: primitive -> rule, for every primitive.

    Raises:
      ValueError: on a primitive that is missing or unknown.
      TypeError: on a value that is no :class:`Rule`.

    Example:
      >>> from jaxhal.lrp import attnlrp, epsilon_linear
      >>> mine = rule_set("mine", rules_of(attnlrp()) | {"linear": epsilon_linear(0.1)})
      >>> mine.name
      'mine'
    """
    wrong = [f"has no rule for {p!r}" for p in Ops._fields if p not in rules]
    wrong += [f"has a rule for unknown {p!r}" for p in rules if p not in Ops._fields]
    if wrong:
        raise ValueError(
            f"rule set {name!r} {' and '.join(wrong)}; a set names "
            f"{', '.join(Ops._fields)}, and rules_of(another set) gives its rules"
        )
    for primitive, rule in rules.items():
        if not isinstance(rule, Rule):
            raise TypeError(
                f"rule set {name!r} gives {primitive!r} as {rule!r}; give a Rule"
            )
    return RuleSet(name, tuple(rules[primitive] for primitive in Ops._fields))


def rules_of(rules: RuleSet) -> dict[str, Rule]:
    """Primitive -> rule, to compose another set from."""
    return dict(zip(Ops._fields, rules.rules, strict=True))


@functools.cache
def _ops(rules: RuleSet) -> Ops:
    bound = {
        name: rule.function if rule.tangent is None else _bound(rule, FLOWS[name])
        for name, rule in rules_of(rules).items()
    }
    return Ops(**bound)


def _bound(rule: Rule, flows: tuple[int, ...]) -> Callable[..., Any]:
    """The primitive with its rule in place of its derivative."""
    assert rule.tangent is not None
    tangent = rule.tangent

    def call(*args):
        moving = tuple(args[i] for i in flows)
        # All arrays are passed, none closed over; what is left is static.
        fixed = {
            i: arg
            for i, arg in enumerate(args)
            if i not in flows and isinstance(arg, jax.Array)
        }

        def together(moving: tuple, fixed: dict[int, Array]) -> tuple:
            known = dict(zip(flows, moving, strict=True)) | fixed
            return tuple(known.get(i, arg) for i, arg in enumerate(args))

        @jax.custom_jvp
        def apply(moving, fixed):
            return rule.function(*together(moving, fixed))

        @apply.defjvp
        def jvp(primals, tangents):
            args = together(*primals)
            output = rule.function(*args)
            # Attention gives its probabilities beside; they pass nothing on.
            whole = output[0] if isinstance(output, tuple) else output
            moved = tangent(args, whole, tangents[0]).astype(whole.dtype)
            if isinstance(output, tuple):
                return output, (moved, jnp.zeros_like(output[1]))
            return output, moved

        del jvp
        return apply(moving, fixed)

    return call
