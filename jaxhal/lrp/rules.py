"""How relevance flows back through each primitive of a decoder.

Every rule has the form :math:`R_{in} = x \\odot g_{in}`, where the slot :math:`g` of
the input is a linear function of that of the output.  A rule is therefore written once,
as the linear map ``tangent`` that stands in for the primitive's derivative: its
transpose carries relevance back (a ``custom_vjp``), and the map itself carries a
direction forward (a ``custom_jvp``), which gives means over prompt tokens in one pass.

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
    "route": (0, 1),
    "delta": (0, 1, 2, 3, 4),
}
# Primitives that give something beside what passes relevance on.
_BESIDE = ("attend", "delta")


class Rule(NamedTuple):
    """One primitive and what stands in for its derivative.

    Attributes:
      function: the primitive, with the signature it has in :mod:`jaxhal.models.ops`.
      tangent: ``(arguments, output, tangents) -> tangent of the output``, linear in
        ``tangents``, which hold one of each argument in :data:`FLOWS`; for ``attend``
        and ``delta`` the output and its tangent are those of the mixed values.
        ``None`` takes the derivative as it is, or that of the function's own
        ``custom_vjp``: a rule that need not be linear, and so has no means by one pass.
      pullbacks: ``(arguments, output, slots) -> slots of the arguments``, the transpose
        of ``tangent`` for many slots at once (a leading axis, of the results too),
        where it can be computed faster than ``vmap`` of the transpose does.
    """

    function: Callable[..., Any]
    tangent: Callable[[tuple, Any, tuple], Array] | None = None
    pullbacks: Callable[[tuple, Any, Array], tuple] | None = None


@dataclasses.dataclass(frozen=True)
class RuleSet:
    """A rule for every primitive; make one with :func:`rule_set`."""

    name: str
    rules: tuple[Rule, ...]  # in the order of :class:`jaxhal.models.ops.Ops`

    @property
    def linear(self) -> bool:
        """Whether relevance is linear in the seed, so that means cost one pass."""
        return not any(isinstance(rule.function, jax.custom_vjp) for rule in self.rules)

    def ops(self, forward: bool = False) -> Ops:
        """Primitives to give to the decoder: for pulling back, or for pushing forward.

        Raises:
          ValueError: when pushing forward through a set that is not :attr:`linear`.
        """
        if forward and not self.linear:
            raise ValueError(
                f"rule set {self.name!r} has a custom_vjp, which cannot be pushed "
                "forward; give a Rule with a tangent, or take the means of "
                "jaxhal.relevance, which pulls back token by token"
            )
        return _ops(self, forward)


def rule_set(name: str, rules: Mapping[str, Rule]) -> RuleSet:
    """A rule set of one's own, with a rule for every primitive.

    Raises:
      ValueError: on a primitive that is missing or unknown.
      TypeError: on a value that is no :class:`Rule`.

    Example:
      >>> from jaxhal.lrp import attnlrp, epsilon_linear
      >>> mine = rule_set("mine", rules_of(attnlrp()) | {"linear": epsilon_linear(0.1)})
      >>> mine.linear
      True
    """
    missing = [p for p in Ops._fields if p not in rules]
    unknown = [p for p in rules if p not in Ops._fields]
    if missing or unknown:
        wrong = [f"has no rule for {p!r}" for p in missing]
        wrong += [f"has a rule for unknown {p!r}" for p in unknown]
        raise ValueError(
            f"rule set {name!r} {' and '.join(wrong)}; a set names "
            f"{', '.join(Ops._fields)}, and rules_of(another set) gives its rules"
        )
    for primitive, rule in rules.items():
        if not isinstance(rule, Rule):
            raise TypeError(
                f"rule set {name!r} gives {primitive!r} as {rule!r}; give a Rule"
            )
        if rule.pullbacks is not None and rule.tangent is None:
            raise ValueError(
                f"the rule of {primitive!r} has pullbacks and no tangent; they are the "
                "transpose of one, so give it as well"
            )
    return RuleSet(name, tuple(rules[primitive] for primitive in Ops._fields))


def rules_of(rules: RuleSet) -> dict[str, Rule]:
    """Primitive -> rule, to compose another set from."""
    return dict(zip(Ops._fields, rules.rules, strict=True))


@functools.cache
def _ops(rules: RuleSet, forward: bool) -> Ops:
    bind = _push if forward else _pull
    bound = {
        name: rule.function
        if rule.tangent is None
        else bind(rule, FLOWS[name], name in _BESIDE)
        for name, rule in rules_of(rules).items()
    }
    return Ops(**bound)


def parts(args: tuple, flows: tuple[int, ...]):
    """Arguments that pass relevance on, other arrays, and how to join them again."""
    moving = tuple(args[i] for i in flows)
    arrays = {
        i: arg
        for i, arg in enumerate(args)
        if i not in flows and isinstance(arg, jax.Array)
    }

    def together(moving: tuple, arrays: dict[int, Array]) -> tuple:
        known = dict(zip(flows, moving, strict=True)) | arrays
        return tuple(known.get(i, arg) for i, arg in enumerate(args))

    return moving, arrays, together


def _pull(rule: Rule, flows: tuple[int, ...], beside: bool) -> Callable[..., Any]:
    """The primitive with its rule for reverse mode."""

    def call(*args):
        moving, arrays, together = parts(args, flows)

        @jax.custom_vjp
        def apply(moving, arrays):
            return rule.function(*together(moving, arrays))

        def forward(moving, arrays):
            output = rule.function(*together(moving, arrays))
            return output, (moving, arrays, output[0] if beside else output)

        def backward(saved, slot):
            moving, arrays, output = saved
            slot = slot[0] if beside else slot

            def transposed(moving, arrays, output, slot):
                args = together(moving, arrays)
                assert rule.tangent is not None
                linear = functools.partial(_straight, rule.tangent, args, output)
                return jax.linear_transpose(linear, *moving)(slot)

            if rule.pullbacks is None:
                return transposed(moving, arrays, output, slot), None
            pull = jax.custom_batching.custom_vmap(transposed)

            @pull.def_vmap
            def many(count, batched, moving, arrays, output, slots):
                if any(jax.tree.leaves(batched[:-1])):
                    axes = jax.tree.map(lambda mapped: 0 if mapped else None, batched)
                    out = jax.vmap(transposed, axes)(moving, arrays, output, slots)
                else:
                    assert rule.pullbacks is not None
                    out = rule.pullbacks(together(moving, arrays), output, slots)
                return out, (True,) * len(moving)

            del many
            return pull(moving, arrays, output, slot), None

        apply.defvjp(forward, backward)
        return apply(moving, arrays)

    return call


def _straight(tangent: Callable, args: tuple, output: Array, *tangents: Array) -> Array:
    return tangent(args, output, tangents).astype(output.dtype)


def _push(rule: Rule, flows: tuple[int, ...], beside: bool) -> Callable[..., Any]:
    """The primitive with its rule for forward mode."""
    assert rule.tangent is not None
    tangent = rule.tangent

    def call(*args):
        moving, arrays, together = parts(args, flows)

        @jax.custom_jvp
        def apply(moving, arrays):
            return rule.function(*together(moving, arrays))

        @apply.defjvp
        def jvp(primals, tangents):
            args = together(*primals)
            output = rule.function(*args)
            whole = output[0] if beside else output
            moved = _straight(tangent, args, whole, *tangents[0])
            return output, (moved, jnp.zeros_like(output[1])) if beside else moved

        del jvp
        return apply(moving, arrays)

    return call
