"""What a method has to beat: numbers that need no model, or next to none.

Higher means more likely hallucinated in all of them.
"""

import re

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from jaxhal.types import Example


def _words(text: str) -> list[str]:
    return re.findall(r"\w+", text.lower())


def response_length(example: Example) -> int:
    r"""Number of words of the response, where a word is a run of ``\w``.

    Example:
      >>> response_length(Example("Paris, of course.", prompt="Capital of France?"))
      3
    """
    return len(_words(example.response))


def novel_words(example: Example) -> int:
    """Number of response words that its source text does not hold, whatever the case.

    Every occurrence counts.

    Example:
      >>> novel_words(Example("Paris, of course.", prompt="Capital of France?"))
      2
    """
    source = set(_words(example.source_text))
    return sum(word not in source for word in _words(example.response))


def novel_word_share(example: Example) -> float:
    """Share of response words that its source text does not hold, in [0, 1].

    0.0 for a response without words.

    Example:
      >>> novel_word_share(Example("Of Paris.", prompt="Capital of France?"))
      0.5
    """
    return novel_words(example) / max(response_length(example), 1)


def max_prompt_score(
    max_prompt: Float[Array, "*heads response"], valid: Bool[Array, " response"]
) -> Float[Array, "*heads"]:
    r"""One minus the mean attention to the best prompt token, per head, in [0, 1].

    .. math:: 1 - \frac{1}{R} \sum_{i \in R} \max_{p \in P} a_{ip}

    It bounds :class:`~jaxhal.features.topology.MTopDiv` from above and often equals
    it; 0.0 for an empty response, as there.

    Args:
      max_prompt: ``[*heads response]`` of
        :class:`~jaxhal.features.topology.MaxPromptAttention` for one sample.
      valid: ``[response]``, False on padding.

    Example:
      >>> max_prompt_score(jnp.array([[0.5, 0.25]]), jnp.array([True, True]))
      Array([0.625], dtype=float32)
    """
    loose = jnp.where(valid, 1.0 - max_prompt, 0.0)
    return loose.sum(-1) / jnp.maximum(valid.sum(), 1)
