"""One battery for every detector: a new one gets it by being in the catalogue.

It runs on a Llama, and where the table of families is recorded on all of them.
"""

import dataclasses
import functools
import os

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxhal
import tiny
from golden_scores import OWN_MODEL, SAMPLED, TAUGHT, labelled, own_model
from jaxhal.capture.forward import read_jit
from jaxhal.detectors import CATALOGUE, Targets, build, features_of, take
from jaxhal.features.base import OfText, Reducer
from jaxhal.reading.bulk import Measure
from jaxhal.reading.extract import extract, kinds
from jaxhal.reading.store import Store
from jaxhal.scoring import saving
from jaxhal.scoring.detection import response_scores
from jaxhal.scoring.fitting import fit
from jaxhal.scoring.inputs import collect
from jaxhal.types import Batch, Example, Label
from tiny_lm import lm_of

SPECS = {
    name: {name: {"draw": {"max_new_tokens": 8, "n": 3}}}
    if name in SAMPLED
    else own_model(name)
    if name in OWN_MODEL
    else name
    for name in CATALOGUE
}
# So short that those of about half of the prompts are alike, or else one more.
SPECS |= {name: {name: {"draw": {"max_new_tokens": 2, "n": 3}}} for name in TAUGHT}
FOUR = {name: {name: {"draw": {"max_new_tokens": 2, "n": 4}}} for name in TAUGHT}
DRAW_FOUR = "gemma2-gqa", "gemma3-gqa", "gpt2-mha", "gptoss-gqa", "qwen2-mha"
SPECS["ensemble"] = {"ensemble": {"members": ["lookback_probe", "novel_words"]}}
SPECS["lrp4rag_lstm"] = {"lrp4rag_lstm": {"response_bins": 3, "prompt_bins": 2}}
NAMES = sorted(SPECS)
OF_TOKENS = [name for name in NAMES if build(SPECS[name]).tokens]
# Of the differences between answers, how much bfloat16 may change a score.
ROUNDING = 0.35
pytestmark = [pytest.mark.shows("detectors")]


@pytest.fixture(
    scope="module",
    params=tiny.ONE_EACH if "JAXHAL_RECORD" in os.environ else ["llama-gqa"],
)
def case(request):
    return request.param


@pytest.fixture(scope="module")
def lm(case):
    # Through windows of a few bytes nothing of a context is seen but rounding.
    return lm_of(case, 4096, sliding_window=128)


@pytest.fixture(scope="module")
def examples():
    return [
        Example(
            **{name: row[name] for name in ("response", "context", "question", "id")},
            labels=tuple(Label(**label) for label in row["labels"]),
            source=row["source"],
        )
        for row in labelled(24)
    ]


@pytest.fixture(scope="module")
def specs(case):
    return SPECS | FOUR if case in DRAW_FOUR else SPECS


@pytest.fixture(scope="module")
def every(specs):
    return {name: build(spec) for name, spec in specs.items()}


@pytest.fixture(scope="module")
def data(lm, examples, every, tmp_path_factory):
    store = Store(tmp_path_factory.mktemp("store"))
    how = dict(batch_size=len(examples), progress=False)
    return collect(lm, examples, list(every.values()), store, **how)


@pytest.fixture(scope="module")
def fitted(data, every):
    """Each detector fitted to all answers, at first use."""
    weight = np.ones(len(data.labels), np.float32)
    targets = Targets(data.labels, data.groups, weight, jax.random.key(0))

    @functools.cache
    def of(name):
        return fit(every[name], data.inputs[name], targets)

    return of


@pytest.fixture(scope="module")
def batch(lm, examples, every):
    """Some answers with the features of all detectors, read without a store."""
    found = extract(lm, examples[:8], features_of(every.values()), progress=False)
    return list(found.batches())


def scores_of(one, features):
    name = one.detector.name
    return np.asarray(response_scores((one.detector,), (one.params,), features)[name])


def close(found, wanted):
    spread = np.ptp(np.asarray(wanted)) + 1e-3
    np.testing.assert_allclose(found, wanted, rtol=1e-4, atol=1e-4 * spread + 1e-5)


@pytest.mark.parametrize("name", NAMES)
def test_a_store_padding_and_company_change_nothing(data, fitted, batch, name):
    """What was read in other batches, padded otherwise, and kept, scores the same."""
    one = fitted(name)
    kept = one.score(data.inputs[name])
    for numbers, features in batch:
        close(scores_of(one, features)[: len(numbers)], kept[numbers])


@pytest.mark.parametrize("name", NAMES)
def test_a_row_of_a_batch_is_the_row_alone(fitted, batch, name):
    one = fitted(name)
    numbers, features = batch[0]
    together = scores_of(one, features)
    alone = dict(features)
    wanted = {n: f for n, f in one.detector.features}
    for key in alone:
        axis = wanted[key].batch_axis if isinstance(wanted.get(key), Reducer) else 0
        if hasattr(getattr(wanted.get(key), "reducer", None), "batch_axis"):
            axis = wanted[key].reducer.batch_axis
        alone[key] = jax.tree.map(
            lambda x, a=axis: np.take(np.asarray(x), [0], a), alone[key]
        )
    close(scores_of(one, only(one, alone)), together[:1])


def only(one, features):
    """The features that a detector looks at: others may have other axes."""
    names = {name for name, _ in one.detector.features} | {"valid", "text", "marked"}
    return {name: value for name, value in features.items() if name in names}


def on_device(features):
    return jax.tree.map(jnp.asarray, features)


@pytest.mark.parametrize("name", NAMES)
def test_jit_is_eager(fitted, batch, name):
    one = fitted(name)
    _, features = batch[0]
    with jax.disable_jit():
        eager = one.detector.score(one.params, on_device(only(one, features)))
    close(scores_of(one, only(one, features)), eager)


@pytest.mark.parametrize("name", NAMES)
def test_one_program_a_bucket(fitted, batch, specs, name):
    one = fitted(name)
    _, features = batch[0]
    mine = on_device(only(one, features))
    scores_of(one, mine)
    before = response_scores._cache_size()
    scores_of(one, jax.tree.map(jnp.copy, mine))
    if name != "ensemble":  # which is made anew of members that are the same
        response_scores((build(specs[name]),), (one.params,), mine)
    assert response_scores._cache_size() == before


@pytest.mark.parametrize("name", NAMES)
def test_scores_and_gradients_are_finite(data, fitted, name):
    one = fitted(name)
    inputs = jax.tree.map(jnp.asarray, take(data.inputs[name], slice(None)))
    leaves, tree = jax.tree.flatten(inputs)
    floats = [n for n, x in enumerate(leaves) if jnp.issubdtype(x.dtype, jnp.floating)]
    assert floats

    def total(some):
        full = list(leaves)
        for n, x in zip(floats, some, strict=True):
            full[n] = x
        return one.detector.decide(one.params, jax.tree.unflatten(tree, full)).sum()

    value, gradients = jax.value_and_grad(total)([leaves[n] for n in floats])
    assert np.isfinite(value)
    for gradient in gradients:
        assert np.isfinite(gradient).all()


@pytest.mark.parametrize("name", OF_TOKENS)
def test_token_scores_are_shares_and_zero_on_padding(fitted, batch, name):
    one = fitted(name)
    for _, features in batch:
        scores = np.asarray(one.detector.tokens(one.params, features))
        assert scores.shape == features["valid"].shape
        assert ((scores >= 0) & (scores <= 1)).all()
        assert not scores[~features["valid"]].any()


@pytest.mark.parametrize("name", NAMES)
def test_saved_and_loaded_is_itself(data, fitted, specs, tmp_path, name):
    one = fitted(name)
    saving.save(tmp_path / "it", one, specs[name])
    again = saving.load(tmp_path / "it")
    np.testing.assert_array_equal(
        again.score(data.inputs[name]), one.score(data.inputs[name])
    )
    assert again.threshold == one.threshold
    assert again.calibration == one.calibration


@pytest.mark.parametrize("name", NAMES)
def test_axes_are_as_declared(lm, every, batch, name):
    """Of reducers at two lengths; of what is computed otherwise, of some answers."""
    found = kinds(dict(every[name].features))
    reducers = found.own | {
        n: r for one in found.rewrites.values() for n, r in one.items()
    }
    layers = lm.config.num_hidden_layers
    attending = len(lm.config.layers_with("self_attn"))
    sizes = {
        "layer": {layers, layers + 1, attending, 1},
        "heads": {lm.config.num_attention_heads},
        "width": {lm.config.hidden_size},
    }
    for prompt, response in ((23, 19), (41, 47)):
        shapes = shapes_of(lm, tuple(reducers.items()), prompt, response)
        for key, reducer in reducers.items():
            shape = list(shapes[key].shape)
            assert shape.pop(reducer.batch_axis) == 2
            assert len(shape) == len(reducer.axes), (key, shape, reducer.axes)
            for axis, size in zip(reducer.axes, shape, strict=True):
                assert size in (sizes | {"response": {response}}).get(axis, {size})
                assert (axis == "response") == (size == response), (key, reducer.axes)
    _, features = batch[0]
    for key, feature in every[name].features:
        if isinstance(feature, Measure | OfText):
            axes = feature.axes
            parts = features[key] if isinstance(axes, dict) else {"": features[key]}
            axes = axes if isinstance(axes, dict) else {"": axes}
            assert set(axes) <= set(parts)
            for part in axes:
                assert np.ndim(parts[part]) == 1 + len(axes[part]), (key, part)


def shapes_of(lm, named, prompt, response):
    mask = jax.ShapeDtypeStruct((2, prompt + response), jnp.bool_)
    ids = jax.ShapeDtypeStruct((2, prompt + response), jnp.int32)
    offsets = jax.ShapeDtypeStruct((2, response, 2), jnp.int32)
    asked = Batch(ids, mask, mask, mask, mask, offsets, prompt)
    return jax.eval_shape(lambda lm, b: read_jit(lm, b, named), lm, asked)


WITHOUT_FIT = [
    name for name in NAMES if name != "ensemble" and not CATALOGUE[name]().fit
]
READ = [name for name in WITHOUT_FIT if name not in SAMPLED]


def test_bfloat16_is_near(lm, examples, data, fitted):
    """Scores of methods that are not trained, by a reader in half precision.

    Rounding may send a token to other experts, which is no small change: of eight
    answers two may have such a token.
    """
    params = jax.tree.map(lambda x: x.astype(jnp.bfloat16), lm.params)
    half = dataclasses.replace(lm, params=params, name="half")
    chosen = [build(SPECS[name]) for name in READ]
    halved = jaxhal.score(half, examples[:8], chosen, progress=False)
    for name in READ:
        a = fitted(name).score(data.inputs[name])[:8]
        b = np.array([report.scores[name] for report in halved])
        # Of hundreds of edges of a forest a few are nearly as short as others.
        edges = 0.01 if name == "sink_share" else 0.0
        allowed = ROUNDING * np.ptp(a) + 0.02 * np.abs(a).max() + edges
        near = np.abs(a - b) <= allowed
        assert (~near).sum() <= (2 if lm.config.num_experts else 0), name
