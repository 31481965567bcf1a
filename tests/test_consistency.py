import json
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import sampling_oracles as oracles
from jaxhal.datasets import data_root
from jaxhal.evaluation import auprc
from jaxhal.features.consistency import (
    bertscore,
    passage_score,
    selfcheck_bertscore,
    selfcheck_ngram,
    selfcheck_nli,
    selfcheck_prompt,
    tokenize,
)

quick = settings(max_examples=25, deadline=None)

# The example of SelfCheckGPT's README, and what it prints there.
WEINER = "Michael Alan Weiner (born {}) is {} radio host."
SENTENCES = [
    WEINER.format("March 31, 1942", "an American"),
    "He is the host of The Savage Nation.",
]
SAMPLES = [
    f"{SENTENCES[0]} He is the host of The Savage Country.",
    WEINER.format("January 13, 1960", "a Canadian")
    + " He works at The New York Times.",
    f"{SENTENCES[0]} He obtained his PhD from MIT.",
]
HUMAN = {"accurate": 0.0, "minor_inaccurate": 0.5, "major_inaccurate": 1.0}


def test_golden_unigrams():
    got = selfcheck_ngram(SENTENCES, SAMPLES)
    mean, worst = [one.mean() for one in got], [one.max() for one in got]
    np.testing.assert_allclose(mean, [3.184312, 3.279775], atol=1e-5)
    np.testing.assert_allclose(worst, [3.476099, 4.574711], atol=1e-5)
    assert np.concatenate(got).mean() == pytest.approx(3.218679, abs=1e-5)


@pytest.fixture(scope="module")
def wikibio():
    """119 passages by GPT-3 with labels a sentence, 20 samples and NLI scores."""
    try:
        path = data_root() / "selfcheck_wikibio119_nli.json"
    except FileNotFoundError as error:
        pytest.skip(str(error))
    if not path.is_file():
        pytest.skip(f"{path}: no such file")
    return json.loads(path.read_text("utf-8"))


def figures(passages, scores):
    """AUC-PR of wrong and of right sentences, Pearson of passages, in percent."""
    human = [[HUMAN[label] for label in each["annotations"]] for each in passages]
    score, truth = np.concatenate(scores), np.concatenate(human)
    passage = [float(passage_score(each)) for each in scores]
    correlation = np.corrcoef(passage, [np.mean(each) for each in human])[0, 1]
    wrong = auprc(score, (truth > 0).astype(int))
    right = auprc(-score, (truth == 0).astype(int))
    return [100 * wrong, 100 * right, 100 * correlation]


def test_golden_wikibio(wikibio):
    assert len(wikibio) == 119 and sum(len(x["sentences"]) for x in wikibio) == 959
    unigram = [
        [
            one.max()
            for one in selfcheck_ngram(each["sentences"], each["gpt3_text_samples"])
        ]
        for each in wikibio
    ]
    np.testing.assert_allclose(figures(wikibio, unigram), [86.02, 55.04, 64.99], 1e-4)
    nli = [each["nli_scores"] for each in wikibio]
    np.testing.assert_allclose(figures(wikibio, nli), [91.75, 64.45, 70.80], 1e-4)


text = st.text("ab .\n", max_size=12)
texts = st.lists(text.filter(str.strip), min_size=1, max_size=4)


@quick
@given(texts, texts, st.integers(1, 3))
def test_ngrams_equal_slices(sentences, samples, n):
    def grams(text):
        tokens = ["<s>"] * (n - 1) + tokenize(text)
        return [" ".join(tokens[i : i + n]) for i in range(len(tokens) - n + 1)]

    seen = [gram for text in [*sentences, *samples] for gram in grams(text)]
    got = selfcheck_ngram(sentences, samples, n)
    for found, text in zip(got, sentences, strict=True):
        want = [-math.log(seen.count(gram) / len(seen)) for gram in grams(text)]
        np.testing.assert_allclose(found, want, atol=1e-12)
        assert found.max() <= np.log(len(seen)) + 1e-12


def test_a_word_of_no_sample_is_the_most_surprising():
    scores = selfcheck_ngram(["Zürich.", "Bern."], ["Bern.", "bern !"])
    np.testing.assert_allclose([one.max() for one in scores], np.log([8, 8 / 3]))
    # Bigrams: the first word has no word before it, so it differs from a later one.
    (pair,) = selfcheck_ngram(["a b"], ["b a b", ""], n=2)
    np.testing.assert_allclose(pair, np.log([5, 2.5]))


def test_nli():
    rng = np.random.default_rng(0)
    probabilities = rng.dirichlet([1, 1, 1], size=(4, 7)).astype(np.float32)
    probabilities[2, 3] = [0.0, 1.0, 0.0]  # neither for nor against
    valid = rng.random((4, 7)) < 0.7
    want = []
    for rows, there in zip(probabilities, valid, strict=True):
        ratios = [c / (c + e) if c + e else 0.5 for c, _, e in rows[there]]
        want.append(np.mean(ratios))
    garbage = np.where(valid[..., None], probabilities, np.nan)
    one = [float(selfcheck_nli(*each)) for each in zip(garbage, valid, strict=True)]
    np.testing.assert_allclose(one, want, rtol=1e-6)
    together = jax.jit(jax.vmap(selfcheck_nli))(garbage, valid)
    np.testing.assert_allclose(together, want, rtol=1e-6)
    assert jax.jit(selfcheck_nli)(garbage[0], np.zeros(7, bool)) == 0.0
    # A model of two classes has no neutral one.
    assert selfcheck_nli([[0.25, 0.0, 0.75]]) == 0.25
    gradient = jax.grad(selfcheck_nli)(jnp.asarray(probabilities[2]))
    assert np.isfinite(gradient).all()


def test_prompt():
    assert selfcheck_prompt(["Yes", "YES, it does", " yes"]) == 0.0
    assert selfcheck_prompt(["no", "No.", "Not really", "None"]) == 1.0
    assert selfcheck_prompt(["N/A", "", "maybe", "The answer is yes"]) == 0.5
    assert selfcheck_prompt(["yes", "no", "hm", "no"]) == 0.625


def sentences(seed, tokens=5, others=8, width=6):
    rng = np.random.default_rng(seed)
    common = rng.normal(size=width)
    return (
        (common + rng.normal(size=(tokens, width))).astype(np.float32),
        (common + rng.normal(size=(others, width))).astype(np.float32),
    )


@quick
@given(st.integers(0, 10**6), st.sampled_from([(1, 1), (3, 6), (9, 2)]))
def test_bertscore_equals_loops(seed, shape):
    candidate, reference = sentences(seed, *shape)
    if seed % 3 == 0:
        candidate = -candidate  # cosines below zero
    want = oracles.bertscore(candidate.astype(float), reference.astype(float))
    got = jax.jit(bertscore)(candidate, reference)
    np.testing.assert_allclose(got, want, atol=1e-5)
    swapped = bertscore(reference, candidate)
    np.testing.assert_allclose(swapped, [want[1], want[0], want[2]], atol=1e-5)


def test_bertscore_of_a_sentence_and_itself():
    candidate, _ = sentences(1)
    np.testing.assert_allclose(bertscore(candidate, 3 * candidate), 1.0, atol=1e-6)
    np.testing.assert_allclose(bertscore(candidate, candidate[::-1]), 1.0, atol=1e-6)


def test_bertscore_masks_and_batches():
    pairs = [sentences(seed) for seed in range(3)]
    one = np.array([bertscore(*pair) for pair in pairs])
    batch = [np.stack(each) for each in zip(*pairs, strict=True)]
    np.testing.assert_allclose(np.stack(jax.vmap(bertscore)(*batch), 1), one, atol=1e-6)
    wide, masks = [], []
    for each in batch:
        pad = np.full((3, 2, 6), np.nan, np.float32)
        wide.append(np.concatenate([pad, each, pad], 1))
        column = np.arange(each.shape[1] + 4)
        inside = (column >= 2) & (column < each.shape[1] + 2)
        masks.append(np.broadcast_to(inside, (3, len(column))))
    got = jax.jit(jax.vmap(bertscore))(*wide, *masks)
    np.testing.assert_allclose(np.stack(got, 1), one, atol=1e-6)
    nothing = jax.jit(bertscore)(wide[0][0], wide[1][0], np.zeros(9, bool), masks[1][0])
    assert [float(x) for x in nothing] == [0.0, 0.0, 0.0]


def test_bertscore_numerics():
    candidate, reference = sentences(4)
    want = np.array(bertscore(candidate, reference))
    half = bertscore(candidate.astype(jnp.bfloat16), jnp.asarray(reference))
    assert half[2].dtype == "float32"
    np.testing.assert_allclose(half, want, atol=0.01)
    candidate[1] = 0.0  # a vector without a direction is like nothing

    def f1(x):
        return bertscore(x, jnp.asarray(reference))[2]

    for x in (candidate, -candidate, 0 * candidate):
        assert np.isfinite(f1(x)) and np.isfinite(jax.grad(f1)(jnp.asarray(x))).all()
    assert f1(0 * candidate) == 0.0


def test_selfcheck_bertscore():
    rng = np.random.default_rng(3)
    f1, valid = rng.uniform(-0.2, 1, (4, 6, 3)), rng.random((4, 6, 3)) < 0.5
    valid[0, 2] = valid[3, 0] = False  # samples without a usable sentence
    want = []
    for scores, there in zip(f1, valid, strict=True):
        best = [
            max(row[use]) for row, use in zip(scores, there, strict=True) if any(use)
        ]
        want.append(1 - np.mean(best))
    garbage = np.where(valid, f1, np.nan)
    pairs = list(zip(garbage, valid, strict=True))
    np.testing.assert_allclose([selfcheck_bertscore(*x) for x in pairs], want, 1e-6)
    together = jax.jit(jax.vmap(selfcheck_bertscore))(garbage, valid)
    np.testing.assert_allclose(together, want, rtol=1e-6)
    assert jax.jit(selfcheck_bertscore)(f1[0], np.zeros((6, 3), bool)) == 0.0
    assert np.isfinite(
        jax.grad(selfcheck_bertscore)(jnp.asarray(f1[0]), valid[0])
    ).all()
    # A sentence that every sample repeats.
    assert selfcheck_bertscore([[0.1, 1.0], [1.0, 0.3]]) == 0.0


def test_passage_score():
    scores, valid = jnp.array([0.5, -3.0, 0.25, 9.0]), jnp.array([1, 1, 1, 0], bool)
    assert passage_score(scores, valid) == -0.75
    assert passage_score(scores, valid, how="max") == 0.5
    # Scores below zero, as rescaled ones may be, have a maximum below zero.
    assert passage_score(-jnp.abs(scores), valid, how="max") == -0.25
    for how in ("mean", "max"):
        jitted = jax.jit(passage_score, static_argnames="how")
        assert jitted(scores, valid, how=how) == passage_score(scores, valid, how)
        assert jitted(scores, ~jnp.ones(4, bool), how=how) == 0.0
        batch = jax.vmap(lambda s, v: passage_score(s, v, how))  # noqa: B023
        np.testing.assert_array_equal(
            batch(jnp.stack([scores, -scores]), jnp.stack([valid, ~valid])),
            [passage_score(scores, valid, how), passage_score(-scores, ~valid, how)],
        )


def test_errors():
    with pytest.raises(ValueError, match="probabilities holds 0 that are valid"):
        selfcheck_nli(np.zeros((0, 3)))
    with pytest.raises(ValueError, match=r"shape \(4, 2\); pass \[samples, 3\]"):
        selfcheck_nli(np.ones((4, 2)))
    with pytest.raises(ValueError, match=r"probabilities\[0, 1\] is nan"):
        selfcheck_nli([[0.5, np.nan, 0.5]])
    for answers in ([], "yes"):
        with pytest.raises(ValueError, match="pass one text for each sample"):
            selfcheck_prompt(answers)

    candidate, reference = sentences(0)
    with pytest.raises(ValueError, match="pass .* of one width"):
        bertscore(candidate, reference[:, :4])
    with pytest.raises(ValueError, match="reference holds 0 that are valid"):
        bertscore(candidate, reference, None, np.zeros(8, bool))
    with pytest.raises(ValueError, match=r"candidate has shape \(5, 6\) and its mask"):
        bertscore(candidate, reference, np.ones(4, bool))
    with pytest.raises(ValueError, match="f1 holds 0 that are valid"):
        selfcheck_bertscore(np.ones((3, 2)), np.zeros((3, 2), bool))
    with pytest.raises(ValueError, match="f1 .* must cover the first 2 axes"):
        selfcheck_bertscore(np.ones(3))
    with pytest.raises(ValueError, match=r"f1\[1, 0\] is inf"):
        selfcheck_bertscore([[0.5], [np.inf]])

    with pytest.raises(ValueError, match="how is 'min'; use one of mean, max"):
        passage_score([0.5], how="min")
    with pytest.raises(ValueError, match="scores holds 0 that are valid"):
        passage_score([])
    with pytest.raises(ValueError, match=r"scores\[0\] is nan"):
        passage_score([np.nan])


@pytest.mark.parametrize(
    "arguments, message",
    [
        (([], ["a"]), "got 0 sentences and 1 samples"),
        ((["a"], []), "got 1 sentences and 0 samples"),
        (("a", ["a"]), "got one text; pass lists"),
        ((["a", " "], ["a"]), "sentence 1 has no token; leave it out"),
        ((["a"], ["a"], 0), "n is 0"),
    ],
)
def test_ngram_errors(arguments, message):
    with pytest.raises(ValueError, match=message):
        selfcheck_ngram(*arguments)
