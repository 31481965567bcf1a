"""The probe of hidden states and attention, against loops and scikit-learn."""

import dataclasses

import jax
import numpy as np
import pytest
from sklearn.linear_model import LogisticRegression
from sklearn.preprocessing import StandardScaler
from test_experiments import labelled

import jaxhal
from jaxhal.classifiers.linear import Linear
from jaxhal.detectors import Targets, build, held_out, scores_of
from jaxhal.detectors.attentive import soft_maximum
from jaxhal.detectors.probes import centred_mean
from jaxhal.detectors.series import Ragged, Series
from jaxhal.reading.store import Store
from jaxhal.scoring.inputs import collect
from jaxhal.types import Label
from tiny_lm import tiny_lm

LENGTHS = np.array([0, 1, 2, 5, 7])
DETECTOR = build({"attentive_probe": {"layer": 1}})
ROWS = np.arange(40)


def drawn(pad=0):
    values = np.random.default_rng(0).normal(0, 3, (len(LENGTHS), 7))
    values = np.pad(values, [(0, 0), (0, pad)])
    valid = np.arange(7 + pad) < LENGTHS[:, None]
    return np.where(valid, values, 1e9).astype(np.float32), valid


def slow_mean(values, window):
    """A token and its neighbours, as far as there are any."""
    half = window // 2
    return [
        values[max(0, at - half) : at + half + 1].mean() for at in range(len(values))
    ]


@pytest.mark.parametrize("pad", [0, 5])
def test_the_soft_maximum_is_that_of_the_formula(pad):
    values, valid = drawn(pad)
    for temperature in (0.5, 2.0):
        wanted = [
            temperature * np.log(np.exp(row[:n].astype(float) / temperature).sum())
            for row, n in zip(values[1:], LENGTHS[1:], strict=True)
        ]
        found = jax.jit(soft_maximum, static_argnums=2)(values, valid, temperature)
        np.testing.assert_allclose(found, [0.0, *wanted], rtol=1e-5, atol=1e-5)
        assert (found[1:] >= np.where(valid, values, -np.inf).max(1)[1:] - 1e-5).all()


@pytest.mark.parametrize("window", [1, 3, 9])
@pytest.mark.parametrize("pad", [0, 5])
def test_the_mean_is_that_of_a_token_and_its_neighbours(window, pad):
    values, valid = drawn(pad)
    found = np.asarray(jax.jit(centred_mean, static_argnums=2)(values, valid, window))
    for row, value, n in zip(found, values, LENGTHS, strict=True):
        np.testing.assert_allclose(row[:n], slow_mean(value[:n], window), rtol=1e-5)


def examples():
    """Of which annotated spans are of several lengths."""
    made = []
    for number, one in enumerate(labelled()):
        spans = [Label(a, b - 4 * (number % 5)) for a, b, _ in one.labels]
        made.append(dataclasses.replace(one, labels=tuple(spans)))
    return made


@pytest.fixture(scope="module")
def lm():
    return tiny_lm()


@pytest.fixture(scope="module")
def data(lm, tmp_path_factory):
    store = Store(tmp_path_factory.mktemp("store"))
    return collect(lm, examples(), [DETECTOR], store)


def targets(data, rows=ROWS):
    everything = np.ones(len(data.labels), np.float32)
    key = jax.random.key(0)
    return Targets(data.labels, data.groups, everything, key).only(rows)


def columns(lm, example):
    """Hidden state, lookback ratios, logarithms of attention, a token a row."""
    batch = lm.encode([example])
    found = jaxhal.read(lm, batch, DETECTOR.reducers)
    hidden, *attention = (np.asarray(found[name]) for name, _ in DETECTOR.features)
    tokens = range(int(batch.response_mask.sum()))
    looks = [attention[0], np.log(attention[1] + 1e-4)]
    return np.array(
        [
            [*hidden[0, 0, at], *(x for one in looks for x in one[:, 0, :, at].ravel())]
            for at in tokens
        ]
    )


def test_against_scikit_learn(lm, data):
    """Marked tokens weigh as much as they are, those of each answer the same."""
    each = [columns(lm, data.examples[n]) for n in ROWS]
    marked = [data.marked[n] for n in ROWS]
    mean = np.mean([one.sum() for one in marked if one.any()])
    assert len({int(one.sum()) for one in marked}) > 2
    weight = [np.where(one, mean / max(one.sum(), 1), 1.0) for one in marked]
    x, y, weight = np.concatenate(each), np.concatenate(marked), np.concatenate(weight)
    assert weight[y].sum() == pytest.approx(y.sum())
    scaler = StandardScaler().fit(x, sample_weight=weight)
    model = LogisticRegression(C=10 / len(y), tol=1e-8, max_iter=1000)
    model.fit(scaler.transform(x), y, weight)
    params = DETECTOR.fit(data.inputs["attentive_probe"], targets(data))
    score = scores_of(DETECTOR, params, data.inputs["attentive_probe"])
    for number in (0, 1, 55):
        example = data.examples[number]
        logits = model.decision_function(scaler.transform(columns(lm, example)))
        wanted = 0.5 * np.log(np.exp(2 * logits).sum())
        assert score[number] == pytest.approx(wanted, abs=5e-3)
        batch = lm.encode([example])
        features = {**jaxhal.read(lm, batch, DETECTOR.reducers)}
        features["valid"] = batch.response_mask
        found = np.asarray(DETECTOR.tokens(params, features))[0]
        smooth = np.array(slow_mean(logits, 9))
        np.testing.assert_allclose(
            found[: len(smooth)], 1 / (1 + np.exp(-smooth)), atol=2e-3
        )
        assert not found[len(smooth) :].any()


@pytest.mark.parametrize("name", ["attentive_probe", "token_probe"])
def test_folds_fitted_at_once_are_those_one_by_one(lm, data, name):
    detector = build({name: {"layer": 1}})
    (states, marked), valid = data.inputs["attentive_probe"][:]
    if name == "token_probe":
        states = states[..., : lm.config.hidden_size]
    inputs = Ragged.of(Series((states, marked), valid))
    together = held_out(detector, inputs, targets(data))
    apart = held_out(detector._replace(fits=None), inputs, targets(data))
    assert np.ptp(apart.unseen[ROWS]) > 1
    np.testing.assert_allclose(together.unseen[ROWS], apart.unseen[ROWS], atol=5e-3)
    for one, other in zip(together.params, apart.params, strict=True):
        np.testing.assert_allclose(one, other, atol=1e-3)


def test_a_token_probe_smooths_alike():
    """Its score of an answer stays, and so does what is padding."""
    values, valid = drawn()
    one = np.ones(1, np.float32)
    params = Linear(one, np.float32(0), 0 * one, one)
    features = {"hidden_1": values[None, ..., None], "valid": valid}
    for window in (1, 3):
        spec = {"token_probe": {"layer": 1, "window": window}}
        found = np.asarray(build(spec).tokens(params, features))
        assert not found[~valid].any()
        for row, value, n in zip(found, values, LENGTHS, strict=True):
            wanted = 1 / (1 + np.exp(-np.array(slow_mean(value[:n], window))))
            np.testing.assert_allclose(row[:n], wanted, rtol=1e-5)
    inputs = Series((values[..., None], valid), valid)
    plain = build({"token_probe": {"layer": 1}}).decide(params, inputs)
    np.testing.assert_array_equal(build(spec).decide(params, inputs), plain)


@pytest.mark.parametrize("name", ["attentive_probe", "token_probe"])
def test_what_they_cannot_do_is_named(name):
    with pytest.raises(ValueError, match="window is 4; give an odd number"):
        build({name: {"window": 4}})
    with pytest.raises(ValueError, match="window"):
        build({name: {"window": 0}})


def test_without_spans_there_is_nothing_to_learn(data):
    series = data.inputs["attentive_probe"][:]
    values, marked = series.values
    blind = series._replace(values=(values, marked & False))
    with pytest.raises(ValueError, match="no token of the training part is marked"):
        DETECTOR.fit(blind, targets(data))
