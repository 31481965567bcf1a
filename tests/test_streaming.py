"""Scores while a response is written are those of what there is of it."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from test_saving import fitted

import jaxhal
from jaxhal import detectors
from jaxhal.classifiers.linear import Linear
from jaxhal.detectors import build
from jaxhal.generation.decoding import with_text
from jaxhal.models.batching import collate
from jaxhal.scoring.detection import judge
from jaxhal.scoring.fitting import untrained
from jaxhal.types import Example
from tiny_lm import tiny_lm

KEY = jax.random.key(7)
PROMPT = Example("-", context="A box of balls.", question="What is inside?")
NAMES = ["token_entropy", "predictive_probability", "lookback_ratio"]


@pytest.fixture(scope="module")
def lm():
    return tiny_lm()


@pytest.fixture(scope="module")
def probe(lm):
    width = lm.config.hidden_size
    vector = jax.random.normal(jax.random.key(1), (width,))
    one = Linear(vector, jnp.zeros(()), jnp.zeros(width), jnp.ones(width))
    return fitted({"token_probe": {"layer": 1}}, one)


def test_scores_are_those_of_a_reading_of_all_that_came(lm, probe):
    """Of attention, hidden states and logits."""
    named = [*NAMES, probe]
    chosen = [*(untrained(one) for one in detectors.get(NAMES)), probe]
    eos = lm.tokenizer.eos_id
    said = list(jaxhal.stream_scores(lm, PROMPT, named, max_new_tokens=9, key=KEY))
    row = lm.tokenizer.encode_example(PROMPT)
    ids = np.array([one.token.id for one in said])
    for count in range(1, len(said) + 1):
        offsets = np.stack([np.arange(count), np.arange(count) + 1], 1)
        whole = dataclasses.replace(row, response_ids=ids[:count], offsets=offsets)
        batch = collate([whole], lm.tokenizer.pad_id, response_length=16)
        features = jaxhal.read(
            lm, batch, detectors.features_of([d.detector for d in chosen])
        )
        valid = batch.response_mask
        text = with_text(batch.tokens[:, batch.prompt_length :], valid, (eos,))
        features |= {"valid": valid, "text": text, "marked": np.zeros_like(valid)}
        want, found = judge(chosen, features), said[count - 1]
        assert set(found.scores) == set(want.scores) == {*NAMES, "token_probe"}
        for name, score in found.scores.items():
            assert score == pytest.approx(float(want.scores[name][0]), abs=1e-4), name
        assert set(found.tokens) == set(want.tokens)
        for name, score in found.tokens.items():
            last = float(want.tokens[name][0, count - 1])
            assert score == pytest.approx(last, abs=1e-4), name


def test_tokens_are_those_of_a_stream(lm):
    options: dict = dict(max_new_tokens=12, key=KEY, stop=["a"])
    plain = list(jaxhal.stream(lm, PROMPT, **options))
    said = list(jaxhal.stream_scores(lm, PROMPT, ["token_entropy"], **options))
    assert [(t.id, t.text) for t in plain] == [(s.token.id, s.token.text) for s in said]


@pytest.mark.parametrize(
    ("names", "message"),
    [
        (["novel_words"], "'novel_words' reads more than the rows of new tokens"),
        (["context_gain"], "'context_gain' reads more than the rows"),
        (["mtop_div"], "needs all response rows at once"),
        (["linear_probe"], "'linear_probe' must be fitted"),
        ([], "detectors is empty"),
    ],
)
def test_what_cannot_be_scored_as_it_comes(lm, names, message):
    with pytest.raises(ValueError, match=message):
        jaxhal.stream_scores(lm, PROMPT, names, key=KEY)
    assert build("token_entropy").reads_rows
