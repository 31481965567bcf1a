import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import oracles
from jaxhal.detectors import max_prompt_attention
from jaxhal.features.controls import novel_word_share, novel_words, response_length
from jaxhal.types import Example

text = st.text(alphabet="aA bB'-.1_éÉ\n", min_size=1, max_size=40).filter(str.strip)


@settings(max_examples=200, deadline=None, derandomize=True)
@given(response=text, prompt=text)
def test_words_equal_loops(response, prompt):
    example = Example(response, prompt=prompt)
    words, source = oracles.words(response), oracles.words(prompt)
    novel = [word for word in words if word not in source]
    assert response_length(example) == len(words)
    assert novel_words(example) == len(novel)
    assert novel_word_share(example) == (len(novel) / len(words) if words else 0.0)


def test_source_is_context_and_question():
    example = Example(
        "Paris has two MILLION people, two!",
        context="Paris is a city of a million.",
        question="How many people?",
    )
    assert response_length(example) == 6
    assert novel_words(example) == 3  # has, two, two
    assert novel_word_share(example) == pytest.approx(0.5)


def test_a_response_without_words():
    example = Example("...", prompt="Well?")
    assert (response_length(example), novel_words(example)) == (0, 0)
    assert novel_word_share(example) == 0.0


def test_the_largest_prompt_attention_is_averaged_over_real_tokens():
    attention = oracles.causal_attention(0, 2, 3, 9)
    best = oracles.max_prompt(attention, 4)
    padded = np.pad(best, ((0, 0), (0, 0), (0, 3)), constant_values=np.nan)
    valid = np.stack([np.arange(8) < 5, np.zeros(8, bool)])
    largest = jnp.asarray(np.stack([padded, padded], 1))  # layer batch heads response
    score = max_prompt_attention().inputs
    found = jax.jit(score)({"max_prompt": largest, "valid": valid})
    np.testing.assert_allclose(found, [1 - best.mean(), 0.0], rtol=1e-6)
