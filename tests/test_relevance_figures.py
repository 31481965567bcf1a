"""Relevance of two classes: tests of the difference, figures, and a run's page."""

import io
import itertools
import json
import math

import numpy as np
import pytest
from sklearn.metrics import roc_auc_score

import jaxhal
from jaxhal import experiments, plotting
from jaxhal.detectors import Detector, build
from jaxhal.evaluation import mann_whitney, mean_interval, sampled_mann_whitney
from jaxhal.experiments import relevance, running
from jaxhal.features.relevance import resample
from jaxhal.lrp import RelevanceMap
from jaxhal.plotting.style import GROUNDED, HALLUCINATED
from jaxhal.reading.store import Store
from jaxhal.scoring.inputs import collect
from jaxhal.types import Example
from tiny_lm import tiny_lm

rng = np.random.default_rng(0)
LABELS = np.repeat([0, 1], [40, 20])
LEVELS = rng.normal(size=60) - 0.5 * LABELS
PROFILES = rng.normal(size=(60, 30)) - LABELS[:, None]
MAPS = rng.normal(size=(60, 8, 5)) - LABELS[:, None, None]


def png(figure) -> bytes:
    """The rendered figure; warnings are errors here."""
    stream = io.BytesIO()
    figure.savefig(stream, format="png", dpi=60)
    assert stream.getvalue().startswith(b"\x89PNG")
    return stream.getvalue()


# The U test ---------------------------------------------------------------------------


def test_equal_values_do_not_differ():
    assert mann_whitney([1.0] * 30, np.repeat([0, 1], 15)) == 1.0
    assert sampled_mann_whitney([1.0] * 30, np.repeat([0, 1], 15)) == 1.0


def test_samples_hold_equally_many_of_each_class():
    """Five against five of nine: near the median over all 126 draws."""
    values = np.random.default_rng(1).normal(size=14)
    labels = np.repeat([0, 1], [9, 5])
    high = [*values[9:]]
    every = [
        mann_whitney([*low, *high], [0] * 5 + [1] * 5)
        for low in itertools.combinations(values[:9], 5)
    ]
    found = sampled_mann_whitney(values, labels, repeats=999)
    near = np.percentile(every, [45, 55])
    assert near[0] <= found <= near[1]
    assert found > mann_whitney(values, labels)


def test_a_sample_of_everything_is_the_test_itself():
    labels = np.repeat([0, 1], 30)
    p = mann_whitney(LEVELS, labels)
    assert sampled_mann_whitney(LEVELS, labels) == pytest.approx(p)
    few = [sampled_mann_whitney(LEVELS, labels, 20, 3, seed) for seed in (0, 0, 1)]
    assert few[0] == few[1] != few[2] and p not in few


@pytest.mark.parametrize("test", [mann_whitney, sampled_mann_whitney])
def test_bad_values_are_named(test):
    with pytest.raises(ValueError, match=r"values\[1\] is nan"):
        test([1.0, math.nan], [0, 1])
    with pytest.raises(ValueError, match="all 2 labels are of one class"):
        test([1.0, 2.0], [1, 1])
    with pytest.raises(ValueError, match="do not pair up"):
        test([1.0, 2.0, 3.0], [0, 1])


def test_bad_samples_are_named():
    for name in ("size", "repeats"):
        with pytest.raises(ValueError, match=f"{name} is 0; give at least 1"):
            sampled_mann_whitney([1.0, 2.0], [0, 1], **{name: 0})


# Intervals of means -------------------------------------------------------------------


def test_an_interval_of_means_is_that_of_the_normal_distribution():
    values = np.random.default_rng(1).normal(size=(400, 3)) * [1, 2, 3]
    low, high = mean_interval(values, repeats=5000)
    error = 1.96 * values.std(0) / 20
    np.testing.assert_allclose(low, values.mean(0) - error, atol=0.1 * error.max())
    np.testing.assert_allclose(high, values.mean(0) + error, atol=0.1 * error.max())


def test_a_source_is_drawn_whole():
    """Answers given twice say nothing new."""
    values = rng.normal(size=(30, 4))
    twice = np.repeat(values, 2, 0)
    once = mean_interval(values)
    np.testing.assert_allclose(mean_interval(twice, np.repeat(range(30), 2)), once)
    low, high = mean_interval(twice)
    assert (high - low < 0.85 * (once[1] - once[0])).all()


def test_bad_means_are_named():
    for values in ([1.0, 2.0], np.zeros((0, 2)), [[math.inf]]):
        with pytest.raises(ValueError, match=r"must be \[rows, columns\] of finite"):
            mean_interval(values)
    with pytest.raises(ValueError, match="got 1 groups for 2 rows"):
        mean_interval([[1.0], [2.0]], ["a"])
    with pytest.raises(ValueError, match="repeats is 0"):
        mean_interval([[1.0]], repeats=0)


# Figures ------------------------------------------------------------------------------


def test_boxes_show_quartiles_and_count_what_lies_beyond():
    values = np.append(LEVELS, [50.0, -50.0, 60.0])
    labels = np.append(LABELS, [0, 0, 1])
    figure = plotting.relevance_boxes({"mean": values, "level": 2 * values}, labels)
    assert [ax.get_ylabel() for ax in figure.axes] == ["mean", "level"]
    ax = figure.axes[0]
    names = [text.get_text() for text in ax.get_xticklabels()]
    beyond = []
    for kind in (0, 1):
        some = values[labels == kind]
        low, middle, high = np.percentile(some, [25, 50, 75])
        box = ax.patches[kind].get_path().vertices[:, 1]
        assert (box.min(), box.max()) == pytest.approx((low, high))
        line = [line for line in ax.lines if line.get_linewidth() == 1.8][kind]
        np.testing.assert_allclose(line.get_ydata(), middle)
        reach = 1.5 * (high - low)
        beyond.append(((some < low - reach) | (some > high + reach)).sum())
    assert names == [
        f"grounded\n42 answers\n{beyond[0]} not drawn",
        f"hallucinated\n21 answers\n{beyond[1]} not drawn",
    ]
    assert min(beyond) >= 1 and ax.get_ylim()[1] < 10  # they do not squeeze the boxes
    png(figure)


def test_lines_are_means_inside_their_intervals():
    groups = np.arange(60) // 2
    profiles = {"R_prompt": PROFILES, "R_response": 2 * PROFILES}
    figure = plotting.relevance_lines(profiles, LABELS, groups, "logit")
    assert [ax.get_title() for ax in figure.axes] == list(profiles)
    assert [ax.get_ylabel() for ax in figure.axes] == ["mean relevance (logit)", ""]
    for ax, values in zip(figure.axes, profiles.values(), strict=True):
        for kind, colour in ((0, GROUNDED), (1, HALLUCINATED)):
            x, y = ax.lines[kind].get_data()
            assert (x[0], x[-1]) == pytest.approx((50 / 30, 100 - 50 / 30))
            np.testing.assert_allclose(y, values[LABELS == kind].mean(0))
            assert ax.lines[kind].get_color() == colour
            low, high = mean_interval(
                values[LABELS == kind], groups[LABELS == kind].tolist()
            )
            edge = ax.collections[kind].get_paths()[0].vertices
            np.testing.assert_allclose(
                [edge[:, 1].min(), edge[:, 1].max()], [low.min(), high.max()]
            )
    named = [text.get_text() for text in figure.legends[0].get_texts()]
    assert named == ["grounded (40)", "hallucinated (20)", "95 % interval"]
    png(figure)


def test_one_bin_does_not_flatten_all_others():
    profiles = rng.normal(size=(60, 100)) - LABELS[:, None]
    shown = plotting.relevance_lines({"R": profiles}, LABELS).axes[0].get_ylim()
    profiles[:, 0] = 1000.0
    figure = plotting.relevance_lines({"R": profiles}, LABELS)
    low, high = figure.axes[0].get_ylim()
    assert high < 2 * shown[1] and low == pytest.approx(shown[0], abs=0.3)
    assert figure.axes[0].lines[0].get_ydata()[0] == 1000.0
    assert [text.get_text() for text in figure.axes[0].texts] == ["up to 1e+03"]
    png(figure)


def test_maps_share_one_scale_around_zero():
    maps = MAPS.copy()
    maps[:, 0, 0] = 99.0
    figure = plotting.relevance_maps(maps, LABELS, "logit")
    left, right, bar = figure.axes
    means = [maps[LABELS == kind].mean(0) for kind in (0, 1)]
    limit = 2 * np.percentile(np.abs(means), 90)
    for ax, mean in zip((left, right), means, strict=True):
        np.testing.assert_allclose(ax.images[0].get_array(), mean)
        assert ax.images[0].get_clim() == pytest.approx((-limit, limit))
    assert (left.get_title(), right.get_title()) == (
        "grounded (40)",
        "hallucinated (20)",
    )
    assert bar.get_ylabel() == "mean relevance (logit)"
    assert limit < 10
    assert right.images[0].colorbar.extend == "max"
    png(figure)
    png(plotting.relevance_maps(np.zeros((2, 1, 1)), [0, 1]))


def test_any_size():
    png(plotting.relevance_boxes({"a": [1.0, 1.0]}, [0, 1]))
    png(plotting.relevance_boxes(dict.fromkeys("abcd", LEVELS), LABELS))
    png(plotting.relevance_lines({"a": [[1.0], [1.0]]}, [0, 1]))
    png(plotting.relevance_maps(rng.normal(size=(2, 300, 800)), [0, 1]))


def test_bad_figures_are_named():
    with pytest.raises(ValueError, match="scores are empty"):
        plotting.relevance_boxes({}, [0, 1])
    with pytest.raises(ValueError, match="scores of 'a' of shape"):
        plotting.relevance_boxes({"a": [1.0]}, [0, 1])
    with pytest.raises(ValueError, match="profiles are empty"):
        plotting.relevance_lines({}, [0, 1])
    for bad in ([1.0, 2.0], [[], []], [[1.0], [math.nan]]):
        with pytest.raises(ValueError, match=r"R of shape .* \[answers, bins\]"):
            plotting.relevance_lines({"R": bad}, [0, 1])
        with pytest.raises(ValueError, match=r"maps of shape .* response, prompt\]"):
            plotting.relevance_maps(bad, [0, 1])
    with pytest.raises(ValueError, match="R holds 3 answers for 2 labels"):
        plotting.relevance_lines({"R": np.ones((3, 2))}, [0, 1])
    with pytest.raises(ValueError, match="maps holds 3 answers for 2 labels"):
        plotting.relevance_maps(np.ones((3, 2, 2)), [0, 1])
    with pytest.raises(ValueError, match="got 1 groups for 2 rows"):
        plotting.relevance_lines({"R": np.ones((2, 2))}, [0, 1], ["a"])
    for draw in (plotting.relevance_boxes, plotting.relevance_lines):
        with pytest.raises(ValueError, match="one class"):
            rank = 1 if draw is plotting.relevance_boxes else 2
            draw({"R": np.ones((2, 2)[:rank])}, [0, 0])
    with pytest.raises(ValueError, match="one class"):
        plotting.relevance_maps(np.ones((2, 2, 2)), [0, 0])


# Runs ---------------------------------------------------------------------------------

RULE = "lrp4rag_threshold"
SPECS = [RULE, {RULE: {"of": "prompt"}}]


def short_answers() -> list[Example]:
    """Of several lengths that are padded to one, so that what reads compiles once."""
    return [
        Example(
            id=str(number),
            context=f"Box {number // 2:02d} holds red balls.",
            question="What is inside?",
            response=f"{'Red ' * (number % 3 == 0)}balls, {number}.",
            label=number % 2,
        )
        for number in range(40)
    ]


@pytest.fixture(scope="module")
def lm():
    return tiny_lm()


@pytest.fixture(scope="module")
def store(tmp_path_factory):
    return tmp_path_factory.mktemp("store")


@pytest.fixture(scope="module")
def data(lm, store):
    whole = Detector(
        *("whole", "mean of R*", "logit", "test"),
        features=(("map", RelevanceMap(response_bins=6, prompt_bins=3)),),
        inputs=lambda features: features["map"].mean((1, 2)),
    )
    made = [*map(build, SPECS), whole]
    return collect(lm, short_answers(), made, Store(store), progress=False)


def test_profiles_are_those_of_the_model(lm, data):
    found = relevance.profiles_of(data)
    assert found.unit == "logit" and found.maps.shape == (40, 6, 3)
    number = 6
    batch = lm.encode([data.examples[number]])
    means = jaxhal.relevance_means(lm, batch)
    there = np.asarray(batch.valid[0])
    prompt = np.asarray(means.prompt[0])[there[: batch.prompt_length]]
    response = np.asarray(means.response[0])[there[batch.prompt_length :]]
    # What the page says of them: one mean, but for the bins.
    assert prompt.mean() == pytest.approx(response.mean(), rel=1e-4)
    wanted = {
        "R_prompt": resample(resample(prompt, 500), 100),
        "R_response": resample(response, 100),
    }
    for name, want in wanted.items():
        np.testing.assert_allclose(found.bins[name][number], want, atol=1e-5)
        mean = found.quantities[f"mean of {name} (logit)"][number]
        assert mean == pytest.approx(float(want.mean()), abs=1e-5)
    for name, rule in (("R_prompt", f"{RULE}_prompt"), ("R_response", RULE)):
        level = found.quantities[f"level of {name} (0 to 1)"]
        np.testing.assert_allclose(level, 1 - data.inputs[rule], atol=1e-5)


def test_figures_of_what_was_read(lm, store, data):
    drawn = dict(relevance.figures(data))
    assert list(drawn) == ["relevance_boxes", "relevance_lines", "relevance_map"]
    assert [ax.get_title() for ax in drawn["relevance_lines"].axes] == [
        "R_prompt",
        "R_response",
    ]
    assert len(drawn["relevance_boxes"].axes) == 4
    grounded = drawn["relevance_map"].axes[0].images[0].get_array()
    maps = relevance.profiles_of(data).maps
    np.testing.assert_allclose(grounded, maps[data.labels == 0].mean(0), rtol=1e-6)
    some = collect(lm, short_answers(), [build(RULE)], Store(store), progress=False)
    drawn = dict(relevance.figures(some))
    assert list(drawn) == ["relevance_boxes", "relevance_lines"]
    assert [row["feature"] for row in relevance.table({"a": some})] == [
        "mean of R_response (logit)",
        "level of R_response (0 to 1)",
    ]


def test_the_table_is_that_of_its_parts(data):
    (row, *others) = relevance.table({"tiny": data})
    assert len(others) == 3 and row["data"] == "tiny" and row["sample"] == 20
    values = relevance.profiles_of(data).quantities[row["feature"]]
    assert row["AUROC"] == pytest.approx(roc_auc_score(data.labels, values))
    assert row["low"] <= row["AUROC"] <= row["high"]
    plain = mann_whitney(values, data.labels)
    # Both classes have twenty, so every draw is of all.
    assert row["p"] == plain == pytest.approx(row["p of samples"])
    text = relevance.markdown([row, *others])
    assert text.startswith("| feature | p |") and "of 20 answers of each class" in text
    text = relevance.markdown([row, {**row, "data": "other", "sample": 200}])
    assert text.startswith("| data | feature |") and "20 or 200 answers" in text
    assert "| other | mean of R_prompt (logit) |" in text


def test_a_run_shows_the_relevance_of_every_data_set(lm, store, tmp_path, monkeypatch):
    def examples(name, **options):
        return short_answers()[:20] if name == "one" else short_answers()[20:]

    monkeypatch.setattr(running, "model", lambda name, *_, **__: lm)
    monkeypatch.setattr(running, "load_dataset", examples)
    config = {
        "name": "tiny",
        "data": [{"name": "one"}, {"name": "two"}],
        "detectors": SPECS,
        "protocol": "holdout",
        "store": str(store),
        "out": str(tmp_path),
    }
    result = experiments.run(config, progress=False)
    names = {path.stem for path in result.folder.glob("relevance_*.png")}
    assert names == {
        f"relevance_{kind}_{label}"
        for kind in ("boxes", "lines")
        for label in ("one", "two")
    }
    rows = json.loads((result.folder / "results.json").read_text("utf-8"))["relevance"]
    assert rows == json.loads(json.dumps(relevance.table(result.data)))
    text = (result.folder / "results.md").read_text("utf-8")
    assert f"## Relevance\n\n{relevance.markdown(rows)}\n" in text
    assert "![relevance_lines_two](relevance_lines_two.png)" in text
