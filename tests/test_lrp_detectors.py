"""LRP4RAG's detectors from answers to fitted, saved and loaded classifiers."""

import jax
import numpy as np
import pytest

import jaxhal
from jaxhal.detectors import AT_ONCE, Targets, build
from jaxhal.features.relevance import profile_level, resample
from jaxhal.lrp import PromptRelevance
from jaxhal.reading.store import Store
from jaxhal.scoring import saving
from jaxhal.scoring.fitting import fit
from jaxhal.scoring.inputs import collect
from jaxhal.types import Example
from tiny_lm import tiny_lm

SPECS = [
    {"lrp4rag_svm": {"length": 12}},
    {"lrp4rag_forest": {"length": 12}},
    {"lrp4rag_mlp": {"length": 12}},
    {"lrp4rag_lstm": {"response_bins": 6, "prompt_bins": 3}},
    "lrp4rag_comb",
    {"lrp4rag_svm": {"published": True, "name": "svm_published"}},
]
OTHERS = [
    "lrp4rag_threshold",
    {"lrp4rag_threshold": {"of": "prompt"}},
    {"lrp4rag_svm": {"length": 12, "of": "prompt"}},
]


def short_answers() -> list[Example]:
    """Of several lengths that are padded to one, so that what reads compiles once."""
    return [
        Example(
            id=str(number),
            context=f"Box {number // 2:02d} holds red balls.",
            question="What is inside?",
            response=f"{'Red ' * (number % 2)}balls, {number}{'.' * (number % 3)}",
            label=number % 2,
        )
        for number in range(24)
    ]


@pytest.fixture(scope="module")
def lm():
    return tiny_lm()


@pytest.fixture(scope="module")
def data(lm, tmp_path_factory):
    made = [build(spec) for spec in (*SPECS, *OTHERS)]
    store = Store(tmp_path_factory.mktemp("store"))
    return collect(lm, short_answers(), made, store, progress=False)


@pytest.fixture(scope="module")
def targets(data):
    weight = np.ones(len(data.labels))
    return Targets(data.labels, data.groups, weight, jax.random.key(0))


def test_inputs_are_resampled_profiles(lm, data):
    one = lm.encode(short_answers()[5:6])
    means = jaxhal.relevance_means(lm, one)
    valid, there = one.response_mask[0], one.valid[0, : one.prompt_length]
    want = resample(means.response[0], 12, valid)
    ours = data.inputs["lrp4rag_svm"][5]
    np.testing.assert_allclose(ours, want, atol=1e-5)
    level = 1 - profile_level(means.response[0], valid)
    assert data.inputs["lrp4rag_threshold"][5] == pytest.approx(float(level), abs=1e-4)
    prompt = resample(means.prompt[0], 500, there)
    ours = data.inputs["lrp4rag_svm_prompt"][5]
    np.testing.assert_allclose(ours, resample(prompt, 12), atol=1e-5)
    level = float(1 - profile_level(prompt))
    ours = data.inputs["lrp4rag_threshold_prompt"][5]
    assert ours == pytest.approx(level, abs=1e-4)
    comb = resample(means.response[0], 235, valid, "zeros")
    np.testing.assert_allclose(data.inputs["svm_published"][5], comb, atol=1e-5)


# The other machines are fitted, saved and loaded with the whole catalogue.
_EACH = SPECS[0], *SPECS[-2:]


@pytest.mark.parametrize("spec", _EACH, ids=lambda spec: build(spec).name)
def test_fit_save_load_score(spec, lm, data, targets, tmp_path):
    detector = build(spec)
    fitted = fit(detector, data.inputs[detector.name], targets)
    scores = fitted.score(data.inputs[detector.name])
    assert np.isfinite(scores).all() and scores.std() > 0
    saving.save(tmp_path / "kept", fitted, spec)
    loaded = saving.load(tmp_path / "kept")
    again = loaded.score(data.inputs[detector.name])
    np.testing.assert_allclose(again, scores, atol=1e-6)
    results = jaxhal.score(lm, short_answers()[:2], [loaded], progress=False)
    for result, score in zip(results, scores, strict=False):
        assert result.scores[detector.name] == pytest.approx(score, abs=1e-3)


def test_the_published_machine_is_scikit_learns(data, targets):
    from sklearn.svm import SVC

    x = data.inputs["svm_published"]
    machine = SVC(C=30, gamma=1).fit(x, data.labels)
    ours = fit(build(SPECS[-1]), x, targets).score(x)
    np.testing.assert_allclose(ours, machine.decision_function(x), atol=1e-4)


def test_the_comb_is_where_the_published_profile_has_tokens(data):
    """Whatever relevance is: lengths that agree make inputs that agree."""
    comb, profile = data.inputs["lrp4rag_comb"], data.inputs["svm_published"]
    np.testing.assert_array_equal(comb, profile != 0)
    counts = [len(row.response_ids) for row in data.rows]
    np.testing.assert_array_equal(comb.sum(1), counts)
    assert len(set(counts)) == len(np.unique(comb, axis=0)) > 4
    assert build("lrp4rag_comb").features == ()


def test_profiles_of_the_prompt_have_names_of_their_own():
    for kind in ("svm", "forest", "mlp", "threshold"):
        usual = f"lrp4rag_{kind}"
        (read,) = build({usual: {"of": "prompt"}}).features
        assert read == ("prompt_relevance", PromptRelevance())
        assert build({usual: {"of": "prompt"}}).name == f"{usual}_prompt"
        assert build({usual: {"of": "prompt", "name": "mine"}}).name == "mine"
        assert build({usual: {"of": "response"}}) is build(usual)
        with pytest.raises(ValueError, match="of is 'answer'; use one of response"):
            build({usual: {"of": "answer"}})


def test_a_second_pass_is_not_made_unasked():
    assert not any(name.startswith("lrp4rag") for name in AT_ONCE)
