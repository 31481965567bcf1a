"""What tokens and spans of an answer rest on, in text that a reader can point at."""

import itertools
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Float, Int

from jaxhal.features.relevance import normalized
from jaxhal.lrp.passes import relevance, relevance_sums
from jaxhal.lrp.rules import RuleSet
from jaxhal.models.batching import Encoded, bucket, collate
from jaxhal.models.lm import LM
from jaxhal.models.mesh import here
from jaxhal.models.prompts import Prompt
from jaxhal.models.templates import spelled
from jaxhal.models.tokenizer import Tokenizer
from jaxhal.texts import sentences, whole_words
from jaxhal.types import Example

# Sentences and words that are named of all that a span rests on.
_SENTENCES, _WORDS = 3, 50

#: Characters ``[start, end)`` of a text.
Place = tuple[int, int]


@dataclass(frozen=True, eq=False)
class Sources:
    """What the tokens of one answer rest on, token by token.

    Attributes:
      prompt: the :func:`pieces` of the prompt, of an added BOS its name.
      matrix: row ``t`` is what response token ``t`` rests on, the prompt tokens and
        then the response tokens: its relevance over the largest absolute value in the
        row, in [-1, 1]; zero from token ``t`` on.  As many rows as tokens have text.
      rules: the name of the rule set.

    Raises:
      ValueError: when the shape does not fit the prompt, or a number is not finite.
    """

    prompt: list[str]
    matrix: Float[np.ndarray, "response source"]
    rules: str

    def __post_init__(self):
        rows, columns = self.matrix.shape
        if columns != len(self.prompt) + rows:
            raise ValueError(
                f"matrix has shape {[rows, columns]} for {len(self.prompt)} prompt "
                "tokens; give a column for each of them and for each row"
            )
        if not np.isfinite(self.matrix).all():
            raise ValueError(_not_finite(self.rules))


class Piece(NamedTuple):
    """A sentence or a word that a span rests on.

    Attributes:
      of: the text it stands in: ``"context"`` or ``"question"``; ``"prompt"`` where
        one was given; ``"messages[n]"`` of a conversation; ``"response"``, before the
        span.
      start, end: its characters there, end exclusive.
      text: these characters.
      share: its part in the relevance of all tokens before the span, those of the chat
        template too; signed, and over the sum of absolute values.
    """

    of: str
    start: int
    end: int
    text: str
    share: float


class SpanRelevance(NamedTuple):
    """What a span of an answer rests on: relevance of the sum of its tokens' seeds.

    Attributes:
      rules: the name of the rule set.
      sentences: up to three that have the largest shares, in size; largest first.
      words: up to fifty such words and numbers.
    """

    rules: str
    sentences: list[Piece]
    words: list[Piece]


def trace(
    lm: LM, example: Example, row: Encoded, rules: RuleSet, places: Sequence[Place]
) -> tuple[Sources, list[SpanRelevance]]:
    """What every token of an answer rests on, and what spans of it do.

    Args:
      row: the answer as tokens.
      places: the characters of the spans.

    Raises:
      ValueError: when relevance is not finite.
    """
    tokenizer = lm.require_tokenizer()
    batch = collate([row], tokenizer.pad_id)
    found = here(relevance(lm, batch, rules))
    matrix = np.asarray(normalized(found.matrix[0], "max"))
    kept = np.flatnonzero(row.offsets[:, 0] < row.offsets[:, 1])
    start = batch.prompt_length
    prompt = np.arange(start - len(row.prompt_ids), start)
    columns = np.concatenate([prompt, start + kept])
    texts = _prompt_pieces(tokenizer, example, row)
    sources = Sources(texts, matrix[np.ix_(kept, columns)], rules.name)
    sums = _inside(row, places) @ np.asarray(found.matrix[0, : len(row.offsets)])
    first = start - len(row.prompt_ids)
    return sources, _explained(lm, example, row, places, sums[:, first:], rules.name)


def explain(
    lm: LM, example: Example, places: Sequence[Place], rules: RuleSet
) -> list[SpanRelevance]:
    """What spans of an answer rest on, a pass back for each; as :func:`trace`."""
    if not places:
        return []
    tokenizer = lm.require_tokenizer()
    row = tokenizer.encode_example(example)
    batch = collate([row], tokenizer.pad_id)
    # Few numbers of spans, so that few programs are compiled; the others are zeros.
    count, columns = bucket(len(places), 1), batch.offsets.shape[1]
    weights = np.zeros((1, count, columns), np.float32)
    weights[0, : len(places), : len(row.offsets)] = _inside(row, places)
    sums = np.asarray(here(relevance_sums(lm, batch, weights, rules))[0, : len(places)])
    first = batch.prompt_length - len(row.prompt_ids)
    return _explained(lm, example, row, places, sums[:, first:], rules.name)


def pieces(text: str, spans: Int[np.ndarray, "tokens 2"]) -> list[str]:
    """The text of each token from its characters; they join up to the whole text.

    Of tokens that share a character the first has the text and the others have none.

    >>> pieces("a🙂b", np.array([[0, 1], [1, 2], [1, 2], [2, 3]]))
    ['a', '🙂', '', 'b']
    """
    reach = np.maximum.accumulate(spans[:, 1])
    first = np.append(0, 1 + np.flatnonzero(spans[1:, 0] >= reach[:-1]))
    edges = [0, *spans[first[1:], 0].tolist(), len(text)]
    found = [""] * len(spans)
    for token, (start, end) in zip(first, itertools.pairwise(edges), strict=True):
        found[token] = text[start:end]
    return found


def page_data(
    sources: Sources, response: str, spans: Int[np.ndarray, "response 2"]
) -> dict[str, Any]:
    """The sources for a page: units of text, and hundredths between them.

    A unit is a token, or the tokens that share a character; the strongest relevance
    among these is the unit's.  ``units`` are the numbers of the response tokens' units,
    ``rows`` a number in [-100, 100] for each unit per unit of the response, without the
    zeros at its end.

    >>> red = Sources(["<s>", "Red"], np.array([[0.123, -1.0, 0.0]]), "attnlrp")
    >>> page_data(red, "No", np.array([[0, 2]]))
    {'rules': 'attnlrp', 'prompt': ['<s>', 'Red'], 'response': ['No'],
     'units': [0], 'rows': [[12, -100]]}
    """
    prompt, answer = sources.prompt, pieces(response, spans)
    left, right = _unit_starts(prompt), _unit_starts(answer)
    values = _strongest(sources.matrix, right, 0)
    values = _strongest(values, np.append(left, len(prompt) + right), 1)
    hundredths = np.rint(100 * values).astype(int)
    return {
        "rules": sources.rules,
        "prompt": [prompt[token] for token in left],
        "response": [answer[token] for token in right],
        "units": (np.searchsorted(right, range(len(answer)), "right") - 1).tolist(),
        "rows": [np.trim_zeros(row, "b").tolist() for row in hundredths],
    }


class _Text(NamedTuple):
    """A text that was sent: numbers and characters of its tokens, and its parts."""

    of: str
    text: str
    tokens: Int[np.ndarray, " tokens"]
    characters: Int[np.ndarray, "tokens 2"]
    sentences: list[Place]
    words: list[Place]


def _explained(
    lm: LM,
    example: Example,
    row: Encoded,
    places: Sequence[Place],
    sums: Float[np.ndarray, "spans some"],
    rules: str,
) -> list[SpanRelevance]:
    """The shares of each span, from its relevance by token of the row."""
    if not places:
        return []
    if not np.isfinite(sums).all():
        raise ValueError(_not_finite(rules))
    *texts, own = _texts(lm.require_tokenizer(), example, row)
    firsts = len(row.prompt_ids) + _inside(row, places).argmax(1)
    found = []
    for (start, _), first, values in zip(places, firsts, sums, strict=True):
        values = np.where(np.arange(len(values)) < first, values, 0.0)
        shares = values / max(np.abs(values).sum(), np.finfo(values.dtype).tiny)
        before = len(example.response[:start].rstrip())
        sentences, words = (
            [(a, min(b, before)) for a, b in parts if a < before]
            for parts in (own.sentences, own.words)
        )
        each = *texts, own._replace(sentences=sentences, words=words)
        strongest = _pieces(((text, text.sentences) for text in each), shares)
        words = _pieces(((text, text.words) for text in each), shares)
        found.append(SpanRelevance(rules, strongest[:_SENTENCES], words[:_WORDS]))
    return found


def _pieces(
    cut: Iterable[tuple[_Text, list[Place]]],
    shares: Float[np.ndarray, " some"],
) -> list[Piece]:
    """The pieces of texts that have a share, the largest in size first."""
    found = [
        Piece(text.of, start, end, text.text[start:end], float(share))
        for text, places in cut
        for (start, end), share in zip(
            places, _summed(places, text.characters, shares[text.tokens]), strict=True
        )
        if share
    ]
    return sorted(found, key=lambda piece: -abs(piece.share))


def _summed(
    places: Sequence[Place],
    characters: Int[np.ndarray, "tokens 2"],
    shares: Float[np.ndarray, " tokens"],
) -> Float[np.ndarray, " places"]:
    """The sum over each place's tokens; one that several places share is split."""
    starts, ends = np.array(places, int).reshape(-1, 2).T
    first = np.searchsorted(ends, characters[:, 0], "right")
    last = np.searchsorted(starts, characters[:, 1], "left")
    sums = np.zeros(len(places))
    for a, b, share in zip(first, last, shares, strict=True):
        sums[a:b] += share / max(b - a, 1)
    return sums


def _texts(tokenizer: Tokenizer, example: Example, row: Encoded) -> Iterator[_Text]:
    """What was sent of the prompt, by name, and last the response."""
    prompt = tokenizer.prompt(example)
    _, spans = tokenizer.encode_with_offsets(prompt.text, prompt.control)
    added, count = len(row.prompt_ids) - len(spans), len(row.prompt_ids)

    def one(of: str, text: str, tokens: np.ndarray, characters: np.ndarray) -> _Text:
        cut = [(each.start, each.end) for each in sentences(text)]
        return _Text(of, text, tokens, characters, cut, whole_words(text))

    for name, text, (start, end) in _sent(example, prompt):
        at = np.flatnonzero((spans[:, 0] < end) & (spans[:, 1] > start))
        inside = spans[at].clip(start, end) - start
        yield one(
            name, text, added + at, _original(text, prompt.text[start:end], inside)
        )
    there = np.arange(len(row.offsets))
    yield one("response", example.response, count + there, row.offsets)


def _sent(example: Example, prompt: Prompt) -> Iterator[tuple[str, str, Place]]:
    """Texts of the prompt as they were sent, and where the prompt has them."""
    if example.turns:
        for number, (turn, at) in enumerate(
            zip(example.turns, prompt.document, strict=True)
        ):
            if at != (0, 0):
                yield f"messages[{number}]", turn.content, at
    elif example.prompt is not None:
        yield "prompt", example.prompt, prompt.user
    else:
        yield "context", example.context or "", prompt.document[0]
        yield "question", example.question or "", prompt.question


def _original(
    text: str, written: str, spans: Int[np.ndarray, "tokens 2"]
) -> Int[np.ndarray, "tokens 2"]:
    """Characters of a text from those of what a template made of it.

    >>> _original(' "a" ', r'\\"a\\"', np.array([[0, 1], [1, 3], [3, 5]])).tolist()
    [[1, 2], [1, 3], [3, 4]]
    """
    if written in text:  # it may have been trimmed
        return spans + text.index(written)
    ends = np.cumsum([len(spelled(letter)) for letter in text])
    shift = spelled(text).index(written)
    first = np.searchsorted(ends, spans[:, 0] + shift, "right")
    return np.stack([first, np.searchsorted(ends, spans[:, 1] + shift) + 1], 1)


def _inside(
    row: Encoded, places: Sequence[Place]
) -> Float[np.ndarray, "spans response"]:
    """1 for tokens of the answer that have a character of each span, else 0."""
    starts, ends = np.array(places, int).reshape(-1, 2, 1).swapaxes(0, 1)
    first, last = row.offsets.T
    return ((first < ends) & (last > starts) & (first < last)).astype(np.float32)


def _prompt_pieces(tokenizer: Tokenizer, example: Example, row: Encoded) -> list[str]:
    prompt = tokenizer.prompt(example)
    ids, spans = tokenizer.encode_with_offsets(prompt.text, prompt.control)
    added = row.prompt_ids[: len(row.prompt_ids) - len(ids)]  # a BOS, or nothing
    return [*map(tokenizer.decode, added[:, None]), *pieces(prompt.text, spans)]


def _not_finite(rules: str) -> str:
    return (
        f"relevance by {rules!r} holds numbers that are not finite; look for NaN in "
        "the model's weights, or take other rules"
    )


def _unit_starts(texts: list[str]) -> Int[np.ndarray, " units"]:
    return np.array([at for at, text in enumerate(texts) if text or not at], int)


def _strongest(
    values: Float[np.ndarray, "rows columns"],
    starts: Int[np.ndarray, " units"],
    axis: int,
) -> Float[np.ndarray, "some others"]:
    """Of each run of rows or columns the value that is furthest from 0."""
    high = np.maximum.reduceat(values, starts, axis)
    low = np.minimum.reduceat(values, starts, axis)
    return np.where(high >= -low, high, low)
