"""Figures show the numbers they are given, draw without warnings, refuse the rest."""

import io
import sys

import numpy as np
import pandas as pd
import pytest
from sklearn import calibration, metrics

import oracles
from jaxhal import plotting
from jaxhal.features.arrays import reduce
from jaxhal.features.forest import Forest
from jaxhal.plotting.style import line_styles

rng = np.random.default_rng(0)
LABELS = np.repeat([0, 1], [40, 20])
SCORES = {
    "mtop_div": rng.normal(size=60) + LABELS,
    "response_length": rng.integers(1, 9, 60),
    "toha": rng.normal(size=60) + 2 * LABELS,
}


def png(figure) -> bytes:
    """The rendered figure; warnings are errors here."""
    stream = io.BytesIO()
    figure.savefig(stream, format="png", dpi=60)
    assert stream.getvalue().startswith(b"\x89PNG")
    return stream.getvalue()


def test_a_notebook_shows_a_figure_that_is_named():
    from IPython.core.formatters import DisplayFormatter

    figure = plotting.head_map(np.eye(3), "title", "label")
    data, _ = DisplayFormatter().format(figure)
    assert data["image/png"].startswith(b"\x89PNG")


def legend(figure):
    return [text.get_text() for text in figure.legends[0].get_texts()]


def texts(figure):
    return [text.get_text() for text in figure.axes[0].texts]


def curves(figure):
    """Lines of the legend by the name they show, and how they look."""
    lines = figure.axes[0].lines
    return {line.get_label().split("  ")[0]: line for line in lines}


def test_no_window_and_no_pyplot():
    png(plotting.timing_bars({"read": 1.0}))
    pyplot = sys.modules.get("matplotlib.pyplot")
    assert pyplot is None or not pyplot.get_fignums()


# Layers -------------------------------------------------------------------------------


def test_head_map_shows_the_values_and_frames():
    values = np.arange(12.0).reshape(4, 3)
    ax = plotting.head_map(
        values, "divergence", "edge weight", framed=[(3, 1), (2, 1)]
    ).axes[0]
    np.testing.assert_array_equal(ax.images[0].get_array(), values)
    assert (ax.get_title(), ax.get_xlabel(), ax.get_ylabel()) == (
        "divergence",
        "head",
        "layer",
    )
    assert {patch.get_xy() for patch in ax.patches} == {(0.5, 2.5), (0.5, 1.5)}
    assert ax.figure.axes[1].get_ylabel() == "edge weight"


def test_signed_values_are_centred_on_zero():
    figure = plotting.head_map(np.array([[-1.0, 3.0]]))
    assert figure.axes[0].images[0].get_clim() == (-3.0, 3.0)
    figure = plotting.head_map(np.array([[1.0, 3.0]]))
    assert figure.axes[0].images[0].get_clim() == (1.0, 3.0)


def test_head_map_draws_on_given_axes():
    from matplotlib.figure import Figure

    figure = Figure()
    left, right = figure.subplots(1, 2)
    assert plotting.head_map(np.ones((2, 2)), ax=right) is figure
    assert right.images and not left.images


@pytest.mark.parametrize("shape", [(1, 1), (2, 40), (80, 64)])
def test_head_map_at_any_size(shape):
    png(plotting.head_map(rng.normal(size=shape), "heads", "weight", framed=[(0, 0)]))


def test_bad_head_maps_are_named():
    with pytest.raises(ValueError, match=r"\[2, 3, 4\]"):
        plotting.head_map(np.zeros((2, 3, 4)))
    with pytest.raises(ValueError, match=r"\[0, 3\]"):
        plotting.head_map(np.zeros((0, 3)))
    with pytest.raises(ValueError, match=r"values\[1, 0\] is nan"):
        plotting.head_map(np.array([[1.0, 2.0], [np.nan, 3.0]]))
    for head in ((4, 0), (0, 3), (-1, 0)):
        with pytest.raises(ValueError, match=r"framed head .* 4 layers and 3 heads"):
            plotting.head_map(np.zeros((4, 3)), framed=[head])


def test_layer_curve_marks_the_best():
    values, low, high = [0.5, 0.9, 0.7], [0.4, 0.8, 0.6], [0.6, 1.0, 0.8]
    figure = plotting.layer_curve(values, low, high, "probe")
    ax = figure.axes[0]
    np.testing.assert_array_equal(ax.lines[0].get_ydata(), values)
    assert texts(figure) == ["layer 1: 0.900"]
    edge = ax.collections[0].get_paths()[0].vertices
    assert {*low, *high} <= {round(y, 9) for y in edge[:, 1]}
    assert (ax.get_xlabel(), ax.get_ylabel()) == ("layer", "AUROC")


@pytest.mark.parametrize("layers", [1, 3, 120])
def test_layer_curve_at_any_size(layers):
    png(plotting.layer_curve(rng.random(layers)))


def swept() -> pd.DataFrame:
    rows = [
        {"length": str(length), "method": method, "control": method == "words"}
        | {"AUROC": 0.6, "low": 0.5, "high": 0.7, "accuracy": 0.01 * length}
        for length in (30, 10, 20)
        for method in ("svm", "words")
    ]
    return pd.DataFrame(rows)


def test_sweep_curves_draw_methods_in_order_of_the_setting():
    figure = plotting.sweep_curves(swept(), "length")
    auroc, accuracy = figure.axes
    assert [line.get_label() for line in auroc.lines] == ["svm", "words"]
    np.testing.assert_array_equal(auroc.lines[0].get_xdata(), [10, 20, 30])
    np.testing.assert_allclose(accuracy.lines[1].get_ydata(), [0.1, 0.2, 0.3])
    assert len(auroc.collections) == 1  # only methods have a band
    png(figure)
    with pytest.raises(ValueError, match="no column 'size'; sweep that key"):
        plotting.sweep_curves(swept(), "size")
    with pytest.raises(ValueError, match="method takes values that are no numbers"):
        plotting.sweep_curves(swept(), "method")


def test_bad_layer_curves_are_named():
    for values in ([], [[0.5]], [0.5, np.nan]):
        with pytest.raises(ValueError, match=r"must be \[layers\] of finite numbers"):
            plotting.layer_curve(values)
    with pytest.raises(ValueError, match="give both or none"):
        plotting.layer_curve([0.5], low=[0.4])
    for low, high in (([0.4, 0.4], [0.6, 0.6]), ([0.6], [0.4])):
        with pytest.raises(ValueError, match="low never above high"):
            plotting.layer_curve([0.5], low, high)


# Curves -------------------------------------------------------------------------------


def test_roc_curves_sorts_by_area_and_greys_controls():
    figure = plotting.roc_curves(SCORES, LABELS, controls={"response_length"})
    areas = {n: metrics.roc_auc_score(LABELS, s) for n, s in SCORES.items()}
    ordered = sorted(areas, key=lambda name: -areas[name])
    assert ordered[0] == "toha"
    assert legend(figure) == [f"{name}  {areas[name]:.3f}" for name in ordered]
    drawn = curves(figure)
    for name in SCORES:
        x, y = drawn[name].get_data()
        assert np.trapezoid(y, x) == pytest.approx(areas[name])
    control = drawn["response_length"]
    assert control.is_dashed() and not drawn["toha"].is_dashed()
    red, green, blue = (int(control.get_color()[i : i + 2], 16) for i in (1, 3, 5))
    assert red == green == blue
    assert drawn["toha"].get_zorder() > control.get_zorder()
    png(figure)


def test_roc_curves_prints_given_intervals():
    known = {"toha": (0.5, 0.4, 0.6), "mtop_div": (0.9, 0.8, 1.0)}
    figure = plotting.roc_curves(SCORES, LABELS, known)
    assert "mtop_div  0.900  [0.80, 1.00]" in legend(figure)
    shown = [entry.split("  ")[0] for entry in legend(figure)]
    assert shown.index("mtop_div") < shown.index("toha")
    png(figure)


def test_precision_recall_curves_show_precision_and_what_guessing_reaches():
    figure = plotting.precision_recall_curves(SCORES, LABELS, {"response_length"})
    assert legend(figure)[-1] == "guessing  0.333"
    drawn = curves(figure)
    np.testing.assert_allclose(drawn["guessing"].get_ydata(), 20 / 60)
    for name, scores in SCORES.items():
        area = metrics.average_precision_score(LABELS, scores)
        assert f"{name}  {area:.3f}" in legend(figure)
        recall, precision = drawn[name].get_data()
        assert -np.sum(np.diff(recall) * precision[:-1]) == pytest.approx(area)
    png(figure)


@pytest.mark.parametrize(
    "draw", [plotting.roc_curves, plotting.precision_recall_curves]
)
def test_curves_at_any_size(draw):
    png(draw({"a": [0.1, 0.2]}, [0, 1]))
    many = {f"method_{i}_$x_{{1}}": rng.normal(size=60) for i in range(25)}
    figure = draw(many, LABELS, controls=list(many)[:10])
    assert set(curves(figure)) >= set(many)
    png(figure)


def test_every_name_has_a_look_of_its_own():
    names = [str(i) for i in range(27)]
    looks = line_styles(names, names[:9]).values()
    assert len({str(look) for look in looks}) == 27


# Distributions ------------------------------------------------------------------------


def test_histograms_count_every_answer_by_class():
    scores = SCORES | {"constant": np.ones(60), "far": np.exp(5 * SCORES["toha"])}
    figure = plotting.score_histograms(scores, LABELS, bins=7)
    assert legend(figure) == ["grounded (40)", "hallucinated (20)"]
    panels = {ax.get_title(): ax for ax in figure.axes if ax.get_visible()}
    assert list(panels) == list(scores)
    for ax in panels.values():
        grounded, _, hallucinated, _ = (patch.get_data() for patch in ax.patches)
        assert grounded.values.sum() == 40 and hallucinated.values.sum() == 20
        assert len(grounded.values) == 7
    data = panels["mtop_div"].patches[2].get_data()
    score = SCORES["mtop_div"][LABELS == 1]
    want = [(score < edge).sum() for edge in data.edges[1:-1]]
    np.testing.assert_array_equal(np.cumsum(data.values)[:-1], want)
    png(figure)


def test_histograms_at_any_size():
    png(plotting.score_histograms({"a": [1, 1]}, [0, 1], bins=1))
    many = {f"method_{i}": rng.normal(size=60) for i in range(13)}
    png(plotting.score_histograms(many, LABELS))


def test_calibration_equals_sklearn():
    rows, bins = 500, 8
    values = rng.random(rows)
    labels = rng.random(rows) < values
    figure = plotting.calibration_curve(values, labels, bins)
    true, predicted = calibration.calibration_curve(labels, values, n_bins=bins)
    np.testing.assert_allclose(
        figure.axes[0].lines[-1].get_xydata(), np.c_[predicted, true]
    )
    want, _ = np.histogram(values, np.linspace(0, 1, bins + 1))
    heights = [bar.get_height() for bar in figure.axes[1].patches]
    np.testing.assert_array_equal(heights, want)
    shown = [int(t.get_text()) for t in figure.axes[1].texts if t.get_text()]
    assert shown == [n for n in want if n]
    png(figure)


def test_calibration_of_certain_answers():
    figure = plotting.calibration_curve([0.0, 1.0], [0, 1])
    np.testing.assert_array_equal(
        figure.axes[0].lines[-1].get_xydata(), [[0, 0], [1, 1]]
    )
    png(figure)


def test_what_is_counted_is_named():
    figure = plotting.score_histograms({"a": SCORES["toha"]}, LABELS, unit="windows")
    assert figure.axes[0].get_ylabel() == "windows"
    figure = plotting.calibration_curve([0.0, 1.0], [0, 1], unit="spans")
    assert figure.axes[1].get_ylabel() == "spans"


# Comparisons --------------------------------------------------------------------------


def test_intervals_put_controls_below_and_draw_the_best_of_them():
    known = {
        "mtop_div": (0.7, 0.6, 0.8),
        "length": (0.6, 0.5, 0.65),
        "toha": (0.8, 0.75, 0.85),
        "words": (0.72, 0.7, 0.74),
    }
    figure = plotting.auroc_intervals(known, {"length", "words"})
    ax = figure.axes[0]
    names = [text.get_text() for text in ax.get_yticklabels()]
    assert names == ["toha", "mtop_div", "words", "length"]
    spans = [line.get_xdata() for line in ax.lines[: 2 * len(known) : 2]]
    assert [tuple(span) for span in spans] == [known[name][1:] for name in names]
    dots = ax.lines[1 : 2 * len(known) : 2]
    assert [line.get_xdata()[0] for line in dots] == [known[n][0] for n in names]
    hollow = [line.get_markerfacecolor() == "white" for line in dots]
    assert hollow == [False, False, True, True]
    assert [line.get_xdata()[0] for line in ax.lines[-2:]] == [0.5, 0.72]
    assert texts(figure)[0] == "0.800  [0.75, 0.85]"
    assert texts(figure)[-1] == "best control"
    top, bottom = ax.get_ylim()[::-1]
    assert top < 0 < len(known) - 1 < bottom
    png(figure)


def test_intervals_at_any_size():
    figure = plotting.auroc_intervals({"a": (0.5, 0.5, 0.5)})
    assert "best control" not in texts(figure)
    png(figure)
    many = {f"method_{i}_$with_a_long_name": (0.5, 0.4, 0.6) for i in range(40)}
    png(plotting.auroc_intervals(many, list(many)[:6]))


def test_transfer_map_writes_legible_numbers_and_frames_its_own():
    from matplotlib.colors import to_rgb

    matrix = np.array([[0.95, 0.3], [np.nan, 0.75], [0.55, 0.62]])
    figure = plotting.transfer_map(matrix, ["CoQA", "SQuAD", "XSum"], ["CoQA", "SQuAD"])
    ax = figure.axes[0]
    assert texts(figure) == ["0.95", "0.30", "0.75", "0.55", "0.62"]
    assert {patch.get_xy() for patch in ax.patches} == {(-0.5, -0.5), (0.5, 0.5)}
    assert (ax.get_xlabel(), ax.get_ylabel()) == ("tested on", "fitted on")
    image = ax.images[0]
    for text in ax.texts:
        column, row = text.get_position()
        back = np.mean(image.cmap(image.norm(matrix[row, column]))[:3])
        assert abs(back - np.mean(to_rgb(text.get_color()))) > 0.4
    png(figure)


def test_transfer_map_at_any_size():
    png(plotting.transfer_map([[0.7]], ["a"], ["a"]))
    names = [f"data set number {i}" for i in range(14)]
    png(plotting.transfer_map(rng.random((14, 14)), names, names))
    png(plotting.transfer_map([[np.nan]], ["a"], ["b"]))


def test_timing_bars_show_seconds_and_shares():
    figure = plotting.timing_bars({"load": 1.5, "read": 498.0, "score": 0.5})
    widths = [bar.get_width() for bar in figure.axes[0].patches]
    assert widths == [1.5, 498.0, 0.5]
    assert texts(figure) == ["1.5 s  (< 1 %)", "498 s  (100 %)", "0.5 s  (< 1 %)"]
    assert figure.axes[0].get_xlabel() == "seconds (500 in all)"
    png(figure)
    png(plotting.timing_bars({"nothing": 0.0}))
    figure = plotting.timing_bars({"read": 6600.4, "score": 407.6})
    assert [text.get_text() for text in figure.axes[0].texts] == [
        "6,600 s  (94 %)",
        "408 s  (6 %)",
    ]
    assert figure.axes[0].get_xlabel() == "seconds (7,008 in all)"


# Forests ------------------------------------------------------------------------------


def test_forest_drawing_shows_every_edge_and_counts_the_rest():
    tokens = ["<s>", "a", "b", "$c", " d", "e", "\n", "x" * 40, "g"]
    figure = plotting.forest_drawing(
        [3, 8, 0], [0.25, 0.5, 0.98], tokens, 6, [False, True, False], "head $1"
    )
    assert figure.axes[0].get_title() == "head $1"
    assert texts(figure) == [
        *("prompt", "response", "<s>", "… 2 tokens", "$c", "… 2 tokens"),
        *("↵", "x" * 19 + "…", "g"),
    ]
    ax = figure.axes[0]
    at = {text.get_text(): text.get_position()[1] for text in ax.texts}
    ends = [patch.get_path().vertices[[0, -1], 1].tolist() for patch in ax.patches]
    middle = at["x" * 19 + "…"]
    assert ends == [[at["↵"], at["$c"]], [middle, at["g"]], [at["g"], at["<s>"]]]
    assert [patch.get_alpha() for patch in ax.patches] == [0.75, 0.5, 0.1]
    grounded, marked, last = (patch.get_edgecolor()[:3] for patch in ax.patches)
    assert grounded == last != marked
    assert legend(figure) == ["not marked", "marked as hallucinated"]
    png(figure)


def test_a_forest_leaves_tokens_without_text_unnamed():
    figure = plotting.forest_drawing([0, 0], [0.5, 0.5], ["a", "", "  "], 1)
    assert texts(figure)[-2:] == ["", "␣"]


@pytest.mark.parametrize("seq, prompt", [(2, 1), (40, 20), (520, 400)])
def test_forest_drawing_at_any_size(seq, prompt):
    attention = oracles.causal_attention(0, seq, kind="peaked")
    tokens = [f"token{i}" for i in range(seq - 1)] + ["中文 🙂\ufeff"]
    edges = reduce(Forest(), attention, prompt)
    figure = plotting.forest_drawing(*edges, tokens, prompt)
    assert len(figure.axes[0].patches) == seq - prompt
    unnamed = sum(
        int(text.split()[1]) for text in texts(figure) if text.startswith("… ")
    )
    named = {int(parent) for parent in edges.parents if parent < prompt}
    assert unnamed + len(named) == prompt
    png(figure)


@pytest.mark.parametrize(
    "change, message",
    [
        ({"prompt_length": 4}, "prompt_length is 4 but there are 4 tokens"),
        ({"prompt_length": 0}, "prompt_length is 0"),
        ({"parents": [0]}, r"parents has shape \[1\] but the response has 2"),
        ({"weights": [[0.5, 0.5]]}, r"weights has shape \[1, 2\]"),
        ({"hallucinated": [True]}, r"hallucinated has shape \[1\]"),
        ({"parents": [0, -1]}, r"parents\[1\] is -1.*padding"),
        ({"parents": [0, 4]}, r"parents\[1\] is 4"),
        ({"parents": [2, 0]}, r"parents\[0\] is 2.*never the token itself"),
        ({"weights": [0.5, 1.5]}, r"span \[0.5, 1.5\]"),
        ({"weights": [0.5, np.nan]}, "1 - attention"),
    ],
)
def test_bad_forests_are_named(change, message):
    good = {
        "parents": [0, 2],
        "weights": [0.5, 0.2],
        "tokens": ["<s>", "Hi", "a", "b"],
        "prompt_length": 2,
    }
    plotting.forest_drawing(**good)
    with pytest.raises(ValueError, match=message):
        plotting.forest_drawing(**good | change)


def test_forests_too_long_to_read_are_refused():
    with pytest.raises(ValueError, match="401 tokens, more than the 400"):
        plotting.forest_drawing(
            np.zeros(401, int), np.zeros(401), ["a"] * 402, prompt_length=1
        )


# Bad input ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    "draw",
    [
        plotting.roc_curves,
        plotting.precision_recall_curves,
        plotting.score_histograms,
    ],
)
def test_bad_scores_are_named(draw):
    bad = {
        "one class": [[0, 0]],
        "do not pair up": [[], [[0, 1]], [0, 1, 1]],
        r"labels\[.\] is .*; use 0 or 1": [[0, 2], ["0", "1"], [0, np.nan]],
    }
    for message, cases in bad.items():
        for labels in cases:
            with pytest.raises(ValueError, match=message):
                draw({"a": [0.1, 0.2]}, labels)
    with pytest.raises(ValueError, match="scores are empty"):
        draw({}, [0, 1])
    with pytest.raises(ValueError, match=r"scores of 'a'\[1\] is nan"):
        draw({"a": [0.1, np.nan]}, [0, 1])


def test_unknown_names_and_bad_intervals_are_named():
    scores, labels = {"a": [0.1, 0.2]}, [0, 1]
    with pytest.raises(ValueError, match=r"controls \['b'\] have no entry"):
        plotting.roc_curves(scores, labels, controls={"b"})
    with pytest.raises(ValueError, match=r"controls \['b'\] have no entry"):
        plotting.auroc_intervals({"a": (0.5, 0.4, 0.6)}, {"b"})
    with pytest.raises(ValueError, match=r"intervals of \['b'\] have no entry"):
        plotting.roc_curves(scores, labels, {"b": (0.5, 0.4, 0.6)})
    for interval in ((0.5, 0.6, 0.4), (0.5, np.nan, 0.6), (50, 40, 60), (0.5, 0.4)):
        with pytest.raises(ValueError, match="interval of 'a'"):
            plotting.auroc_intervals({"a": interval})
    with pytest.raises(ValueError, match="at least one detector"):
        plotting.auroc_intervals({})


def test_other_bad_numbers_are_named():
    with pytest.raises(ValueError, match="bins is 0"):
        plotting.score_histograms({"a": [0.1, 0.2]}, [0, 1], bins=0)
    with pytest.raises(ValueError, match="bins is 0"):
        plotting.calibration_curve([0.1, 0.2], [0, 1], bins=0)
    with pytest.raises(ValueError, match=r"span \[0.1, 1.5\]"):
        plotting.calibration_curve([0.1, 1.5], [0, 1])
    with pytest.raises(ValueError, match=r"\[1, 2\] for 1 rows and 1 columns"):
        plotting.transfer_map([[0.5, 0.6]], ["a"], ["a"])
    for value in (-0.1, 75.0):
        with pytest.raises(ValueError, match="not per cent"):
            plotting.transfer_map([[value]], ["a"], ["a"])
    with pytest.raises(ValueError, match="at least one stage"):
        plotting.timing_bars({})
    for value in (-1.0, float("nan"), float("inf")):
        with pytest.raises(ValueError, match="stage 'read' took"):
            plotting.timing_bars({"read": value})
