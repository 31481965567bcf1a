"""Log probabilities as OpenAI-compatible servers write them beside an answer."""

import contextlib
from typing import Any

from jaxhal.io.showing import quoted
from jaxhal.types import Logprob

# What rounding may add to the log probability of a certain token.
_ROUNDED = 1e-3


def logprobs_of(said: Any) -> tuple[Logprob, ...]:
    """Tokens of an answer with their log probabilities, in nats.

    Args:
      said: ``logprobs`` of a choice, as JSON has it: of a chat completion, ``content``
        with ``token``, ``logprob`` and ``top_logprobs`` of each token; of a completion,
        ``tokens``, ``token_logprobs`` and ``top_logprobs``.

    Raises:
      ValueError: on another form, and on a token without a log probability, as the
        first of a prompt is.

    Example:
      >>> logprobs_of({"content": [{"token": "So", "logprob": -0.5}]})
      (Logprob(token='So', logprob=-0.5, top=()),)
      >>> logprobs_of({"tokens": ["So"], "token_logprobs": [-0.5]})
      (Logprob(token='So', logprob=-0.5, top=()),)
    """
    try:
        if said.get("content") is not None:
            tokens = [
                (
                    one["token"],
                    one["logprob"],
                    [top["logprob"] for top in one.get("top_logprobs") or ()],
                )
                for one in said["content"]
            ]
        else:
            words, numbers = said["tokens"], said["token_logprobs"]
            tops = said.get("top_logprobs") or [None] * len(words)
            each = zip(words, numbers, tops, strict=True)
            tokens = [
                (word, number, (top or {}).values()) for word, number, top in each
            ]
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise ValueError(
            f"'logprobs' is no choice's logprobs ({type(error).__name__}: {error}); "
            "give {content: [{token, logprob, top_logprobs}]} of a chat completion, or "
            "{tokens, token_logprobs, top_logprobs} of a completion"
        ) from None
    return tuple(
        Logprob(
            _token(at, token),
            _number(at, number),
            tuple(_number(at, one) for one in top),
        )
        for at, (token, number, top) in enumerate(tokens)
    )


def _token(at: int, token: Any) -> str:
    if not isinstance(token, str):
        raise ValueError(f"token {at} of 'logprobs' is {quoted(token)}; use text")
    return token


def _number(at: int, number: Any) -> float:
    known = isinstance(number, int | float) and not isinstance(number, bool)
    with contextlib.suppress(OverflowError):  # a whole number of hundreds of digits
        if known and float(number) <= _ROUNDED:  # which NaN is not
            return min(float(number), 0.0)
    raise ValueError(
        f"token {at} of 'logprobs' has log probability {quoted(number)}; give a number "
        "of at most 0, of the answer's own tokens (echo=false)"
    )
