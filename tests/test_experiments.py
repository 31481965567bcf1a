"""Fitting, protocols, runs and sweeps, on a tiny model and few answers."""

import dataclasses
import json
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pandas as pd
import pytest
import thorough
from sklearn.feature_extraction.text import TfidfTransformer
from sklearn.linear_model import LogisticRegression
from sklearn.metrics import f1_score, precision_score, recall_score, roc_auc_score
from sklearn.preprocessing import StandardScaler

import jaxhal
from chat_server import serving
from jaxhal import detectors, experiments, plotting
from jaxhal.classifiers import selection
from jaxhal.detectors import (
    CATALOGUE,
    Targets,
    build,
    closed_book,
    ensemble,
    scores_of,
)
from jaxhal.detectors.base import held_out
from jaxhal.detectors.lookback_lens import lookback_spans
from jaxhal.detectors.series import Series
from jaxhal.detectors.toha import Heads
from jaxhal.evaluation import (
    Decided,
    Isotonic,
    Measured,
    adapted,
    aurc,
    auroc,
    coverage_at_precision,
    decided,
    ece,
    ece_by_chance,
    interval,
    prr,
)
from jaxhal.evaluation.guarantees import STEPS
from jaxhal.evaluation.promises import Highlights, kept_highlights
from jaxhal.evaluation.splits import grouped_kfold
from jaxhal.experiments import (
    figures,
    folder,
    promises,
    running,
    splitting,
)
from jaxhal.experiments.answers import reports
from jaxhal.experiments.config import Data, load_config
from jaxhal.experiments.tokens import first_highlights, token_table
from jaxhal.io import sealing
from jaxhal.models import lm as lms
from jaxhal.models.devices import device_name
from jaxhal.reading import parts
from jaxhal.reading.store import Store
from jaxhal.reading.units import Part, parts_of
from jaxhal.reporting import results
from jaxhal.reporting.markdown import escaped
from jaxhal.scoring import saving
from jaxhal.scoring.fitting import fit
from jaxhal.scoring.inputs import collect, frame_of
from jaxhal.scoring.tokens import highlights
from jaxhal.types import Example, Label
from tiny_lm import ordered, read_into, tiny_lm

# Most tests replace them.
MODEL, FIGURES = running.model, folder.figures

TRAINED = [
    "toha",
    "toha_supervised",
    "topology_probe",
    "lookback_lens",
    "lookback_probe",
    "linear_probe",
    {"hidden_probe": {"layer": 1}},
    {"mlp_probe": {"layer": 1}},
    {"attention_pooling": {"layer": 1}},
    {"token_probe": {"layer": 1}},
    "tfidf",
]


def labelled(count: int = 60) -> list[Example]:
    """Three answers to a source; made-up ones are longer and carry a span."""
    examples = []
    for number in range(count):
        source, made_up = number // 3, number % 3 == 0 or number % 7 == 0
        context = f"Crate {source} holds {'very ' * (source % 4)}ripe pears."
        response = f"It holds pears, {number}."
        labels = ()
        if made_up:
            start = len(response)
            response += " And a dragon lives there."
            labels = (Label(start + 1, len(response) - 1),)
        examples.append(
            Example(
                response,
                context=context,
                question="What is in it?",
                id=f"a{number}",
                labels=labels,
                source=f"s{source}",
                split="train" if source < 14 else "test",
            )
        )
    return examples


@pytest.fixture(scope="module")
def lm():
    return tiny_lm()


@pytest.fixture(scope="module")
def store(tmp_path_factory):
    return tmp_path_factory.mktemp("store")


@pytest.fixture(scope="module")
def data(lm, store):
    chosen = [build(one) for one in [*TRAINED, "novel_words", "context_gain_count"]]
    return collect(lm, labelled(), chosen, Store(store))


@pytest.fixture
def here(lm, store, tmp_path, monkeypatch):
    """Configurations find the tiny model and the examples above; nothing is drawn."""
    monkeypatch.setattr(folder, "figures", lambda *_: ())
    monkeypatch.setattr(running, "model", lambda name, *_, **__: lm)
    monkeypatch.setattr(running, "load_dataset", lambda name, **options: labelled())
    return {
        "name": "tiny",
        "data": [{"name": "crates"}],
        "detectors": ["toha", "lookback_probe", "context_gain"],
        "store": str(store),
        "out": str(tmp_path),
    }


@pytest.fixture
def drawn_here(here, monkeypatch):
    monkeypatch.setattr(folder, "figures", FIGURES)
    return here


def targets_of(data, rows=None) -> Targets:
    everything = Targets(
        data.labels, data.groups, np.ones(len(data.labels)), jax.random.key(0)
    )
    return everything if rows is None else everything.only(rows)


def test_inputs_equal_those_of_one_answer(lm, data):
    """Chunks, padding and the store change nothing."""
    for number in (0, 1, 34):
        example = data.examples[number]
        batch = lm.encode([example])
        features = dict(
            jaxhal.read(
                lm,
                batch,
                detectors.features_of(
                    [build("linear_probe"), build("toha"), build("lookback_probe")]
                ),
            )
        )
        features["valid"] = batch.response_mask
        for name in ("linear_probe", "toha", "lookback_probe"):
            alone = np.asarray(build(name).inputs(features))[0]
            np.testing.assert_allclose(
                data.inputs[name][number], alone, atol=2e-5, err_msg=name
            )


def test_context_gain_counts_tokens_the_context_hurts(lm, data):
    for number in (0, 4):
        example = data.examples[number]
        logp = {"logprob": jaxhal.TokenLogprob()}
        opened = jaxhal.read(lm, lm.encode([example]), logp)["logprob"]
        alone = jaxhal.read(lm, lm.encode([closed_book(example)]), logp)["logprob"]
        count = len(data.rows[number].response_ids)
        gain = np.asarray(opened)[0, :count] - np.asarray(alone)[0, :count]
        assert data.inputs["context_gain_count"][number] == (gain < 0).sum()


def test_closed_book_needs_a_question():
    summary = Example("s", prompt="Summarise: TEXT now", context="TEXT")
    assert closed_book(summary).prompt == "Summarise:  now"
    with pytest.raises(ValueError, match="no question apart from its context"):
        closed_book(Example("yes", context="C"))


def test_spans_are_those_of_lookback_lens():
    rng = np.random.default_rng(0)
    ratio = rng.random((2, 3, 4, 9)).astype(np.float32)  # layer batch heads response
    text = np.arange(9) < np.array([[8], [6], [7]])  # one more has none
    marked = np.zeros((3, 9), bool)
    marked[0, [2, 3, 6]] = True
    marked[1, [0, 5]] = True
    features = {"lookback": ratio, "text": text, "marked": marked}
    spans = lookback_spans(jax.tree.map(jnp.asarray, features))
    expected = [
        [[2, 3, 6], [0, 1], [7]],
        [[0, 5], [], []],
        [[], [], []],
    ]
    for sample, parts_ in enumerate(expected):
        for at, tokens in enumerate(parts_):
            assert spans.there[sample, at] == bool(tokens)
            if tokens:
                mean = ratio[:, sample][..., tokens].mean(-1).ravel()
                np.testing.assert_allclose(spans.parts[sample, at], mean, rtol=1e-5)
        whole = ratio[:, sample][..., text[sample]].mean(-1).ravel()
        np.testing.assert_allclose(spans.whole[sample], whole, rtol=1e-5)


def test_choice_of_layer_and_strength_equals_a_slow_search():
    rng = np.random.default_rng(1)
    labels = rng.integers(0, 2, 90)
    groups = np.arange(90) // 2
    x = rng.normal(size=(90, 3, 6)).astype(np.float32)
    x[:, 1, :2] += 0.8 * labels[:, None]
    weight = np.ones(90)
    weight[80:] = 0
    strengths = (0.01, 1.0)
    chosen, _ = selection.choose_linear(x, labels, groups, weight, strengths)
    best = {}
    folds = grouped_kfold(labels[:80], groups[:80].tolist(), 5)
    for layer in range(3):
        for c in strengths:
            found = []
            for train, test in folds:
                scale = StandardScaler().fit(x[train, layer])
                model = LogisticRegression(C=c, max_iter=1000)
                model.fit(scale.transform(x[train, layer]), labels[train])
                score = model.decision_function(scale.transform(x[test, layer]))
                found.append(roc_auc_score(labels[test], score))
            best[layer, c] = np.mean(found)
    layer, c = max(best, key=lambda key: best[key])
    assert (int(chosen.layer), float(chosen.strength)) == (layer, pytest.approx(c))
    assert float(chosen.auroc) == pytest.approx(best[layer, c], abs=2e-3)
    scale = StandardScaler().fit(x[:80, layer])
    model = LogisticRegression(C=c, max_iter=1000)
    model.fit(scale.transform(x[:80, layer]), labels[:80])
    np.testing.assert_allclose(
        selection.chosen_logits(chosen, x),
        model.decision_function(scale.transform(x[:, layer])),
        atol=5e-3,
    )


@pytest.mark.parametrize("spec", TRAINED, ids=str)
def test_what_is_left_out_does_not_teach(data, spec):
    """Rows of weight 0 may hold anything: neither labels nor inputs reach the fit."""
    detector = build(spec)
    rows = np.flatnonzero([e.split == "train" for e in data.examples])
    hidden = np.setdiff1d(np.arange(len(data.labels)), rows)
    targets = targets_of(data, rows)
    inputs = data.inputs[detector.name]
    fitted = fit(detector, inputs, targets)
    order = np.arange(len(data.labels))
    order[hidden] = hidden[::-1]
    spoiled = ordered(inputs, order)
    labels = np.array(targets.labels)
    labels[hidden] = 1 - labels[hidden]
    again = fit(detector, spoiled, targets._replace(labels=labels))
    np.testing.assert_allclose(
        fitted.score(inputs)[rows], again.score(inputs)[rows], rtol=1e-3, atol=1e-4
    )
    assert fitted.threshold == pytest.approx(again.threshold, rel=1e-3, abs=1e-4)
    probability = fitted.probabilities(fitted.score(inputs))
    assert ((0 <= probability) & (probability <= 1)).all()


def test_dragons_are_found(data):
    """The made-up answers are longer, so trained probes must rank them."""
    rows = np.flatnonzero([e.split == "train" for e in data.examples])
    test = np.setdiff1d(np.arange(len(data.labels)), rows)
    for name in ("linear_probe", "lookback_probe", "tfidf"):
        fitted = fit(build(name), data.inputs[name], targets_of(data, rows))
        score = fitted.score(data.inputs[name])[test]
        assert roc_auc_score(data.labels[test], score) > 0.9, name


def test_an_ensemble_by_itself_and_from_known_members(data):
    members = [build("linear_probe"), build("novel_words")]
    both = ensemble(members)
    inputs = {m.name: data.inputs[m.name] for m in members}
    targets = targets_of(data)
    known = {m.name: fit(m, inputs[m.name], targets) for m in members}
    one = fit(both, inputs, targets)
    two = fit(both, inputs, targets, known=known)
    np.testing.assert_allclose(one.score(inputs), two.score(inputs), rtol=1e-3)
    three = both.fit(inputs, targets).params
    score = both.decide(three, jax.device_put(inputs))
    np.testing.assert_allclose(one.score(inputs), score, rtol=1e-3)
    with pytest.raises(ValueError, match="at least two detectors"):
        ensemble(members[:1])


def test_fitted_detectors_judge_new_answers(lm, data):
    fitted = fit(build("lookback_lens"), data.inputs["lookback_lens"], targets_of(data))
    (report,) = jaxhal.score(lm, [data.examples[3]], [fitted])
    expected = fitted.score(data.inputs["lookback_lens"])[3]
    assert report.scores["lookback_lens"] == pytest.approx(expected, abs=1e-3)
    assert all(0 <= t.scores["lookback_lens"] <= 1 for t in report.tokens)
    with pytest.raises(ValueError, match="'toha' must be fitted"):
        jaxhal.score(lm, [data.examples[3]], ["toha"])


def test_precision_threshold(data):
    targets = targets_of(data)
    inputs = data.inputs["novel_words"]
    fitted = fit(build("novel_words"), inputs, targets, precision=1.0)
    flagged = inputs >= fitted.threshold
    assert flagged.any() and data.labels[flagged].all()


def test_a_run_leaves_its_directory(drawn_here, tmp_path):
    result = experiments.run(drawn_here, progress=False)
    names = {path.name for path in (tmp_path / "tiny").iterdir()}
    assert {
        "config.yaml", "scores.parquet", "results.json", "results.md", "report.html",
        "auroc.png", "roc.png", "pr.png", "scores.png", "calibration.png",
        "heads_toha_crates.png", "forest_crates_hallucinated.png",
        "forest_crates_grounded.png", "timing.png",
    } <= names  # fmt: skip
    scores = pd.read_parquet(tmp_path / "tiny" / "scores.parquet")
    assert set(scores["id"]) == {e.id for e in labelled() if e.split == "test"}
    by_method = result.table.set_index("method")
    controls = {d.name for d in (make() for make in CATALOGUE.values()) if d.control}
    assert set(by_method.index[by_method["control"]]) == controls
    for name in by_method.index:
        expected = roc_auc_score(scores["label"], scores[name])
        assert by_method.loc[name, "AUROC"] == pytest.approx(expected)
        flagged = scores[f"{name}.flagged"] == scores["label"]
        assert by_method.loc[name, "accuracy"] == pytest.approx(flagged.mean())
        one = saving.load(tmp_path / "tiny" / "fitted" / "crates" / name)
        prior = np.mean([e.label for e in labelled() if e.split == "train"])
        given, _ = adapted(
            scores[f"{name}.probability"],
            prior,
            scores["source"],
            known=one.probabilities(one.calibrated_on.scores),
            known_groups=one.calibrated_on.sources,
        )
        expected = ece(given, scores["label"])
        assert by_method.loc[name, "ECE adapted"] == pytest.approx(expected)
        assert by_method.loc[name, "ECE by chance"] == pytest.approx(
            ece_by_chance(given)
        )
    found = json.loads((tmp_path / "tiny" / "results.json").read_text("utf-8"))
    assert found["rows"] == json.loads(json.dumps(result.rows))
    kept = {row["method"]: row for row in found["selective"]}
    assert kept.keys() == set(by_method.index)
    for name, row in kept.items():
        given = scores[name], scores["label"]
        assert (row["PRR"], row["AURC"]) == pytest.approx((prr(*given), aurc(*given)))
        assert row["coverage at 90 %"] == coverage_at_precision(*given, 0.9)
        assert row["PRR low"] <= row["PRR"] <= row["PRR high"]
    text = (tmp_path / "tiny" / "results.md").read_text("utf-8")
    assert "| recall | ECE | ECE adapted | ECE by chance | vs best control |" in text
    assert (
        "| data | method | PRR [95 %] | AURC [95 %] | coverage at 90 % [95 %] |" in text
    )
    page = (tmp_path / "tiny" / "report.html").read_text("utf-8")
    assert "data:image/png" in page and 'src="auroc' not in page
    assert f"Below are {len(scores)} answers" in page and "fitted without them" in page
    for example in labelled():
        assert (f'"id":"{example.id}"' in page) == (example.split == "test")
    stale = tmp_path / "tiny" / "fitted" / "crates" / "linear_probe"
    stale.mkdir()
    mine = tmp_path / "tiny" / "mine.png"
    mine.touch()
    again = experiments.run(tmp_path / "tiny" / "config.yaml", progress=False)
    assert again.rows == result.rows  # the written configuration repeats the run
    assert not stale.exists()
    mine.unlink()  # what no run made stays
    assert names == {path.name for path in (tmp_path / "tiny").iterdir()}


def test_what_every_method_costs_alone(here, tmp_path, monkeypatch):
    timed, methods = [], ["toha", "toha_supervised", "predictive_entropy"]
    run = running._seconds

    def seconds(lm, examples, detector, batch_size):
        timed.append((detector.name, len(examples)))
        return run(lm, examples, detector, batch_size)

    monkeypatch.setattr(running, "_seconds", seconds)
    draw = {"n": 2, "max_new_tokens": 2, "temperature": 1.0}
    chosen = [*methods[:2], {methods[2]: {"draw": draw}}]
    result = experiments.run(here | {"detectors": chosen, "timed": 3}, progress=False)
    costs = result.table.set_index("method")[results.COST]
    assert (costs > 0).all()
    assert costs["toha"] == costs["toha_supervised"]  # compute the same
    names = [name for name, _ in timed]
    assert names.count("toha") == 2 and "toha_supervised" not in names
    assert {count for _, count in timed} == {3}
    text = (tmp_path / "tiny" / "results.md").read_text("utf-8")
    row = next(line for line in text.splitlines() if line.startswith("| toha |"))
    assert row.endswith(f"| {costs['toha']:.0f} |")
    assert device_name() in text
    # Every method says what it computes, and what by.
    said = text.partition("## Methods")[2]
    for detector in (build("toha"), build("novel_words")):
        assert f"- {detector.name}: {detector.summary} ({detector.reference})" in said


def test_kinds_of_spans_are_judged_by_fits_that_lacked_them(here, lm, monkeypatch):
    some = labelled(180)
    for at, each in enumerate(some):
        kind = "abc"[at // 3 % 3]
        labels = tuple(span._replace(label=kind) for span in each.labels)
        some[at] = dataclasses.replace(each, labels=labels)
    monkeypatch.setattr(running, "load_dataset", lambda name, **options: some)
    one = {"protocol": "kinds", "folds": 2, "detectors": ["lookback_probe"]}
    found = experiments.run(here | one, progress=False)
    kinds = np.array([[*splitting.kinds_of(each), ""][0] for each in some])
    (splits,) = found.splits.values()
    for train, test in splits:
        assert not set(kinds[train]) & set(kinds[test]) - {""}
    written = json.loads((found.folder / "results.json").read_text())["kinds"]
    assert [row["kind"] for row in written] == ["a", "b", "c"]

    def area(name, *kinds_of):
        """Of pairs that one fit judged, pair by pair."""
        won = []
        for part in found.judged:
            kind, score = kinds[part.frame["row"]], part.frame[name].to_numpy()
            bad, good = score[np.isin(kind, kinds_of)], score[kind == ""]
            won += ((bad[:, None] > good) + (bad[:, None] == good) / 2).ravel().tolist()
        return np.mean(won)

    for row in found.rows:
        assert row["AUROC"] == pytest.approx(area(row["method"], *"abc"), abs=1e-6)
        assert row["low"] <= row["AUROC"] <= row["high"]
    for row in written:
        assert row["answers"] == (kinds == row["kind"]).sum()
        for name in (one.name for one in found.methods):
            assert row[name] == pytest.approx(area(name, row["kind"]), abs=1e-6)
            assert row[f"{name} low"] <= row[name] <= row[f"{name} high"]
    text = (found.folder / "results.md").read_text()
    assert "## Kinds" in text and "## Selective" not in text
    # No curve pools scores of fits that are not comparable.
    names = {name for name, _ in figures.figures(found, lm)}
    assert "auroc" in names and not names & {"roc", "pr", "scores", "calibration"}


def test_a_part_of_one_class_is_said_before_anything_is_fitted(data, drawn_here):
    rare = dataclasses.replace(data)
    few = [n for n in range(60) if data.labels[n] == 0][:2]
    labels = np.ones(60, int)
    labels[few] = 0
    some = [
        dataclasses.replace(one, labels=None, label=int(label))
        for one, label in zip(data.examples, labels, strict=True)
    ]
    vars(rare)["examples"] = some
    assert rare.labels.tolist() == labels.tolist()
    config = load_config(drawn_here, ["protocol=kfold", "folds=5"])
    wrong = (
        "data set 'crates', protocol 'kfold': all 12 answers to judge in split .* of 5"
    )
    with pytest.raises(ValueError, match=f"{wrong} are hallucinated; use 'grouped'"):
        splitting.splits(config, rare, "crates")


@pytest.mark.parametrize(
    "protocol", ["grouped", "toha", *thorough.more("kfold", "stratified")]
)
def test_protocols_with_several_splits(drawn_here, data, protocol, monkeypatch):
    changes = [f"protocol={protocol}", "folds=3", "train_size=30", "seed=1"]
    config = load_config(drawn_here, changes)
    splits = splitting.splits(config, data, "crates")
    assert len(splits) == (5 if protocol == "toha" else 3)
    for train, test in splits:
        assert not set(train) & set(test)
        if protocol == "grouped":
            assert not set(data.groups[train]) & set(data.groups[test])
        if protocol == "stratified":
            assert abs(data.labels[test].sum() - data.labels.sum() / 3) < 1
            assert set(data.groups[train]) & set(data.groups[test])
    drawn, real = [], plotting.roc_curves
    monkeypatch.setattr(
        plotting, "roc_curves", lambda *given: drawn.append(given) or real(*given)
    )
    changes = ["detectors=[lookback_probe,mtop_div]"]
    result = experiments.run(config, changes, progress=False)
    rows = result.table.set_index("method")
    scores, _, intervals, _ = drawn[0]
    for name in ("lookback_probe", "mtop_div"):
        parts = [part.frame for part in result.judged]
        folds = [roc_auc_score(part["label"], part[name]) for part in parts]
        assert rows.loc[name, "AUROC (folds)"] == pytest.approx(np.mean(folds))
        # Only fits of their own need a probability to be compared.
        own = name == "mtop_div" or protocol == "toha"
        once = pd.concat(parts).drop_duplicates("row").sort_values("row")
        expected = once[name if own else f"{name}.probability"]
        area = roc_auc_score(once["label"], expected)
        assert rows.loc[name, "AUROC"] == pytest.approx(area), name
        np.testing.assert_allclose(scores[name], expected, rtol=1e-6)
        assert intervals[name] == tuple(rows.loc[name, ["AUROC", "low", "high"]])
    text = (result.folder / "results.md").read_text("utf-8")
    seed = {"kfold": "42, as published", "toha": "42 to 46, as published"}
    assert f"Seed 1; seed of the split {seed.get(protocol, 1)}." in text
    assert ("One fit judged all parts" in text) == (protocol == "toha")
    place = result.folder / "fitted" / "crates" / "mtop_div" / "card.json"
    note = json.loads(place.read_text("utf-8")).get("note", "")
    assert ("test parts of 3 fits" in note) == (protocol != "toha")


def test_what_test_parts_are_pooled_by():
    """A score that ranked the training part the wrong way round still ranks."""
    rng = np.random.default_rng(0)
    frames = []
    for rows in (np.arange(20), np.arange(20, 40)):
        score = rng.normal(size=20).astype(np.float32)
        label, never = (score < 0).astype(int), np.zeros(20, bool)
        frames.append(
            pd.DataFrame(
                {"row": rows, "source": rows, "label": label}
                | {
                    key: value
                    for name in ("toha", "mtop_div")
                    for key, value in (
                        (name, score),
                        (f"{name}.probability", 0.5),
                        (f"{name}.adapted", 0.5),
                        (f"{name}.flagged", never),
                    )
                }
            )
        )
    chosen = [build("toha"), build("mtop_div")]
    for fits, expected in (((0, 0), (0.0, 0.0)), ((0, 1), (0.5, 0.0))):
        judged = [
            results.Judged("a", "a", fold, fit, 0, frame)
            for fold, (fit, frame) in enumerate(zip(fits, frames, strict=True))
        ]
        found = {r["method"]: r["AUROC"] for r in results.table(judged, chosen)}
        assert (found["toha"], found["mtop_div"]) == expected


def test_a_run_leaves_its_detectors(here, tmp_path):
    result = experiments.run(here, progress=False)
    beats = {row["method"]: row["beats controls"] for row in result.rows}
    assert {"yes", "no"} & set(beats.values())
    for name, fitted in result.fitted["crates"].items():
        again = saving.load(tmp_path / "tiny" / "fitted" / "crates" / name)
        assert again.beats == fitted.beats == beats[name]
        marks = fitted.detector.tokens is not None and fitted.beats == "yes"
        assert (again.highlights is not None) == marks
        assert fitted.detector.control == (again.beats is None)
        inputs = result.data["crates"].inputs[name]
        np.testing.assert_array_equal(again.score(inputs), fitted.score(inputs))
    place = tmp_path / "tiny" / "fitted" / "crates"
    card = json.loads((place / "toha" / "card.json").read_text("utf-8"))
    assert card["model"] == "smollm2-135m" and card["data"]["answers"] == 42
    assert [row["method"] for row in card["metrics"]] == ["toha"]
    ready = jaxhal.FittedDetectors.from_pretrained(place)
    assert ready.about == result.ready("crates").about
    assert {one.dtype for one in ready} == {"float32"}
    assert f"42 answers to {card['data']['sources']} sources, " in ready.card()
    for name in ready.fitted:  # as cards were before
        about = sealing.read(place / name / "card.json")
        del about["note"], about["data"]["sources"]
        sealing.write(place / name / "card.json", about)
    older = jaxhal.FittedDetectors.from_pretrained(place)
    older.save_pretrained(tmp_path / "again")
    again = jaxhal.FittedDetectors.from_pretrained(tmp_path / "again")
    assert again.about == older.about and again.rows == ready.rows
    assert (
        "Fitted to crates: 42 answers, " in (tmp_path / "again/README.md").read_text()
    )
    for name, alike in experiments.fit(here, progress=False).fitted.items():
        inputs = result.data["crates"].inputs[name]
        for one in (again[name], alike):
            np.testing.assert_array_equal(one.score(inputs), ready[name].score(inputs))
        assert alike.reader is not None is again[name].reader
    for wrong in ({"unit": "span"}, {"tuning": {}}):
        with pytest.raises(ValueError, match="one data set, to whole answers and with"):
            experiments.fit({**here, **wrong})


def test_stored_answers_are_judged_like_those_read_anew(lm, data):
    names = ["lookback_probe", "toha", "topology_probe", "novel_words"]
    fitted = {n: fit(build(n), data.inputs[n], targets_of(data)) for n in names}
    kept = reports(data, fitted, [7, 0, 33])
    chosen = [data.examples[number] for number in (7, 0, 33)]
    for one, other in zip(
        kept, jaxhal.score(lm, chosen, [*fitted.values()]), strict=True
    ):
        assert one.id == other.id and one.flagged == other.flagged
        for name in names:
            assert one.scores[name] == pytest.approx(other.scores[name], abs=1e-4)
            probability = fitted[name].probabilities([one.scores[name]])[0]
            assert one.probabilities[name] == pytest.approx(probability)
            flagged = fitted[name].flags([one.scores[name]])[0]
            assert (name in one.flagged) == flagged
        assert [token.text for token in one.tokens] == [t.text for t in other.tokens]
        for a, b in zip(one.tokens, other.tokens, strict=True):
            assert a.scores == pytest.approx(b.scores, abs=1e-4)
        for name, values in one.heads.items():
            np.testing.assert_allclose(values, other.heads[name], atol=1e-4)


def test_token_table_against_scikit_learn(data):
    names = ["lookback_probe", "novel_words"]
    fitted = {n: fit(build(n), data.inputs[n], targets_of(data)) for n in names}
    train, test = np.arange(30), np.arange(30, 60)
    (row,) = token_table(data, fitted, train, test)
    assert row["method"] == "lookback_probe" and not row["control"]

    detector, params = (
        fitted["lookback_probe"].detector,
        fitted["lookback_probe"].params,
    )
    scores, labels = {}, {}
    for numbers, features in data.source.batches():
        values = np.asarray(detector.tokens(params, features))
        for at, number in enumerate(numbers):
            count = len(data.marked[number]) - 1  # without the end of the sequence
            scores[number] = values[at, :count]
            labels[number] = data.marked[number][:count]
    s, y = (np.concatenate([some[n] for n in test]) for some in (scores, labels))
    assert row["token AUROC"] == pytest.approx(roc_auc_score(y, s))
    seen, known = (
        np.concatenate([some[n] for n in train]) for some in (scores, labels)
    )
    best = max(f1_score(known, seen >= cut) for cut in np.unique(seen))
    cuts = [cut for cut in np.unique(seen) if f1_score(known, seen >= cut) == best]
    assert any(row["token F1"] == pytest.approx(f1_score(y, s >= cut)) for cut in cuts)
    assert row["tokens marked"] == pytest.approx(y.mean())
    sources = [data.groups[n] for n in test for _ in labels[n]]
    cut = row["threshold"]
    for name, metric in (
        ("AUROC", auroc),
        ("F1", lambda s, y: decided(s, y, cut)["f1"]),
    ):
        low, high = interval(metric, s, y, sources, repeats=200)
        assert (row[f"token {name} low"], row[f"token {name} high"]) == (low, high)
    text = results.short_markdown([row])
    assert f"{row['token F1']:.3f} [{low:.2f}, {high:.2f}]" in text
    source = dataclasses.replace(data.source, marked=[m & False for m in data.marked])
    nothing = dataclasses.replace(data, source=source)
    assert token_table(nothing, fitted, train, test) == []
    # Where it is hallucinated is not known of every answer.
    vague = dataclasses.replace(data)
    vars(vague)["examples"] = [
        dataclasses.replace(one, labels=None, label=1) if n in (4, 33) else one
        for n, one in enumerate(data.examples)
    ]
    without = np.setdiff1d(train, [4]), np.setdiff1d(test, [33])
    assert data.labels[[4, 33]].any()
    assert token_table(vague, fitted, train, test) == token_table(
        data, fitted, *without
    )


@pytest.fixture(scope="module")
def decides(data):
    """A detector that scores tokens and, whatever it is worth, decides."""
    name = "lookback_probe"
    some = fit(build(name), data.inputs[name], targets_of(data, np.arange(30)))
    worth = Measured("crates", 30, 10, 0.9)
    return dataclasses.replace(some, beats="yes", measured=worth)


def shown(lm, data, one, test, threshold):
    """Characters in spans of the reports, and in annotated ones."""
    given = [data.examples[n] for n in test]
    found = jaxhal.score(lm, given, [one], token_threshold=threshold, progress=False)
    assert {report.verdict for report in found} >= {"supported", "hallucinated"}
    held, true = (
        [
            [any(s.start <= at < s.end for s in spans) for at in range(len(e.response))]
            for e, spans in zip(given, some, strict=True)
        ]
        for some in ([r.spans for r in found], [e.labels for e in given])
    )
    return held, true


def test_span_f1_is_that_of_the_spans_a_report_shows(lm, data, decides):
    train, test = np.arange(30), np.arange(30, 60)
    (row,) = token_table(data, {"lookback_probe": decides}, train, test)
    held, true = shown(lm, data, decides, test, row["threshold"])
    both = np.concatenate(true), np.concatenate(held)
    for name, metric in (
        ("F1", f1_score), ("precision", precision_score), ("recall", recall_score),
    ):  # fmt: skip
        assert row[f"span {name}"] == pytest.approx(metric(*both))
    sources = [data.groups[n] for n, some in zip(test, held, strict=True) for _ in some]
    ends = interval(Decided("f1"), both[1] + 0.0, both[0], sources, repeats=200)
    assert (row["span F1 low"], row["span F1 high"]) == ends


def test_highlighted_characters_are_those_that_reports_show(lm, data, decides):
    test = [*range(30, 60)]
    (shares,) = highlights(data, {"lookback_probe": decides}, test).values()
    for step in (0, 90, 120, 200):
        held, true = shown(lm, data, decides, test, STEPS[step])
        for n, (some, marked) in enumerate(zip(held, true, strict=True)):
            pairs = zip(some, marked, strict=True)
            assert shares[n, step] == pytest.approx(
                np.mean([h for h, y in pairs if not y])
            )


def test_what_is_saved_knows_what_it_highlights(data, decides):
    """On the first split, of what beats the controls."""
    name, first, later = "lookback_probe", np.arange(40, 60), np.arange(6, 60)
    beats, no = (dataclasses.replace(decides, beats=one) for one in ("yes", "no"))
    frames = [frame_of(data, rows, {name: decides}) for rows in (first, later)]
    judged = [
        results.Judged("crates", "crates", n, n, 0, frame)
        for n, frame in enumerate(frames)
    ]
    found = first_highlights(data, {name: beats}, judged)
    (shares,) = highlights(data, {name: beats}, first.tolist()).values()
    sources = data.groups[first]
    for at, source in enumerate(np.unique(sources)):
        want = np.nanmean(shares[sources == source], 0)
        np.testing.assert_allclose(found[name][at], want, atol=1e-6)
    assert first_highlights(data, {name: no}, judged) == {}


def test_a_run_looks_at_promises_of_highlights(data, decides, monkeypatch):
    monkeypatch.setattr(promises, "SPLITS", 8)
    name, promised = "lookback_probe", [{"highlighted": 0.4}, {"recall": 0.5}]
    config = {"name": "a", "data": [{"name": "crates"}], "detectors": [name]}
    test, fitted = np.arange(6, 60), {name: decides}
    judged = results.Judged("crates", "crates", 0, 0, 0, frame_of(data, test, fitted))
    found = running.Result(
        load_config(config | {"promises": promised}),
        *(Path(), [decides.detector], {"crates": data}, {}, [judged]),
        *({"crates": fitted}, {}, [{"method": name, "beats controls": "yes"}]),
    )
    said, other = promises.rows(found)
    (shares,) = highlights(data, fitted, test.tolist()).values()
    one = Highlights(shares, data.groups[test].tolist())
    looked = kept_highlights(one, promised[0], splits=8)
    about = {"data": "crates", "method": name, "promise": promised[0]}
    assert said == about | looked and looked["made"] > 0
    text = promises.markdown([said, other])
    assert f"| crates | {name} | highlighted at most 0.4 | {said['made']:.2f} |" in text
    with pytest.raises(ValueError, match="unit is 'span' with a promise of highlight"):
        load_config(config | {"unit": "span", "promises": promised})


def test_a_sweep_reads_once(here, lm, tmp_path, monkeypatch):
    loads, reads = [], []
    monkeypatch.setattr(running, "model", MODEL)
    monkeypatch.setattr(lms, "load", lambda name, *_, **__: loads.append(name) or lm)
    real = parts.read
    monkeypatch.setattr(parts, "read", lambda *a, **k: reads.append(1) or real(*a, **k))
    changes = ["detectors=[novel_words,mtop_div]", "protocol=holdout"]
    changes.append(f"store={tmp_path / 'fresh'}")
    grid = {"seed": [0, 1], "test_share": [0.3, 0.5]}
    made = tmp_path / "tiny"
    lms._kept.cache_clear()
    experiments.sweep(here, {"seed": ["0", "1"]}, changes, progress=False)
    assert (made / "sweep.png").read_bytes().startswith(b"\x89PNG")
    once = len(reads)
    table = experiments.sweep(here, grid, changes, progress=False)
    lms._kept.cache_clear()  # of a tiny model under the name of a real one
    assert loads == ["smollm2-135m"]
    assert len(reads) == once > 0
    assert len(table[["seed", "test_share"]].drop_duplicates()) == 4
    assert len(pd.read_csv(made / "sweep.csv")) == len(table)
    assert not (made / "sweep.png").exists()  # not of this sweep, of two keys
    with pytest.raises(ValueError, match="grid is {}"):
        experiments.sweep(here, {})


def test_a_sweep_over_nothing(here, tmp_path, monkeypatch):
    """``None`` is YAML's null, not a word."""
    grid = {"data.0.sources": [None, 15], "precision": [None]}
    changes = ["detectors=[mtop_div]", "protocol=holdout"]
    table = experiments.sweep(here, grid, changes, progress=False)
    assert table["data.0.sources"].isna().any() and table["precision"].isna().all()
    assert table["precision (metric)"].notna().all()
    made = {path.name for path in (tmp_path / "tiny").iterdir()}
    runs = {"sources=null,precision=null", "sources=15,precision=null"}
    assert made == runs | {"sweep.csv"}


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ("folds=many", "folds|many"),
        ("fold=3", "unknown key 'fold'"),
        ("folds", "not of the form key=value"),
        ("protocol=guess", "protocol is 'guess'"),
        ("detectors=[]", "detectors is empty"),
        ("folds=1", "folds is 1; give at least 2"),
        ("test_share=1.5", "test_share is 1.5; give a share between 0 and 1"),
        ("train_size=-3", "train_size is -3; give at least 1"),
        ("batch_size=0", "batch_size is 0; give at least 1"),
        ("precision=1.5", "precision is 1.5; give a share above 0"),
        ("seed=-1", "seed is -1; give 0"),
        ("dtype=float99", "dtype is 'float99'; use one of float32, bfloat16"),
        ("calibration=none", "calibration is 'none'; use one of platt"),
        ("data.0.sources=0", "sources is 0; give at least 1"),
        ("data.0.label=a/b", "label is 'a/b'; it names one folder"),
        ("data.1.sources=3", "unknown key 'data.1'; 'data' has 1"),
        ("folds.x=3", "unknown key 'folds.x'; 'folds' is one value, 5"),
        ("detectors=[mtop_div", r"'detectors=\[mtop_div' is not YAML"),
        ("detectors=[toha,{toha: {max_heads: 3}}]", "two detectors are named 'toha'"),
        ("detectors=[tohha]", "did you mean 'toha'"),
        ("detectors=[{toha: {heads: 3}}]", "detector 'toha'"),
    ],
)
def test_bad_settings_are_found_before_reading(here, change, problem, monkeypatch):
    monkeypatch.setattr(running, "read_data", None)
    with pytest.raises(ValueError, match=problem):
        experiments.run(here, [change], progress=False)


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("- name: a", r"c\.yaml is a list; a configuration is a mapping of keys"),
        ("name: a\ndata: {b: 1}", "configuration: data is a mapping and has to be a l"),
        ("name: a\ndetectors: {toha: {}}", "configuration: detectors is a mapping and"),
        ("detectors: {a: {}}\ntuning: {rank: 3}", "n: detectors is a mapping and has"),
        ("name: a\ntimed: many", "configuration: timed: Value 'many' of type"),
    ],
)
def test_what_is_no_mapping_or_no_list(tmp_path, text, problem):
    path = tmp_path / "c.yaml"
    path.write_text(text)
    with pytest.raises(ValueError, match=problem):
        load_config(path)


def test_settings_that_the_data_does_not_allow(here):
    for change, problem in (
        (["protocol=toha", "train_size=60"], "train_size is 60 of 60"),
        (["data.0.sources=99"], "'crates' has 14 sources to train on; sources is 99"),
    ):
        with pytest.raises(ValueError, match=problem):
            experiments.run(here, change, progress=False)


def test_no_official_split_costs_no_reading(here, monkeypatch):
    """One within sources, and none at all."""
    monkeypatch.setattr(running, "collect", None)
    for names, problem in (
        (("train", "test"), "4 sources have answers to fit to and to judge"),
        (("", ""), r"it has the splits \[''\]; use 'grouped' or 'holdout'"),
    ):
        some = [
            dataclasses.replace(one, split=names[number % 2])
            for number, one in enumerate(labelled(12))
        ]
        monkeypatch.setattr(running, "load_dataset", lambda *_, some=some, **__: some)
        found = f"'crates', protocol 'official': {problem}"
        with pytest.raises(ValueError, match=found):
            experiments.run(here, progress=False)


def test_sources_are_drawn_around_an_official_test(monkeypatch):
    crates = [
        dataclasses.replace(
            one, split="test" if number % 3 else "train", source=f"{number}"
        )
        for number, one in enumerate(labelled()[:9])
    ]
    monkeypatch.setattr(running, "load_dataset", lambda *_, **__: crates)
    few = running.examples_of(Data("crates", sources=2), 0, "official")
    assert [one.split for one in few].count("train") == 2 and len(few) == 8
    assert len(running.examples_of(Data("crates", sources=2), 0, "grouped")) == 2
    three = running.examples_of(Data("crates", sources=3), 0, "official")
    assert three == crates
    with pytest.raises(ValueError, match="has 3 sources to train on; sources is 4"):
        running.examples_of(Data("crates", sources=4), 0, "official")


def test_what_an_official_split_has_beside_is_left_out(monkeypatch, capsys):
    parts = ("train", "validation", "test")
    crates = [
        dataclasses.replace(one, split=parts[number % 3], source=f"{number}")
        for number, one in enumerate(labelled()[:12])
    ]
    monkeypatch.setattr(running, "load_dataset", lambda *_, **__: crates)
    few = running.examples_of(Data("crates", sources=3), 0, "official")
    assert "4 of 12 answers are of the splits 'validation'" in capsys.readouterr().err
    assert sorted(one.split for one in few) == ["test"] * 4 + ["train"] * 3
    assert running.examples_of(Data("crates"), 0, "grouped") == crates


def test_a_span_of_no_kind_is_not_grounded():
    spans = (Label(0, 3, ""),)
    one = jaxhal.Example("Six pears.", prompt="How many?", labels=spans)
    assert splitting.kinds_of(one) == ["unknown"]


def test_answers_that_decline_can_be_left_out(monkeypatch, here, tmp_path):
    crates = labelled()
    decline = dataclasses.replace(crates[1], response="It is not mentioned.", id="none")
    monkeypatch.setattr(running, "load_dataset", lambda *_, **__: [decline, *crates])
    assert running.examples_of(Data("crates"), 0) == [decline, *crates]
    few = [f"out={tmp_path}", "detectors=[novel_words]", "data.0.refusals=false"]
    found = experiments.run(here, few, progress=False)
    text = (tmp_path / found.config.name / "results.md").read_text("utf-8")
    assert "- crates: 60 answers, 20 sources" in text
    assert "could not be read; refusals are left out" in text
    monkeypatch.setattr(running, "load_dataset", lambda *_, **__: [decline])
    with pytest.raises(
        ValueError, match="'crates': all answers decline; keep refusals"
    ):
        running.examples_of(Data("crates", refusals=False), 0)


def test_several_data_sets_are_split_once(here, monkeypatch):
    monkeypatch.setattr(running, "read_data", None)
    pair = [{"name": "crates", "label": "a"}, {"name": "crates", "label": "b"}]
    with pytest.raises(ValueError, match="protocol is 'kfold' with 2 data sets; use"):
        experiments.run(here | {"data": pair}, ["protocol=kfold"])


def test_a_folder_that_cannot_be_written_is_found_before_reading(
    here, tmp_path, monkeypatch
):
    monkeypatch.setattr(running, "read_data", None)
    (tmp_path / "taken").touch()
    with pytest.raises(OSError, match="cannot write the run: .*choose another 'out'"):
        experiments.run(here, [f"out={tmp_path / 'taken'}"])


def test_broken_yaml_is_named(tmp_path):
    path = tmp_path / "broken.yaml"
    path.write_text("name: [a", "utf-8")
    with pytest.raises(ValueError, match=r"broken.yaml' is not YAML"):
        load_config(path)


def test_a_file_is_labelled_by_its_name():
    given = {"name": "a", "data": [{"name": "some/where.jsonl"}], "detectors": ["toha"]}
    assert load_config(given).data[0].label == "where"


def test_isotonic_calibration(here, monkeypatch):
    changes = ["detectors=[mtop_div]", "calibration=isotonic"]
    result = experiments.run(here, changes, progress=False)
    assert isinstance(result.fitted["crates"]["mtop_div"].calibration, Isotonic)


def test_missing_configuration(tmp_path):
    with pytest.raises(FileNotFoundError, match="no such file"):
        experiments.run(tmp_path / "none.yaml")


def test_labels_are_needed(lm, store):
    with pytest.raises(ValueError, match="'x' has no label"):
        example = Example("a", prompt="b", id="x")
        collect(lm, [example], [build("mtop_div")], Store(store))


def test_spans_and_windows_of_an_answer():
    example = Example("one two three four", context="C", labels=(Label(4, 7),), id="e")
    offsets = np.array([[0, 3], [3, 7], [7, 13], [13, 18], [18, 18]])
    marked = np.array([False, True, False, False, False])
    whole = Part(3, np.ones(5, bool), example)
    spans = list(parts_of("span", whole, offsets, marked))
    assert [(p.example.response, p.example.label) for p in spans] == [
        (" two", 1), ("one", 0), (" three four", 0)]  # fmt: skip
    assert [p.tokens.tolist() for p in spans][2] == [False, False, True, True, False]
    assert {(p.row, p.example.source) for p in spans} == {(3, "C")}
    assert not list(parts_of("window", whole, offsets, marked))  # five tokens only
    offsets = np.array([[n, n + 1] for n in range(10)])
    marked = np.arange(10) == 0
    example = Example("abcdefghij", context="C", labels=(Label(0, 1),))
    whole = Part(0, np.ones(10, bool), example)
    windows = list(parts_of("window", whole, offsets, marked))
    assert [(p.example.response, p.example.label) for p in windows] == [
        ("abcdefgh", 1), ("bcdefghi", 0), ("cdefghij", 0)]  # fmt: skip
    with pytest.raises(ValueError, match="no token of it is marked"):
        list(parts_of("span", whole, offsets, marked & False))


def test_parts_are_means_over_their_tokens(lm, store):
    examples = labelled(6)
    detector = build("lookback_probe")
    found = collect(lm, examples, [detector], Store(store), unit="span")
    ratio = read_into(store, lm, examples, detector.reducers).features["lookback"]
    number = next(n for n, e in enumerate(examples) if e.label)
    spans = [n for n, e in enumerate(found.examples) if e.id.startswith(f"a{number}#")]
    assert [found.labels[n] for n in spans] == [1, 0, 0]
    row = found.rows[spans[0]]
    start, end = examples[number].labels[0][:2]
    tokens = (row.offsets[:, 0] < end) & (row.offsets[:, 1] > start)
    expected = ratio[number][..., tokens].mean(-1).ravel()
    value = found.inputs["lookback_probe"][spans[0]]
    np.testing.assert_allclose(value, expected, atol=1e-5)


def test_leaky_windows_share_answers(here):
    changes = ["unit=window", "protocol=leaky", "detectors=[lookback_lens]"]
    changes += ["data.0.sources=12"]
    result = experiments.run(here, changes, progress=False)
    data = result.data["crates"]
    train, test = (set(data.groups[part.frame["row"]]) for part in result.judged)
    assert train & test
    text = (result.folder / "results.md").read_text("utf-8")
    assert "one window is judged at a time" in text
    count = f"crates: {len(data.labels)} windows, 12 sources, {data.labels.sum()} hall"
    assert count in text
    first, second = (len(part.frame) for part in result.judged)
    assert f"Judged in each test part: {first}, {second} windows." in text


@pytest.mark.parametrize("spec", TRAINED, ids=str)
def test_saved_detectors_come_back(data, tmp_path, spec):
    detector = build(spec)
    inputs = data.inputs[detector.name]
    fitted = fit(detector, inputs, targets_of(data))
    saving.save(tmp_path / "one", fitted, spec, {"model": "tiny"})
    again = saving.load(tmp_path / "one")
    score = again.score(inputs)
    np.testing.assert_array_equal(score, fitted.score(inputs))
    np.testing.assert_array_equal(
        again.probabilities(score), fitted.probabilities(score)
    )
    assert again.threshold == fitted.threshold
    for path in (tmp_path / "one").rglob("*"):  # what is shipped names no machine
        assert path.is_dir() or str(tmp_path).encode() not in path.read_bytes(), path
    card = json.loads((tmp_path / "one" / "card.json").read_text("utf-8"))
    assert card["model"] == "tiny" and card["detector"] == spec
    with pytest.raises(FileExistsError, match="not empty"):
        saving.save(tmp_path / "one", fitted, spec)


def test_ensembles_and_untrained_methods_come_back(data, tmp_path):
    spec = {"ensemble": {"members": ["linear_probe", "novel_words"]}}
    inputs = {name: data.inputs[name] for name in ("linear_probe", "novel_words")}
    fitted = fit(build(spec), inputs, targets_of(data))
    saving.save(tmp_path / "one", fitted, spec)
    score = saving.load(tmp_path / "one").score(inputs)
    np.testing.assert_array_equal(score, fitted.score(inputs))
    words = fit(build("novel_words"), inputs["novel_words"], targets_of(data))
    saving.save(tmp_path / "two", words, "novel_words")
    assert saving.load(tmp_path / "two").threshold == words.threshold
    with pytest.raises(ValueError, match="makes 'toha', not 'novel_words'"):
        saving.save(tmp_path / "three", words, "toha")
    with pytest.raises(FileNotFoundError, match="no card.json"):
        saving.load(tmp_path / "four")


def test_a_layer_that_is_not_there(lm, store):
    with pytest.raises(ValueError, match="layer 20 is outside the 3 hidden states"):
        collect(lm, labelled(), [build({"mlp_probe": {"layer": 20}})], Store(store))


def test_tokens_are_judged_by_their_window(lm, data):
    """The mean ratio of a token and the seven before it, through the classifier."""
    fitted = fit(
        build("lookback_probe"), data.inputs["lookback_probe"], targets_of(data)
    )
    example = data.examples[0]
    batch = lm.encode([example])
    ratio = jaxhal.read(lm, batch, fitted.detector.reducers)["lookback"]
    features = {"lookback": ratio, "valid": batch.response_mask}
    found = np.asarray(fitted.detector.tokens(fitted.params, features))[0]
    probe = jax.tree.map(np.asarray, fitted.params.linear)
    for at in range(len(data.rows[0].response_ids)):
        window = np.asarray(ratio)[:, 0, :, max(0, at - 7) : at + 1].mean(-1).ravel()
        logit = ((window - probe.mean) / probe.std) @ probe.w + probe.b
        assert found[at] == pytest.approx(1 / (1 + np.exp(-logit)), abs=1e-4)


def test_token_probe_against_scikit_learn(data):
    inputs = data.inputs["token_probe"]
    (states, spans), valid = inputs[:]
    detector = build({"token_probe": {"layer": 1}})
    rows = np.arange(40)
    params = detector.fit(inputs, targets_of(data, rows))
    hidden = np.concatenate([states[n][valid[n]] for n in rows])
    marked = np.concatenate([data.marked[n] for n in rows])
    known = np.concatenate(
        [
            np.full(valid[n].sum(), data.marked[n].any() or not data.labels[n])
            for n in rows
        ]
    )
    scaler = StandardScaler().fit(hidden[known])
    model = LogisticRegression(C=10 / known.sum(), tol=1e-8, max_iter=1000)
    model.fit(scaler.transform(hidden[known]), marked[known])
    score = scores_of(detector, params, inputs)
    for number in (0, 1, 55):
        tokens = states[number][valid[number]]
        logits = model.decision_function(scaler.transform(tokens))
        assert score[number] == pytest.approx(np.sort(logits)[-5:].mean(), abs=2e-3)
    blind = Series((states, spans & False), valid)
    with pytest.raises(ValueError, match="no token of the training part is marked"):
        detector.fit(blind, targets_of(data))
    # Of one source alone: a fold without it has nothing to learn from.
    lone = np.flatnonzero((spans & valid).any(1))[0]
    alone = spans & (data.groups == data.groups[lone])[:, None]
    with pytest.raises(ValueError, match="annotate spans in answers of more sources"):
        held_out(detector, Series((states, alone), valid), targets_of(data))


def test_token_probe_learns_an_answer_without_spans_whole(data):
    """As if it were marked from its first token to its last; marks keep their say."""
    ((states, marked), valid), targets = data.inputs["token_probe"][:], targets_of(data)
    made_up = np.flatnonzero(np.asarray(targets.labels))
    some = np.array(marked)
    some[made_up[::2]] = False
    spelled = some.copy()
    spelled[made_up[::2]] = valid[made_up[::2]]
    assert (spelled != marked).any()
    whole = build({"token_probe": {"layer": 1, "whole": True}})
    alone = build({"token_probe": {"layer": 1}})
    found = whole.fit(Series((states, some), valid), targets)
    same = alone.fit(Series((states, spelled), valid), targets)
    other = alone.fit(Series((states, some), valid), targets)
    np.testing.assert_array_equal(found.w, same.w)
    assert not np.allclose(found.w, other.w)
    assert "whole answers" in whole.summary and "whole" not in alone.summary


def test_the_heads_of_the_largest_coefficients(data):
    inputs = data.inputs["lookback_lens"]
    size = inputs.whole.shape[1]
    every = build("lookback_lens").fit(inputs, targets_of(data)).linear
    few = build({"lookback_lens": {"heads": 3, "name": "three"}})
    found = np.flatnonzero(few.fit(inputs, targets_of(data)).linear.w)
    assert set(found) == set(np.argsort(-np.abs(np.asarray(every.w)))[:3])
    wrong = build({"lookback_lens": {"heads": size + 1}})
    with pytest.raises(ValueError, match=f"choose in 1..{size}"):
        wrong.fit(inputs, targets_of(data))


def test_tfidf_weights_are_those_of_scikit_learn(data):
    counts = data.inputs["tfidf"]
    rows = np.arange(40)
    params = build("tfidf").fit(counts, targets_of(data, rows)).params
    expected = TfidfTransformer().fit(counts[rows])
    np.testing.assert_allclose(params.idf, expected.idf_, rtol=1e-5)


def test_forests_show_the_head_that_separates_best(lm, data, monkeypatch):
    """Of the short answers the extreme ones; edge weights average to the MTop-Div."""
    # Of eight heads the last separates best but is not chosen, the seventh is.
    heads = Heads(np.float32([1, 1, 1, 1, 1, 1, 1, 0]) / 7, np.arange(8.0))
    toha = fit(build("toha"), data.inputs["toha"], targets_of(data))
    toha = dataclasses.replace(toha, params=heads)
    score, test = toha.score(data.inputs["toha"]), np.arange(60)
    length = np.array([len(row.response_ids) for row in data.rows])
    monkeypatch.setattr(figures, "_DRAWN", length[data.labels == 1].min())
    drawn, real = [], plotting.forest_drawing
    monkeypatch.setattr(
        plotting,
        "forest_drawing",
        lambda *a, **k: drawn.append((a, k)) or real(*a, **k),
    )
    kinds = [kind for kind, _ in figures.forests(lm, data, test, toha)]
    assert kinds == ["hallucinated", "grounded"]
    short = test[length[test] <= figures._DRAWN]
    assert len(short) < len(test)
    high, low = (short[data.labels[short] == label] for label in (1, 0))
    rows = high[score[high].argmax()], low[score[low].argmin()]
    for row, (given, more) in zip(rows, drawn, strict=True):
        parents, weights, tokens, prompt = given
        example = data.examples[row]
        divergence = data.inputs["toha"][row, 6]
        assert np.mean(weights) == pytest.approx(divergence, abs=1e-5)
        assert more["title"] == f"{example.id}: layer 1, head 2"
        text = "".join(tokens)
        assert text.endswith(f"{example.response}</s>") and example.context in text
        assert "".join(tokens[prompt:]) == f"{example.response}</s>"
        assert parents.min() >= 0 and (more["hallucinated"] == data.marked[row]).all()
    monkeypatch.setattr(figures, "_DRAWN", 0)
    assert not list(figures.forests(lm, data, test, toha))


def test_an_endpoint_that_fails_costs_single_answers(here, tmp_path, monkeypatch):
    """One of the training part and one of the test part; or all of them."""

    def reply(question):
        if "pears, 4." in question:
            return 503
        odd = "pears, 45." in question
        return "{}" if odd else json.dumps({"hallucinations": ["dragon"]})

    some = labelled()[:30] + labelled()[42:54]
    monkeypatch.setattr(running, "load_dataset", lambda name: some)
    with serving(reply, tmp_path, monkeypatch) as server:
        asked = {"detection_prompt": {"endpoint": server.url, "model": "m"}}
        experiments.run({**here, "detectors": [asked]}, progress=False)
        server.replies = ["no"]
        monkeypatch.setattr(running, "load_dataset", lambda name: some[4:5])
        with pytest.raises(ValueError, match="none of the 1 answers can be judged: ex"):
            other = {"name": "none", "protocol": "grouped"}
            experiments.run({**here, **other, "detectors": [asked]})
    scores = pd.read_parquet(tmp_path / "tiny" / "scores.parquet").set_index("id")
    tested = {one.id: one for one in some if one.split == "test" and one.id != "a45"}
    assert set(scores.index) == set(tested)
    for name, example in tested.items():
        share = len("dragon") / len(example.response)
        assert scores["detection_prompt"][name] == pytest.approx(share)
    text = (tmp_path / "tiny" / "results.md").read_text("utf-8")
    assert "- crates: 40 " in text and "; 2 answers could not be " in text
    said = f"row 4: example 'a4': {server.url} gave no answer from 'm'"
    assert escaped(said) in text
    assert escaped("row 33: example 'a45': 'm' replied '{}', of no use") in text


def test_a_character_of_several_tokens_is_drawn_once():
    def decode(tokens):
        return bytes(tokens).decode("utf-8", "replace")

    text = "aØ 中🎈b"
    found = figures.texts_of(decode, [*text.encode()])
    assert found == ["a", "Ø", "", " ", "中", "", "", "🎈", "", "", "", "b"]
    # What is none stays what it is.
    assert figures.texts_of(decode, [0xFF, 0x61]) == ["\ufffd", "a"]
    assert figures.texts_of(decode, [*"中".encode()][:2]) == ["\ufffd", "\ufffd"]
