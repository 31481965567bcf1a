"""What a feature is: something computed of an answer, once, for all who look at it."""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any, ClassVar, Literal

from jaxhal.types import Example, View

# Names of the axes of an array, or of each array of a mapping.
Axes = tuple[str, ...] | Mapping[str, tuple[str, ...]]

# From an answer to another example that is read in its place.
Rewrite = Callable[[Example], Example]


class Feature:
    """What is computed of an answer; a frozen dataclass, so equal ones are one.

    A :class:`Reducer` reads the answer itself in the model's pass, :class:`OfRewrite`
    reads another example that is made of it, :class:`OfText` needs no model, and a
    :class:`jaxhal.reading.bulk.Measure` is computed of many answers at once.
    """

    @property
    def axes(self) -> Axes:
        """Of the feature of one answer: ``"response"`` runs along its tokens."""
        raise NotImplementedError(f"{type(self).__name__} must define axes")


@dataclasses.dataclass(frozen=True)
class Reducer(Feature):
    """Turns the rows of one forward pass into a small feature; subclass it.

    A reducer is a frozen dataclass, so that two with equal fields compile once.  It is
    written for **one head of one sample**; layers, batch and heads are mapped around
    it.  Say what it reads and from which row::

        @dataclasses.dataclass(frozen=True)
        class QuestionAttention(jaxhal.Reducer):
            '''Attention mass on the question, per head and response token.'''
            def rows(self, probs, view):
                return jnp.sum(probs * view.question, axis=-1)

    Class attributes:
      reads: ``"probs"`` gives ``rows`` the attention ``[query key]`` of one head,
        ``"hidden"`` the residual stream ``[query width]``, ``"logits"`` the next-token
        logits ``[query vocab]``, all float32 except hidden (the model's dtype).
        (``"relevance"`` marks those of :mod:`jaxhal.lrp`, which are read backwards.)
      row: whose row stands for a response token: ``"token"``, its own, or
        ``"predictor"``, the row before it, which predicted it.
      reads_target: whether ``rows`` looks at ``view.target``; while decoding, that
        token must then be given.
      values: names of the axes of what ``rows`` gives for one query row or, where it is
        overridden, ``finish`` for the response; ``()`` for one number.

    A ``hidden`` reducer may have a field ``layers``, a tuple of hidden-state numbers
    (0 = embeddings, L = after the final norm; ``None`` = all); only those are kept.

    A reducer is *row-wise* when each query row alone gives its number; then it also
    rides along while decoding.  One that overrides ``finish`` needs all response rows.
    """

    reads: ClassVar[Literal["probs", "hidden", "logits", "relevance"]] = "probs"
    row: ClassVar[Literal["token", "predictor"]] = "token"
    reads_target: ClassVar[bool] = False
    values: ClassVar[tuple[str, ...]] = ()

    @property
    def axes(self) -> tuple[str, ...]:
        """``layer`` and ``heads`` where there are some, ``response``, ``values``."""
        lead = {"probs": ("layer", "heads"), "hidden": ("layer",)}.get(self.reads, ())
        return (*lead, *(("response",) if self.rowwise else ()), *self.values)

    @property
    def batch_axis(self) -> int:
        """Of its feature: 0, or 1 after that of layers."""
        return 1 if self.reads in ("probs", "hidden") else 0

    @property
    def rowwise(self) -> bool:
        """True when the reducer needs one query row at a time."""
        return type(self).finish is Reducer.finish

    def rows(self, rows: Any, view: View, /) -> Any:
        """``[query ...] -> [query ...]``, one value (of any shape) a query row."""
        raise NotImplementedError(f"{type(self).__name__} must define rows(rows, view)")

    def finish(self, rows: Any, view: View, /) -> Any:
        """``[response ...]`` of all response rows, zero on padding, to the feature."""
        return rows


@dataclasses.dataclass(frozen=True)
class OfRewrite(Feature):
    """What is read of another example that is made of an answer.

    Where its response is the answer's own, features may run along its tokens; where it
    is another one, each is one array an answer, whatever their length.

    Attributes:
      rewrite: ``example -> example``, static by value; those of one are read together.
      reducer: what is read.
    """

    rewrite: Rewrite
    reducer: Reducer

    @property
    def axes(self) -> tuple[str, ...]:
        return self.reducer.axes


@dataclasses.dataclass(frozen=True)
class OfText(Feature):
    """Numbers computed from an example's text.

    Attributes:
      function: ``example -> number``, or an array of numbers.
      values: names of the array's axes.
    """

    function: Callable[[Example], Any]
    values: tuple[str, ...] = ()

    @property
    def axes(self) -> tuple[str, ...]:
        return self.values
