"""Relevance read beside other features, batched, stored."""

import jax
import numpy as np
import pytest

import jaxhal
from jaxhal import lrp
from jaxhal.features.relevance import resample
from jaxhal.models import kernels
from tiny_lm import answers, read_into, tiny_lm

READS = {
    "response": lrp.ResponseRelevance(),
    "prompt": lrp.PromptRelevance(bins=12),
    "map": lrp.RelevanceMap(response_bins=6, prompt_bins=4),
}
OTHER = {"cp": lrp.ResponseRelevance(rules="cp_lrp", seed="logprob")}


@pytest.fixture(scope="module")
def lm():
    return tiny_lm()


@pytest.fixture(scope="module")
def batch(lm):
    return lm.encode(answers(3))


def test_features_are_those_of_relevance(lm, batch):
    wanted = READS | OTHER | {"logprob": jaxhal.TokenLogprob()}
    read = jaxhal.read(lm, batch, wanted)
    assert list(read) == list(wanted)
    means = jaxhal.relevance_means(lm, batch)
    np.testing.assert_allclose(read["response"], means.response, atol=1e-6)
    valid = batch.valid[:, : batch.prompt_length]
    want = [resample(m, 12, v) for m, v in zip(means.prompt, valid, strict=True)]
    np.testing.assert_allclose(read["prompt"], want, atol=1e-6)
    want = jaxhal.relevance_resampled(lm, batch, (6, 4))
    np.testing.assert_allclose(read["map"], want, atol=1e-6)
    other = jaxhal.relevance_means(lm, batch, "cp_lrp", seed="logprob")
    np.testing.assert_allclose(read["cp"], other.response, atol=1e-6)
    alone = jaxhal.read(lm, batch, {"logprob": jaxhal.TokenLogprob()})["logprob"]
    np.testing.assert_array_equal(read["logprob"], alone)


def test_rows_that_do_not_fit_together_come_one_by_one(lm, batch, monkeypatch):
    shapes = ((3, 2), (2, 3))  # pushed and pulled
    whole = jaxhal.relevance_means(lm, batch)
    bins = [jaxhal.relevance_resampled(lm, batch, shape) for shape in shapes]
    jax.clear_caches()
    # Attention runs again as well.
    monkeypatch.setattr(kernels, "CPU", kernels.CPU._replace(kept=0))
    apart = jaxhal.relevance_means(lm, batch)
    for shape, want in zip(shapes, bins, strict=True):
        ours = jaxhal.relevance_resampled(lm, batch, shape)
        np.testing.assert_allclose(ours, want, atol=1e-5)
    jax.clear_caches()
    for name in ("prompt", "response", "seed"):
        ours, theirs = getattr(apart, name), getattr(whole, name)
        np.testing.assert_allclose(ours, theirs, atol=1e-5)


def test_stored(lm, tmp_path):
    examples = answers(6)
    stored = read_into(tmp_path, lm, examples, READS, batch_size=4, progress=False)
    for number in (0, 5):
        one = lm.encode(examples[number : number + 1])
        read = jaxhal.read(lm, one, READS)
        count = int(one.response_mask.sum())
        for name, reducer in READS.items():
            want = np.take(np.asarray(read[name]), 0, reducer.batch_axis)
            want = want[:count] if stored.features[name].axes else want
            np.testing.assert_allclose(stored.features[name][number], want, atol=1e-5)
    assert stored.features["response"].axes == [0]
    assert stored.features["prompt"].axes == []


def test_shared_prompts_have_their_own_relevance(lm):
    rows = lm.encode(answers(4))
    together = jaxhal.read(lm, rows, READS, copies=2)
    apart = jaxhal.read(lm, rows, READS)
    for name in READS:
        np.testing.assert_allclose(together[name], apart[name], atol=1e-5)


def test_bad_input(lm, batch):
    with pytest.raises(ValueError, match="unknown rules 'lrp'"):
        lrp.ResponseRelevance(rules="lrp")
    with pytest.raises(ValueError, match="seed is 'prob'"):
        lrp.ResponseRelevance(seed="prob")
    with pytest.raises(ValueError, match="bins is 0"):
        jaxhal.read(lm, batch, {"prompt": lrp.PromptRelevance(bins=0)})
    with pytest.raises(ValueError, match="response"):
        jaxhal.prefill(lm, batch, 2, {"response": lrp.ResponseRelevance()})
