"""Answers, and other examples that are made of them, read for some detectors."""

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from jaxhal.detectors import Detector, Recast, reads, views
from jaxhal.io.showing import quoted
from jaxhal.models.batching import Encoded
from jaxhal.models.lm import LM
from jaxhal.reading.columns import Column
from jaxhal.reading.keys import column_name
from jaxhal.reading.parts import response_axes
from jaxhal.reading.store import Store, encode
from jaxhal.types import Example, Reducer


class Read(NamedTuple):
    """What a store gives back for everything that detectors read.

    Attributes:
      kept: numbers of the examples that could be read, in order.
      errors: why the others could not, by number.
      rows: the kept examples as tokens, with their own responses.
      features: name, reducer and values of each feature of the kept examples.
    """

    kept: list[int]
    errors: dict[int, str]
    rows: list[Encoded]
    features: list[tuple[str, Reducer, Column]]


class _Found(NamedTuple):
    """A feature in the store, and the place there of each example that has it."""

    name: str
    reducer: Reducer
    column: Column
    at: dict[int, int]


def read_all(
    lm: LM,
    examples: Sequence[Example],
    detectors: Sequence[Detector],
    store: Store,
    **options: Any,
) -> Read:
    """Reads answers and every view of them that detectors ask for.

    An example is kept when each of its views can be read.

    Args:
      lm: the model.
      examples: the answers.
      detectors: the methods.
      store: where features are kept.
      options: of :meth:`jaxhal.reading.store.Store.read`.

    Raises:
      ValueError: when no detector reads the model, or on an example that a view cannot
        be made of.
      TypeError: as :func:`viewed`.
    """
    named, others = reads(detectors), views(detectors)
    if not named and not others and not any(one.measures for one in detectors):
        raise ValueError("none of the detectors reads the model; name one that does")
    found: list[_Found] = []
    if named:
        own = store.read(lm, examples, named, **options)
        kept, errors, rows = own.kept, own.errors, own.rows
        at = {number: place for place, number in enumerate(kept)}
        found += [_Found(n, r, own.features[n], at) for n, r in named.items()]
    else:
        kept, errors, rows = encode(lm, examples)
    encoded = dict(zip(kept, rows, strict=True))
    for more, unread in _read_views(lm, examples, others, store, options):
        found += more
        errors = errors | unread
    kept = [n for n in kept if n not in errors]
    features = [
        (one.name, one.reducer, one.column.only([one.at[n] for n in kept]))
        for one in found
    ]
    return Read(kept, errors, [encoded[n] for n in kept], features)


def _read_views(
    lm: LM,
    examples: Sequence[Example],
    others: Mapping[Recast, Mapping[str, Reducer]],
    store: Store,
    options: Mapping[str, Any],
) -> Iterator[tuple[list[_Found], dict[int, str]]]:
    """Features of views, and why some examples have none.

    Views from which the same is read are read together, for they may share prompts.
    """
    along = token_features(lm, others)
    alike: dict[tuple[str, ...], list[Recast]] = defaultdict(list)
    for of, named in others.items():
        alike[tuple(sorted({column_name(r) for r in named.values()}))].append(of)
    count = len(examples)
    for together in alike.values():
        asked = [viewed(of, one, along[of]) for of in together for one in examples]
        reducers = {column_name(r): r for r in others[together[0]].values()}
        stored = store.read(lm, asked, reducers, **options)
        found = []
        for number, of in enumerate(together):
            at = {n - number * count: place for place, n in enumerate(stored.kept)}
            found += [
                _Found(name, reducer, stored.features[column_name(reducer)], at)
                for name, reducer in others[of].items()
            ]
        yield found, {n % count: error for n, error in stored.errors.items()}


def token_features(
    lm: LM, others: Mapping[Recast, Mapping[str, Reducer]]
) -> dict[Recast, list[str]]:
    """Names of each view's features that run along the tokens of its response.

    Args:
      lm: the model.
      others: of :func:`jaxhal.detectors.views`.
    """
    named = {n: r for reducers in others.values() for n, r in reducers.items()}
    axes = response_axes(lm, named) if named else {}
    return {of: [n for n in reducers if axes[n]] for of, reducers in others.items()}


def viewed(of: Recast, example: Example, along: Sequence[str]) -> Example:
    """A view of an answer, made sure that its features fit the answer's own tokens.

    Args:
      of: what makes it.
      example: the answer.
      along: its features that run along the tokens of the response.

    Raises:
      TypeError: when there are such features and the view has another response.
      ValueError: on an answer that it cannot be made of.
    """
    made = of(example)
    if along and made.response != example.response:
        raise TypeError(
            f"feature {along[0]!r} runs along the tokens of a response, but example "
            f"{quoted(example.id)} is read with another response there, "
            f"{quoted(made.response)}; read one number of the whole response instead"
        )
    return made
