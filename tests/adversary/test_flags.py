"""Nothing is flagged by a detector that is worth no more than a control."""

import warnings

import numpy as np
import pytest

import golden_scores
from jaxhal.detectors import Detector, Targets, build
from jaxhal.evaluation.calibration import Isotonic, Platt, isotonic, platt
from jaxhal.io import sealing
from jaxhal.scoring.fitting import Fitted, fit
from jaxhal.scoring.saving import load, save
from jaxhal.scoring.shipped import shipped

NOTHING = np.zeros(0, np.float32)
COLUMN = Detector("column", "", "", "", (), inputs=lambda f: f["column"])
KEYS = np.zeros(2, np.uint32)
LOGISTIC = Platt(1.0, 0.0)


def fitted(
    name="toha_supervised", calibration: Platt | Isotonic = LOGISTIC, beats=None
):
    return Fitted(build(name), (), calibration, 0.5, NOTHING, beats)


# --- what the package ships, on the answers that come with it -----------------------

SHIPPED = shipped("smollm2-135m")
WORTH_IT = {
    *("ensemble", "token_probe", "linear_probe", "lookback_lens", "lookback_probe"),
    *("max_prompt_probe", "toha_supervised"),
}


def test_only_what_beats_the_controls_flags_the_bundled_answers():
    known = golden_scores.known("demo")
    flagged = {n: one.flags(known["scores"][n]) for n, one in SHIPPED.items()}
    assert {name for name, some in flagged.items() if some.any()} == WORTH_IT
    for name, some in flagged.items():
        chance = SHIPPED[name].probabilities(known["scores"][name])
        assert (chance[some] >= 0.5).all()
    assert {n for n, one in SHIPPED.items() if one.silent is None} == WORTH_IT
    assert {n for n, one in SHIPPED.items() if one.beats == "yes"} == WORTH_IT
    # Theirs flagged nearly every answer at a probability of 0.44.
    for name in ("lookback_ratio", "max_prompt_attention", "mtop_div"):
        one, scores = SHIPPED[name], known["scores"][name]
        assert one.reaches(scores).sum() > 90 and not one.flags(scores).any()
        np.testing.assert_allclose(one.probabilities(scores), 0.44, atol=0.01)


def test_what_flags_nothing_says_why():
    said = {name: one.silent for name, one in SHIPPED.items()}
    assert said["toha"] == "it does not beat the best control"
    assert said["novel_words"] == "it is a control"
    assert said["mtop_div"] == "it gives every answer the same probability"
    assert repr(SHIPPED["toha"]).endswith(f", flags nothing: {said['toha']}>")
    assert repr(SHIPPED["token_probe"]).endswith(f"{SHIPPED['token_probe'].threshold}>")


# --- one place decides --------------------------------------------------------------


@pytest.mark.parametrize(
    ("one", "flags"),
    [
        (fitted(), True),
        (fitted(beats="yes"), True),
        (fitted(beats="within noise"), False),
        (fitted(beats="no"), False),
        (fitted("novel_words"), False),
        (fitted("tfidf", beats="yes"), False),
        (fitted(calibration=Platt(0.0, 3.0), beats="yes"), False),
        (fitted(calibration=Isotonic((0.0, 1.0), (0.4, 0.4))), False),
        (fitted(calibration=Isotonic((0.0, 1.0), (0.4, 0.6))), True),
    ],
)
def test_who_flags_and_after_a_load_too(tmp_path, one, flags):
    save(tmp_path / "kept", one, one.detector.name)
    for each in (one, load(tmp_path / "kept")):
        assert each.beats == one.beats and each.silent == one.silent
        assert each.flags([0.4, 0.6]).tolist() == [False, flags]
        assert each.reaches([0.4, 0.6]).tolist() == [False, True]
        assert len(each.probabilities([0.4, 0.6])) == 2


def test_what_is_more_likely_grounded_is_not_flagged():
    """Whatever the threshold, which the best F1 may well put there."""
    low = Fitted(build("toha_supervised"), (), Platt(1.0, 0.0), -1.0)
    assert low.reaches([-2.0, -0.5, 0.0, 1.0]).tolist() == [False, True, True, True]
    assert low.flags([-2.0, -0.5, 0.0, 1.0]).tolist() == [False, False, True, True]


def test_a_card_that_says_something_else_is_refused(tmp_path):
    save(tmp_path / "kept", fitted(), "toha_supervised")
    path = tmp_path / "kept" / "card.json"
    sealing.write(path, sealing.read(path) | {"beats controls": "surely"})
    with pytest.raises(ValueError, match="kept holds no whole .*beats is surely; use"):
        load(tmp_path / "kept")


# --- scores that say nothing --------------------------------------------------------


def learnt(scores, labels, calibration):
    targets = Targets(labels, np.arange(len(labels)), np.ones(len(labels)), KEYS)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        return fit(COLUMN, scores, targets, calibration=calibration), said


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("calibrate", [platt, isotonic])
def test_a_fit_to_labels_at_random_warns_and_flags_nothing(seed, calibrate):
    rng = np.random.default_rng(seed)
    scores, labels = np.sort(rng.normal(size=40)), np.sort(rng.integers(0, 2, 40))
    for given in (labels[::-1], rng.permutation(labels), labels):
        one, said = learnt(scores, given, calibrate.__name__)
        flat = calibrate(scores, given).flat
        assert len(said) == flat and one.flags(scores).any() == (not flat)
        if flat:
            (warning,) = said
            assert warning.category is UserWarning
            assert str(warning.message).startswith("detector 'column' ranks answers")
            assert len(set(one.probabilities(scores))) == 1
            assert one.silent and one.reaches(scores).any()
    assert not flat


def test_half_of_the_labels_at_random_are_caught():
    rng = np.random.default_rng(0)
    scores = rng.normal(size=60)
    found = [learnt(scores, rng.permutation(60) % 2, "platt") for _ in range(20)]
    caught = [len(said) for _, said in found]
    assert 5 <= sum(caught) <= 15 and set(caught) == {0, 1}
