"""Log probabilities that an engine gave of an answer, as features of its tokens."""

import math
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType

import jax.numpy as jnp
import numpy as np
from jaxtyping import Float

from jaxhal.features.base import Reducer
from jaxhal.features.uncertainty import TokenEntropy, TokenLogprob, token_entropy
from jaxhal.io.showing import quoted
from jaxhal.models.batching import Encoded
from jaxhal.models.tokenizer import Tokenizer
from jaxhal.types import Logprob

# How vLLM spells a token where it is asked for return_tokens_as_token_ids.
_BY_ID = "token_id:"
# By how much the probabilities of a whole vocabulary may miss 1.
_ROUNDED = 1e-3


def check_logprobs(
    logprobs: Sequence[Logprob], row: Encoded, tokenizer: Tokenizer, text: str
) -> None:
    """ValueError that says where, unless tokens are those of the response ``text``.

    Its last token may be missing where that has no text.  Part of a character, which an
    engine cannot spell, is known by its place.
    """
    for at, (one, number) in enumerate(zip(logprobs, row.response_ids, strict=False)):
        start, end = row.offsets[at].tolist()
        if not _same(one.token, int(number), text[start:end], tokenizer):
            raise ValueError(
                f"'logprobs' have {quoted(one.token)} for token {at} of the response, "
                f"where the reader's tokenizer makes {quoted(text[start:end])} "
                f"({number}) of the text; give the model that wrote it"
            )
    count, ends = len(row.response_ids), has_end(row)
    if not count - ends <= len(logprobs) <= count:
        raise ValueError(
            f"'logprobs' have {len(logprobs)} tokens, and the response has {count}; "
            "give those of the whole response and of nothing else"
        )


def _same(token: str, number: int, text: str, tokenizer: Tokenizer) -> bool:
    # The end of the sequence, which servers spell or leave empty, and models choose.
    ends = () if text else tokenizer.stop_ids
    if token.startswith(_BY_ID):
        return token in {f"{_BY_ID}{one}" for one in (number, *ends)}
    if not text:
        return token in {"", *(tokenizer.decode([one]) for one in (number, *ends))}
    # Whether a space belongs to a word, tokenizers and servers do not agree.
    return "\N{REPLACEMENT CHARACTER}" in token or token.strip() == text.strip()


def has_end(row: Encoded) -> bool:
    """Whether the last token of a response has no text."""
    start, end = row.offsets[-1].tolist()
    return start == end


def _given(
    logprobs: Sequence[Logprob], vocabulary: int
) -> Float[np.ndarray, " response"]:
    del vocabulary
    return np.array([one.logprob for one in logprobs], np.float32)


def _entropies(
    logprobs: Sequence[Logprob], vocabulary: int
) -> Float[np.ndarray, " response"]:
    """Of whole distributions; ValueError where one is a part of one."""
    for at, one in enumerate(logprobs):
        total = sum(map(math.exp, one.top))
        if len(one.top) != vocabulary or abs(total - 1) > _ROUNDED:
            raise ValueError(
                f"'logprobs' have {len(one.top)} of {vocabulary} tokens in place of "
                f"token {at}, of probability {total:.3f} together, and the entropy of "
                "a part is not that of all; ask for all of them (vLLM: max_logprobs "
                "and top_logprobs -1), or leave detectors of entropy out"
            )
    tops = np.array([one.top for one in logprobs], np.float32)
    return np.asarray(token_entropy(jnp.asarray(tops)))


#: What is made of log probabilities that were given, by the reducer that it equals.
OF_LOGPROBS: Mapping[Reducer, Callable[[Sequence[Logprob], int], np.ndarray]] = (
    MappingProxyType({TokenLogprob(): _given, TokenEntropy(): _entropies})
)
