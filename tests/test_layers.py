"""Readers of any depth: which hidden states are looked at, and the whole catalogue."""

import dataclasses

import jax
import numpy as np
import pytest
import thorough
from sklearn.metrics import roc_auc_score

import jaxhal
from jaxhal.detectors import CATALOGUE, Targets, build, scores_of
from jaxhal.detectors.layers import LAYERS
from jaxhal.detectors.series import Ragged, Series
from jaxhal.evaluation.splits import grouped_kfold
from jaxhal.features.base import Reducer
from jaxhal.features.hidden import state_number
from jaxhal.reading.store import Store
from jaxhal.scoring import saving
from jaxhal.scoring.fitting import fit, untrained
from jaxhal.scoring.inputs import collect, fit_part
from jaxhal.types import Example, Label
from tiny_lm import ordered, read_into, tiny_lm

# The layers at a third, a half, two thirds and five sixths, by hand.
NUMBERS = {
    4: (1, 2, 3, 3),
    12: (4, 6, 8, 10),
    30: (10, 15, 20, 25),
    80: (26, 40, 54, 66),
}
DRAW = {"draw": {"n": 2, "given": True}}


def reader(layers):
    size = {"hidden_size": 8, "intermediate_size": 8, "num_attention_heads": 2}
    changes = {"num_hidden_layers": layers, "num_key_value_heads": 1}
    return tiny_lm(context=4096, **size, **changes)


def examples():
    """Answers of one length, so that few programs are compiled; two to a source."""
    made = []
    for number in range(24):
        source, made_up = divmod(number, 2)
        claim = "dragons, really" if made_up else "pears and apples"
        labels = (Label(9, 9 + len(claim), "conflict"),) if made_up else ()
        context = f"Crate {source:02} holds pears and apples."
        response = f"It holds {claim:16}, {number:02}."
        text = {"context": context, "question": "What is in it?"}
        samples = f"It holds {source:02} pears.", f"It may hold {number:02}."
        one = Example(response, **text, labels=labels, source=str(source))
        made.append(dataclasses.replace(one, samples=samples))
    return made


def chosen():
    """What of the catalogue looks at layers, or is not trained and reads the model.

    The others see the same of a reader of any depth, and `test_catalogue.py` fits them;
    so it does what samples to be fitted, and sees what `linear_probe_last` sees.
    """
    for name, make in CATALOGUE.items():
        one = make()
        reads = any(isinstance(feature, Reducer) for _, feature in one.features)
        if not one.taught and (one.layered or (reads and one.fit is None)):
            yield name, one
    yield "eigenscore", build({"eigenscore": DRAW})


def test_shares_are_the_nearest_layer():
    for layers, numbers in NUMBERS.items():
        assert tuple(state_number(share, layers) for share in LAYERS) == numbers
        assert state_number(1e-9, layers) == 1  # never the embeddings
        assert state_number(0.999999, layers) == layers
        assert state_number(-1, layers) == layers and state_number(0, layers) == 0
    assert [state_number(0.5, layers) for layers in (1, 3, 5)] == [1, 2, 3]


@pytest.mark.parametrize("layer", [0.0, 1.0, 1.5, -0.5, float("nan")])
def test_a_share_lies_between_nothing_and_all(layer):
    with pytest.raises(ValueError, match=f"layer is {layer}; give a share"):
        jaxhal.HiddenStates(layers=(layer,))
    build({"hidden_probe": {"layer": 1}})
    with pytest.raises(ValueError, match=f"layer is {layer}; give a share"):
        build({"hidden_probe": {"layer": layer}})
    with pytest.raises(ValueError, match=r"layer is \(\); name one"):
        build({"hidden_probe": {"layer": []}})


def test_bad_layers_are_named_before_anything_is_read():
    lm = reader(4)
    with pytest.raises(ValueError, match="layer 20 is outside the 5 .* has 4 layers"):
        jaxhal.read(lm, lm.encode(examples()[:1]), {"x": jaxhal.HiddenStates((20,))})
    with pytest.raises(ValueError, match=r"\(0.67, 0.83\) name one .* of 4 layers"):
        jaxhal.read(
            lm, lm.encode(examples()[:1]), {"x": jaxhal.HiddenStates((0.67, 0.83))}
        )


def test_a_store_knows_a_share_by_its_number(tmp_path):
    lm, some = reader(30), examples()[:4]
    store = Store(tmp_path)
    by_number = read_into(store, lm, some, {"x": jaxhal.HiddenStates((20,))})
    before = sorted(tmp_path.rglob("*.parquet"))
    by_share = read_into(store, lm, some, {"y": jaxhal.HiddenStates((0.67,))})
    assert sorted(tmp_path.rglob("*.parquet")) == before
    for one, other in zip(by_number.features["x"], by_share.features["y"], strict=True):
        np.testing.assert_array_equal(one, other)


@thorough.mark
@pytest.mark.parametrize("layers", [4, 12, 30, 80])
def test_the_catalogue_on_a_reader_of(layers, tmp_path):
    """Also of the shallowest, in which two shares are one layer.

    Layers are scanned: deeper ones run the same programs for longer.
    """
    lm, every = reader(layers), dict(chosen())
    many = {"batch_size": 24, "progress": False}
    data = collect(lm, examples(), [*every.values()], Store(tmp_path), **many)
    assert not data.errors
    wanted = data.inputs["linear_probe"][:, NUMBERS[layers]]  # of all states
    np.testing.assert_allclose(data.inputs["hidden_probe"], wanted, atol=1e-5)
    np.testing.assert_allclose(np.stack(data.inputs["mlp_probe"], 1), wanted, atol=1e-5)
    trained = [one for one in every.values() if one.fit is not None]
    rows = np.arange(len(data.labels))
    fitted = fit_part(trained, data, rows, jax.random.key(0))
    for name, one in every.items():
        ready = fitted.get(name) or untrained(one)
        assert ready.layers == (layers if one.layered else None), name
        score = ready.score(data.inputs[name])
        assert score.shape == rows.shape and np.isfinite(score).all(), name


# The choice of a layer ---------------------------------------------------------------

ROWS, TOKENS, WIDTH, PLANTED = 48, 3, 4, 2
LABELS, GROUPS = np.arange(ROWS) % 2, np.arange(ROWS) // 2
VALID = np.arange(TOKENS) < 2 + np.arange(ROWS)[:, None] % 2
TARGETS = Targets(LABELS, GROUPS, np.float32(np.arange(ROWS) < 40), jax.random.key(0))
BY_TOKENS = {
    "mlp_probe": lambda x: x.mean(1),
    "attention_pooling": lambda x: Ragged.of(Series(x, VALID)),
    "token_probe": lambda x: Ragged.of(
        Series((x, VALID & (LABELS == 1)[:, None]), VALID)
    ),
}


def inputs_of(name, seed=0):
    """Noise at every layer, and at one of them what tells the classes apart."""
    states = np.random.default_rng(seed).normal(size=(4, ROWS, TOKENS, WIDTH))
    states[PLANTED, :, :, 0] += 2.0 * LABELS[:, None]
    return tuple(BY_TOKENS[name](np.float32(one)) for one in states)


@pytest.mark.parametrize("name", BY_TOKENS)
def test_the_layer_is_the_best_of_the_training_folds(name, tmp_path):
    """As a search with one detector a layer finds it; the rest may hold anything."""
    spec, inputs = {name: {"layer": list(LAYERS)}}, inputs_of(name)
    fitted = fit(build(spec), inputs, TARGETS, layers=30)
    found = {}
    train = grouped_kfold(LABELS[:40], GROUPS[:40].tolist(), 3)
    for at, share in enumerate(LAYERS):
        alone, areas = build({name: {"layer": share}}), []
        for rows, test in train:
            params = alone.fit(inputs[at], TARGETS.only(rows))
            score = scores_of(alone, params, inputs[at])
            areas.append(roc_auc_score(LABELS[test], score[test]))
        found[at] = np.mean(areas)
    assert max(found, key=lambda at: found[at]) == PLANTED
    assert int(fitted.params.setting["layer"]) == PLANTED
    assert float(fitted.params.auroc) == pytest.approx(found[PLANTED])
    alone = build({name: {"layer": LAYERS[PLANTED]}})
    params = alone.fit(inputs[PLANTED], TARGETS)
    score = fitted.score(inputs)
    np.testing.assert_allclose(score, scores_of(alone, params, inputs[PLANTED]), 1e-5)
    spoiled = ordered(inputs, [*range(40), *reversed(range(40, ROWS))])
    again = fit(build(spec), spoiled, TARGETS, layers=30)
    np.testing.assert_array_equal(again.score(inputs), score)
    saving.save(tmp_path / "it", fitted, spec)
    again = saving.load(tmp_path / "it")
    assert again.layers == 30
    np.testing.assert_array_equal(again.score(inputs), score)


def test_token_scores_are_those_of_the_chosen_layer():
    name, inputs = "token_probe", inputs_of("token_probe")
    several = build({name: {"layer": list(LAYERS)}})
    params = several.fit(inputs, TARGETS).params
    padded = [one[:] for one in inputs]
    features = {
        f"hidden_{n}": x.values[0][None, :, :TOKENS]
        for n, x in zip(LAYERS, padded, strict=True)
    }
    features |= {"valid": VALID}
    alone = build({name: {"layer": LAYERS[PLANTED]}})
    expected = np.asarray(alone.tokens(params.params, features))
    assert expected[VALID].min() > 0 and not expected[~VALID].any()
    np.testing.assert_array_equal(several.tokens(params, features), expected)


def test_another_depth_is_refused():
    lm, spec = reader(4), {"mlp_probe": {"layer": 0.5}}
    fitted = fit(build(spec), inputs_of("mlp_probe")[0], TARGETS, layers=30)
    words = fit(
        build("novel_words"), inputs_of("mlp_probe")[0][:, 0], TARGETS, layers=30
    )
    message = (
        "'mlp_probe' was fitted to a reader of 30 layers, and 'tiny 0' has 4; read"
    )
    with pytest.raises(ValueError, match=message):
        jaxhal.score(lm, examples()[:1], [words, fitted], progress=False)
    with pytest.raises(ValueError, match=message):
        jaxhal.detect(lm, response="No.", prompt="Is it?", detectors=[fitted])
    (report,) = jaxhal.score(lm, examples()[:1], [words], progress=False)
    assert report.error is None
