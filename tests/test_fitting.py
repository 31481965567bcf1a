"""Fits, their unseen scores, and the catalogue's numbers by hand; no model is read."""

import json
import os
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from sklearn.linear_model import LogisticRegression
from sklearn.preprocessing import StandardScaler

import jaxhal
from jaxhal.classifiers import selection
from jaxhal.classifiers.linear import Linear
from jaxhal.classifiers.selection import choose_linear, published, unseen_scores
from jaxhal.detectors import (
    CATALOGUE,
    Detector,
    HeldOut,
    Targets,
    build,
    ensemble,
    features_of,
    get,
    scores_of,
)
from jaxhal.detectors.contradiction import evidence
from jaxhal.detectors.ensemble import _stack
from jaxhal.detectors.lookback_lens import Spans
from jaxhal.detectors.toha import Heads
from jaxhal.evaluation import Platt, auroc, ece, isotonic, platt
from jaxhal.evaluation.splits import grouped_kfold
from jaxhal.features.support import COLUMNS
from jaxhal.reading.store import Store
from jaxhal.scoring import saving
from jaxhal.scoring.fitting import Fitted, fit
from jaxhal.scoring.inputs import collect
from jaxhal.scoring.released import released_lookback
from tiny_lm import answers, tiny_lm


def targets_of(labels, groups=None, weight=None) -> Targets:
    groups = np.arange(len(labels)) // 2 if groups is None else groups
    weight = np.ones(len(labels), np.float32) if weight is None else weight
    return Targets(np.asarray(labels), groups, weight, jax.random.key(0))


def draw(seed, rows=200):
    """Answers of which a weak direction in many features tells the hallucinated."""
    rng = np.random.default_rng(seed)
    labels = rng.integers(0, 2, rows)
    x = rng.normal(size=(rows, 30)) + 0.25 * labels[:, None] * (np.arange(30) > 9)
    return x.astype(np.float32), labels


def plain(name, column, **options) -> Detector:
    """A detector without parameters, the score of which is a column."""
    return Detector(
        name, "", "", "", (), inputs=lambda f: f[name][:, column], **options
    )


# Unseen scores -----------------------------------------------------------------------


def test_unseen_scores_know_nothing_of_the_source():
    """A memory of the sources it was fitted to recognises none of the unseen ones."""
    groups = np.arange(40) // 2
    memory = Detector(
        "memory", "", "", "", (),
        inputs=lambda f: f,
        decide=lambda params, x: jnp.isin(x, params).astype(float),
        fit=lambda x, targets: jnp.asarray(targets.groups)[targets.rows],
    )  # fmt: skip
    weight = np.float32(groups < 15)
    targets = targets_of(np.arange(40) % 2, groups, weight)
    fitted = fit(memory, groups, targets)
    np.testing.assert_array_equal(fitted.score(groups), weight)
    np.testing.assert_array_equal(fitted.unseen[targets.rows], 0.0)
    kept = fitted.calibrated_on
    np.testing.assert_array_equal(kept.scores, fitted.unseen[targets.rows])
    np.testing.assert_array_equal(kept.labels, np.asarray(targets.labels)[targets.rows])
    np.testing.assert_array_equal(
        kept.sources, np.asarray(targets.groups)[targets.rows]
    )
    np.testing.assert_allclose(fitted.probabilities([0.0, 1.0]), 0.5)


@pytest.mark.parametrize("rows", [0, 1, 64, 65, 600])
def test_scores_of_many_answers_are_those_of_each(rows):
    """They are scored some at a time."""
    x = np.random.default_rng(0).normal(size=(rows, 3)).astype(np.float32)
    both = Detector(
        "both", "", "", "", (),
        inputs=lambda f: f,
        decide=lambda params, x: params * x[0][:, 1] - x[1],
    )  # fmt: skip
    found = scores_of(both, np.float32(2), (x, x[:, 2]))
    np.testing.assert_array_equal(found, 2 * x[:, 1] - x[:, 2])


def test_unseen_scores_are_on_the_scale_of_the_final_fit():
    rng = np.random.default_rng(0)
    final = rng.normal(size=30)
    train = np.ones((3, 30), np.float32)
    for fold in range(3):
        train[fold, fold:24:3] = 0.0
    train[:, 24:] = 0.0  # not learnt from
    scores = np.outer([1.0, 40.0, 0.01], final) + np.array([[0.0], [-7.0], [3.0]])
    found = unseen_scores(scores, train, final)
    np.testing.assert_allclose(found[:24], final[:24], rtol=1e-5, atol=1e-6)
    assert not found[24:].any()
    flat = np.full((3, 30), np.float32(0.1)) + (train == 0)
    found = unseen_scores(flat, train, final)
    for fold in range(3):
        level = final[train[fold] > 0].mean() + 1.0
        np.testing.assert_allclose(found[fold:24:3], level, rtol=1e-5)


def test_unseen_scores_of_a_grid_are_those_of_a_nested_search():
    """Each fold is scored by what suits the others best, found by fits without it."""
    x, labels = draw(1)
    x = np.stack([x, x + np.random.default_rng(3).normal(size=x.shape)], 1)
    weight, groups = np.float32(np.arange(200) < 180), np.arange(200) // 2
    strengths, pairs = (0.003, 1.0), [(n, c) for n in (0, 1) for c in (0.003, 1.0)]
    chosen, found = choose_linear(x, labels, groups, weight, strengths)
    with pytest.raises(ValueError, match="folds is 2; give at least 3"):
        choose_linear(x, labels, groups, weight, strengths, folds=2)

    def logits(rows, layer, c):
        each, model = x[:, layer], LogisticRegression(C=c, tol=1e-8)
        scale = StandardScaler().fit(each[rows])
        model.fit(scale.transform(each[rows]), labels[rows])
        return model.decision_function(scale.transform(each))

    final = logits(np.arange(180), int(chosen.layer), float(chosen.strength))
    parts = [part for _, part in grouped_kfold(labels[:180], groups[:180].tolist(), 5)]
    taken = set()
    for test in parts:
        seen, worth = np.setdiff1d(np.arange(180), test), []
        for pair in pairs:
            inner = [part for part in parts if part is not test]
            fits = [logits(np.setdiff1d(seen, part), *pair) for part in inner]
            areas = map(auroc, (s[p] for s, p in zip(fits, inner, strict=True)),
                        (labels[part] for part in inner))  # fmt: skip
            worth.append(np.mean([*areas]))
        best = pairs[int(np.argmax(worth))]
        taken.add(best)
        score = logits(seen, *best)
        apart = (score[test] - score[seen].mean()) / score[seen].std()
        expected = apart * final[seen].std() + final[seen].mean()
        np.testing.assert_allclose(found[test], expected, rtol=5e-3, atol=5e-3)
    assert len(taken) > 1 and not found[180:].any()


def test_what_was_chosen_by_chance_is_unseen_at_chance():
    areas, seen = [], []
    for seed in range(6):
        rng = np.random.default_rng(seed)
        x, labels = rng.normal(size=(120, 20, 16)), np.arange(120) % 2
        groups, weight = np.arange(120), np.ones(120, np.float32)
        chosen, found = choose_linear(np.float32(x), labels, groups, weight)
        areas.append(auroc(found, labels))
        seen.append(float(chosen.auroc))
    assert np.mean(seen) > 0.6  # the best of so many, where it was chosen
    assert 0.4 < np.mean(areas) < 0.53


def test_members_chosen_by_chance_are_unseen_at_chance():
    """Each fold is stacked of the members that the others chose."""
    areas, labels = [], np.arange(90) % 2
    names = [f"noise {n}" for n in range(8)]
    for seed in range(4):
        noise = np.random.default_rng(seed).normal(size=(90, 8)).astype(np.float32)
        targets = Targets(
            labels, np.arange(90), np.ones(90, np.float32), jax.random.key(0)
        )
        known = {
            name: HeldOut((), column)
            for name, column in zip(names, noise.T, strict=True)
        }
        members = [build({"novel_words": {"name": name}}) for name in names]
        found = _stack(
            members, True, dict.fromkeys(names), targets._replace(known=known)
        )
        areas.append(auroc(found.unseen, labels))
    assert 0.35 < np.mean(areas) < 0.54


def scored(name, x):
    """A detector and its inputs from one vector an answer."""
    if name == "ensemble":
        alone = plain("ninth", 9)
        both = ensemble([build("lookback_probe"), alone])
        return both, {"lookback_probe": x, "ninth": alone.inputs({"ninth": x})}
    if name == "lookback_lens":
        parts, there = np.zeros((len(x), 3, x.shape[1])), np.zeros((len(x), 3), bool)
        return build(name), Spans(x, parts.astype(np.float32), there)
    return build(name), x


@pytest.mark.parametrize(
    "name", ["lookback_probe", "lookback_lens", "toha", "ensemble"]
)
def test_calibration_holds_for_fresh_answers(name):
    """Folds choose penalties a thousand times apart, and so differ their logits."""
    ratios, errors, gaps = [], [], []
    for seed in range(3):
        (x, labels), (fresh, truth) = draw(seed), draw(seed + 100, 3000)
        detector, inputs = scored(name, x)
        targets = targets_of(labels)
        fitted = fit(detector, inputs, targets)
        score = fitted.score(scored(name, fresh)[1])
        ratios.append(fitted.unseen.std() / score.std())
        errors.append(ece(fitted.probabilities(score), truth))
        gaps.append(auroc(score, truth) - auroc(fitted.unseen, labels))
    assert all(0.5 < ratio < 2 for ratio in ratios), ratios
    assert np.mean(errors) < 0.08, errors
    assert abs(np.mean(gaps)) < 0.08, gaps


def test_the_folds_that_choose_also_score(monkeypatch):
    """Nothing is fitted a second time for the unseen scores."""
    calls, real = [], selection.fit_grid
    monkeypatch.setattr(
        selection, "fit_grid", lambda *a, **k: calls.append(a) or real(*a, **k)
    )
    x, labels = draw(0)
    fit(build("lookback_probe"), x, targets_of(labels))
    assert len(calls) == 1


# Calibration and threshold -----------------------------------------------------------


def test_a_probability_is_of_the_calibration_asked_for(tmp_path):
    x, labels = draw(0)
    column, targets = plain("novel_words", 20), targets_of(labels)
    inputs = column.inputs({"novel_words": x})
    for calibration, by_hand in (("platt", platt), ("isotonic", isotonic)):
        fitted = fit(column, inputs, targets, calibration=calibration)
        assert fitted.calibration == by_hand(inputs, labels)
        fitted = fit(build("novel_words"), inputs, targets, calibration=calibration)
        saving.save(tmp_path / calibration, fitted, "novel_words")
        again = saving.load(tmp_path / calibration)
        assert again.calibration == fitted.calibration
        assert again.threshold == fitted.threshold
    # Annotations, which tests check, refuse it before the function does.
    with pytest.raises((ValueError, TypeError), match="'beta'"):
        fit(column, inputs, targets, calibration="beta")
    with pytest.raises((ValueError, TypeError), match="'acuracy'"):
        fit(column, inputs, targets, objective="acuracy")


def test_flags_are_told_apart_in_float64():
    """As in a report, which compares numbers of Python."""
    score = np.float32(1.0)
    fitted = Fitted(plain("a", 0), (), Platt(1.0, 0.0), 1.0 + 1e-9)
    assert not fitted.flags([score]).any()
    assert fitted.flags([np.nextafter(score, np.float32(2.0))]).all()


def test_too_few_sources_are_named():
    x, labels = draw(0)
    few = np.float32(np.arange(200) < 6)
    for name in ("lookback_probe", "toha"):
        with pytest.raises(ValueError) as caught:
            fit(build(name), x, targets_of(labels, weight=few))
        text = str(caught.value)
        assert text.startswith(
            f"detector '{name}' cannot be fitted, which takes folds "
        )
        assert text.endswith("; give more labelled sources of each class")
        assert "fewer folds" not in text and "seed" not in text
    wrong = build({"lookback_lens": {"heads": 31}})
    with pytest.raises(ValueError, match=r"^heads is 31; the model has 30"):
        fit(wrong, scored("lookback_lens", x)[1], targets_of(labels))


# Ensembles ---------------------------------------------------------------------------


def test_known_members_are_not_fitted_again():
    x, labels = draw(2)
    calls = []

    def counted(name):
        def learn(x, targets):
            calls.append(name)
            return jnp.asarray(x)[targets.rows].mean()

        return plain(name, 0)._replace(decide=lambda p, x: x - p, fit=learn)

    a, b, c = counted("a"), counted("b"), plain("c", 2)
    inner = ensemble([a, c], name="inner")
    outer = ensemble(one for one in (inner, b))
    assert outer is ensemble([inner, b]) and outer.members == (inner, b)
    columns = {"a": x[:, 0], "b": x[:, 1], "c": x[:, 2]}
    nested = {"inner": {"a": x[:, 0], "c": x[:, 2]}, "b": x[:, 1]}
    nested = jax.device_put(nested)
    targets = targets_of(labels)
    alone = fit(outer, nested, targets)
    assert sorted(calls) == ["a"] * 6 + ["b"] * 6  # one final fit and five folds
    known = {d.name: fit(d, columns[d.name], targets) for d in (a, b)}
    calls.clear()
    again = fit(outer, nested, targets, known=known)
    assert not calls
    np.testing.assert_allclose(again.unseen, alone.unseen, rtol=1e-5)
    np.testing.assert_allclose(again.score(nested), alone.score(nested), rtol=1e-5)
    params = outer.fit(nested, targets).params
    np.testing.assert_allclose(outer.decide(params, nested), alone.score(nested), 1e-5)


def test_an_ensemble_of_members_that_are_chosen(tmp_path):
    rng = np.random.default_rng(2)
    labels = np.arange(200) % 2
    names = ["novel_words", "response_length", "predictive_probability"]
    columns = {name: np.float32(rng.normal(size=200)) for name in names}
    columns["response_length"] += 2 * labels
    columns["predictive_probability"] -= 1.5 * labels
    spec = {"ensemble": {"members": [*columns], "choose": True}}
    few, targets = build(spec), targets_of(labels)
    fitted = fit(few, columns, targets)
    chosen = set(fitted.params.members)
    assert chosen == {"response_length", "predictive_probability"}
    assert np.sign(fitted.params.weights.linear.w).tolist() == [1.0, -1.0]
    pair = ensemble([build(name) for name in names[1:]])
    expected = fit(pair, {name: columns[name] for name in chosen}, targets)
    np.testing.assert_allclose(
        fitted.score(columns), expected.score(columns), rtol=1e-4, atol=1e-5
    )
    every = fit(build({"ensemble": {"members": [*columns]}}), columns, targets)
    assert set(every.params.members) == set(columns)
    saving.save(tmp_path / "few", fitted, spec)
    again = saving.load(tmp_path / "few")
    np.testing.assert_array_equal(again.score(columns), fitted.score(columns))
    card = json.loads((tmp_path / "few" / "card.json").read_text("utf-8"))
    assert set(card["params"]["Stack"]["members"]["dict"]) == chosen


# The catalogue -----------------------------------------------------------------------


def test_an_option_at_its_default_is_the_same_detector():
    for spec, same in (
        ({"toha": {"max_heads": 6}}, "toha"),
        ({"toha": {"max_heads": 6, "probe": "split", "name": "toha"}}, "toha"),
        ({"linear_probe": {"tokens": "last"}}, "linear_probe_last"),
        ({"linear_probe": {"tokens": "mean"}}, "linear_probe"),
        ({"token_probe": {"layer": 0.67}}, "token_probe"),
    ):
        assert build(spec) == build(same) and build(spec) is build(same)
    assert build({"toha": {"max_heads": 5}}) != build("toha")


def test_an_option_is_known_by_its_types():
    build({"mlp_probe": {"layer": (1, 0.5)}})
    with pytest.raises(ValueError, match="layer is 1.0; give a share"):
        build({"mlp_probe": {"layer": (1.0, 0.5)}})


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ({"selfcheck_ngram": {"over": "median"}}, "over is 'median'; use one of mean"),
        ({"nli_context": {"how": "median"}}, "how is 'median'; use one of mean, max"),
        ({"linear_probe": {"tokens": "all"}}, "tokens is 'all'; use one of mean, last"),
        ({"eigenscore": {"tokens": "response"}}, "tokens is 'response'; use one of la"),
        ({"lap_eigvals": {"top": 2.5}}, "top is 2.5; give a whole number"),
        ({"toha": {"max_heads": True}}, "max_heads is True; give a whole number"),
        ({"lrp4rag_svm": {"length": "9"}}, "length is '9'; give a whole number"),
        ({"token_probe": {"whole": "no"}}, "whole is 'no'; give true or false"),
        ({"selfcheck_ngram": {"n": 0}}, "n is 0; give at least 1"),
        ({"token_classifier": {"length": 0}}, "length is 0; give at least 1"),
        ({"multimax_probe": {"window": 0}}, "window is 0; give at least 1"),
        ({"lookback_lens": {"heads": 0}}, "heads is 0; give at least 1"),
        ({"lrp4rag_svm": {"length": 0}}, "length is 0; give at least 1"),
        ({"lrp4rag_lstm": {"response_bins": 0}}, "response_bins is 0; give at least"),
        ({"detection_prompt": {"name": "../x"}}, "name of detector 'detection_prompt'"),
        (
            {"ensemble": {"members": ["mtop_div", "sink_share"], "name": "../x"}},
            "name of detector 'ensemble' is '../x'; it names one folder",
        ),
    ],
)
def test_an_option_that_is_none_is_said_at_once(spec, message):
    with pytest.raises(ValueError, match=message):
        build(spec)


def test_an_ensemble_compiles_once():
    spec = {"ensemble": {"members": ["mtop_div", {"toha": {"max_heads": 5}}]}}
    assert build(spec) is build(spec)
    assert build(spec) != build({"ensemble": {"members": ["mtop_div", "toha"]}})


@pytest.mark.parametrize(
    "name", ["hidden_probe", "mlp_probe", "attention_pooling", "token_probe"]
)
def test_two_settings_of_one_stand_side_by_side(name):
    deep = build({name: {"layer": 3, "name": "deep"}})
    assert deep.name == "deep" and build(name).name == name
    assert set(features_of([deep])) <= set(features_of([deep, build(name)]))
    last = build({"linear_probe": {"tokens": "last", "name": "of_end"}})
    assert last.name == "of_end"
    assert last.features == build("linear_probe_last").features


def test_an_ensemble_is_built_not_named():
    with pytest.raises(ValueError, match="must be fitted: jaxhal.detectors.build"):
        get(["ensemble"])


VALID = np.array([[True, True, True, False], [True, True, False, False]])


def features(seed=0):
    """What is read of two answers, of two layers, three heads and at most 4 tokens."""
    rng = np.random.default_rng(seed)
    ratio = rng.random((2, 2, 3, 4))
    made = {
        "valid": VALID,
        "text": VALID,
        "marked": np.zeros_like(VALID),
        "lookback": ratio,
        "max_prompt": rng.random((2, 2, 3, 4)),
        "sink_share": rng.random((2, 2, 3)),
        "mtop_div": rng.random((2, 2, 3)),
        "logprob": -3 * rng.random((2, 4)),
        "closed_logprob": -3 * rng.random((2, 4)),
        "entropy": 3 * rng.random((2, 4)),
        "hidden_last": rng.normal(size=(3, 2, 5)),
        "hidden_0.67": rng.normal(size=(1, 2, 4, 5)),
        "support": rng.normal(size=(2, 4, len(COLUMNS))),
        "copied": rng.random((2, 2, 3, 4)),
        "external_context_0.1": rng.random((2, 2, 3, 4)),
        "parametric": rng.random((2, 2, 4)),
    }
    return {
        name: jnp.asarray(value if value.dtype == bool else np.float32(value))
        for name, value in made.items()
    }


def loops(values):
    """Mean over layers, heads and real tokens, for each answer."""
    return [
        np.mean(
            [np.asarray(values)[:, row, :, at] for at in np.flatnonzero(VALID[row])]
        )
        for row in range(2)
    ]


def test_scores_by_hand():
    f = features()
    logp, closed = np.asarray(f["logprob"]), np.asarray(f["closed_logprob"])
    gain = [np.mean(closed[row, v] - logp[row, v]) for row, v in enumerate(VALID)]
    for name, expected in {
        "context_gain": gain,
        "max_prompt_attention": 1 - np.array(loops(f["max_prompt"])),
        "lookback_ratio": 1 - np.array(loops(f["lookback"])),
        "sink_share": np.asarray(f["sink_share"]).mean((0, 2)),
        "mtop_div": np.asarray(f["mtop_div"]).mean((0, 2)),
    }.items():
        np.testing.assert_allclose(build(name).score((), f), expected, 1e-5, 1e-6)


def probe_of(size, layer=0):
    rng = np.random.default_rng(size)
    w, mean, std = np.float32(rng.random((3, size)) + 0.1)
    linear = Linear(*map(jnp.asarray, (w, np.float32(0.3), mean, std)))
    chosen = published(linear)._replace(layer=jnp.int32(layer))
    return chosen, lambda x: ((x - mean) / std) @ w + 0.3


def test_scores_of_probes_by_hand():
    f = features()
    chosen, by_hand = probe_of(6)
    most = np.asarray(f["max_prompt"])
    rows = [
        [most[layer, row, head, v].mean() for layer in range(2) for head in range(3)]
        for row, v in enumerate(VALID)
    ]
    found = build("max_prompt_probe").score(chosen, f)
    np.testing.assert_allclose(found, by_hand(np.array(rows)), rtol=1e-5)
    chosen, by_hand = probe_of(5, layer=2)
    found = build("linear_probe_last").score(chosen, f)
    np.testing.assert_allclose(found, by_hand(f["hidden_last"][2]), rtol=1e-5)
    weights = jnp.array([0.5, 0, 0, 0, 0.5, 0])  # of layer 0, head 0; layer 1, head 1
    found = build("toha").score(Heads(weights, weights), f)
    divergence = np.asarray(f["mtop_div"])
    expected = (divergence[0, :, 0] + divergence[1, :, 1]) / 2
    np.testing.assert_allclose(found, expected, rtol=1e-6)


def params_of(name):
    if name in ("lookback_lens", "lookback_probe", "redeep"):
        return probe_of(6 + 2 * (name == "redeep"))[0]
    width = {
        "token_probe": 5,
        "attentive_probe": 5 + 6 + 6,  # of the state, and of every head twice
        "contradiction": evidence(features()).shape[-1],
    }
    return probe_of(width[name])[0].linear if name in width else ()


def test_token_scores_by_hand():
    f = features()
    logp, closed, entropy = (
        np.asarray(f[name]) for name in ("logprob", "closed_logprob", "entropy")
    )
    for name, expected in {
        "predictive_probability": 1 - np.exp(logp),
        "predictive_probability_max": 1 - np.exp(logp),
        "token_entropy": 1 - np.exp(-entropy),
        "token_entropy_mean": 1 - np.exp(-entropy),
        "context_gain": 1 / (1 + np.exp(logp - closed)),
        "context_gain_count": 1 / (1 + np.exp(logp - closed)),
        "lookback_ratio": 1 - np.asarray(f["lookback"]).mean((0, 2)),
        "max_prompt_attention": 1 - np.asarray(f["max_prompt"]).mean((0, 2)),
    }.items():
        found = np.asarray(build(name).tokens((), f))
        np.testing.assert_allclose(found[VALID], expected[VALID], 1e-5, 1e-6, name)


def test_token_scores_are_zero_on_padding():
    f = features()
    every = [make() for make in CATALOGUE.values()]
    # Those of sentences need tokens that have text.
    with_tokens = [d for d in every if d.tokens and not d.measures]
    assert len(with_tokens) > 10
    for detector in with_tokens:
        found = np.asarray(detector.tokens(params_of(detector.name), f))
        assert found.shape == VALID.shape and not found[~VALID].any(), detector.name
        assert ((0 < found[VALID]) & (found[VALID] <= 1)).all(), detector.name


def test_toha_needs_no_matrix_product():
    """Which an accelerator would round to a few digits."""
    weights = jnp.ones(6)
    decide = jax.make_jaxpr(build("toha").decide)
    assert "dot_general" not in str(decide(Heads(weights, weights), jnp.ones((2, 6))))


def test_toha_takes_up_to_all_heads_of_a_model_of_few():
    labels, rng = np.arange(24) % 2, np.random.default_rng(0)
    scores = rng.normal(size=(24, 4)) + labels[:, None] * [0.0, 5.0, 0.0, 5.0]
    weight = np.ones(24, np.float32)
    targets = Targets(labels, np.arange(24) // 2, weight, jax.random.key(0))
    few, all_of = (
        build({"toha": {"max_heads": most}}).fit(np.float32(scores), targets)
        for most in (6, 4)
    )
    np.testing.assert_array_equal(few.weights, all_of.weights)
    assert few.weights[1] + few.weights[3] == 1  # those that tell them apart


# Released coefficients ---------------------------------------------------------------


def release(path, layers=2, heads=4, **changes):
    """A classifier of faithful text in the format of the released ones."""
    rng = np.random.default_rng(layers * heads)
    about = {
        "n_layers": layers,
        "n_heads": heads,
        "classes": [0, 1],
        "coef": (4 * rng.normal(size=layers * heads)).tolist(),
        "intercept": [0.4],
    }
    path.write_text(json.dumps(about | changes), "utf-8")
    return path


def theirs_of(path):
    about = json.loads(path.read_text("utf-8"))
    model = LogisticRegression()
    model.coef_ = np.array([about["coef"]])
    model.intercept_ = np.array(about["intercept"])
    model.classes_ = np.array(about["classes"])
    return model


def spans_of(x):
    return scored("lookback_lens", np.float32(x))[1]


def agrees(path):
    """A released classifier, once it is that of scikit-learn."""
    theirs, fitted = theirs_of(path), released_lookback(path)
    x = np.random.default_rng(0).random((40, theirs.coef_.shape[1]), np.float32)
    made_up = theirs.predict_proba(x)[:, 0]  # class 1 is faithful
    score = fitted.score(spans_of(x))
    np.testing.assert_allclose(fitted.probabilities(score), made_up, atol=1e-5)
    clear = np.abs(made_up - 0.5) > 1e-4
    flagged = fitted.flags(score)[clear]
    np.testing.assert_array_equal(flagged, (theirs.predict(x) == 0)[clear])
    return fitted


def test_released_classifiers_are_those_of_scikit_learn(tmp_path):
    own = agrees(release(tmp_path / "own.json")).params.linear
    about = json.loads((tmp_path / "own.json").read_text("utf-8"))
    # scikit-learn's coef_ is a row, and an intercept may be exported as a number.
    for changes in ({"coef": [about["coef"]]}, {"intercept": about["intercept"][0]}):
        other = released_lookback(release(tmp_path / "same.json", **changes))
        np.testing.assert_array_equal(other.params.linear.w, own.w)
        assert other.params.linear.b == own.b


def released():
    root = os.environ.get("JAXHAL_DATA")
    default = Path(__file__).parent.parent.parent / "shared" / "data"
    folder = (Path(root) if root else default) / "lookback_lens"
    return sorted(folder.glob("classifier_*.json"))


def test_released_lookback_lens_classifiers():
    if not released():
        pytest.skip("set JAXHAL_DATA to a folder with lookback_lens/classifier_*.json")
    for path in released():
        strongest = int(np.argmin(agrees(path).params.linear.w))  # most faithful
        assert divmod(strongest, 32) == (15, 26)


@pytest.fixture(scope="module")
def lm():
    return tiny_lm()


def test_a_released_classifier_judges_answers_tokens_and_spans(lm, tmp_path):
    path = release(tmp_path / "one.json")
    fitted, theirs = released_lookback(path), theirs_of(path)
    example = answers(1)[0]
    (report,) = jaxhal.score(lm, [example], [fitted])
    batch = lm.encode([example])
    ratio = jaxhal.read(lm, batch, fitted.detector.reducers)["lookback"]
    ratio = np.asarray(ratio)[:, 0][..., np.asarray(batch.response_mask)[0]]
    whole = theirs.predict_proba(ratio.mean(-1).reshape(1, -1))[0, 0]  # layer-major
    assert report.probabilities["lookback_lens"] == pytest.approx(whole, abs=1e-4)
    windows = [
        ratio[..., max(0, at - 7) : at + 1].mean(-1).ravel()
        for at in range(len(report.tokens))
    ]
    found = [token.scores["lookback_lens"] for token in report.tokens]
    np.testing.assert_allclose(found, theirs.predict_proba(windows)[:, 0], atol=1e-4)
    store = Store(tmp_path / "store")
    cut = collect(lm, [example], [fitted.detector], store, unit="window")
    score = fitted.score(cut.inputs["lookback_lens"])
    np.testing.assert_allclose(fitted.probabilities(score), found[7:], atol=1e-4)
    saving.save(tmp_path / "kept", fitted, "lookback_lens")
    again = saving.load(tmp_path / "kept")
    assert (again.calibration, again.threshold) == (fitted.calibration, 0.0)


def test_a_released_classifier_of_another_geometry_is_refused(lm, tmp_path):
    fitted = released_lookback(release(tmp_path / "big.json", layers=3))
    said = "fitted to a reader of num_hidden_layers 3, and '.*' has 2; read with"
    with pytest.raises(ValueError, match=said):
        jaxhal.score(lm, answers(1), [fitted])


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"n_heads": 5}, "8 coefficients for 2 layers of 5 heads"),
        ({"n_layers": "two"}, "no released classifier .*'two'"),
        ({"classes": [1, 0]}, r"classes \[1, 0\]"),
        ({"coef": [float("nan")] * 8}, "no released classifier .* not finite"),
        ({"intercept": [0.1, 0.2]}, r"no released classifier .*intercept \(2,\); give"),
        ({"coef": [[1.0] * 8] * 2}, r"no released classifier .*shape \(2, 8\)"),
    ],
)
def test_bad_releases_are_named(tmp_path, changes, problem):
    path = release(tmp_path / "bad.json", **changes)
    with pytest.raises(ValueError, match=problem):
        released_lookback(path)
    path.write_text('{"n_layers": 2}', "utf-8")
    with pytest.raises(ValueError, match=r"KeyError: 'n_heads'\); export"):
        released_lookback(path)
    with pytest.raises(FileNotFoundError):
        released_lookback(tmp_path / "none.json")
