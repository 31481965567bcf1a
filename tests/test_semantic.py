import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from sklearn.cluster import KMeans
from sklearn.metrics import roc_auc_score

import sampling_oracles as oracles
from jaxhal.detectors import Targets, build, features_of, held_out
from jaxhal.features.semantic import (
    PRESETS,
    cluster,
    equivalence,
    semantic_entropy,
    two_means,
)

RULES = ("strict", "non_strict", "no_contradiction")
quick = settings(max_examples=25, deadline=None)


def entailments(seed, n):
    """Probabilities whose likeliest class is an entailment half of the time."""
    rng = np.random.default_rng(seed)
    return rng.dirichlet([0.5, 0.7, 1.2], size=(n, n)).astype(np.float32)


@functools.cache
def jitted(function, **static):
    return jax.jit(functools.partial(function, **static))


@quick
@given(st.integers(0, 10**6), st.sampled_from([1, 2, 7]), st.sampled_from(RULES))
def test_equivalence_equals_words(seed, n, rule):
    probabilities = entailments(seed, n)
    got = jitted(equivalence, rule=rule)(probabilities)
    np.testing.assert_array_equal(got, oracles.same_meaning(probabilities, rule))
    np.testing.assert_array_equal(got, got.T)


def test_rules_go_from_few_to_many():
    got = [equivalence(entailments(0, 30), rule).sum() for rule in RULES]
    assert 30 < got[0] < got[1] < got[2] < 900


@quick
@given(st.integers(0, 10**6), st.sampled_from([1, 2, 9]), st.booleans())
def test_clusters_equal_loops(seed, n, symmetric):
    rng = np.random.default_rng(seed)
    same = rng.random((n, n)) < rng.random()
    same = same | same.T if symmetric else same
    valid = rng.random(n) < rng.choice([0.6, 1.0])
    got = jitted(cluster, published=False)(same, valid)
    np.testing.assert_array_equal(got, oracles.first_match(same, valid))
    again = jitted(cluster, published=True)(same, valid)
    np.testing.assert_array_equal(again, oracles.overwriting(same, valid))
    # Both have the same founders, so only members move, and only to later clusters.
    assert got.max() == again.max() == len(set(got.tolist()) - {-1}) - 1
    assert (again >= got).all()


def test_a_later_cluster_takes_over():
    # 2 means the same as 0 and as 1, which do not mean the same.
    same = np.eye(4, dtype=bool)
    same[[0, 1, 2, 2], [2, 2, 0, 1]] = True
    assert cluster(same).tolist() == [0, 1, 0, 2]
    assert cluster(same, published=True).tolist() == [0, 1, 1, 2]


def test_only_the_first_member_is_asked():
    # 0 - 1 - 2 is a chain: 2 is like 1, but not like 0, who founded the cluster.
    chain = np.array([[1, 1, 0], [1, 1, 1], [0, 1, 1]], bool)
    assert cluster(chain).tolist() == [0, 0, 1]
    assert cluster(chain, [False, True, True]).tolist() == [-1, 0, 0]


@quick
@given(st.integers(0, 10**6), st.sampled_from([1, 3, 8]), st.sampled_from([*PRESETS]))
def test_entropy_equals_loops(seed, n, preset):
    rng = np.random.default_rng(seed)
    ids = rng.integers(-1, n, n)
    ids[0] = max(ids[0], 0)
    # Log-likelihoods far below each other, as those of whole answers are.
    loglik = -rng.exponential(rng.choice([1.0, 60.0]), n)
    want = oracles.semantic_entropy(ids, loglik, PRESETS[preset].weighing)
    got = jitted(semantic_entropy, preset=preset)(jnp.asarray(ids), loglik)
    assert float(got) == pytest.approx(want, rel=1e-5, abs=1e-5)
    if preset != "iclr":
        assert 0 <= got <= np.log((ids >= 0).sum()) + 1e-6


@pytest.mark.parametrize(
    "sizes, want",
    [
        ((6,), 0.0),
        ((4, 2), 0.636514168),
        ((5, 1), 0.450561209),
        ((1, 1, 4), 0.867563228),
        ((2, 2, 1, 1), 1.329661349),
    ],
)
def test_golden_discrete_entropies(sizes, want):
    ids = np.repeat(np.arange(len(sizes)), sizes)
    for preset in ("discrete", "nature", "toha"):
        # Answers that are all as likely as each other are only counted.
        loglik = np.full(6, -2.5)
        short = semantic_entropy(jnp.asarray(ids), loglik, preset)
        assert short.dtype == "float32"
        assert float(short) == pytest.approx(want, abs=1e-6)
        with jax.enable_x64(True):
            wide = semantic_entropy(jnp.asarray(ids), loglik, preset)
            assert wide.dtype == "float64"
            assert float(wide) == pytest.approx(want, abs=1e-8)


def test_published_shift_and_repeated_answers():
    # Two likely answers in one cluster: more than everything, and -log of it below 0.
    loglik = np.log([0.75, 0.75])
    got = semantic_entropy(jnp.array([0, 0]), loglik, "iclr")
    assert float(got) == pytest.approx(5 - np.log(1.5), abs=1e-6)
    assert float(semantic_entropy(jnp.array([0, 0]), loglik)) == 0.0


def test_presets_end_to_end():
    assert set(PRESETS) == {"nature", "discrete", "toha", "iclr"}
    probabilities, loglik = entailments(3, 10), -np.linspace(0.1, 2.0, 10)
    for preset, (rule, weighing) in PRESETS.items():
        got = semantic_entropy(
            cluster(equivalence(probabilities, rule)), loglik, preset
        )
        ids = oracles.first_match(
            oracles.same_meaning(probabilities, rule), [True] * 10
        )
        want = oracles.semantic_entropy(ids, loglik, weighing)
        assert float(got) == pytest.approx(want, abs=1e-5)


def test_jit_vmap_and_padding_change_nothing():
    rng = np.random.default_rng(5)
    same, loglik = rng.random((4, 6, 6)) < 0.4, -rng.exponential(size=(4, 6))

    def score(same, loglik, valid):
        return semantic_entropy(cluster(same, valid), loglik)

    valid = np.ones((4, 6), bool)
    one = [float(score(*each)) for each in zip(same, loglik, valid, strict=True)]
    np.testing.assert_allclose(jax.jit(jax.vmap(score))(same, loglik, valid), one, 1e-6)
    # Missing answers, wherever they stand and whatever they hold.
    at = [0, 2, 3, 4, 6, 7]
    wide, long = np.ones((4, 9, 9), bool), np.full((4, 9), np.nan)
    wide[np.ix_(range(4), at, at)], long[:, at] = same, loglik
    there = np.broadcast_to(np.isin(np.arange(9), at), (4, 9))
    np.testing.assert_allclose(jax.jit(jax.vmap(score))(wide, long, there), one, 1e-6)


def test_nothing_inside_a_trace_scores_zero():
    none = jax.jit(cluster)(np.ones((3, 3), bool), np.zeros(3, bool))
    assert none.tolist() == [-1, -1, -1]
    for preset in PRESETS:
        score = jitted(semantic_entropy, preset=preset)
        assert score(none, jnp.full(3, jnp.nan)) == 0.0
        gradient = jax.grad(lambda x: score(none, x))(jnp.zeros(3))  # noqa: B023
        assert gradient.tolist() == [0.0, 0.0, 0.0]


@pytest.mark.parametrize("preset", ["nature", "iclr"])
def test_gradients_are_finite_and_right(preset):
    ids, loglik = jnp.array([0, 1, 0, -1, 2]), jnp.array([-0.1, -90.0, -2.0, 0.0, -0.5])
    gradient = jax.grad(lambda x: semantic_entropy(ids, x, preset))(loglik)
    assert np.isfinite(gradient).all() and gradient[3] == 0.0

    weighing, step = PRESETS[preset].weighing, np.eye(5)[0] * 1e-4
    up, down = (
        oracles.semantic_entropy(ids.tolist(), np.asarray(loglik, float) + d, weighing)
        for d in (step, -step)
    )
    assert float(gradient[0]) == pytest.approx((up - down) / 2e-4, abs=1e-3)


def test_bfloat16():
    ids, loglik = jnp.array([0, 1, 0, 2]), jnp.array([-0.1, -1.0, -2.0, -0.5])
    half = semantic_entropy(ids, loglik.astype(jnp.bfloat16))
    assert half.dtype == "float32"
    assert float(half) == pytest.approx(float(semantic_entropy(ids, loglik)), abs=0.01)


def test_errors():
    same, ids = np.eye(3, dtype=bool), jnp.array([0, 1, 0])
    with pytest.raises(ValueError, match=r"probabilities have shape \(2, 3, 3\)"):
        equivalence(np.ones((2, 3, 3)), "strict")
    with pytest.raises(ValueError, match=r"probabilities have shape \(\)"):
        equivalence(np.float32(1), "strict")
    with pytest.raises(ValueError, match=r"\[1, 0, 2\] is nan; give a finite number"):
        broken = np.ones((2, 2, 3))
        broken[1, 0, 2] = np.nan
        equivalence(broken, "strict")
    broken[1, 0, 2], broken[0, 0, 0] = 1.0, np.nan  # what the diagonal holds
    assert equivalence(broken, "no_contradiction").tolist() == [[1, 0], [0, 1]]
    with pytest.raises(ValueError, match="rule is 'loose'; use one of strict"):
        equivalence(np.ones((2, 2, 3)), "loose")
    with pytest.raises(ValueError, match="equivalent holds 0 that are valid"):
        cluster(np.zeros((0, 0), bool))
    with pytest.raises(ValueError, match="equivalent holds 0 that are valid"):
        cluster(same, [False, False, False])
    with pytest.raises(ValueError, match=r"equivalent has shape \(3, 2\)"):
        cluster(same[:, :2])
    with pytest.raises(ValueError, match=r"its mask \(2,\); the mask must cover"):
        cluster(same, [True, True])
    with pytest.raises(ValueError, match="preset is 'oxford'; use one of nature"):
        semantic_entropy(ids, preset="oxford")
    with pytest.raises(ValueError, match="'toha' weighs answers; give their loglik"):
        semantic_entropy(ids, preset="toha")
    with pytest.raises(ValueError, match=r"loglik\[2\] is -inf"):
        semantic_entropy(ids, [-1.0, -2.0, -np.inf])
    with pytest.raises(
        ValueError, match=r"loglik has shape \(2,\) and its mask \(3,\)"
    ):
        semantic_entropy(ids, [-1.0, -2.0])
    with pytest.raises(ValueError, match="loglik holds 0 that are valid"):
        semantic_entropy(jnp.array([-1, -1]), [0.0, 0.0])


# A probe of it -----------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(4))
def test_two_means_are_those_of_k_means(seed):
    values = np.random.default_rng(seed).choice([0.0, 0.6, 0.7, 1.1, 1.5], 30)
    found = KMeans(2, n_init=10, random_state=0).fit(values[:, None])
    high = int(found.cluster_centers_.argmax())
    assert two_means(values) == values[found.labels_ == high].min()
    with pytest.raises(ValueError, match="all 2 values are 0.5"):
        two_means(np.array([0.5, 0.5]))


def test_a_probe_learns_from_entropy_alone():
    rng, rows = np.random.default_rng(0), 60
    entropy = rng.choice([0.0, 0.3, 1.5], rows).astype(np.float32)
    states = np.float32(rng.normal(size=(rows, 3, 4)))
    states[:, 1, 0] += 4 * (entropy > 1)
    probe = build("semantic_entropy_probe")
    weight, key = np.float32(np.arange(rows) < 40), jax.random.key(0)
    labels, groups = np.arange(rows) % 2, np.arange(rows)
    fitted, turned = (
        held_out(probe, (states, entropy), Targets(some, groups, weight, key))
        for some in (labels, 1 - labels)
    )
    jax.tree.map(np.testing.assert_array_equal, fitted, turned)
    assert int(fitted.params.layer) == 1
    # Judging needs no entropy, and asks for no samples.
    score = probe.decide(fitted.params, (jnp.asarray(states), None))
    assert roc_auc_score(entropy[40:] > 1, score[40:]) > 0.9
    (name, _), taught = probe.features[0], dict(probe.taught)
    assert list(features_of([probe])) == [name]
    assert list(features_of([probe], fitting=True)) == [name, *taught]
    flat, few = np.full(rows, 0.3), np.where(np.arange(rows) < 2, 1.0, 0.3)
    for some, count in ((flat, 0), (few, 2)):
        with pytest.raises(ValueError, match=f"one of the two is that of {count} "):
            probe.fit((states, some), Targets(labels, groups, weight, key))
