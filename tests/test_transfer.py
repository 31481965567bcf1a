"""Fitted to one data set and tested on another, or fitted to another model's heads."""

import dataclasses

import jax
import numpy as np
import pytest
from sklearn.metrics import roc_auc_score

from jaxhal import experiments
from jaxhal.detectors import Targets, build
from jaxhal.experiments import running, splitting
from jaxhal.experiments.crossing import predicted_heads
from jaxhal.reading.store import Store
from jaxhal.scoring.fitting import fit
from jaxhal.scoring.inputs import collect
from jaxhal.types import Label
from tiny_lm import answers, tiny_lm


def crates():
    """Answers to 25 boxes, and others to the boxes from number 12 on."""
    first, second = answers(50), answers(70)[24:]
    return {
        "a": first,
        "b": [
            dataclasses.replace(e, id=f"b{e.id}", response=f"I say: {e.response}")
            for e in second
        ],
    }


@pytest.fixture(scope="module")
def lm():
    return tiny_lm()


@pytest.fixture(scope="module")
def store(tmp_path_factory):
    return tmp_path_factory.mktemp("store")


@pytest.fixture(scope="module")
def config(store, tmp_path_factory):
    return {
        "name": "tiny",
        "data": [{"name": "a"}, {"name": "b"}],
        "detectors": ["toha"],
        "protocol": "holdout",
        "test_share": 0.4,
        "store": str(store),
        "out": str(tmp_path_factory.mktemp("runs")),
    }


@pytest.fixture(scope="module")
def result(config, lm):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(running, "model", lambda name, *_, **__: lm)
        patch.setattr(running, "load_dataset", lambda name, **_: crates()[name])
        return experiments.run(config, progress=False)


def test_transfer_between_data_sets(result):
    pairs = [("a", "a"), ("a", "b"), ("b", "a"), ("b", "b")]
    assert [(part.train, part.test) for part in result.judged] == pairs
    parts = dict(zip(pairs, result.judged, strict=True))
    text = (result.folder / "results.md").read_text("utf-8")
    for (train, test), part in parts.items():
        one = result.data[test]
        rows = part.frame["row"].to_numpy()
        for name in ("toha", "tfidf"):
            score = result.fitted[train][name].score(one.inputs[name])[rows]
            (row,) = [
                r
                for r in result.rows
                if (r["train"], r["test"], r["method"]) == (train, test, name)
            ]
            area = roc_auc_score(one.labels[rows], score)
            assert row["AUROC"] == pytest.approx(area)
        whole = len(parts[test, test].frame)
        assert part.left_out == whole - len(rows)
        told = f"trained on: {part.left_out} of {whole}." in text
        assert told == (part.left_out > 0) == (train != test)
    areas = result.table.query("method == 'toha'")["AUROC"]
    assert areas.nunique() == 4  # other data and other fits in every cell
    assert "## toha: AUROC, trained on rows, tested on columns" in text
    assert "## Trained on a, tested on b" in text


def test_no_source_is_both_trained_on_and_tested(result):
    tested = {
        (part.train, part.test): {
            result.data[part.test].examples[row].group for row in part.frame["row"]
        }
        for part in result.judged
    }
    every = {name: {e.group for e in one.examples} for name, one in result.data.items()}
    for train, test in (("a", "b"), ("b", "a")):
        trained = every[train] - tested[train, train]
        assert trained & tested[test, test]  # what the split by itself would leak
        assert tested[train, test] == tested[test, test] - trained


def test_figures_and_cards_of_several_data_sets(result):
    names = {path.stem for path in result.folder.glob("*.png")}
    kinds = ("auroc", "roc", "pr", "scores", "calibration", "heads_toha")
    assert {f"{kind}_{label}" for kind in kinds for label in "ab"} <= names
    for label in "ab":
        card = result.folder / "fitted" / label / "toha" / "card.json"
        (row,) = [
            row
            for row in result.rows
            if row["method"] == "toha" and row["train"] == row["test"] == label
        ]
        assert f'"AUROC": {row["AUROC"]}' in card.read_text("utf-8")
        assert card.read_text("utf-8").count('"AUROC"') == 1


def test_data_sets_of_the_same_sources(config, lm, monkeypatch):
    """What one data set tests, the other trains on."""
    sets = {
        name: [dataclasses.replace(e, split=parts[int(e.id) < 20]) for e in answers(40)]
        for name, parts in (("a", ("train", "test")), ("b", ("test", "train")))
    }
    monkeypatch.setattr(running, "model", lambda name, *_, **__: lm)
    monkeypatch.setattr(running, "load_dataset", lambda name, **_: sets[name])
    changes = ["protocol=official", "name=same", "detectors=[mtop_div]"]
    with pytest.raises(ValueError, match="'a' and 'b' share sources.* 0 of 20 test"):
        experiments.run(config, changes, progress=False)


@pytest.fixture
def two_models(config, lm, monkeypatch):
    models = {"smollm2-135m": lm, "other": tiny_lm(seed=1)}
    monkeypatch.setattr(running, "model", lambda name, *_, **__: models[name])
    examples = [
        dataclasses.replace(e, labels=(Label(0, 5),) if e.label else ())
        for e in answers(50)
    ]
    monkeypatch.setattr(running, "load_dataset", lambda name, **_: examples)
    return config | {"data": [{"name": "a"}]}


def least_squares(source, target, rows, ridge=1e-4):
    """A ridge regression with an intercept, as least squares of more rows."""
    source, target = (np.asarray(one, float) for one in (source, target))
    middle, offset = source.mean(0), target.mean(0)
    heads = source.shape[1]
    tall = np.concatenate([source - middle, np.sqrt(ridge) * np.eye(heads)])
    below = np.zeros((heads, target.shape[1]))
    weights = np.linalg.lstsq(tall, np.concatenate([target - offset, below]))[0]
    return (np.asarray(rows, float) - middle) @ weights + offset


@pytest.mark.parametrize("shape", ["tall", "wide", "collinear"])
def test_heads_are_predicted_by_least_squares(shape):
    rng = np.random.default_rng(0)
    rows, heads = {"tall": (60, 8), "wide": (20, 30), "collinear": (60, 8)}[shape]
    source = rng.random((rows + 10, heads), np.float32)
    if shape == "collinear":
        source[:, 1], source[:, 2], source[:, 3] = source[:, 0], 2 * source[:, 0], 0.5
    target = (source @ rng.normal(size=(heads, 5))).astype(np.float32)
    target += rng.normal(size=target.shape).astype(np.float32) / 10
    found = predicted_heads(source[:rows], target[:rows], source)
    want = least_squares(source[:rows], target[:rows], source)
    assert found.dtype == np.float32 and np.isfinite(found).all()
    np.testing.assert_allclose(found, want, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("name", ["lookback_probe", "lookback_lens"])
def test_a_classifier_judges_what_another_model_reads(two_models, lm, store, name):
    changes = [f"detectors=[{name}]"]
    table = experiments.across_models(two_models, "other", changes, progress=False)
    assert [*table.columns] == ["detector", "fitted on", "AUROC", "low", "high"]
    area = table.set_index("fitted on")["AUROC"]
    detector = build(name)
    examples = running.load_dataset("a")
    ours, theirs = (
        collect(m, examples, [detector], Store(store))
        for m in (lm, running.model("other", "float32"))
    )
    x, z = (one.inputs[name] for one in (theirs, ours))
    train, test = splitting.splits(experiments.load_config(two_models), ours, "a")[0]
    weight = np.ones(len(ours.labels))
    targets = Targets(ours.labels, ours.groups, weight, jax.random.key(0)).only(train)
    fitted = fit(detector, z, targets)
    if name == "lookback_lens":
        whole = least_squares(x.whole[train], z.whole[train], x.whole)
        mapped = z._replace(whole=whole.astype(np.float32))
    else:
        mapped = least_squares(x[train], z[train], x).astype(np.float32)
    y = ours.labels[test]
    first, other, transferred = (
        roc_auc_score(y, one.score(inputs)[test])
        for one, inputs in (
            (fitted, z),
            (fit(detector, x, targets), x),
            (fitted, mapped),
        )
    )
    assert area["transferred"] == pytest.approx(transferred, abs=1e-6)
    assert area["first"] == pytest.approx(first)
    assert area["other"] == pytest.approx(other)


def test_what_two_models_read_must_pair_up(two_models, lm, store, monkeypatch):
    wrong = ["detectors=[{attention_pooling: {layer: 1}}]"]
    with pytest.raises(ValueError, match="one vector an answer; use lookback_probe"):
        experiments.across_models(two_models, "other", wrong)
    chosen = [build("lookback_probe")]
    one = collect(lm, running.load_dataset("a"), chosen, Store(store), unit="span")

    def changed(**changes):
        return dataclasses.replace(
            one, source=dataclasses.replace(one.source, **changes)
        )

    few = changed(parts=one.source.parts[:-1])
    failed, too = (
        changed(errors={3: why}) for why in ("5 tokens too long", "9 tokens too long")
    )
    changes = ["detectors=[lookback_probe]", "unit=span"]
    for first, second, problem in (
        (
            one,
            few,
            f"different spans, {len(one.examples)} and {len(few.examples)}; use",
        ),
        (one, failed, r"could read rows \[3\]"),
    ):
        both = iter([{"a": first}, {"a": second}])
        monkeypatch.setattr(running, "read_data", lambda *_, both=both: next(both))
        with pytest.raises(ValueError, match=problem):
            experiments.across_models(two_models, "other", changes)
    broken = one.inputs["lookback_probe"].copy()
    broken[2, 1] = np.nan
    broken = dataclasses.replace(one, inputs={"lookback_probe": broken})
    name = one.examples[2].id
    for both, which in (((broken, one), "first"), ((one, broken), "other")):
        pairs = iter([{"a": each} for each in both])
        monkeypatch.setattr(running, "read_data", lambda *_, pairs=pairs: next(pairs))
        problem = f"head 1 of the {which} model is nan at row 2, answer {name!r}; leave"
        with pytest.raises(ValueError, match=problem):
            experiments.across_models(two_models, "other", changes)
    both = iter([{"a": failed}, {"a": too}])  # both models stumble, each over its own
    monkeypatch.setattr(running, "read_data", lambda *_: next(both))
    assert len(experiments.across_models(two_models, "other", changes)) == 3
