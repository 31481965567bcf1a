"""Guided, sampled and greedy responses compared: the run folder and its numbers."""

import dataclasses
import json

import numpy as np
import pytest
import typer.testing
from test_guided import UNSURE

import jaxhal
from jaxhal.cli import app as cli
from jaxhal.datasets import Question
from jaxhal.experiments import guiding, making
from jaxhal.experiments.guiding import WAYS, compare
from jaxhal.plotting.comparisons import guided_pairs
from jaxhal.scoring.saving import save
from tiny_lm import tiny_lm

QUESTIONS = [
    Question(f"What of {n}?", f"nothing of {n}", id=f"q{n}", context=f"A text on {n}.")
    for n in range(5)
]


@pytest.fixture
def world(monkeypatch):
    calls = []
    real = guiding.guide

    def counting(lm, prompts, *rest, **options):
        calls.extend(prompts)
        return real(lm, prompts, *rest, **options)

    lm = tiny_lm()
    monkeypatch.setitem(making.QUESTIONS, "numbers", lambda: QUESTIONS)
    monkeypatch.setattr(guiding, "model", lambda name, *_, **__: lm)
    monkeypatch.setattr(guiding, "_detector", lambda config, lm: UNSURE)
    monkeypatch.setattr(guiding, "guide", counting)
    return calls


def test_who_guides(tmp_path):
    def named(detector):
        lm = dataclasses.replace(tiny_lm(), name="smollm2-135m")
        return guiding._detector(guiding.Guiding("a", "xsum", detector=detector), lm)

    assert named("lookback_probe").detector.name == "lookback_probe"
    save(tmp_path / "kept", named("lookback_probe"), "lookback_probe")
    assert named(str(tmp_path / "kept")).detector.name == "lookback_probe"
    with pytest.raises(ValueError, match="'hidden_probe' must be fitted"):
        named("hidden_probe")


def config(tmp_path, **changes):
    base = {"name": "own", "questions": "numbers", "out": str(tmp_path)}
    small = {"candidates": 3, "chunk": 4, "max_new_tokens": 12, "batch_size": 2}
    return base | small | changes


def test_a_run_folder(world, tmp_path):
    found = compare(config(tmp_path), progress=False)
    names = {path.name for path in found.folder.iterdir()}
    assert names >= {
        "config.yaml",
        "results.md",
        "results.json",
        "responses.jsonl",
        "report.html",
        "guided.png",
    }
    rows = [
        json.loads(line)
        for line in (found.folder / "responses.jsonl").read_text("utf-8").splitlines()
    ]
    assert [row["id"] for row in rows] == [q.id for q in QUESTIONS]
    lm = tiny_lm()
    ((greedy,),) = jaxhal.generate(
        lm,
        ["A text on 0.\n\nWhat of 0?"],
        max_new_tokens=12,
        sampling=jaxhal.GREEDY,
    )
    assert rows[0]["greedy"] == greedy.text.strip()
    score, *_, words, cut = found.rows
    assert cut["measure"] == "share cut off by the limit of tokens"
    assert score["measure"] == "entropy (lower is better)"
    # The guide minimises what is measured here; greedy decoding is no rival of chance.
    assert score["guided"] < score["sampled"]
    assert score["guided - sampled high"] >= score["guided - sampled"]
    whole = [row for row in rows if all(row[way] for way in WAYS)]
    counted = [len(jaxhal.features.controls._words(row["greedy"])) for row in whole]
    assert words["greedy"] == pytest.approx(np.mean(counted))
    every = jaxhal.generate(
        lm,
        [f"{q.context}\n\n{q.text}" for q in QUESTIONS],
        max_new_tokens=12,
        sampling=jaxhal.GREEDY,
    )
    share = np.mean([one.stopped == "length" for (one,) in every])
    assert cut["greedy"] == pytest.approx(share) and share > 0
    text = (found.folder / "results.md").read_text("utf-8")
    assert text.count("\n| ") == 2 + len(found.rows)
    assert "What chooses also measures" in text


def test_answers_with_a_reference_in_them(world, monkeypatch, tmp_path):
    greedy = jaxhal.generate(
        tiny_lm(),
        [f"{q.context}\n\n{q.text}" for q in QUESTIONS],
        max_new_tokens=12,
        sampling=jaxhal.GREEDY,
    )
    known = [
        dataclasses.replace(q, answer=one.text if number else "no such thing")
        for number, (q, (one,)) in enumerate(zip(QUESTIONS, greedy, strict=True))
    ]
    monkeypatch.setitem(making.QUESTIONS, "numbers", lambda: known)
    found = compare(config(tmp_path), progress=False)
    rows = {row["measure"]: row for row in found.rows}
    assert rows["share with a whole reference"]["greedy"] == 0.8
    assert rows["share with a whole reference"]["sampled"] == 0.0


@pytest.mark.parametrize("lost", [(2,), range(5)])
def test_a_response_that_cannot_be_read_costs_its_question(
    world, monkeypatch, tmp_path, lost
):
    real = guiding.score

    def score(lm, examples, *rest, **options):
        found = real(lm, examples, *rest, **options)
        return [
            dataclasses.replace(one, error="too long", scores={})
            if one.id in {f"q{n} sampled" for n in lost}
            else one
            for one in found
        ]

    monkeypatch.setattr(guiding, "score", score)
    if len(lost) == 5:
        with pytest.raises(ValueError, match="of 5 questions can be judged: too long"):
            compare(config(tmp_path), progress=False)
        return
    found = compare(config(tmp_path), progress=False)
    assert "1 questions were left out" in (found.folder / "results.md").read_text()


def test_responses_without_text(world, monkeypatch, tmp_path):
    monkeypatch.setattr(
        guiding,
        "_written",
        lambda *_: {q.id: dict.fromkeys(WAYS, "") for q in QUESTIONS},
    )
    with pytest.raises(ValueError, match="none of 5 questions has a response with te"):
        compare(config(tmp_path), progress=False)


def test_a_prompt_without_room_is_left_out(world, monkeypatch, tmp_path):
    long = dataclasses.replace(QUESTIONS[1], context="much " * 9999)
    known = [QUESTIONS[0], long, *QUESTIONS[2:]]
    monkeypatch.setitem(making.QUESTIONS, "numbers", lambda: known)
    found = compare(config(tmp_path, batch_size=1), progress=False)
    text = (found.folder / "responses.jsonl").read_text("utf-8").splitlines()
    errors = {row["id"]: row.get("error") for row in map(json.loads, text)}
    assert "prompt 1 has" in errors.pop("q1") and set(errors.values()) == {None}
    assert len(world) == 4
    assert "1 questions were left out" in (found.folder / "results.md").read_text()


def test_a_run_goes_on(world, monkeypatch, tmp_path):
    first = compare(config(tmp_path), progress=False)
    assert len(world) == 5
    path = first.folder / "responses.jsonl"
    lines = path.read_text("utf-8").splitlines(keepends=True)
    path.write_text("".join(lines[:3]) + '{"id": "q3", "gui')
    again = compare(config(tmp_path), progress=False)
    assert (
        len(world) == 7 and path.read_text("utf-8").splitlines(keepends=True) == lines
    )
    assert again.rows == first.rows
    # A response to what the question was before is none; batches are no matter.
    other = dataclasses.replace(QUESTIONS[1], text="What of 11?")
    changed = [QUESTIONS[0], other, *QUESTIONS[2:]]
    monkeypatch.setitem(making.QUESTIONS, "numbers", lambda: changed)
    compare(config(tmp_path, batch_size=3), progress=False)
    assert len(world) == 8 and "What of 11?" in str(world[-1].prompt)
    # Nor is one that another fit of the detector chose.
    fitted = dataclasses.replace(UNSURE, params=(np.ones(1),))
    monkeypatch.setattr(guiding, "_detector", lambda config, lm: fitted)
    monkeypatch.setattr(guiding, "guide", lambda *given, **_: world.append(1) or 1 / 0)
    with pytest.raises(ZeroDivisionError):
        compare(config(tmp_path), progress=False)
    assert len(world) == 9


def test_intervals_are_over_sources():
    rng = np.random.default_rng(5)
    source = np.repeat(np.arange(8), 3)
    value = rng.normal(size=8)[source]  # questions of one source are as good
    measured = {way: {"words": value + 1 + at} for at, way in enumerate(WAYS)}
    (row,) = guiding._table(measured, [f"s{n}" for n in source])
    means = [value[::3][rng.integers(8, size=8)].mean() + 1 for _ in range(4000)]
    want = np.percentile(means, [2.5, 97.5])
    assert [row["guided low"], row["guided high"]] == pytest.approx(want, abs=0.06)


@pytest.mark.parametrize(
    "wrong, message",
    [
        (dict(questions="riddles"), "questions is 'riddles'; use one of"),
        (dict(candidates=1), "candidates is 1; give at least 2"),
        (dict(limit=9), "limit is 9; there are 5 questions"),
        (dict(temperature=0.0), "greedy sampling draws the same candidate"),
    ],
)
def test_wrong_configurations(world, tmp_path, wrong, message):
    with pytest.raises(ValueError, match=message):
        compare(config(tmp_path, **wrong), progress=False)


def test_the_command(world, tmp_path):
    path = tmp_path / "own.yaml"
    path.write_text("name: own\nquestions: numbers\n")
    settings = [f"{k}={v}" for k, v in config(tmp_path).items() if k != "name"]
    run = typer.testing.CliRunner().invoke(cli.app, ["guide", str(path), *settings])
    assert run.exit_code == 0, run.output
    assert "greedy" in run.stdout and "written to" in run.stderr


def test_pairs_show_every_way():
    ways = {"guided": [1.0, 2.0]} | {f"way {n}": [n, n + 1.0] for n in range(8)}
    axes = guided_pairs(ways, ways, "lens").axes
    for ax in axes:
        told = [text.get_text() for text in ax.get_legend().get_texts()]
        assert told == [f"against way {n}" for n in range(8)]
        looks = {(line.get_color(), line.get_marker()) for line in ax.lines[:8]}
        assert len(looks) == 8


def test_pairs_want_the_guided_way():
    with pytest.raises(ValueError, match="give 'guided' and others, as many each"):
        guided_pairs({"greedy": [1.0]}, {"greedy": [1.0]}, "lens")
    with pytest.raises(ValueError, match="overlaps are"):
        guided_pairs(
            {"guided": [1.0], "greedy": [2.0]}, {"guided": [1.0], "greedy": []}, "lens"
        )
