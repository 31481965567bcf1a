"""Judging sentence by sentence, and samples that come with the answers."""

import dataclasses
import json
import math

import numpy as np
import pytest
from scipy.stats import pearsonr

from jaxhal import detectors, experiments
from jaxhal.datasets.jsonl import to_row
from jaxhal.detectors.semantic_entropy import Likelihood
from jaxhal.evaluation import auprc, correlation
from jaxhal.experiments import running
from jaxhal.reading.bulk import Bulk
from jaxhal.reading.samples import Draw, draw
from jaxhal.reading.store import Store
from jaxhal.reading.units import Part, parts_of, sentence_numbers
from jaxhal.scoring.fitting import untrained
from jaxhal.scoring.inputs import collect
from jaxhal.scoring.saving import load
from jaxhal.texts import sentences_of
from jaxhal.types import Example, Label
from tiny_lm import read_into, tiny_lm

GIVEN = Draw(n=2, given=True)


def passages(count: int = 12) -> list[Example]:
    """Three sentences each, of which some are made up, and what was said beside."""
    found = []
    for number in range(count):
        said = [f"Ada was born in {1800 + number}.", "She wrote.", "She had a cat."]
        starts = [0, len(said[0]) + 1, len(said[0]) + len(said[1]) + 2]
        wrong = [at for at in range(3) if (number >> at) & 1]
        found.append(
            Example(
                " ".join(said),
                prompt="Who was Ada?",
                id=f"p{number}",
                labels=tuple(
                    Label(starts[at], starts[at] + len(said[at])) for at in wrong
                ),
                source=f"s{number}",
                samples=("Ada was born in 1805. She wrote.", "Ada had a dog.", " "),
            )
        )
    return found


@pytest.fixture(scope="module")
def lm():
    return tiny_lm()


@pytest.fixture(scope="module")
def store(tmp_path_factory):
    return tmp_path_factory.mktemp("store")


def test_sentences_of_tokens():
    offsets = np.array([[n, n + 1] for n in range(8)] + [[8, 8]])
    numbers = sentence_numbers(" A b. C!", offsets)
    # A token of space between two sentences is in neither, and so is the end.
    assert numbers.tolist() == [-1, 0, 0, 0, 0, -1, 1, 1, -1]
    assert sentence_numbers("", offsets[:0]).tolist() == []


def test_parts_are_sentences():
    (example,) = passages(6)[5:]  # the first and the third sentence are made up
    offsets = np.array([[n, n + 1] for n in range(len(example.response))])
    marked = np.zeros(len(offsets), bool)
    for start, end, _ in example.labels:
        marked[start:end] = True
    whole = Part(7, np.ones(len(offsets), bool), example)
    parts = list(parts_of("sentence", whole, offsets, marked))
    assert [part.example.response for part in parts] == sentences_of(example.response)
    assert [part.example.label for part in parts] == [1, 0, 1]
    assert [part.sentence for part in parts] == [0, 1, 2]
    assert [part.example.id for part in parts] == ["p5#0", "p5#1", "p5#2"]
    assert {part.row for part in parts} == {7}
    # No token is in two of them, and only the spaces between are in none.
    assert sum(part.tokens.astype(int) for part in parts).sum() == len(offsets) - 2


def test_samples_that_come_with_the_answers(lm):
    examples = passages(3)
    found = draw(lm, examples, GIVEN)
    assert [[one.text for one in some] for some in found] == [
        list(each.samples[:2]) for each in examples
    ]
    assert all(math.isnan(one.logprob) and one.tokens == 0 for one in found[0])
    few = [dataclasses.replace(examples[0], samples=("One.",))]
    with pytest.raises(ValueError, match="'p0' comes with 1 samples, and 2 are asked"):
        draw(lm, few, GIVEN)


def test_given_samples_have_no_likelihood():
    with pytest.raises(ValueError, match="no log probabilities; use a detector"):
        Likelihood(GIVEN, per_token=True)
    with pytest.raises(ValueError, match="semantic_entropy_discrete"):
        detectors.semantic_entropy(draw={"given": True})
    discrete = detectors.semantic_entropy_discrete(draw={"given": True, "n": 2})
    assert len(discrete.measures) == 1


def test_rows_bring_samples():
    row = {"response": "A.", "prompt": "B", "samples": ["C", ""]}
    assert to_row(1, "line", lambda: row).example.samples == ("C", "")
    for bad, why in ((5, "'samples' is 5; use a list"), ([5], "'samples[0]' is 5")):
        error = to_row(1, "line", lambda bad=bad: row | {"samples": bad}).error
        assert error is not None
        assert why in error


def test_sentences_have_their_own_scores(lm, store):
    examples = passages()
    chosen = [
        detectors.selfcheck_ngram(draw=GIVEN),
        detectors.selfcheck_ngram(2, "mean", draw=GIVEN, name="bigram"),
        *detectors.get(["predictive_probability", "novel_words"]),
    ]
    found = collect(lm, examples, chosen, Store(store), unit="sentence", progress=False)
    assert len(found.examples) == 36 and found.labels.sum() == sum(
        len(each.labels) for each in examples
    )
    bulk = Bulk(lm, examples)
    for one in chosen[:2]:
        got = untrained(one).score(found.inputs[one.name])
        want = one.measures[0](bulk)["values"]
        np.testing.assert_allclose(got, want.ravel(), rtol=1e-6)
    # What is read of tokens is averaged over those of the sentence.
    whole = read_into(store, lm, examples, chosen[2].reducers)
    got = untrained(chosen[2]).score(found.inputs["predictive_probability"])
    for part, score in zip(found.source.parts, got, strict=True):
        logprob = whole.features["logprob"][part.row]
        assert score == pytest.approx(-logprob[part.tokens].mean(), abs=1e-5)


def test_whole_answers_are_no_sentences(lm, store):
    chosen = [detectors.semantic_entropy_discrete(draw=GIVEN)]
    with pytest.raises(
        ValueError,
        match="belongs to a whole answer.*leave out semantic_entropy_discrete",
    ):
        collect(lm, passages(2), chosen, Store(store), unit="sentence")


def test_a_run_over_sentences(lm, store, tmp_path, monkeypatch):
    monkeypatch.setattr(running, "model", lambda name, *_, **__: lm)
    monkeypatch.setattr(running, "load_dataset", lambda name, **options: passages(24))
    config = {
        "name": "sentences",
        "data": [{"name": "ada"}],
        "unit": "sentence",
        "protocol": "grouped",
        "folds": 2,
        "detectors": [
            {"selfcheck_ngram": {"draw": {"given": True, "n": 2}}},
            "predictive_probability",
        ],
        "store": str(store),
        "out": str(tmp_path),
    }
    result = experiments.run(config, progress=False)
    text = (result.folder / "results.md").read_text("utf-8")
    assert "one sentence is judged at a time" in text and "72 sentences" in text
    assert "## Sentences and answers" in text and "Pearson of answers [95 %]" in text
    saved = result.folder / "fitted" / "ada"
    assert load(saved / "selfcheck_ngram").unit == "sentence"
    assert "each sentence of an answer" in (saved / "README.md").read_text("utf-8")
    kept = json.loads((result.folder / "results.json").read_text("utf-8"))
    rows = {row["method"]: row for row in kept["sentences"]}
    data = result.data["ada"]
    share = data.labels.reshape(24, 3).mean(1)
    for name in ("selfcheck_ngram", "predictive_probability"):
        scores = result.fitted["ada"][name].score(data.inputs[name])
        means = scores.reshape(24, 3).mean(1)
        row = rows[name]
        assert row["Pearson of answers"] == pytest.approx(
            pearsonr(means, share)[0], abs=1e-5
        )
        assert row["low"] < row["Pearson of answers"] < row["high"]
        assert row["AUPRC of hallucinated"] == auprc(scores, data.labels)
        assert row["AUPRC of grounded"] == auprc(-scores, 1 - data.labels)


def test_correlation():
    rng = np.random.default_rng(0)
    x = rng.normal(size=200)
    y = x + rng.normal(size=200)
    r, low, high = correlation(x, y)
    want = pearsonr(x, y)
    assert r == pytest.approx(want[0])
    theory = want.confidence_interval(0.95)
    assert low == pytest.approx(theory.low, abs=0.03)
    assert high == pytest.approx(theory.high, abs=0.03)
    # Answers that share a source say no more than one of them.
    twice = correlation(np.tile(x, 2), np.tile(y, 2), [*range(200), *range(200)])
    np.testing.assert_allclose(twice, (r, low, high), atol=1e-9)
    line = np.linspace(0.1, 0.7, 7)  # rounding makes it more than 1
    assert max(correlation(line, 3 * line + 0.1)) == 1.0
    assert all(map(math.isnan, correlation([1.0, 1.0], [1.0, 2.0])))
    for bad, more in (([math.inf, 1.0], {}), ([1.0, 2.0], {"repeats": 0})):
        with pytest.raises(ValueError, match="finite|repeats is 0"):
            correlation(bad, [1.0, 2.0], **more)
