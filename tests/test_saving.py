"""Saved detectors: only what a spec makes again, and errors that name the folder."""

import dataclasses

import jax.numpy as jnp
import numpy as np
import pytest

from jaxhal.classifiers.linear import Linear
from jaxhal.detectors import build, nli_context
from jaxhal.evaluation import CalibrationSet, Guarantee, Measured, Platt
from jaxhal.io import sealing
from jaxhal.reading.samples import Draw
from jaxhal.scoring import encoders
from jaxhal.scoring.fitting import Fitted
from jaxhal.scoring.saving import load, save


def fitted(spec, params=()):
    return Fitted(build(spec), params, Platt(1.0, 0.0), 0.5, np.zeros(0, np.float32))


@pytest.fixture
def probe():
    vector = jnp.ones(3)
    return fitted("token_probe", Linear(vector, jnp.zeros(()), vector, vector))


@pytest.mark.parametrize(
    ("built", "spec", "field"),
    [
        (
            {"selfcheck_bertscore": {"baseline": 0.3}},
            "selfcheck_bertscore",
            "features",
        ),
        ({"mlp_probe": {"layer": 1}}, "mlp_probe", "summary"),
        (
            {"ensemble": {"members": ["novel_words", {"mlp_probe": {"layer": 1}}]}},
            {"ensemble": {"members": ["novel_words", "mlp_probe"]}},
            "features",
        ),
    ],
)
def test_a_spec_must_make_what_was_fitted(tmp_path, built, spec, field):
    with pytest.raises(ValueError, match=f"makes another .*: its {field} is"):
        save(tmp_path / "one", fitted(built), spec)
    assert not (tmp_path / "one").exists()


def test_a_spec_must_be_plain(tmp_path):
    spec = {"eigenscore": {"draw": Draw(n=3)}}
    with pytest.raises(ValueError, match="Draw is not JSON .* options as numbers, tex"):
        save(tmp_path / "one", fitted(spec), spec)
    assert not (tmp_path / "one").exists()
    plain = {"eigenscore": {"draw": {"n": 3}}}
    save(tmp_path / "one", fitted(spec), plain)
    assert load(tmp_path / "one").detector == build(plain)


def test_other_options_make_another_detector(tmp_path):
    other = fitted({"token_probe": {"highest": 1}})
    with pytest.raises(ValueError, match="its settings is .*'highest': 5"):
        save(tmp_path / "one", other, "token_probe")
    save(tmp_path / "one", other, {"token_probe": {"highest": 1}})
    assert load(tmp_path / "one").detector is other.detector


def test_what_was_written_is_built_again(tmp_path):
    """JSON has lists where Python has tuples."""
    spec = {"eigenscore": {"draw": (("n", 5),)}}
    save(tmp_path / "one", fitted(spec), spec)
    assert load(tmp_path / "one").detector is build(spec)


def test_a_promise_and_a_rate_are_kept(tmp_path, probe):
    promise = Guarantee("recall", 0.9, None, 0.25, 40)
    whole = dataclasses.replace(probe, promise=promise, rate=0.05)
    save(tmp_path / "one", whole, "token_probe")
    again = load(tmp_path / "one")
    assert (again.promise, again.rate) == (promise, 0.05)


def test_options_may_be_written_out(tmp_path, probe):
    save(tmp_path / "one", probe, {"token_probe": {"layer": 0.67}})
    again = load(tmp_path / "one")
    assert again.detector.features == probe.detector.features
    assert [leaf.tolist() for leaf in again.params] == [
        leaf.tolist() for leaf in probe.params
    ]


def test_what_it_was_measured_and_calibrated_on_is_kept(tmp_path, probe):
    measured = Measured("crates", 40, 10, 0.9, 0.8, 0.95)
    kept = CalibrationSet(np.float32([0.1, 2.0]), np.array([0, 1]), np.array([7, 7]))
    whole = dataclasses.replace(
        probe, beats="yes", measured=measured, calibrated_on=kept
    )
    whole = dataclasses.replace(whole, highlights=np.float32([[0.0, 0.5], [0.1, 1.0]]))
    save(tmp_path / "one", whole, "token_probe")
    again = load(tmp_path / "one")
    assert (again.beats, again.measured) == ("yes", measured)
    for ours, theirs in zip(again.calibrated_on, kept, strict=True):
        np.testing.assert_array_equal(ours, theirs)
    np.testing.assert_array_equal(again.highlights, whole.highlights)
    assert sealing.read(tmp_path / "one" / "card.json")["measured"]["answers"] == 40
    save(tmp_path / "two", probe, "token_probe")
    bare = load(tmp_path / "two")
    assert bare.beats is bare.measured is bare.calibrated_on is bare.highlights is None


@pytest.mark.parametrize("key", ["detector", "threshold", "calibration", "params"])
def test_a_card_cannot_take_the_place_of_what_loading_needs(tmp_path, probe, key):
    with pytest.raises(ValueError, match=f"card has '{key}', which save writes itself"):
        save(tmp_path / "one", probe, "token_probe", {key: 33, "model": "tiny"})
    assert not (tmp_path / "one").exists()


def without_params(folder):
    (folder / "params.safetensors").unlink()


def cut_short(folder):
    card = (folder / "card.json").read_text("utf-8")
    (folder / "card.json").write_text(card[:40], encoding="utf-8")


def changed(**keys):
    """A card that is sealed, so that nothing but these is wrong with it."""

    def change(folder):
        card = {**sealing.read(folder / "card.json"), **keys}
        card = {key: value for key, value in card.items() if value is not None}
        sealing.write(folder / "card.json", card)

    return change


@pytest.mark.parametrize(
    "damage",
    [
        without_params,
        cut_short,
        changed(threshold=None),
        changed(calibration=None),
        changed(calibration={"slope": 1.0}),
        changed(measured={"data": "crates"}),
        changed(**{"calibrated on": {"Unheard": {"w": "w"}}}),
        changed(sha256=None),
        changed(sha256="0"),
        changed(params=33),
        changed(params={"Linear": {"w": "w"}}),
        changed(params={"Unheard": {"w": "w"}}),
        changed(detector="unheard"),
    ],
)
def test_a_damaged_folder_is_named(tmp_path, probe, damage):
    save(tmp_path / "one", probe, "token_probe")
    damage(tmp_path / "one")
    with pytest.raises(ValueError, match="one holds no whole detector; copy it again"):
        load(tmp_path / "one")


def test_names_with_dots_do_not_meet(tmp_path):
    params = {"a.b": jnp.zeros(2), "a": {"b": jnp.ones(3)}}
    save(tmp_path / "one", fitted("token_probe", params), "token_probe")
    again = load(tmp_path / "one").params
    assert again["a.b"].tolist() == [0, 0] and again["a"]["b"].tolist() == [1, 1, 1]


def test_a_folder_without_a_card(tmp_path):
    with pytest.raises(FileNotFoundError, match="no card.json"):
        load(tmp_path)


def test_the_encoders_of_a_detector():
    class Own:
        name, source = "mine", "kb-2024"

        def __call__(self, pairs):
            return np.zeros((len(pairs), 3), np.float32)

    def of(spec, **options):
        made = build(spec) if isinstance(spec, str | dict) else spec(**options)
        return encoders.sources(made.measures)

    assert of(nli_context, entailment=Own()) == of("nli_context") == []
    assert of({"nli_context": {"entailment": "nli:owner/name"}}) == ["owner/name"]
    assert of("pair_grader:owner/name") == ["owner/name"]
    assert of("token_entropy") == of("semantic_entropy") == []
