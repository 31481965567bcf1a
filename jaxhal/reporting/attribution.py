"""What each token of an answer rests on, in text that a reader can point at."""

import itertools
from dataclasses import dataclass
from typing import Any

import numpy as np
from jaxtyping import Float, Int

from jaxhal.features.relevance import normalized
from jaxhal.lrp.passes import relevance
from jaxhal.lrp.rules import RuleSet
from jaxhal.models.batching import Encoded, collate
from jaxhal.models.lm import LM
from jaxhal.models.tokenizer import Tokenizer
from jaxhal.types import Example


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
            raise ValueError(
                f"relevance by {self.rules!r} holds numbers that are not finite; look "
                "for NaN in the model's weights, or take other rules"
            )


def trace(lm: LM, example: Example, row: Encoded, rules: RuleSet) -> Sources:
    """What every token of an answer rests on; ``row`` is the answer as tokens.

    Raises:
      ValueError: when relevance is not finite.
    """
    tokenizer = lm.require_tokenizer()
    batch = collate([row], tokenizer.pad_id)
    found = relevance(lm, batch, rules)
    matrix = np.asarray(normalized(found.matrix[0], "max"))
    kept = np.flatnonzero(row.offsets[:, 0] < row.offsets[:, 1])
    start = batch.prompt_length
    prompt = np.arange(start - len(row.prompt_ids), start)
    columns = np.concatenate([prompt, start + kept])
    texts = _prompt_pieces(tokenizer, example, row)
    return Sources(texts, matrix[np.ix_(kept, columns)], rules.name)


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


def _prompt_pieces(tokenizer: Tokenizer, example: Example, row: Encoded) -> list[str]:
    prompt = tokenizer.prompt(example)
    ids, spans = tokenizer.encode_with_offsets(prompt.text, prompt.control)
    added = row.prompt_ids[: len(row.prompt_ids) - len(ids)]  # a BOS, or nothing
    return [*map(tokenizer.decode, added[:, None]), *pieces(prompt.text, spans)]


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
