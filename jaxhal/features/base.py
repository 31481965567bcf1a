"""What a feature is: something computed of an answer, once, for all who look at it."""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any, ClassVar, Literal

from jaxtyping import Array, Float

from jaxhal.types import Example, View

# Names of the axes of an array, or of each array of a mapping.
Axes = tuple[str, ...] | Mapping[str, tuple[str, ...]]

# Attention of one head, and one number for each of its rows.
Attention = Float[Array, "query key"]
OfRows = Float[Array, " query"]

# From an answer to another example that is read in its place.
Rewrite = Callable[[Example], Example]


class Feature:
    """What is computed of an answer; a frozen dataclass, so equal ones are one.

    A :class:`Reducer` reads it in the model's pass, :class:`OfRewrite` reads another
    example that is made of it, :class:`OfText` needs no model, and a
    :class:`jaxhal.reading.bulk.Measure` is computed of many answers at once.
    """

    @property
    def axes(self) -> Axes:
        """Of the feature of one answer: ``"response"`` runs along its tokens."""
        raise NotImplementedError(f"{type(self).__name__} must define axes")

    @property
    def extra(self) -> str:
        """The extra that brings what it computes with, such as ``"sentences"``."""
        return ""


@dataclasses.dataclass(frozen=True)
class Reducer(Feature):
    """Turns the rows of one forward pass into a small feature; subclass it.

    A frozen dataclass, so that two with equal fields compile once, written for **one
    head of one sample**; layers, batch and heads are mapped around it::

        @dataclasses.dataclass(frozen=True)
        class QuestionAttention(jaxhal.Reducer):
            '''Attention mass on the question, per head and response token.'''
            def rows(self, probs, view):
                return jnp.sum(probs * view.question, axis=-1)

    A ``hidden`` reducer may have a field ``layers``, a tuple of what
    :func:`~jaxhal.features.hidden.state_number` takes, numbers of hidden states or
    shares of the reader's layers (``None`` = all); only those are kept.
    One that overrides ``finish`` or ``settle`` needs all response rows at once; any
    other is *row-wise* and rides along while decoding.

    Attributes:
      reads: ``"probs"``, the attention ``[query key]`` of one head; ``"hidden"``, the
        residual stream ``[query width]`` in the model's dtype; ``"logits"`` of the next
        token ``[query vocab]``; ``"lens"``, those that the final norm and the output
        layer make of the residual stream before and after the feed-forward part of each
        layer, a pair; ``"relevance"`` for those of :mod:`jaxhal.lrp`.
      row: whose row stands for a response token: ``"token"``, its own, or
        ``"predictor"``, the row before it, which predicted it.
      reads_target: ``rows`` looks at ``view.target``, which decoding then must know.
      values: names of the axes of a row (or, with ``finish``, of a response).
    """

    reads: ClassVar[Literal["probs", "hidden", "logits", "lens", "relevance"]] = "probs"
    row: ClassVar[Literal["token", "predictor"]] = "token"
    reads_target: ClassVar[bool] = False
    values: ClassVar[tuple[str, ...]] = ()

    @property
    def axes(self) -> tuple[str, ...]:
        """``layer`` and ``heads`` where there are some, ``response``, ``values``."""
        lead = {"probs": ("layer", "heads"), "logits": (), "relevance": ()}
        lead = lead.get(self.reads, ("layer",))
        return (*lead, *(("response",) if self.rowwise else ()), *self.values)

    @property
    def batch_axis(self) -> int:
        """Of its feature: 0, or 1 after that of layers."""
        return 1 if self.reads in ("probs", "hidden", "lens") else 0

    @property
    def rowwise(self) -> bool:
        """True when the reducer needs one query row at a time."""
        return type(self).finish is Reducer.finish and not self.settles

    @property
    def settles(self) -> bool:
        """True when it takes what it saw to the last hidden states in the end."""
        return type(self).settle is not Reducer.settle

    def rows(self, rows: Any, view: View, /) -> Any:
        """``[query ...] -> [query ...]``, one value (of any shape) a query row."""
        raise NotImplementedError(f"{type(self).__name__} must define rows(rows, view)")

    def pack(self, rows: Any, view: View, /) -> Any:
        """``[response ...]`` of all response rows, zero on padding, to what waits.

        ``finish`` gets it when those of several layers are there; a reducer that needs
        a part of its rows for it may keep that part alone.
        """
        return rows

    def finish(self, packed: Any, view: View, /) -> Any:
        """What ``pack`` made of the rows, by default themselves, to the feature."""
        return packed

    def settle(
        self, kept: Any, hidden: Float[Array, "key width"], view: View, /
    ) -> Any:
        """What ``finish`` made of one head to the feature, when the last layer is done.

        ``hidden`` are the last hidden states of all columns, after the final norm; only
        a reducer of ``"probs"`` may override this.
        """
        return kept


@dataclasses.dataclass(frozen=True)
class OfRewrite(Feature):
    """What is read of another example that is made of an answer.

    Where its response is the answer's own, features may run along its tokens; where it
    is another one, each is one array an answer, whatever their length.
    """

    rewrite: Rewrite  # static by value; those of one rewrite are read together
    reducer: Reducer

    @property
    def axes(self) -> tuple[str, ...]:
        return self.reducer.axes


@dataclasses.dataclass(frozen=True)
class OfText(Feature):
    """A number, or an array of numbers, computed from an example's text."""

    function: Callable[[Example], Any]
    values: tuple[str, ...] = ()  # names of the array's axes

    @property
    def axes(self) -> tuple[str, ...]:
        return self.values
