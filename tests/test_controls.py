import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import oracles
from jaxhal.features.controls import (
    max_prompt_score,
    novel_word_share,
    novel_words,
    response_length,
)
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


def test_max_prompt_score():
    attention = oracles.causal_attention(0, 2, 3, 9)
    best = oracles.max_prompt(attention, 4)
    want = 1 - best.mean(-1)
    got = max_prompt_score(jnp.asarray(best), jnp.ones(5, bool))
    np.testing.assert_allclose(got, want, rtol=1e-6)
    padded = np.pad(best, ((0, 0), (0, 0), (0, 3)), constant_values=np.nan)
    valid = jnp.arange(8) < 5
    got = jax.jit(max_prompt_score)(jnp.asarray(padded), valid)
    np.testing.assert_allclose(got, want, rtol=1e-6)
    empty = max_prompt_score(jnp.asarray(best), jnp.zeros(5, bool))
    np.testing.assert_array_equal(empty, np.zeros((2, 3)))
    single = max_prompt_score(jnp.asarray(best[0, 0]), jnp.ones(5, bool))
    np.testing.assert_allclose(single, want[0, 0], rtol=1e-6)
