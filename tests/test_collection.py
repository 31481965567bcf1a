"""Labelled answers to detectors to verdicts, and to the share of hallucinated ones."""

import dataclasses
import json
import re
import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from huggingface_hub.utils import filter_repo_objects
from make_golden_probe import GOLDEN
from safetensors.numpy import load_file, save_file
from sklearn.metrics import roc_auc_score
from typer.testing import CliRunner

import jaxhal
import tiny_encoders
from jaxhal import evaluation
from jaxhal.cli.app import app
from jaxhal.datasets import ragtruth
from jaxhal.datasets.jsonl import write_rows
from jaxhal.detectors import lettucedetect
from jaxhal.evaluation.guarantees import STEPS
from jaxhal.experiments import PRESETS, Experiment
from jaxhal.io.configuration import structured, write_config
from jaxhal.models import registry
from jaxhal.reading.samples import Draw
from jaxhal.scoring import collection
from jaxhal.scoring.detection import placed
from jaxhal.scoring.verdicts import ranked
from jaxhal.types import Example
from tiny_lm import tiny_lm, write_lm

CHOSEN = ["mtop_div", "linear_probe"]


def answers(count=90, seed=0):
    """What is made up ends in "!", most of the time; no control looks at that."""
    rng, fruits = np.random.default_rng(seed), "pears plums figs limes".split()
    found = []
    for number in range(count):
        one, other = rng.choice(fruits, 2, replace=False)
        made_up = int(rng.random() < 0.4)
        mark = "!" if made_up ^ (rng.random() < 0.1) else "?"
        found.append(
            Example(
                f"It has {one}, and {other} too{mark}",
                context=f"Crate {number // 2} holds {one} and {other}.",
                question="What is in it?",
                id=f"a{number}",
                label=made_up,
                source=f"s{number // 2}",
            )
        )
    return found


def rows(examples, *keys):
    return [{key: getattr(one, key) for key in ("id", *keys)} for one in examples]


ROW = ("response", "context", "question", "source")


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    return write_lm(tmp_path_factory.mktemp("lm") / "model")


@pytest.fixture(scope="module")
def lm(place):
    return jaxhal.load(place)


@pytest.fixture(scope="module")
def ready(lm, tmp_path_factory):
    how = {"folds": 3, "store": tmp_path_factory.mktemp("store"), "progress": False}
    worthless = r"control, \w+ with AUROC [\d.]+, on held-out answers: mtop_div; they"
    with pytest.warns(UserWarning, match=worthless):
        return jaxhal.fit(lm, answers(), CHOSEN, data="crates", **how)


@pytest.fixture(scope="module")
def saved(ready, tmp_path_factory):
    folder = tmp_path_factory.mktemp("saved") / "mine"
    ready.save_pretrained(folder)
    return folder


def test_each_is_measured_on_folds_and_beside_every_control(lm, ready):
    by_name = {row["method"]: row for row in ready.rows}
    assert (
        {"novel_words", "tfidf", "response_length"} < set(by_name) == set(ready.fitted)
    )
    examples = answers()
    labels = [one.label for one in examples]
    scores = [r.scores["mtop_div"] for r in jaxhal.score(lm, examples, ["mtop_div"])]
    expected = roc_auc_score(labels, scores)  # it learns nothing, so folds change none
    assert by_name["mtop_div"]["AUROC"] == pytest.approx(expected, abs=1e-6)
    probe = ready["linear_probe"]
    assert probe.beats == by_name["linear_probe"]["beats controls"] == "yes"
    assert probe.measured[:3] == ("crates", 90, sum(labels))
    assert probe.measured.auroc == by_name["linear_probe"]["AUROC"] > 0.75
    # What is returned learnt from all of them: each is in its calibration.
    assert len(probe.calibrated_on.labels) == 90
    seen = [r.scores["linear_probe"] for r in jaxhal.score(lm, examples, [probe])]
    assert roc_auc_score(labels, seen) > probe.measured.auroc


def test_what_was_saved_judges_as_before(lm, ready, saved):
    again = jaxhal.FittedDetectors.from_pretrained(saved)
    new = answers(6, seed=1)
    ours, theirs = (jaxhal.score(lm, new, one) for one in (ready, again))
    for before, after in zip(ours, theirs, strict=True):
        assert before.by == after.by == "linear_probe"
        assert before.verdict == after.verdict is not None
        assert before.scores == after.scores
        assert before.probability == after.probability
    by_name = [sorted(each.rows, key=str) for each in (ready, again)]
    assert by_name[0] == by_name[1] and again.about == ready.about
    text = (saved / "README.md").read_text("utf-8")
    assert "Fitted to crates: 90 answers to 45 sources" in text
    assert f"of the family llama: 2 layers, {lm.size:,} parameters." in text
    assert "| linear_probe | 0." in text and "*tfidf* (control)" in text
    assert "flags nothing. Verdicts are by linear_probe: of what beats it, the" in text
    worthless = replace(ready, fitted={"mtop_div": ready["mtop_div"]}).card()
    assert "flags nothing. None of these decides a verdict." in worthless
    later = ("ECE adapted", "ECE by chance")
    older = [{k: v for k, v in row.items() if k not in later} for row in again.rows]
    assert (
        "| ECE adapted |" in text
        and "| ECE | vs best" in replace(again, rows=older).card()
    )


def test_a_folder_is_replaced_only_by_consent(ready, saved, tmp_path):
    with pytest.raises(FileExistsError, match="holds detectors already; .*--force"):
        ready.save_pretrained(saved)
    (tmp_path / "letters").write_text("dear")
    with pytest.raises(FileExistsError, match="holds no detectors; give a new folder"):
        ready.save_pretrained(tmp_path, force=True)
    twice = tmp_path / "twice"
    ready.save_pretrained(twice)
    (twice / "mine.txt").write_text("kept")
    ready.save_pretrained(twice, force=True)
    assert (twice / "mine.txt").read_text() == "kept"
    assert {one.name for one in twice.iterdir()} >= {"README.md", *ready.fitted}


def test_a_place_of_no_use_is_said_before_anything_is_fitted(lm, tmp_path):
    few = tmp_path / "few.jsonl"
    few.write_text(json.dumps({"response": "x", "prompt": "y", "label": 0}) + "\n")
    for place, why in ((tmp_path / "nope/mine", "no such folder"), ("n" * 300, "a sh")):
        command = ["fit", str(few), "-m", "gone", "-o", str(place)]
        found = CliRunner().invoke(app, command)
        assert found.exit_code == 2 and why in " ".join(found.output.split())


def test_a_detector_without_its_card_is_damage(saved, tmp_path):
    place = tmp_path / "half"
    shutil.copytree(saved, place)
    (place / "linear_probe" / "card.json").unlink()
    with pytest.raises(ValueError, match="linear_probe has no card.json, so it is dam"):
        jaxhal.FittedDetectors.from_pretrained(place)


def test_folders_are_used_together_and_as_they_are_given(lm, ready, saved, tmp_path):
    """Each has the controls beside it, which count once; a tie is decided by name."""
    one = jaxhal.FittedDetectors.from_pretrained(saved)
    probe = ready["linear_probe"]
    other = dataclasses.replace(
        probe, detector=jaxhal.detectors.build({"linear_probe": {"name": "another"}})
    )
    also = replace(
        one,
        fitted={"another": other, "novel_words": one["novel_words"]},
        specs={"another": {"linear_probe": {"name": "another"}}} | {**one.specs},
    )
    also.save_pretrained(tmp_path / "also")
    places = [saved, tmp_path / "also", "novel_words"]
    (found,) = jaxhal.score(lm, answers(1), places)
    assert found.scores.keys() == {*ready.fitted, "another"}
    (again,) = jaxhal.score(lm, answers(1), [also, one, "novel_words"])
    assert again.scores == found.scores and again.by == found.by
    both = [dataclasses.replace(each, beats="yes") for each in (probe, other)]
    assert ranked(both)[0] is ranked(both[::-1])[0] is both[1]
    with pytest.raises(ValueError, match="3 is no detector; give a name, or a folder"):
        getattr(placed, "__wrapped__", placed)("tiny", [3])


def test_another_reader_is_refused(ready, tmp_path):
    other = jaxhal.load(write_lm(tmp_path / "other", seed=1))
    with pytest.raises(ValueError, match="fitted to a reader of other weights than"):
        jaxhal.score(other, answers(1), ready)


def hub_of(folder, cache):
    """Downloads of a repository that holds what a folder does."""

    def download(repo, *, allow_patterns, ignore_patterns, local_files_only):
        files = [p.relative_to(folder) for p in folder.rglob("*") if p.is_file()]
        rules = {"allow_patterns": allow_patterns, "ignore_patterns": ignore_patterns}
        for name in filter_repo_objects(map(str, files), **rules):
            (cache / repo / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(folder / name, cache / repo / name)
        return cache / repo

    return download


def test_a_released_probe_may_be_on_the_hub(tmp_path, monkeypatch):
    monkeypatch.setattr("huggingface_hub.snapshot_download", hub_of(GOLDEN, tmp_path))
    (here,), (there,) = (placed("tiny", [name]) for name in (str(GOLDEN), "me/probe"))
    assert there.detector == here.detector
    np.testing.assert_array_equal(there.params.w, here.params.w)
    (tmp_path / "me/probe/adapter_config.json").write_text("{}")
    adapted = hub_of(tmp_path / "me/probe", tmp_path)
    monkeypatch.setattr("huggingface_hub.snapshot_download", adapted)
    with pytest.raises(ValueError, match="me/adapted holds adapter_config.json"):
        placed("tiny", ["me/adapted"])


def test_one_of_many_probes_is_named_by_its_folder(tmp_path, monkeypatch):
    """In a repository as in a folder; a wrong name says which there are."""
    many, cache = tmp_path / "many", tmp_path / "cache"
    for name in ("first", "second"):
        shutil.copytree(GOLDEN, many / name)
    config = json.loads((many / "second" / "probe_config.json").read_text("utf-8"))
    changed = json.dumps(config | {"layer_idx": 1})
    (many / "second" / "probe_config.json").write_text(changed, "utf-8")
    monkeypatch.setattr("huggingface_hub.snapshot_download", hub_of(many, cache))
    monkeypatch.chdir(tmp_path)
    for begin in ("many", "./many", "me/probes"):
        one, other = placed("tiny", [f"{begin}/first", f"{begin}/second"])
        assert one.detector != other.detector
        if begin == "me/probes":  # of others the weights stay where they are
            shutil.rmtree(cache)
            placed("tiny", ["me/probes/second"])
            assert {one.parent.name for one in cache.rglob("*.bin")} == {"second"}
        for wrong in (begin, f"{begin}/third"):
            said = f"^{re.escape(wrong)} holds no detectors, .*give {begin}/first, "
            with pytest.raises(ValueError, match=f"{said}{begin}/second$"):
                placed("tiny", [wrong])
    # What others trained is no place.
    assert placed("tiny", ["token_classifier:me/mine"]) == ["token_classifier:me/mine"]


def test_the_hub_is_a_folder_far_away(ready, saved, tmp_path, monkeypatch):
    sent = {}
    monkeypatch.setattr("huggingface_hub.create_repo", lambda repo, **o: sent.update(o))

    before = ["old/card.json", "old/params.safetensors", "mine.txt"]
    before += ["others/old/card.json"]

    def listed(repo, token):
        assert token == "secret"
        return before

    monkeypatch.setattr("huggingface_hub.list_repo_files", listed)

    def upload(repo_id, folder_path, delete_patterns, token):
        assert token == "secret"
        gone = filter_repo_objects(before, allow_patterns=delete_patterns)
        assert [*gone] == before[:2]
        files = sorted(
            p.relative_to(folder_path).as_posix() for p in folder_path.rglob("*")
        )
        sent[repo_id] = files
        return "https://hub.example/me/mine"

    monkeypatch.setattr("huggingface_hub.upload_folder", upload)
    made = ready.push_to_hub("me/mine", private=True, token="secret")
    assert made == "https://hub.example/me/mine"
    assert sent["private"] and "linear_probe/params.safetensors" in sent["me/mine"]
    assert "README.md" in sent["me/mine"]
    monkeypatch.setattr("huggingface_hub.snapshot_download", hub_of(saved, tmp_path))
    assert "linear_probe" in jaxhal.FittedDetectors.from_pretrained("me/mine").fitted
    with pytest.raises(ValueError, match="'nowhere' is no folder and no hub id"):
        jaxhal.FittedDetectors.from_pretrained("nowhere")
    with pytest.raises(ValueError, match="holds no detectors, which are folders with"):
        jaxhal.FittedDetectors.from_pretrained(saved / "tfidf")
    with pytest.raises(ValueError, match="a released probe; use jaxhal.scoring.rel"):
        jaxhal.FittedDetectors.from_pretrained(GOLDEN)


@pytest.fixture
def preset(place, tmp_path, monkeypatch):
    """A preset of fewer detectors, and answers of RAGTruth's form in a data root."""
    written = {"split": "train", "quality": "good", "model": "llama-2-7b-chat"}
    responses, sources = [], {}
    for number, one in enumerate(answers()):
        row = written | {"id": one.id, "source_id": one.source, "labels": []}
        row |= {"response": one.response, "split": "train" if number < 60 else "test"}
        if one.label:
            span = {"start": 0, "end": 2, "text": "It", "label_type": "baseless"}
            row["labels"] = [span]
        if number % 2:
            row["model"] = "llama-2-70b-chat"
        responses.append(row)
        info = {"question": one.question, "passages": one.context}
        prompt = f"{one.question} {one.context} output:"
        about = {"source_id": one.source, "task_type": "QA", "source_info": info}
        sources[one.source] = about | {"prompt": prompt}
    for other in ({"quality": "truncated"}, {"model": "mistral-7B-instruct"}):
        responses.append({**responses[0], "id": f"not {other}", **other})
    folder = tmp_path / "data" / "ragtruth"
    folder.mkdir(parents=True)
    write_rows(folder / "response.jsonl", responses)
    write_rows(folder / "source_info.jsonl", sources.values())
    monkeypatch.setenv("JAXHAL_DATA", str(folder.parent))
    monkeypatch.setenv("JAXHAL_CACHE", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)
    few = structured(
        Experiment, PRESETS["ragtruth"], [f"detectors=[{','.join(CHOSEN)}]"]
    )
    write_config(tmp_path, few)
    monkeypatch.setitem(PRESETS, "ragtruth", tmp_path / "config.yaml")
    return ["fit", "--preset", "ragtruth", "--model", str(place)]


def test_a_preset_makes_for_a_reader_what_ships_for_another(lm, place, preset):
    made = CliRunner().invoke(app, [*preset, "-o", "mine"])
    assert made.exit_code == 0, made.output
    ready = jaxhal.FittedDetectors.from_pretrained("mine")
    every = ragtruth(model=None, quality="good")
    train, test = ([one for one in every if one.split == s] for s in ("train", "test"))
    # The figures are those of what is saved, on answers that it has not seen.
    scores = [r.scores["linear_probe"] for r in jaxhal.score(lm, test, ready)]
    (row,) = (row for row in ready.rows if row["method"] == "linear_probe")
    expected = roc_auc_score([one.label for one in test], scores)
    assert row["AUROC"] == pytest.approx(expected, abs=1e-6)
    assert ready["linear_probe"].measured[:2] == ("ragtruth_qa", len(test))
    ours = [one for one in train if one.id[0] == "a"]
    assert ready.about["data"]["answers"] == len(ours) == 60
    labels = ready["linear_probe"].calibrated_on.labels
    assert labels.tolist() == [one.label for one in ours]
    with pytest.raises(ValueError, match="fitted to a reader of other weights than"):
        jaxhal.score(tiny_lm(), test[:1], ready)
    text = Path("mine", "README.md").read_text("utf-8")
    assert "Fitted to ragtruth_qa: 60 answers to 30 sources" in text
    assert "protocol official: answers that what is saved was not fitted to" in text


def test_a_preset_says_everything_itself(preset):
    for words, said in (
        (["labelled.jsonl"], "--preset ragtruth has answers, detectors and a split"),
        (["-d", "toha"], "--preset ragtruth has answers, detectors and a split"),
        (["--preset", "ragtrut"], "preset is 'ragtrut'; use one of ragtruth"),
    ):
        found = CliRunner().invoke(app, [*preset, "-o", "mine", *words])
        assert found.exit_code == 2 and said in found.output
    found = CliRunner().invoke(app, ["fit", "-o", "mine"])
    assert found.exit_code == 2 and "give DATA or --preset ragtruth" in found.output


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        ({"seed": -1}, "seed is -1; give 0 to 4294967295"),
        ({"seed": 2**32}, "seed is 4294967296; give 0 to 4294967295"),
        ({"folds": 200}, "cannot be judged by folds: .* too few for 200 folds"),
        ({"folds": 1}, "folds is 1; give at least 2"),
    ],
)
def test_folds_that_cannot_be_made_cost_no_reading(lm, options, problem, monkeypatch):
    monkeypatch.setattr(collection, "collect", None)
    with pytest.raises(ValueError, match=problem):
        jaxhal.fit(lm, answers(), CHOSEN, **options)


@pytest.mark.parametrize("seed", ["-1", str(2**32)])
def test_a_seed_is_one_of_numpys(seed):
    found = CliRunner().invoke(app, ["fit", "gone.jsonl", "-o", "mine", "--seed", seed])
    assert found.exit_code == 2 and "'--seed'" in found.output


def test_what_cannot_be_fitted_says_why(lm, tmp_path):
    few = answers(8)
    options = {"store": tmp_path, "progress": False}
    with pytest.raises(ValueError, match="cannot be judged by folds: .* too few for 5"):
        jaxhal.fit(lm, few, CHOSEN, **options)
    with pytest.raises(ValueError, match="cannot be judged by folds"):
        jaxhal.fit(lm, iter(few), CHOSEN, **options)
    with pytest.raises(ValueError, match="examples is empty; give labelled answers"):
        jaxhal.fit(lm, [], CHOSEN, **options)
    with pytest.raises(ValueError, match="'token_probe' learns from annotated spans,"):
        jaxhal.fit(lm, answers(), ["linear_probe", "token_probe"], **options)
    with pytest.raises(ValueError, match="detectors is empty; name at least one"):
        jaxhal.fit(lm, few, [], **options)
    with pytest.raises(ValueError, match="detectors is 'mtop_div'; give a list"):
        jaxhal.fit(lm, few, "mtop_div", **options)
    with pytest.raises(ValueError, match="eigenscore.* cannot be saved"):
        jaxhal.fit(lm, few, [{"eigenscore": {"draw": Draw(n=3)}}], **options)
    with pytest.raises(ValueError, match="two detectors are named 'mtop_div'"):
        jaxhal.fit(lm, few, ["mtop_div", "mtop_div"], **options)
    alike = [Example("x", prompt="y", id=str(n), label=1) for n in range(8)]
    with pytest.raises(ValueError, match="all 8 answers have one label; give some of"):
        jaxhal.fit(lm, alike, CHOSEN, **options)
    with pytest.raises(ValueError, match="'b' has no label"):
        jaxhal.fit(lm, [*few, Example("x", prompt="y", id="b")], CHOSEN, **options)


def test_a_share_is_that_of_the_deciding_detector(lm, ready):
    new = [replace(one, label=None) for one in answers(40, seed=2)]
    found = jaxhal.rate(lm, new, ready, progress=False)
    one = ready["linear_probe"]
    reports = jaxhal.score(lm, new, [one])
    expected = evaluation.rate(
        [report.probability for report in reports],
        one.probabilities(one.calibrated_on.scores),
        one.calibrated_on.labels,
        one.calibrated_on.sources.tolist(),
        [example.group for example in new],
    )
    assert found[:3] == tuple(expected) and found.low <= found.rate <= found.high
    assert found[3:5] == (40, 0) and found.by == "linear_probe"
    called = np.mean([report.verdict == "hallucinated" for report in reports])
    assert found.called == called
    with pytest.warns(UserWarning, match="1 of 41 answers cannot be read and are left"):
        long = Example("x " * 900, prompt="y", id="long")
        again = jaxhal.rate(lm, [*new, long], ready, progress=False)
    assert again == found
    with pytest.warns(UserWarning, match="sources of the answers: 1, so"):
        jaxhal.rate(lm, new[:1], ready, progress=False)
    with pytest.raises(ValueError, match="1 of 1 answers cannot be read: "):
        jaxhal.rate(lm, [long], ready, progress=False)
    with pytest.raises(ValueError, match="no verdict: "):
        jaxhal.rate(lm, new, ["mtop_div"], progress=False)


def test_labels_of_some_answers_correct_the_detector_instead(lm, ready):
    some, count = answers(60, seed=2), 24
    new = [*some[:count], *(replace(one, label=None) for one in some[count:])]
    found = jaxhal.rate(lm, new, ready, progress=False)
    reports = jaxhal.score(lm, new, [ready["linear_probe"]])
    probabilities = [report.probability for report in reports]
    labels, groups = ([getattr(o, k) for o in some] for k in ("label", "group"))
    expected = evaluation.rate(
        probabilities[count:],
        probabilities[:count],
        labels[:count],
        groups[:count],
        groups[count:],
        shifted=False,
    )
    assert found[:3] == tuple(expected) and found.low < found.rate < found.high
    assert (found.answers, found.labelled) == (60, count)
    none = jaxhal.rate(lm, [replace(one, label=None) for one in new], ready)
    assert none.labelled == 0 and none[:3] != found[:3]
    for first in (8, 60):  # fewer than five of a class, and nothing unlabelled
        given = [*some[:first], *(replace(one, label=None) for one in some[first:])]
        said = f"{first} of 60 answers are labelled, and their labels are not used"
        with pytest.warns(UserWarning, match=said):
            assert jaxhal.rate(lm, given, ready) == none
    own = replace(ready["linear_probe"], calibrated_on=None)
    assert jaxhal.rate(lm, new, [own]) == found
    with pytest.raises(ValueError, match="carries no labelled answers to correct its"):
        jaxhal.rate(lm, given, [own])


def test_two_commands_lead_to_verdicts(place, tmp_path, monkeypatch):
    """Those of the quickstart, to the letter."""
    text = Path(__file__).parent.parent / "notebooks" / "quickstart.md"
    section = text.read_text("utf-8").partition("## Detectors of your own")[2]
    written = re.findall(r"^jaxhal (.+(?:-o|--detector) mine)$", section, re.MULTILINE)
    monkeypatch.setattr(registry, "cache_dir", lambda: tmp_path)
    monkeypatch.chdir(tmp_path)
    shutil.copytree(place, "smollm2-135m")  # goes before the model of that name
    write_rows("labelled.jsonl", rows(answers(), *ROW, "label"))
    write_rows("answers.jsonl", rows(answers(20, seed=1), *ROW))
    fitted, judged, share = (CliRunner().invoke(app, line.split()) for line in written)
    assert "linear_probe" in fitted.stdout and "written to mine" in fitted.stderr
    assert "verdicts by linear_probe: AUROC" in fitted.stderr
    assert "verdicts by linear_probe: AUROC" in judged.stderr
    lines = [json.loads(line) for line in judged.stdout.splitlines()]
    assert [line["by"] for line in lines] == ["linear_probe"] * 20
    assert all(line["verdict"] and line["error"] is None for line in lines)
    assert (
        "answers" in share.stdout and "90 held-out answers of labelled" in share.stderr
    )
    assert "scaled probability average, by the labelled answers that" in share.stderr
    some = answers(80, seed=1)
    told = [*rows(some[:40], *ROW, "label"), *rows(some[40:], *ROW)]
    write_rows("some.jsonl", told)
    share = CliRunner().invoke(app, ["rate", "some.jsonl", "--detector", "mine"])
    assert "prediction-powered inference, by 40 labelled rows" in share.stderr
    again = CliRunner().invoke(app, ["fit", "labelled.jsonl", "-o", "mine"])
    assert again.exit_code == 2 and "holds detectors already" in again.output


def test_what_was_fitted_in_a_dtype_reads_in_it(place, tmp_path, monkeypatch):
    monkeypatch.setattr(registry, "cache_dir", lambda: tmp_path)
    monkeypatch.chdir(tmp_path)
    write_rows("labelled.jsonl", rows(answers(), *ROW, "label"))
    write_rows("answers.jsonl", rows(answers(4, seed=1), *ROW))
    small = ["--model", str(place), "--dtype", "bfloat16"]
    fit = ["fit", "labelled.jsonl", "-d", "mtop_div", "-o", "mine", *small]
    made = CliRunner().invoke(app, fit)
    assert made.exit_code == 0
    assert "no detector in use may decide (mtop_div: it " in made.stderr
    detect = ["detect", "-i", "answers.jsonl", "-d", "mine", *small]
    assert CliRunner().invoke(app, detect).exit_code == 0
    share = CliRunner().invoke(app, ["rate", "answers.jsonl", *detect[3:]])
    assert "no verdict: " in share.output  # it read them, and nothing decides
    other = CliRunner().invoke(app, detect[:-2])
    assert other.exit_code == 2 and "or in another dtype; read with" in other.output
    wrong = CliRunner().invoke(app, [*detect[:-1], "float8"])
    assert wrong.exit_code == 2
    assert "dtype is float8; use float32 or bfloat16" in wrong.output


def test_a_classifier_that_others_trained_is_fitted_to_give_verdicts(
    place, tmp_path, monkeypatch
):
    """One of random weights, which holds the last word before a "!" for made up."""

    def probabilities(encoder, asked, progress):
        found = []
        for _, answer in asked:
            offsets = encoder.tokenizer.encode_with_offsets(answer)[1]
            last = (offsets[:, 1] > len(answer) - 4) & answer.endswith("!")
            found.append(np.where(last, 0.9, 0.1))
        return found

    monkeypatch.setattr(lettucedetect, "token_probabilities", probabilities)
    monkeypatch.setattr(registry, "cache_dir", lambda: tmp_path)
    monkeypatch.chdir(tmp_path)
    tiny_encoders.write_any_text(Path("theirs"), "modernbert-tokens", 512)
    write_rows("labelled.jsonl", rows(answers(), *ROW, "label"))
    new = answers(8, seed=1)
    write_rows("answers.jsonl", rows(new, *ROW))
    named = ["-d", "token_classifier:theirs", "--model", str(place)]
    detect = ["detect", "-i", "answers.jsonl", "-o", "-"]
    bare = CliRunner().invoke(app, [*detect, *named])
    assert "no verdict: " in bare.stderr and '"verdict": null' in bare.stdout
    fit = ["fit", "labelled.jsonl", "-o", "mine", *named]
    assert CliRunner().invoke(app, fit).exit_code == 0
    found = CliRunner().invoke(app, [*detect, "-d", "mine", "--model", str(place)])
    assert found.exit_code == 0 and "verdicts by token_classifier: " in found.stderr
    said = [json.loads(line) for line in found.stdout.splitlines()]
    for one, row in zip(new, said, strict=True):
        marked = one.response.endswith("!")
        assert row["by"] == "token_classifier" and 0 < row["probability"] < 1
        assert row["verdict"] == ("hallucinated" if marked else "supported")
        assert [span["text"] for span in row["spans"]] == ["too!"] * marked
    assert len({row["verdict"] for row in said}) == 2
    # Of grounded answers, few end in "!": in the mean, few of their characters are in
    # spans, from any score on that other tokens do not have.
    one = jaxhal.FittedDetectors.from_pretrained("mine")["token_classifier"]
    grounded = [row for row in answers() if row.label == 0]
    shares = {row.source: [] for row in grounded}
    for row in grounded:
        share = len("too!") / len(row.response) if row.response[-1] == "!" else 0.0
        shares[row.source].append(share)
    means = np.mean([np.mean(each) for each in shares.values()])
    assert one.highlights.shape == (len(shares), len(STEPS))
    assert one.highlights.mean(0)[100] == pytest.approx(means, abs=1e-6) and means > 0
    sure = [*detect, "-d", "mine", "--model", str(place), "--threshold"]
    found = CliRunner().invoke(app, [*sure, "highlighted=0.2"])
    assert "threshold for highlighted at most 20% with 90% conf" in found.stderr
    assert [json.loads(line)["spans"] for line in found.stdout.splitlines()] == [
        row["spans"] for row in said
    ]
    both = CliRunner().invoke(app, [*sure, "highlighted=0.2", "--adapt"])
    assert both.exit_code == 2 and "give one of the two" in both.stderr
    # From any folder it is the same classifier; with other weights it is none of this.
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    detect[2], there = "../answers.jsonl", ["-d", "../mine", "--model", str(place)]
    again = CliRunner().invoke(app, [*detect, *there])
    assert [json.loads(line) for line in again.stdout.splitlines()] == said
    kept = jaxhal.FittedDetectors.from_pretrained("../mine")
    with pytest.raises(
        ValueError, match="asks the classifier in .*theirs, which nobod"
    ):
        kept.push_to_hub("owner/name")
    weights = tmp_path / "theirs" / "model.safetensors"
    arrays = load_file(weights)
    save_file({name: 1.5 * array for name, array in arrays.items()}, weights)
    changed = CliRunner().invoke(app, [*detect, *there])
    assert changed.exit_code == 2 and "theirs said, which has other w" in changed.stderr
