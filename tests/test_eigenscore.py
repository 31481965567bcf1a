import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import sampling_oracles as oracles
from jaxhal.features.eigenscore import (
    PRESETS,
    clip_features,
    clip_thresholds,
    eigenscore,
    form_of,
)


def answers(seed, n=6, width=64, spread=1.0):
    """Vectors that lie ``spread`` around one of length about ``sqrt(width)``."""
    rng = np.random.default_rng(seed)
    common, own = rng.normal(size=(1, width)), rng.normal(size=(n, width))
    return (common + spread * own).astype(np.float32)


@functools.cache
def jitted(preset):
    return jax.jit(functools.partial(eigenscore, preset=preset))


def test_presets_are_the_published_ones():
    assert PRESETS == {
        "official": (1e-3, 10.0, True),
        "toha": (1.0, math.e, True),
        "lm_polygraph": (1e-3, math.e, False),
    }


def test_a_form_of_ones_own():
    embeddings = answers(3)
    form = form_of("official", alpha=0.3, base=2.0, per_feature=False)
    want = oracles.eigenscore(embeddings, 0.3, 2.0, False)
    assert float(eigenscore(embeddings, preset=form)) == pytest.approx(want, abs=2e-5)
    assert form_of("toha") == PRESETS["toha"]


@pytest.mark.parametrize(
    "wrong, message",
    [
        ({"alpha": 0.0}, "alpha is 0.0; give a positive number"),
        ({"base": 1.0}, "base is 1.0; give a number above 1"),
        ({"base": math.nan}, "base is nan"),
    ],
)
def test_wrong_forms(wrong, message):
    with pytest.raises(ValueError, match=message):
        form_of("official", **wrong)


@pytest.mark.parametrize("preset", PRESETS)
@pytest.mark.parametrize("spread", [0.0, 0.1, 30.0])
@pytest.mark.parametrize("n, width", [(2, 64), (20, 64), (5, 3)])
def test_equals_the_covariance_in_float64(n, width, spread, preset):
    embeddings = answers([n, width], n, width, spread)
    want = oracles.eigenscore(embeddings, *PRESETS[preset])
    got = jitted(preset)(embeddings)
    assert got.dtype == "float32"
    assert float(got) == pytest.approx(want, abs=1e-3 if spread == 0 else 2e-5)
    assert float(got) >= math.log(PRESETS[preset].alpha, PRESETS[preset].base) - 1e-6


def test_answers_nearly_alike_need_more_than_their_covariance():
    # Why singular values: the covariance in float32 has lost what alpha should weigh.
    embeddings = 100 * answers(0, 20, 4096, spread=1e-3)
    want = oracles.eigenscore(embeddings, *PRESETS["lm_polygraph"])
    centred = embeddings - embeddings.mean(1, keepdims=True)
    covariance = jnp.matmul(centred, centred.T, precision="highest")
    eigenvalues = jnp.linalg.eigvalsh(covariance + 1e-3 * jnp.eye(20))
    naive = jnp.log(jnp.maximum(eigenvalues, 1e-10)).mean()
    assert abs(float(naive) - want) > 0.5
    got = eigenscore(embeddings, preset="lm_polygraph")
    assert float(got) == pytest.approx(want, abs=1e-3)


@pytest.mark.parametrize("preset", PRESETS)
def test_closed_forms(preset):
    alpha, base, per_feature = PRESETS[preset]

    def log(x):
        return math.log(x, base)

    score = functools.partial(eigenscore, preset=preset)
    # Rows of a Hadamard matrix but the first: orthogonal, and of mean zero.
    hadamard = np.array([[1, -1, 1, -1], [1, 1, -1, -1], [1, -1, -1, 1]], np.float32)
    divisor = 3 if per_feature else 1
    want = log(1 / divisor + alpha)
    assert float(score(hadamard / 2)) == pytest.approx(want, abs=1e-5)
    # Duplicates leave one eigenvalue; embeddings without any variation leave none.
    one = float(np.var(hadamard[0]) * 4 / divisor)
    same = np.tile(hadamard[:1], (5, 1))
    want = (4 * log(alpha) + log(5 * one + alpha)) / 5
    assert float(score(same)) == pytest.approx(want, abs=1e-5)
    flat = np.ones((5, 4)) * np.arange(5)[:, None]
    assert float(score(flat)) == pytest.approx(log(alpha), abs=1e-5)


@pytest.mark.parametrize("preset", PRESETS)
def test_invariances(preset):
    embeddings, score = answers(1), jitted(preset)
    want = float(score(embeddings))
    shift = np.arange(6, dtype=np.float32)[:, None]
    assert float(score(embeddings + shift)) == pytest.approx(want, abs=1e-4)
    assert float(score(embeddings[::-1])) == pytest.approx(want, abs=1e-5)
    assert float(score(embeddings[:, ::-1])) == pytest.approx(want, abs=1e-5)
    assert float(score(-embeddings)) == pytest.approx(want, abs=1e-5)
    assert float(score(2 * embeddings)) > want


def test_jit_vmap_and_padding_change_nothing():
    batch = np.stack([answers(seed) for seed in range(3)])
    one = [float(eigenscore(each)) for each in batch]
    np.testing.assert_allclose(jax.vmap(jitted("official"))(batch), one, rtol=1e-5)
    at = [0, 2, 3, 6, 7, 8]
    wide = np.full((3, 9, 64), np.nan, np.float32)
    wide[:, at] = batch
    valid = np.broadcast_to(np.isin(np.arange(9), at), (3, 9))
    got = jax.jit(jax.vmap(eigenscore))(wide, valid)
    np.testing.assert_allclose(got, one, rtol=1e-5)
    assert float(eigenscore(wide[0], valid[0])) == pytest.approx(one[0], rel=1e-5)
    assert jitted("official")(wide[0], np.zeros(9, bool)) == 0.0


def test_bfloat16_and_float64():
    embeddings = answers(2, 10, 128)
    want = oracles.eigenscore(embeddings, *PRESETS["official"])
    half = eigenscore(jnp.asarray(embeddings, jnp.bfloat16))
    assert half.dtype == "float32" and float(half) == pytest.approx(want, abs=0.01)
    with jax.enable_x64(True):
        wide = eigenscore(embeddings.astype(np.float64))
        assert wide.dtype == "float64" and float(wide) == pytest.approx(want, abs=1e-12)


@pytest.mark.parametrize("preset", PRESETS)
def test_gradient(preset):
    # Eigenvalues that are equal, or zero, have a score with a gradient all the same.
    degenerate = [np.eye(4, 16), np.tile(answers(3, 1, 16), (4, 1)), np.zeros((4, 16))]
    for embeddings in (answers(4, 4, 16), *degenerate):
        gradient = jax.grad(jitted(preset))(jnp.asarray(embeddings, jnp.float32))
        assert np.isfinite(gradient).all()
    embeddings, direction = answers(4, 4, 16), answers(5, 4, 16)
    gradient = jax.grad(jitted(preset))(jnp.asarray(embeddings))
    up, down = (
        oracles.eigenscore(embeddings + step * direction, *PRESETS[preset])
        for step in (1e-3, -1e-3)
    )
    want = (up - down) / 2e-3
    assert float((gradient * direction).sum()) == pytest.approx(want, rel=1e-3)


def test_thresholds_equal_quantiles():
    rng = np.random.default_rng(1)
    for tokens, share in ((1, 0.1), (4, 0.1), (9, 0.25), (3500, 0.002), (40, 0.0)):
        hidden = rng.normal(size=(tokens, 5)).astype(np.float32)
        want = np.quantile(hidden[-3000:], [share, 1 - share], axis=0)
        np.testing.assert_allclose(clip_thresholds(hidden, share), want, atol=1e-4)


def test_the_published_share_cuts_six_tokens_either_side():
    hidden = np.random.default_rng(2).permutation(3000).astype(np.float32)[:, None]
    low, high = clip_thresholds(hidden, 0.002)
    assert (hidden < low).sum() == (hidden > high).sum() == 6
    clipped = clip_features(hidden, low, high)
    np.testing.assert_allclose([clipped.min(), clipped.max()], [low[0], high[0]])
    assert (clipped != hidden).sum() == 12


def test_clipping_keeps_type_and_shape():
    low, high = jnp.array([-1.0, 0.0]), jnp.array([1.0, 0.5])
    hidden = jnp.array([[[-3.0, -3.0]], [[0.25, 0.25]], [[9.0, 9.0]]])
    want = np.array([[[-1.0, 0.0]], [[0.25, 0.25]], [[1.0, 0.5]]])
    for dtype in (jnp.float32, jnp.bfloat16):
        clipped = jax.jit(clip_features)(hidden.astype(dtype), low, high)
        assert clipped.dtype == dtype
        np.testing.assert_array_equal(clipped.astype(float), want)
    one = [clip_features(each, low, high) for each in hidden]
    every = jax.vmap(clip_features, in_axes=(0, None, None))(hidden, low, high)
    np.testing.assert_array_equal(every, one)


def test_errors():
    embeddings = answers(0)
    with pytest.raises(ValueError, match="preset is 'inside'; use one of official"):
        eigenscore(embeddings, preset="inside")
    for few in (embeddings[:1], embeddings[:0]):
        with pytest.raises(ValueError, match="at least 2 must be there"):
            eigenscore(few)
    with pytest.raises(ValueError, match="embeddings holds 1 that are valid"):
        eigenscore(embeddings, np.arange(6) == 3)
    with pytest.raises(ValueError, match=r"its mask \(5,\); the mask must cover"):
        eigenscore(embeddings, np.ones(5, bool))
    for wrong in (embeddings[:, :1], embeddings[:, 0], embeddings[None]):
        with pytest.raises(ValueError, match="embeddings"):
            eigenscore(wrong, None if wrong.shape[0] > 1 else np.ones(1, bool))
    embeddings[2, 5] = np.nan
    with pytest.raises(ValueError, match=r"embeddings\[2, 5\] is nan"):
        eigenscore(embeddings)

    for share in (-0.1, 0.5, np.nan):
        with pytest.raises(ValueError, match=f"share is {share}; give one in"):
            clip_thresholds(np.ones((2, 3)), share)
    with pytest.raises(ValueError, match=r"shape \(0, 3\); give at least one token"):
        clip_thresholds(np.ones((0, 3)), 0.1)
    with pytest.raises(ValueError, match="pass .* twice"):
        clip_features(np.ones((2, 3)), np.zeros(3), np.ones(2))
    with pytest.raises(ValueError, match="feature 1 has low 2.0 and high 1.0"):
        clip_features(np.ones((2, 2)), np.array([0.0, 2.0]), np.ones(2))
