"""How well marked tokens and characters match the annotated ones."""

from collections.abc import Collection, Sequence
from typing import Any

import numpy as np

from jaxhal.evaluation.metrics import f1, precision, ratio, recall
from jaxhal.evaluation.ranking import auroc


def token_metrics(
    token_scores: Sequence[Collection[Any]],
    token_labels: Sequence[Collection[Any]],
    threshold: float,
) -> dict[str, float]:
    """Precision, recall, F1 and AUROC over the tokens of all responses, in [0, 1].

    All tokens count the same, whichever response they are from (micro average).

    Args:
      token_scores: per response, one finite number per token.
      token_labels: per response, 1 for each token of an annotated span, 0 otherwise.
      threshold: a token with a score at or above it is flagged.

    >>> token_metrics([[0.9, 0.1], [0.6, 0.2, 0.3]], [[1, 0], [0, 0, 1]], 0.5)
    {'precision': 0.5, 'recall': 0.5, 'f1': 0.5, 'auroc': 0.8333333333333334}
    """
    _check_pairs(token_scores, token_labels, "token_scores", "token_labels")
    for row, (score, label) in enumerate(zip(token_scores, token_labels, strict=True)):
        if len(score) != len(label):
            raise ValueError(
                f"response {row} has {len(score)} token scores and {len(label)} token "
                "labels; give one each per token"
            )
    scores = np.concatenate([np.asarray(each, float) for each in token_scores])
    labels = np.concatenate([np.asarray(each) for each in token_labels])
    found = {m.__name__: m(scores, labels, threshold) for m in (precision, recall, f1)}
    return found | {"auroc": auroc(scores, labels)}


def span_f1(
    predicted: Sequence[Collection[Sequence[Any]]],
    annotated: Sequence[Collection[Sequence[Any]]],
) -> dict[str, float]:
    r"""Precision, recall and F1 of the marked characters of all responses, in [0, 1].

    With the characters :math:`P` and :math:`A` in predicted and in annotated spans,
    precision is :math:`|P \cap A| / |P|` and recall :math:`|P \cap A| / |A|`, counted
    over all responses together (micro average).  A character in several spans counts
    once.  A ratio of nothing is 0.

    Args:
      predicted: per response, spans that begin with ``start, end``, end exclusive.
      annotated: per response, the same, such as the ``labels`` of an example.

    Raises:
      ValueError: when the numbers of responses differ, or a span is empty or begins
        before the response.

    >>> span_f1([[(0, 10)], []], [[(5, 10), (5, 9)], [(0, 5)]])
    {'precision': 0.5, 'recall': 0.5, 'f1': 0.5}

    References:
      Niu et al., "RAGTruth: A Hallucination Corpus for Developing Trustworthy
      Retrieval-Augmented Language Models", 2024, span-level evaluation.
    """
    _check_pairs(predicted, annotated, "predicted", "annotated")
    both = marked = true = 0
    for row, (some, others) in enumerate(zip(predicted, annotated, strict=True)):
        found = _characters(some, f"predicted[{row}]")
        known = _characters(others, f"annotated[{row}]")
        both += len(found & known)
        marked += len(found)
        true += len(known)
    return {
        "precision": ratio(both, marked),
        "recall": ratio(both, true),
        "f1": ratio(2 * both, marked + true),
    }


def _check_pairs(some: Sequence[Any], others: Sequence[Any], name: str, other: str):
    if len(some) != len(others):
        raise ValueError(
            f"{name} is of {len(some)} responses and {other} of {len(others)}; give "
            "both for the same responses"
        )
    if not len(some):
        raise ValueError(f"{name} and {other} are empty; give at least one response")


def _characters(spans: Collection[Sequence[Any]], where: str) -> set[int]:
    for start, end, *_ in spans:
        if not 0 <= start < end:
            raise ValueError(
                f"{where} holds the span [{start}, {end}); it needs 0 <= start < end"
            )
    return {at for start, end, *_ in spans for at in range(start, end)}
