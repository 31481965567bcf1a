"""Hallucinated characters to hallucinated tokens."""

from collections.abc import Sequence

import numpy as np
from jaxtyping import Bool, Int

from jaxhal.types import Label


def token_labels(
    offsets: Int[np.ndarray, "response 2"], labels: Sequence[Label] | None
) -> Bool[np.ndarray, " response"]:
    """Which response tokens share a character with a hallucinated span.

    A token without characters (the end of the sequence, padding) shares none.  Lookback
    Lens begins a span at the first token whose end is at or after its start, which can
    take in the token before it; this function does not.  Raises ValueError when
    ``labels`` is ``None``, that is, when nobody looked for spans.

    Args:
      offsets: the characters ``[start, end)`` of each token.
      labels: the spans of the same response; empty when it is grounded.

    >>> token_labels(np.array([[0, 3], [3, 9], [9, 10], [10, 10]]), [Label(4, 9)])
    array([False,  True, False, False])
    """
    if labels is None:
        raise ValueError("labels is None: the spans are unknown; leave the example out")
    start, end = offsets[:, :1], offsets[:, 1:]
    spans = np.array([(each.start, each.end) for each in labels], int).reshape(-1, 2)
    overlap = (start < spans[:, 1]) & (spans[:, 0] < end) & (start < end)
    return np.any(overlap, axis=1)
