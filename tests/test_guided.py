"""Guided decoding: winners, what they go on from, and what may guide."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxhal
from jaxhal import detectors
from jaxhal.generation import GREEDY, Sampling, decoding
from jaxhal.scoring import guided
from jaxhal.scoring.fitting import Fitted, untrained
from jaxhal.scoring.guided import guide
from tiny_lm import tiny_lm

KEY = jax.random.key(2)
PROMPTS = ["Which of them?", "Say something longer about boxes, please.", "No"]


@pytest.fixture(scope="module")
def lm():
    return tiny_lm()


def by(name: str, reducer, score) -> Fitted:
    """A detector that scores a chunk by a mean over its tokens."""
    return untrained(
        detectors.Detector(
            *(name, "for tests", "none", "none"),
            features=((name, reducer),),
            inputs=lambda f: score(f[name], f["valid"]),
        )
    )


def mean(values, valid):
    return jnp.where(valid, values, 0).sum(-1) / jnp.maximum(valid.sum(-1), 1)


UNSURE = by("entropy", jaxhal.TokenEntropy(), mean)
SURE = by("entropy", jaxhal.TokenEntropy(), lambda v, m: -mean(v, m))
# Looks at each token's own row, which is read one step later.
INSIDE = by(
    "states",
    jaxhal.HiddenStates(layers=(1,)),
    lambda v, m: mean(v[0, ..., 0], m),
)


@pytest.mark.parametrize("detector", [UNSURE, INSIDE])
def test_winners_are_the_least_suspicious_and_make_the_text(lm, detector):
    found = guide(
        lm, PROMPTS, detector, candidates=4, chunk=5, max_new_tokens=17, key=KEY
    )
    for one in found:
        assert len(one.response.tokens) == 17
        assert len(one.chunks) == 4  # of 5, 5, 5 and 2 tokens
        for chunk in one.chunks:
            assert chunk.chosen == int(np.argmin(chunk.scores))
            assert len(set(chunk.texts)) > 1
        written = "".join(chunk.texts[chunk.chosen] for chunk in one.chunks)
        # A character that two chunks share is whole only in the text.
        whole = one.response.text
        assert [c for c in written if c.isascii()] == [c for c in whole if c.isascii()]


def test_a_choice_between_ends_is_shown(lm):
    """A response of one token is chosen too."""
    (one,) = guide(lm, PROMPTS[:1], SURE, candidates=3, max_new_tokens=1, key=KEY)
    (chunk,) = one.chunks
    assert chunk.chosen == int(np.argmin(chunk.scores)) and len(chunk.texts) == 3
    assert len(one.response.tokens) == 1


def test_an_end_is_no_text():
    """It is judged only where there is nothing else."""
    tokens = jnp.array([[5, 2, 0], [2, 0, 0], [5, 6, 7]])
    real = jnp.array([[1, 1, 0], [1, 0, 0], [1, 1, 1]], bool)
    found = decoding.with_text(tokens, real, (1, 2))
    assert found.tolist() == [[True, False, False], [True, False, False], [True] * 3]


def test_scores_are_those_of_the_finished_text(lm):
    """A chunk's score is that of its tokens in a reading of the whole response."""
    prompt = PROMPTS[1]
    (one,) = guide(
        lm, [prompt], UNSURE, candidates=3, chunk=4, max_new_tokens=12, key=KEY
    )
    tokens = one.response.tokens
    row = lm.tokenizer.encode_prompt(jaxhal.Example("-", prompt=prompt))
    whole = np.concatenate([row.prompt_ids, tokens])
    logits = np.asarray(lm.forward(whole[None]))[0, len(row.prompt_ids) - 1 : -1]
    logp = jax.nn.log_softmax(logits)
    entropy = np.asarray(-(jnp.exp(logp) * logp).sum(-1)).reshape(3, 4).mean(1)
    won = [float(chunk.scores[chunk.chosen]) for chunk in one.chunks]
    np.testing.assert_allclose(won, entropy, atol=1e-4)
    picked = np.asarray(logp)[np.arange(12), tokens]
    np.testing.assert_allclose(one.response.logprobs, picked, atol=1e-4)


def test_guiding_does_what_it_is_for(lm):
    """Entropy over a text falls or rises with the guide."""

    def entropy(detector):
        options = dict(candidates=6, chunk=3, max_new_tokens=24, key=KEY)
        found = guide(lm, PROMPTS, detector, **options)
        return np.mean([abs(c.scores[c.chosen]) for one in found for c in one.chunks])

    assert entropy(UNSURE) < entropy(SURE) - 0.05


def test_a_response_does_not_depend_on_its_batch(lm):
    options = dict(candidates=3, chunk=4, max_new_tokens=10, key=KEY)
    together = guide(lm, PROMPTS, UNSURE, batch_size=3, **options)
    apart = guide(lm, PROMPTS, UNSURE, batch_size=2, **options)
    for ours, theirs in zip(apart, together, strict=True):
        assert ours.response.tokens.tolist() == theirs.response.tokens.tolist()
        for mine, other in zip(ours.chunks, theirs.chunks, strict=True):
            assert mine.texts == other.texts
            np.testing.assert_allclose(mine.scores, other.scores, atol=1e-4)


def test_a_winner_that_ends_ends_the_response(lm, monkeypatch):
    eos = lm.tokenizer.eos_id
    head = lm.params["lm_head"]["kernel"].get_value()
    likely = head.at[:, eos].set(head[:, eos] + head.mean(1) * 60)
    ends = dataclasses.replace(
        lm, params=jax.tree.map(lambda x: likely if x is head else x, lm.params)
    )
    found = guide(
        ends, PROMPTS, UNSURE, candidates=3, chunk=4, max_new_tokens=60, key=KEY
    )
    ended = [one.response for one in found if one.response.stopped == "eos"]
    assert ended
    for response in ended:
        assert response.tokens[-1] == eos and eos not in response.tokens[:-1]
    for one in found:
        assert len(one.chunks) == -(-len(one.response.tokens) // 4)


@pytest.mark.parametrize(
    "wrong, message",
    [
        (dict(candidates=1), "candidates is 1; give at least 2"),
        (dict(chunk=0), "chunk is 0; give at least 1"),
        (dict(batch_size=0), "batch_size is 0; give at least 1"),
        (dict(max_new_tokens=0), "max_new_tokens is 0; give at least 1"),
        (dict(sampling=GREEDY), "greedy sampling draws the same candidate"),
        (dict(max_new_tokens=600), "over the model's context"),
    ],
)
def test_wrong_settings(lm, wrong, message):
    options = dict(candidates=2, chunk=2, max_new_tokens=4, key=KEY) | wrong
    with pytest.raises(ValueError, match=message):
        guide(lm, ["Hi"], UNSURE, **options)


@pytest.mark.parametrize(
    "name, message",
    [
        ("novel_words", "'novel_words' reads more than the rows of new tokens"),
        ("context_gain", "'context_gain' reads more than the rows of new tokens"),
        ("mtop_div", "needs all response rows at once"),
        ("semantic_entropy", "'semantic_entropy' reads more than the rows"),
    ],
)
def test_what_cannot_guide(lm, name, message):
    with pytest.raises(ValueError, match=message):
        guide(lm, ["Hi"], untrained(*detectors.get([name])), key=KEY)


def test_a_guide_is_given_as_to_score(lm):
    options: dict = dict(candidates=2, chunk=2, max_new_tokens=4, key=KEY)
    (want,) = guide(lm, ["Hi"], untrained(*detectors.get(["token_entropy"])), **options)
    for detector in ("token_entropy", detectors.token_entropy()):
        (found,) = guide(lm, ["Hi"], detector, **options)
        assert found.response.tokens.tolist() == want.response.tokens.tolist()
    with pytest.raises(ValueError, match="'toha' must be fitted"):
        guide(lm, ["Hi"], "toha", **options)


def test_a_folder_of_several_cannot_guide(lm, monkeypatch):
    pair = [untrained(one) for one in detectors.get(["token_entropy", "mtop_div"])]
    monkeypatch.setattr(guided, "resolve_for", lambda lm, given: pair)
    with pytest.raises(ValueError, match="mine holds token_entropy, mtop_div; give on"):
        guide(lm, ["Hi"], "mine", key=KEY)


def test_a_penalty_follows_the_winner(lm):
    heavy = Sampling(repetition_penalty=1e6, temperature=0.7)
    options = dict(candidates=3, chunk=4, max_new_tokens=16, key=KEY)
    (one,) = guide(lm, ["Say"], UNSURE, sampling=heavy, **options)
    tokens = one.response.tokens.tolist()
    assert len(set(tokens)) == len(tokens)
