"""What is in a data set, and how far its answers can be told apart without a model."""

import collections
import re
from collections.abc import Sequence
from typing import Any

import numpy as np

from jaxhal.evaluation import auroc
from jaxhal.features.controls import novel_word_share, novel_words, response_length
from jaxhal.types import Example

_CONTROLS = (response_length, novel_words, novel_word_share)


def card(examples: Sequence[Example]) -> list[dict[str, Any]]:
    r"""Counts, lengths and control scores of each split, then of all.

    Lengths are quartiles in words, where a word is a run of ``\w``.  A control that
    ranks hallucinated answers above grounded ones says how much of the labels follows
    from length or wording alone.

    Args:
      examples: of one data set; without splits there is one row, ``"all"``.

    Returns:
      A dict for each split, among it ``sources``, the number of groups; ``share`` of
      hallucinated ones among the labelled; ``spans`` by kind; ``same_prompt``, rows
      whose prompt another row of the split has too; ``auroc`` of each control.
      ``None`` where a share or an AUROC is undefined.

    >>> from jaxhal.datasets import bundled
    >>> [row] = card(bundled())
    >>> row["rows"], row["sources"], row["share"], row["spans"]
    (104, 52, 0.5, {'conflict': 48, 'baseless': 30})
    """
    if not examples:
        raise ValueError("got no examples; a data set needs at least one")
    splits = list(dict.fromkeys(example.split for example in examples))
    if splits == [""]:
        return [_part("all", examples)]
    parts = [
        _part(split or "none", [each for each in examples if each.split == split])
        for split in splits
    ]
    return parts if len(parts) == 1 else [*parts, _part("all", examples)]


def _part(split: str, examples: Sequence[Example]) -> dict[str, Any]:
    labelled = [example for example in examples if example.label is not None]
    labels = [example.label for example in labelled]
    prompts = collections.Counter(example.source_text for example in examples)
    kinds = collections.Counter(
        span.label for example in examples for span in example.labels or ()
    )
    return {
        "split": split,
        "rows": len(examples),
        "sources": len({example.group for example in examples}),
        "hallucinated": labels.count(1),
        "grounded": labels.count(0),
        "unlabelled": len(examples) - len(labels),
        "share": labels.count(1) / len(labels) if labels else None,
        "spans": dict(kinds.most_common()),
        "same_prompt": sum(count for count in prompts.values() if count > 1),
        "prompt_words": _quartiles([_words(each.source_text) for each in examples]),
        "response_words": _quartiles([response_length(each) for each in examples]),
        "auroc": {
            control.__name__: auroc([control(each) for each in labelled], labels)
            if len(set(labels)) == 2
            else None
            for control in _CONTROLS
        },
    }


def _words(text: str) -> int:
    return len(re.findall(r"\w+", text))


def _quartiles(counts: Sequence[int]) -> list[float]:
    return np.percentile(counts, [25, 50, 75]).tolist()


def table(parts: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """A card as rows to print: a row a measure, a column a split.

    >>> table(card([Example("Paris.", prompt="Capital of France?")]))[0]
    {'split': 'rows', 'all': 1}
    """
    columns = {part["split"]: _column(part) for part in parts}
    measures = dict.fromkeys(name for column in columns.values() for name in column)
    return [
        {"split": name} | {split: each.get(name, 0) for split, each in columns.items()}
        for name in measures
    ]


def _column(part: dict[str, Any]) -> dict[str, Any]:
    names = ("rows", "sources", "hallucinated", "grounded", "unlabelled")
    return {
        **{name: part[name] for name in names},
        "share hallucinated": part["share"],
        "rows that share a prompt": part["same_prompt"],
        "words of a prompt, quartiles": _three(part["prompt_words"]),
        "words of a response, quartiles": _three(part["response_words"]),
        **{
            f"AUROC of {name.replace('_', ' ')}": value
            for name, value in part["auroc"].items()
        },
        **{f"spans: {kind}": count for kind, count in part["spans"].items()},
    }


def _three(quartiles: Sequence[float]) -> str:
    return " / ".join(f"{words:.0f}" for words in quartiles)
