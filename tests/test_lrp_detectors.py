"""LRP4RAG's detectors from answers to fitted, saved and loaded classifiers."""

import jax
import numpy as np
import pytest

import jaxhal
from jaxhal import saving
from jaxhal.classifiers import svm
from jaxhal.detectors import AT_ONCE, Targets, build
from jaxhal.features.relevance import profile_level, resample
from jaxhal.fitting import fit
from jaxhal.inputs import collect
from jaxhal.store import Store
from tiny_lm import answers, tiny_lm

SPECS = [
    {"lrp4rag_svm": {"length": 12}},
    {"lrp4rag_forest": {"length": 12}},
    {"lrp4rag_mlp": {"length": 12}},
    {"lrp4rag_lstm": {"response_bins": 6, "prompt_bins": 3}},
    {"lrp4rag_svm": {"published": True, "name": "svm_published"}},
]


@pytest.fixture(scope="module")
def lm():
    return tiny_lm()


@pytest.fixture(scope="module")
def data(lm, tmp_path_factory):
    made = [build(spec) for spec in (*SPECS, "lrp4rag_threshold")]
    store = Store(tmp_path_factory.mktemp("store"))
    return collect(lm, answers(24), made, store, progress=False)


@pytest.fixture(scope="module")
def targets(data):
    weight = np.ones(len(data.labels))
    return Targets(data.labels, data.groups, weight, jax.random.key(0))


def test_inputs_are_resampled_profiles(lm, data):
    one = lm.encode(answers(24)[5:6])
    means = jaxhal.relevance_means(lm, one)
    valid = one.response_mask[0]
    want = resample(means.response[0], 12, valid)
    ours = data.inputs["lrp4rag_svm"][5]
    np.testing.assert_allclose(ours, want, atol=1e-5)
    level = 1 - profile_level(means.response[0], valid)
    assert data.inputs["lrp4rag_threshold"][5] == pytest.approx(float(level), abs=1e-4)
    comb = resample(means.response[0], 235, valid, "zeros")
    np.testing.assert_allclose(data.inputs["svm_published"][5], comb, atol=1e-5)


@pytest.mark.parametrize("spec", SPECS, ids=lambda spec: build(spec).name)
def test_fit_save_load_score(spec, lm, data, targets, tmp_path):
    detector = build(spec)
    fitted = fit(detector, data.inputs[detector.name], targets)
    scores = fitted.score(data.inputs[detector.name])
    assert np.isfinite(scores).all() and scores.std() > 0
    saving.save(tmp_path / "kept", fitted, spec)
    loaded = saving.load(tmp_path / "kept")
    again = loaded.score(data.inputs[detector.name])
    np.testing.assert_allclose(again, scores, atol=1e-6)
    results = jaxhal.score(lm, answers(24)[:2], [loaded], progress=False)
    for result, score in zip(results, scores, strict=False):
        assert result.scores[detector.name] == pytest.approx(score, abs=1e-3)


def test_the_published_machine_is_scikit_learns(data, targets):
    from sklearn.svm import SVC

    x = data.inputs["svm_published"]
    machine = SVC(**svm.PUBLISHED).fit(x, data.labels)
    ours = fit(build(SPECS[-1]), x, targets).score(x)
    np.testing.assert_allclose(ours, machine.decision_function(x), atol=1e-4)


def test_a_second_pass_is_not_made_unasked():
    assert not any(name.startswith("lrp4rag") for name in AT_ONCE)
