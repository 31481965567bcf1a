"""What one device computes, eight do: run by ``test_mesh.py`` on eight fake ones."""

import dataclasses
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import jaxhal
import tiny_lm
from jaxhal import detectors, tuning
from jaxhal.capture import forward as capture
from jaxhal.models import kernels
from jaxhal.models import mesh as mesh_lib
from jaxhal.types import Example

MESHES = [(8, 1), (2, 4), (1, 8)]
REDUCERS = {
    "lookback": jaxhal.LookbackRatio(),
    "mtop_div": jaxhal.MTopDiv(),
    "max_prompt": jaxhal.MaxPromptAttention(),
    "states": jaxhal.HiddenStates(),
    "logprob": jaxhal.TokenLogprob(),
    "entropy": jaxhal.TokenEntropy(),
}
EXAMPLES = [
    Example(f"It was opened in {year}.", context=f"Opened in {year - row}. " * 3)
    for row, year in enumerate(range(1830, 1838))
]
# Eight heads, two of keys: fewer than devices, so those are copied.
SHAPE = dict(num_attention_heads=8, num_key_value_heads=2, hidden_size=64, head_dim=8)
SHAPE |= dict(vocab_size=264, intermediate_size=96)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    assert jax.device_count() == 8
    return tiny_lm.write_lm(tmp_path_factory.mktemp("lm"), **SHAPE)


@pytest.fixture(scope="module")
def alone(folder):
    return jaxhal.load(folder)


@pytest.fixture(scope="module", params=MESHES, ids=lambda m: f"{m[0]}x{m[1]}")
def spread(request, folder):
    data, model = request.param
    return jaxhal.load(folder, mesh=jaxhal.make_mesh(data=data, model=model))


@pytest.fixture(scope="module")
def crossed(folder):
    return jaxhal.load(folder, mesh=jaxhal.make_mesh(data=2, model=4))


def _equal(got, want, most=1e-5):
    """Leaf by leaf, within a share of the largest number."""
    got, want = jax.tree.leaves(got), jax.tree.leaves(want)
    for one, other in zip(got, want, strict=True):
        scale = max(1.0, np.abs(np.asarray(other, np.float32)).max())
        np.testing.assert_allclose(one, other, atol=most * scale, rtol=0)


def test_each_device_holds_its_part(spread):
    mesh = mesh_lib.mesh_of(spread.params)
    up = spread.params["blocks"]["mlp"]["up_proj"]["kernel"].get_value()
    part = up.addressable_shards[0].data.shape
    assert part == (2, 64, 96 // mesh.shape["model"])
    key = spread.params["blocks"]["self_attn"]["k_proj"]["kernel"].get_value()
    heads = 2 // mesh.shape["model"] if mesh.shape["model"] <= 2 else 2
    assert key.addressable_shards[0].data.shape == (2, 64, heads * 8)


def test_weights_are_those_of_one_device(spread, alone):
    _equal(jax.device_get(spread.params), jax.device_get(alone.params), 0)


@pytest.mark.parametrize("rows", [8, 3])
def test_every_reducer(spread, alone, rows):
    batch = alone.encode(EXAMPLES[:rows])
    want = jaxhal.read(alone, batch, REDUCERS)
    _equal(jaxhal.read(spread, batch, REDUCERS), want)


def test_logits(spread, alone):
    tokens = np.random.default_rng(0).integers(3, 250, (8, 40), np.int32)
    _equal(spread.forward(tokens), alone.forward(tokens))


@pytest.mark.parametrize("rules", ["attnlrp", "cp_lrp"])
def test_relevance(spread, alone, rules):
    batch = alone.encode(EXAMPLES[:8])
    for function in (jaxhal.relevance_means, jaxhal.relevance):
        _equal(function(spread, batch, rules), function(alone, batch, rules))


def test_generation(spread, alone):
    how = dict(max_new_tokens=12, key=jax.random.key(0))
    want, got = (jaxhal.generate(lm, EXAMPLES, **how) for lm in (alone, spread))
    assert [[r.text for r in row] for row in got] == [
        [r.text for r in row] for row in want
    ]


def test_a_stream(crossed, alone):
    how = dict(max_new_tokens=8, key=jax.random.key(0))
    want, got = (
        [token.text for token in jaxhal.stream(lm, "Tell", **how)]
        for lm in (alone, crossed)
    )
    assert got == want


def test_tuning(crossed, alone):
    rows = [
        dataclasses.replace(e, label=n % 2, source=str(n))
        for n, e in enumerate(EXAMPLES * 2)
    ]
    how = tuning.Tuning(epochs=1, batch_size=8, micro_batch=4, validation_share=0.25)
    want, got = (tuning.fit(lm, rows, how) for lm in (alone, crossed))
    _equal(got.losses, want.losses, 1e-4)


def test_scores_of_detectors(spread, alone):
    names = [n for n in detectors.AT_ONCE if detectors.build(n).fit is None]
    want, got = (
        jaxhal.score(lm, EXAMPLES, names, progress=False) for lm in (alone, spread)
    )
    for one, other in zip(got, want, strict=True):
        assert one.scores == pytest.approx(other.scores, abs=1e-5)


def test_one_fit(spread, alone, tmp_path):
    rows = [
        dataclasses.replace(e, label=n % 2, source=str(n // 2))
        for n, e in enumerate(EXAMPLES * 3)
    ]
    scores = []
    for name, lm in {"alone": alone, "spread": spread}.items():
        kept = dict(store=tmp_path / name, progress=False)
        fitted = jaxhal.fit(lm, rows, ["linear_probe"], folds=3, **kept)
        reports = jaxhal.score(lm, EXAMPLES, fitted, progress=False)
        scores.append([report.scores["linear_probe"] for report in reports])
    _equal(scores[1], scores[0], 1e-3)


def test_attention_rows_stay_on_their_device(spread, alone):
    batch = mesh_lib.spread(alone.encode(EXAMPLES), spread.params)
    named = tuple(REDUCERS.items())
    text = capture.read_jit.lower(spread.bare, batch, named).compile().as_text()
    shapes = re.findall(r"= \(?\w+\[([\d,]*)\]\S* (?:all-gather|all-to-all)\(", text)
    heads, columns = spread.config.num_attention_heads, batch.tokens.shape[1]
    for shape in shapes:
        sizes = [int(size) for size in shape.split(",") if size]
        assert not (columns in sizes and heads in sizes), shape
    if spread.params and mesh_lib.mesh_of(spread.params).shape["model"] > 1:
        assert "all-reduce(" in text


def test_fully_sharded_weights_are_the_same(folder, alone):
    mesh = jaxhal.make_mesh(data=4, model=2)
    lm = jaxhal.load(folder, mesh=mesh, rules=mesh_lib.FULLY_SHARDED)
    up = lm.params["blocks"]["mlp"]["up_proj"]["kernel"].get_value()
    assert up.addressable_shards[0].data.shape == (2, 16, 48)
    tokens = np.random.default_rng(0).integers(3, 250, (8, 40), np.int32)
    _equal(lm.forward(tokens), alone.forward(tokens))


def test_half_precision(folder):
    lm = jaxhal.load(folder, mesh=jaxhal.make_mesh(model=4), dtype=jnp.bfloat16)
    want = jaxhal.load(folder, dtype=jnp.bfloat16)
    _equal(jax.device_get(lm.params), jax.device_get(want.params), 0)


@pytest.mark.parametrize("data, model", [(8, 1), (2, 4)])
def test_a_kernel_is_given_its_own_heads(data, model):
    mesh = jaxhal.make_mesh(data=data, model=model)
    shape = 6, 4, 2, 40, 8  # rows that eight devices copy
    q = jax.random.normal(jax.random.key(0), shape, jnp.bfloat16)
    valid = jnp.arange(40) >= 5 * jnp.arange(6)[:, None]

    @jax.jit
    def attend(q, valid):
        k, v = q[:, :, 0], q[:, :, 1]
        return kernels.splash(q, k, v, valid, (0,), jnp.asarray(0), interpret=True)

    heads = NamedSharding(mesh, P("data" if data == 2 else None, "model"))
    placed = jax.device_put(q, heads), valid
    _equal(attend(*placed), attend(q, valid), 1e-2)
    text = attend.lower(*placed).compile().as_text()
    assert not re.search("all-gather|all-to-all|all-reduce|collective-permute", text)
    other = NamedSharding(jaxhal.make_mesh(model=8), P())
    few = [jax.device_put(x, other) for x in (q, q[:, :, 0])]
    assert kernels.splash_takes(q, q[:, :, 0]) and not kernels.splash_takes(*few)
