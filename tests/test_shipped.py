"""The detectors that come with the package, on the model they were fitted for."""

import json
from dataclasses import replace
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxhal
from jaxhal import detectors
from jaxhal.experiments import load_config
from jaxhal.io import progress
from jaxhal.models import registry
from jaxhal.models.lm import LM, random
from jaxhal.scoring.collection import beside_controls
from jaxhal.scoring.detection import resolve, resolve_for
from jaxhal.scoring.fitting import untrained
from jaxhal.scoring.shipped import MODELS, nearest, shipped
from jaxhal.scoring.verdicts import described
from tiny_lm import tiny_lm, write_lm

ROOT = Path(__file__).parent.parent
MODEL = "smollm2-135m"
_SHAPES = {
    "smollm2-135m": ("llama", 134_515_008, 30),
    "qwen2.5-coder-0.5b": ("qwen2", 630_167_424, 24),
    "qwen2.5-coder-1.5b": ("qwen2", 1_777_088_000, 28),
}
# As configs/results/ragtruth.md, ragtruth_qwen05b.md and ragtruth_qwen15b.md have them.
_DTYPES = {
    "smollm2-135m": "float32",
    "qwen2.5-coder-0.5b": "bfloat16",
    "qwen2.5-coder-1.5b": "bfloat16",
}


@pytest.mark.parametrize("model", MODELS)
def test_they_are_what_their_configuration_makes(model):
    assert set(MODELS) <= set(registry.names())
    config = load_config("ragtruth")
    found = shipped(model)
    specs = beside_controls(config.detectors)
    assert set(found) == set(specs) >= set(detectors.AT_ONCE)
    for name, one in found.items():
        path = ROOT / "jaxhal" / "scoring" / "shipped" / model / name / "card.json"
        card = json.loads(path.read_text("utf-8"))
        assert card["model"] == model
        assert (card["family"], card["parameters"], card["depth"]) == _SHAPES[model]
        assert registry.ENTRIES[model].family == card["family"]
        assert card["detector"] == specs[name]
        assert (one.dtype, one.reader) == (_DTYPES[model], None)
        assert card["data"]["answers"] > 800 and len(card["data"]["sha256"]) == 64
        (metrics,) = card["metrics"]
        assert metrics["method"] == name
        assert metrics["low"] <= metrics["AUROC"] <= metrics["high"]
        limits = metrics["AUROC"], metrics["low"], metrics["high"]
        assert one.measured == (card["data"]["name"], 298, 87, *limits)
        assert one.beats == metrics["beats controls"]
        assert one.threshold == card["threshold"] and one.detector.name == name
        for leaf in jax.tree.leaves(one.params):
            assert np.isfinite(np.asarray(leaf, float)).all(), name
    assert shipped("another") == {} and config.model == MODEL
    folder = ROOT / "jaxhal" / "scoring" / "shipped" / model
    written = (folder / "README.md").read_text("utf-8")
    assert "Verdicts are by token_probe: " in written
    assert written == jaxhal.FittedDetectors.from_pretrained(folder).card()


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_another_dtype_than_that_of_the_fit_is_noted_once(model, dtype, capsys):
    config = replace(tiny_lm().config, num_hidden_layers=_SHAPES[model][2])
    lm = replace(random(config, jax.random.key(0), jnp.dtype(dtype)), name=model)
    progress.note.cache_clear()
    resolve_for(lm, ["novel_words", "tfidf"])  # of texts alone
    assert capsys.readouterr().err == ""
    resolve_for(lm, None)
    resolve_for(lm, ["token_probe"])
    said = capsys.readouterr().err
    if dtype == _DTYPES[model]:
        assert said == ""
    else:
        (line,) = said.splitlines()
        assert f"{model!r} reads in {_DTYPES[model]}, and it reads in {dtype}" in line
        assert f"--dtype {_DTYPES[model]}" in line


@pytest.mark.parametrize(
    "family, size, near",
    [
        ("qwen2", 10**7, "qwen2.5-coder-0.5b"),
        ("llama", 7 * 10**9, "smollm2-135m"),
        ("qwen2", 7 * 10**9, "qwen2.5-coder-1.5b"),
        ("gemma3_text", 7 * 10**9, "qwen2.5-coder-1.5b"),
        ("gemma3_text", 600 * 10**6, "qwen2.5-coder-0.5b"),
        ("gemma3_text", 270 * 10**6, "smollm2-135m"),
    ],
)
def test_the_nearest_reader_that_has_some_is_named(monkeypatch, family, size, near):
    """Of the same family, or else of about the same size."""
    monkeypatch.setattr(LM, "size", size)
    lm = tiny_lm()
    lm = replace(lm, name="other", config=replace(lm.config, family=family))
    assert nearest(lm) == near
    assert described([untrained(detectors.build("mtop_div"))], lm) == (
        "no verdict: none of the detectors in use was fitted to labelled answers read "
        f"by 'other'; fit one, or read with {near}, the nearest model with some"
    )
    named = f"answers of 'other' first; .*, or read with {near}, the nearest model with"
    with pytest.raises(ValueError, match=named):
        jaxhal.score(lm, [], ["lookback_lens"])


@pytest.mark.parametrize("promise", [{"recall": 0.9}, {"false_alarms": 0.05}])
def test_the_deciding_one_can_promise(promise):
    (one,) = [one for one in resolve(MODEL, None, promise, 0.9) if one.promise]
    assert one.detector.name == "token_probe" and one.promise.sources == 839
    scores, labels, _ = one.calibrated_on
    flagged = np.asarray(scores) >= one.threshold
    ((kind, level),) = promise.items()
    if kind == "recall":
        assert flagged[labels == 1].mean() >= level
    else:
        assert flagged[labels == 0].mean() <= level


@pytest.mark.parametrize("model", MODELS)
def test_the_deciding_one_can_promise_of_spans(model):
    found = resolve(model, None, {"highlighted": 0.05}, 0.9)
    (one,) = [one for one in found if one.promise]
    assert one.detector.name == "token_probe"
    assert one.promise.kind == "highlighted" and 0 < one.promise.threshold < 1


def test_scores_come_with_probabilities(smollm2):
    context = "The Marlow bridge opened in 1832 and spans 72 metres."
    question = "When did the bridge open?"
    answer = "It opened in 1832, and Queen Victoria crossed it in a golden carriage."
    asked = {"context": context, "question": question, "response": answer}
    report = jaxhal.detect(smollm2, **asked)
    assert set(report.scores) == set(report.probabilities) == set(shipped(MODEL))
    assert all(0 <= p <= 1 for p in report.probabilities.values())
    for name, one in shipped(MODEL).items():
        reached = report.scores[name] >= one.threshold
        likely = report.probabilities[name] >= 0.5
        flagged = reached and likely and one.beats == "yes"
        assert (name in report.flagged) == flagged, name
    # The ensemble's AUROC is higher, by less than its standard error.
    assert report.by == report.detector == "token_probe"
    assert report.basis == shipped(MODEL)["token_probe"].measured
    assert report.probability == report.probabilities["token_probe"]
    scores = [token.scores["token_probe"] for token in report.tokens]
    assert all(0 <= score <= 1 for score in scores)
    row = report.to_dict(every=True)
    assert row["probabilities"]["ensemble"] == report.probabilities["ensemble"]
    only = jaxhal.detect(smollm2, **asked, detectors=["ensemble"])
    assert only.scores["ensemble"] == pytest.approx(report.scores["ensemble"], abs=1e-3)


def test_other_models_must_be_fitted_first():
    with pytest.raises(
        ValueError,
        match="answers of 'tiny' first; .* or read with qwen.*, smollm2-135m$",
    ):
        resolve("tiny", ["token_probe"])
    with pytest.raises(ValueError, match="'redeep' must .* returned instead of it$"):
        resolve("tiny", ["redeep"])  # which there is for no model
    (one,) = resolve("tiny", ["mtop_div"])
    assert one.calibration is None and one.threshold is None
    with pytest.raises(ValueError, match="no probability and no threshold"):
        one.probabilities([0.5])
    with pytest.raises(ValueError, match="no probability and no threshold"):
        one.flags([0.5])


def test_a_folder_called_like_a_model_is_another_model(tmp_path, monkeypatch):
    write_lm(tmp_path / MODEL)
    monkeypatch.chdir(tmp_path)
    names = {jaxhal.load(source).name for source in (MODEL, Path(MODEL), f"./{MODEL}")}
    assert names == {f"./{MODEL}"}
    with pytest.raises(ValueError, match=f"labelled answers of './{MODEL}' first"):
        resolve(names.pop(), ["token_probe"])
