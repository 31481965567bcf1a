"""Fused attention against a slow oracle, and against blocks in a whole reading pass."""

import functools
import json
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import thorough
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import jaxhal
import tiny
from jaxhal.capture import forward as capture
from jaxhal.models import kernels, splash
from jaxhal.models.families import from_huggingface
from jaxhal.models.lm import LM, random
from jaxhal.types import Batch

REDUCERS = {
    "lookback": jaxhal.LookbackRatio(),
    "mtop_div": jaxhal.MTopDiv(),
    "states": jaxhal.HiddenStates(),
    "entropy": jaxhal.TokenEntropy(),
}
GPU = pytest.mark.skipif(jax.default_backend() != "gpu", reason="no NVIDIA GPU")
TPU = pytest.mark.skipif(jax.default_backend() != "tpu", reason="no TPU")
XLA = functools.partial(kernels.flash, implementation="xla")
INTERPRETED = functools.partial(kernels.splash, interpret=True)
# What the kernels of devices give in 16 bits, and what is computed here in 32.
EACH = [
    pytest.param(XLA, "float32", 1e-5, id="xla"),
    pytest.param(kernels.flash, "bfloat16", 2e-2, id="cudnn", marks=GPU),
    pytest.param(INTERPRETED, "float32", 1e-5, id="splash"),
    pytest.param(kernels.splash, "bfloat16", 2e-2, id="tpu", marks=TPU),
]


def _mask() -> np.ndarray:
    """Rows whole, padded on either side and on both, with a hole, and of padding."""
    valid = np.ones((6, 272), bool)  # three blocks of a TPU's kernel
    valid[1, :40] = valid[2, 70:] = valid[3, :10] = valid[3, 90:] = False
    valid[4, 30:50] = False
    valid[5] = False
    return valid


@pytest.mark.parametrize("attend, dtype, most", EACH)
@pytest.mark.parametrize("windows, window", [((0,), 0), ((0, 16), 0), ((0, 16), 16)])
@pytest.mark.parametrize("capped", [False, True], ids=["", "cap and sinks"])
def test_rows_mix_what_they_may_see(attend, dtype, most, windows, window, capped):
    valid, rng = _mask(), np.random.default_rng(0)
    rows, seq = valid.shape
    q = rng.normal(size=(rows, 2, 3, seq, 16)) / 4
    cap, sink = (0.5, rng.normal(size=(1, 2, 3, 1, 1))) if capped else (None, None)
    if capped and attend in (XLA, kernels.flash):
        pytest.skip("it has neither")
    k, v = rng.normal(size=(2, rows, 2, seq, 16))
    position = np.maximum(np.cumsum(valid, 1) - 1, 0)
    distance = position[:, :, None] - position[:, None]
    seen = valid[:, None] & (np.tril(np.ones((seq, seq), bool)))
    seen &= (window == 0) | (distance < window)
    scores = np.einsum("bngqd,bnkd->bngqk", q, k)
    scores = scores if cap is None else cap * np.tanh(scores / cap)
    scores = np.where(seen[:, None, None], scores, -np.inf)
    scores[~valid[:, None, None].repeat(2, 1).repeat(3, 2)] = 0.0
    weight = np.exp(scores)
    weight /= weight.sum(-1, keepdims=True) + (0 if sink is None else np.exp(sink))
    want = np.einsum("bngqk,bnkd->bngqd", weight, v)
    arrays = (jnp.asarray(x, dtype) for x in (q, k, v))
    sink = None if sink is None else jnp.asarray(sink, jnp.float32)
    got = jax.jit(attend, static_argnums=(4, 6))(
        *arrays, jnp.asarray(valid), windows, jnp.asarray(window), cap, sink
    )
    got = np.asarray(got, np.float32)
    assert np.isfinite(got).all()
    at = np.broadcast_to(valid[:, None, None], got.shape[:4])
    np.testing.assert_allclose(got[at], want[at], atol=most)


def _reader(family: str) -> tuple[LM, Batch]:
    """A tiny model in bfloat16, and a batch padded on either side."""
    meta = json.loads((tiny.GOLDEN / "parity.json").read_text("utf-8"))
    config = from_huggingface(meta[family]["config"])
    model = random(config, jax.random.key(0), jnp.bfloat16)
    valid = np.zeros((3, 24), bool)
    for row, (first, last) in enumerate([(0, 24), (5, 20), (11, 18)]):
        valid[row, first:last] = True
    tokens = np.random.default_rng(0).integers(3, 61, valid.shape, np.int32) * valid
    context = valid & (np.arange(24) < 13)
    offsets = np.zeros((3, 9, 2), np.int32)
    return model, Batch(tokens, valid, context, context, valid & False, offsets, 15)


def test_the_way_back_is_that_of_blocks():
    """What fine-tuning a reader goes through."""
    q, k, v = jax.random.normal(jax.random.key(0), (3, 1, 1, 272, 16))
    valid = jnp.asarray(_mask()[1:2])

    def loss(attend, q, k, v):
        out = attend(q[:, :, None], k, v, valid, (16,), jnp.asarray(16))
        return jnp.sum(jnp.sin(out) * valid[:, None, None, :, None])

    slopes = (
        jax.jit(jax.grad(functools.partial(loss, attend), (0, 1, 2)))(q, k, v)
        for attend in (INTERPRETED, XLA)
    )
    for got, want in zip(*slopes, strict=True):
        np.testing.assert_allclose(got, want, atol=1e-5)


@pytest.mark.parametrize("seq, left", [(512, None), (512, 0), (640, 100), (640, 300)])
def test_a_block_says_as_much_as_all_of_it(seq, left):
    mask = splash._Window(seq, left)
    rows, columns = np.indices((seq, seq))
    whole = (columns <= rows) & (rows - columns <= (seq if left is None else left))
    for i, j in np.ndindex(seq // 128, seq // 128):
        block = slice(i * 128, i * 128 + 128), slice(j * 128, j * 128 + 128)
        part, said = whole[block], mask[block]
        assert (said.any(), said.all()) == (part.any(), part.all())
        assert said.size == 1 or (said == part).all()


@pytest.mark.parametrize(
    "family, attend",
    [
        ("llama-gqa", XLA),
        ("gemma3-gqa", XLA),
        ("gemma3-gqa", INTERPRETED),
        ("gptoss-gqa", INTERPRETED),
        *thorough.more(("gemma2-gqa", INTERPRETED)),
    ],
    ids=["llama", "gemma3", "gemma3-splash", "sinks", "caps"],
)
def test_a_fused_reading_pass_is_that_of_blocks(family, attend, monkeypatch):
    lm, batch = _reader(family)
    want = jaxhal.read(lm, batch, REDUCERS)
    called = []

    def fused(q, *rest):
        called.append(q.shape)
        return attend(q, *rest)

    on = kernels.TPU if attend is INTERPRETED else kernels.CUDA
    monkeypatch.setattr(kernels, "CPU", on._replace(fused=fused))
    capture.read_jit.clear_cache()
    got = jaxhal.read(lm, batch, REDUCERS)
    capture.read_jit.clear_cache()
    # Of the whole batch in one call, traced once in the scan over layers.
    assert [shape[3] for shape in called] == [24]
    for name in REDUCERS:
        a, b = (np.asarray(x[name], np.float32) for x in (got, want))
        np.testing.assert_allclose(a, b, atol=0.03 * np.abs(b).max(), err_msg=name)


def test_what_kernels_do_not_take_goes_in_blocks(monkeypatch):
    def fused(*arrays):
        raise AssertionError("float32 has no kernel")

    for takes in (kernels.flash_takes, kernels.splash_takes):
        assert not takes(jnp.ones((1, 2, 3, 4, 8)), jnp.ones((1, 2, 4, 8)), None, None)
    here = kernels.CPU._replace(fused=fused, takes=kernels.splash_takes)
    monkeypatch.setattr(kernels, "CPU", here)
    lm, batch = _reader("llama-gqa")
    wide = random(lm.config, jax.random.key(0))
    capture.read_jit.clear_cache()
    out = jaxhal.read(wide, batch, REDUCERS)
    capture.read_jit.clear_cache()
    assert np.isfinite(np.asarray(out["entropy"])).all()


@pytest.mark.parametrize("case", ["gemma2-gqa", "gptoss-gqa"])
def test_caps_and_sinks_go_in_blocks_on_a_gpu(case, monkeypatch):
    def fused(*arrays):
        raise AssertionError("cuDNN has neither")

    monkeypatch.setattr(kernels, "CPU", kernels.CUDA._replace(fused=fused))
    lm, batch = _reader(case)
    capture.read_jit.clear_cache()
    out = jaxhal.read(lm, batch, {"logprob": jaxhal.TokenLogprob()})
    capture.read_jit.clear_cache()
    assert np.isfinite(np.asarray(out["logprob"])).all()


def test_another_platform_that_is_here_too_changes_nothing(monkeypatch):
    lm, batch = _reader("llama-gqa")
    lm = random(lm.config, jax.random.key(0))
    want = jaxhal.read(lm, batch, REDUCERS)
    relevance = jaxhal.relevance_means(lm, batch)
    monkeypatch.setattr(kernels, "installed", lambda: {"tpu": kernels.TPU})
    monkeypatch.setattr(kernels, "backends", lambda: {"cpu": None, "tpu": None})
    jax.clear_caches()
    got = jaxhal.read(lm, batch, REDUCERS)
    again = jaxhal.relevance_means(lm, batch)
    jax.clear_caches()
    for name in REDUCERS:
        np.testing.assert_allclose(got[name], want[name], atol=1e-5, err_msg=name)
    np.testing.assert_allclose(again.prompt, relevance.prompt, atol=1e-5)


def test_a_product_is_traced_for_platforms_that_it_may_be_lowered_for(monkeypatch):
    """A plugin without its device costs nothing."""
    both = {"cuda": kernels.CUDA, "tpu": kernels.TPU}
    monkeypatch.setattr(kernels, "installed", lambda: both)

    def traced(*arrays):
        seen = []

        def double(platform, x):
            seen.append(platform)
            return 2 * x

        jax.eval_shape(lambda x: kernels.by_platform(double, x), *arrays)
        return seen

    x = jax.ShapeDtypeStruct((2,), jnp.float32)
    assert traced(x) == [kernels.CPU]
    here = Mesh(np.array(jax.devices()[:1]), "data")
    sharding = NamedSharding(here, PartitionSpec("data"))
    on_mesh = jax.ShapeDtypeStruct((2,), jnp.float32, sharding=sharding)
    monkeypatch.setattr(kernels, "backends", lambda: {"cpu": None, "tpu": None})
    assert traced(on_mesh) == [kernels.CPU]
    assert set(traced(x)) == {kernels.CPU, kernels.TPU}


def test_platforms_are_those_whose_plugins_are_there(monkeypatch):
    there = {"libtpu", "jax_cuda13_plugin"}
    find = kernels.importlib.util.find_spec
    monkeypatch.setattr(
        kernels.importlib.util,
        "find_spec",
        lambda name: object() if name in there else None,
    )
    kernels.installed.cache_clear()
    assert kernels.installed() == {"cuda": kernels.CUDA, "tpu": kernels.TPU}
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    for capability, fused, gib, kept in (
        ("7.5", None, 12, 4),
        ("8.0", kernels.flash, 30, 4),
        ("9.0", kernels.flash, 60, 16),
    ):
        device = SimpleNamespace(
            compute_capability=capability,
            memory_stats=lambda gib=gib: {"bytes_limit": gib << 30},
        )
        monkeypatch.setattr(jax, "local_devices", lambda device=device: [device])
        kernels.installed.cache_clear()
        found = kernels.installed()["cuda"]
        assert found.fused is fused and found.kept == kept << 30
    monkeypatch.setattr(kernels.importlib.util, "find_spec", find)
    kernels.installed.cache_clear()
