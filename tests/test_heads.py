"""Choosing heads against a slow loop with scikit-learn."""

import jax
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from sklearn.metrics import roc_auc_score

from jaxhal.classifiers import heads


def slow_choice(probe_scores, probe_labels, scores, labels, max_heads):
    delta = []
    for head in range(probe_scores.shape[1]):
        column = probe_scores[:, head]
        delta.append(
            column[probe_labels == 1].mean() - column[probe_labels == 0].mean()
        )
    order = sorted(range(len(delta)), key=lambda head: -delta[head])
    best, count, aurocs = -1.0, 0, []
    for n in range(1, max_heads + 1):
        total = sum(scores[:, head] for head in order[:n])
        aurocs.append(roc_auc_score(labels, total))
        if aurocs[-1] > best:
            best, count = aurocs[-1], n
    return order[:max_heads], count, delta, aurocs


def sample(seed, rows=32, width=7, levels=None):
    """Scores of which some heads lean up for hallucinated answers."""
    rng = np.random.default_rng(seed)
    labels = np.arange(rows) % 2
    scores = rng.normal(size=(rows, width)) + labels[:, None] * rng.normal(size=width)
    if levels:  # multiples of a power of two: sums are exact and ties are many
        scores = np.round(scores * levels) / levels
    return scores.astype(np.float32), labels


@settings(deadline=None, max_examples=30)
@given(st.integers(0, 10**6), st.sampled_from([None, 1, 4]))
def test_choice_equals_the_slow_loop(seed, levels):
    probe, labels = sample(seed, levels=levels)
    scores, _ = sample(seed + 1, levels=levels)
    found = heads.choose_heads(probe, labels, scores, labels, max_heads=5)
    order, count, delta, aurocs = slow_choice(probe, labels, scores, labels, 5)
    assert found.heads.tolist() == order
    assert int(found.number) == count
    np.testing.assert_allclose(found.separation, delta, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(found.aurocs, aurocs, rtol=1e-6)


def test_ties_go_to_the_first_head_and_the_fewest():
    labels = np.array([0, 0, 1, 1])
    column = np.array([0.0, 1.0, 2.0, 3.0])
    scores = np.stack([column, -column, column, column], 1)
    choice = heads.choose_heads(scores, labels, scores, labels, max_heads=4)
    assert choice.heads.tolist() == [0, 2, 3, 1] and choice.number == 1
    np.testing.assert_allclose(choice.aurocs, 1.0)


def test_the_validation_set_decides_how_many():
    labels = np.array([0, 0, 1, 1])
    probe = np.array([[0, 0], [0, 0], [2, 1], [2, 1]])
    validation = np.array([[3.0, 0.0], [0.0, 0.0], [2.0, 2.0], [2.0, 2.0]])
    choice = heads.choose_heads(probe, labels, validation, labels, max_heads=2)
    assert choice.heads.tolist() == [0, 1] and choice.number == 2
    np.testing.assert_allclose(choice.aurocs, [0.5, 1.0])


def test_separation_keeps_its_digits_on_an_accelerator():
    scores, labels = sample(0)
    traced = str(jax.make_jaxpr(heads.separation)(scores, labels))
    assert traced.count("dot_general") == traced.count("=(Precision.HIGHEST") == 2


def test_choice_under_jit_and_vmap():
    samples = [sample(seed) for seed in range(3)]
    scores, labels = np.stack([s for s, _ in samples]), samples[0][1]

    def choose(scores):
        return heads.choose_heads(scores, labels, scores, labels)

    mapped = jax.jit(jax.vmap(choose))(scores)
    for row in range(3):
        alone = choose(scores[row])
        for name in ("heads", "number", "separation", "aurocs"):
            np.testing.assert_allclose(
                getattr(mapped, name)[row], getattr(alone, name), rtol=1e-6
            )


def test_order_of_heads_and_rows_does_not_matter():
    scores, labels = sample(5)
    rng = np.random.default_rng(0)
    rows, columns = rng.permutation(32), rng.permutation(7)
    choice = heads.choose_heads(scores, labels, scores, labels)
    other = scores[rows][:, columns], labels[rows]
    moved = heads.choose_heads(*other, *other)
    assert columns[moved.heads].tolist() == choice.heads.tolist()
    assert moved.number == choice.number


@pytest.mark.parametrize(
    ("scores", "labels", "message"),
    [
        ([[1.0], [2.0]], [1, 1], "no grounded row"),
        ([[1.0], [2.0]], [0, 0], "no hallucinated row"),
        ([[1.0], [np.inf]], [0, 1], "is not finite"),
        ([[1.0], [2.0]], [0, 1, 1], "do not pair up"),
        ([1.0, 2.0], [0, 1], r"pass \[rows, heads\]"),
    ],
)
def test_bad_samples_are_named(scores, labels, message):
    good = np.array([[1.0], [2.0]]), np.array([0, 1])
    for call in (
        lambda: heads.separation(scores, labels),
        lambda: heads.choose_heads(scores, labels, *good, max_heads=1),
        lambda: heads.choose_heads(*good, scores, labels, max_heads=1),
    ):
        with pytest.raises(ValueError, match=message):
            call()


@pytest.mark.parametrize("max_heads", [0, -1, 8])
def test_max_heads_is_checked(max_heads):
    scores, labels = sample(0)
    with pytest.raises(ValueError, match=rf"max_heads is {max_heads}; choose 1..7"):
        heads.choose_heads(scores, labels, scores, labels, max_heads)


def test_sets_of_different_models_are_refused():
    scores, labels = sample(0)
    with pytest.raises(ValueError, match="cover 6 heads, probe scores 7"):
        heads.choose_heads(scores, labels, scores[:, 1:], labels)
