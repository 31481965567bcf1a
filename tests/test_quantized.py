"""Weights that stay as a GGUF file stores them are the numbers that they stand for."""

import dataclasses
import math
import types

import gguf
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import test_decoding
import test_parity
import thorough
from safetensors.numpy import load_file, save_file
from test_decoding import how

import jaxhal
import tiny
import tiny_lm
from jaxhal.generation import decoding
from jaxhal.models import blocks as blocks_lib
from jaxhal.models import devices, placement, quantized, weights
from jaxhal.models import mesh as mesh_lib
from jaxhal.models.batching import Encoded, collate
from jaxhal.models.families import FAMILIES, huggingface_table
from jaxhal.models.gguf import GGUFSource
from jaxhal.models.gguf_config import config_from_gguf
from jaxhal.models.gguf_families import gguf_table
from jaxhal.models.lm import LM
from jaxhal.models.safetensors import SafetensorsSource
from jaxhal.reading.keys import fingerprint

# Where the blocks of a format have what they are scaled by, in bytes of a block.
SCALES = {
    "Q4_1": slice(0, 4),
    "Q5_1": slice(0, 4),
    "Q4_K": slice(0, 4),
    "Q5_K": slice(0, 4),
    "Q6_K": slice(208, 210),
}


def blocks(kind: str, rows: int, columns: int, seed: int = 0, size: float = 0.01):
    """Rows of random blocks of a format, as a file has them."""
    each, bytes_ = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[kind]]
    rng = np.random.default_rng(seed)
    data = rng.integers(0, 256, (rows, columns // each, bytes_), np.uint8)
    where = SCALES.get(kind, slice(0, 2))
    count = (where.stop - where.start) // 2
    scales = size * rng.standard_normal((*data.shape[:2], count))
    data[..., where] = scales.astype(np.float16).view(np.uint8)
    return data.reshape(rows, -1)


@pytest.mark.parametrize("once", [1, 4 << 20])
@pytest.mark.parametrize("kind", blocks_lib.FORMATS)
def test_numbers_are_those_of_the_gguf_package(kind, once, monkeypatch):
    monkeypatch.setattr(blocks_lib, "_AT_ONCE", once)
    data = blocks(kind, 6, 1280)
    want = gguf.quants.dequantize(data, gguf.GGMLQuantizationType[kind])
    packed = blocks_lib.pack(kind, data)
    found = jax.jit(quantized.Packed.numbers)(jax.tree.map(jnp.asarray, packed))
    assert packed.shape == want.shape
    np.testing.assert_array_equal(found, want)
    assert sum(leaf.nbytes for leaf in jax.tree.leaves(packed)) <= 1.03 * data.nbytes
    for most in (1, 4 * 1280 * 2, 1 << 30):
        parts = jax.tree.map(jnp.asarray, packed).parts(most)
        np.testing.assert_array_equal(parts.numbers().reshape(want.shape), want)
        each = jax.tree.map(jnp.asarray, packed).parts(most, ways=2).numbers()
        each = each.swapaxes(0, 1).reshape(want.shape)
        np.testing.assert_array_equal(each, want)


# Of each layer.
KINDS = {
    "attn_q": ("Q4_K", "Q4_K", "Q4_K"),
    "attn_k": ("Q4_0", "Q8_0", "Q4_0"),
    "attn_v": ("Q6_K", "Q4_K", "Q6_K"),
    "attn_output": ("Q5_0", "Q5_0", "Q4_1"),
    "ffn_gate": ("Q5_K", "Q6_K", "Q8_0"),
    "ffn_up": ("Q5_1", "Q5_1", "Q5_1"),
    "ffn_down": ("Q4_K", "Q6_K", "Q6_K"),
}
WIDTH, HEADS, KV, INNER, VOCAB = 256, 4, 2, 512, 96


def write(
    path, arch="llama", tied=True, other=(), kinds=KINDS, experts=4
) -> GGUFSource:
    """A file of a small model; ``other`` puts further tensors in place of its own.

    It has experts where ``kinds`` are those of some.
    """
    writer = gguf.GGUFWriter(path, arch)
    layers = len(kinds["attn_output"])
    writer.add_block_count(layers)
    writer.add_context_length(128)
    writer.add_embedding_length(WIDTH)
    writer.add_feed_forward_length(INNER)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV)
    writer.add_key_length(WIDTH // HEADS)
    writer.add_layer_norm_rms_eps(1e-5)
    mixed = "ffn_gate_exps" in kinds
    if mixed:
        writer.add_expert_count(experts)
        writer.add_expert_used_count(2)
        writer.add_expert_feed_forward_length(INNER)
    ones, kv = np.ones(WIDTH, np.float32), KV * WIDTH // HEADS
    tensors = {"token_embd": ("Q6_K", VOCAB, WIDTH, 1e-4), "output_norm": ones}
    if not tied:
        tensors["output"] = ("Q8_0", VOCAB, WIDTH, 1e-3)
    shapes = {
        "attn_q": (WIDTH, WIDTH),
        "attn_k": (kv, WIDTH),
        "attn_v": (kv, WIDTH),
        "attn_qkv": (WIDTH + 2 * kv, WIDTH),
        "attn_output": (WIDTH, WIDTH),
        "ffn_gate": (INNER, WIDTH),
        "ffn_up": (INNER if "ffn_gate" in kinds else 2 * INNER, WIDTH),
        "ffn_down": (WIDTH, INNER),
        "ffn_gate_exps": (experts, INNER, WIDTH),
        "ffn_up_exps": (experts, INNER, WIDTH),
        "ffn_down_exps": (experts, WIDTH, INNER),
    }
    router = np.random.default_rng(9).standard_normal((experts, WIDTH))
    for layer in range(layers):
        for name, found in kinds.items():
            tensors[f"blk.{layer}.{name}"] = (found[layer], *shapes[name], 1e-3)
        for name in ("attn_norm", "ffn_norm"):
            tensors[f"blk.{layer}.{name}"] = ones
        if mixed:
            tensors[f"blk.{layer}.ffn_gate_inp"] = router.astype(np.float32)
    for seed, (name, made) in enumerate((tensors | dict(other)).items()):
        if isinstance(made, np.ndarray):
            writer.add_tensor(f"{name}.weight", made)
            continue
        kind, *lead, columns, size = made
        data = blocks(kind, math.prod(lead), columns, seed, size).reshape(*lead, -1)
        raw = gguf.GGMLQuantizationType[kind]
        writer.add_tensor(f"{name}.weight", data, raw_dtype=raw)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return GGUFSource(path)


def check_outline(lm: LM, source, table, packed: str, mesh=None):
    """A model is what is said of it before anything is read."""
    _, shapes = weights.abstract(lm.config, jnp.float32)
    place = placement.on(mesh or jaxhal.make_mesh(), lm.config, mesh_lib.RULES)
    said = weights.laid_out(shapes, source, table, packed, place)
    # Formats, and the devices that rows are shared by, are part of the structure.
    assert jax.tree.structure(said) == jax.tree.structure(lm.params)
    said, real = (
        [
            (leaf.shape, leaf.dtype, leaf.sharding.shard_shape(leaf.shape))
            for leaf in jax.tree.leaves(params)
        ]
        for params in (said, lm.params)
    )
    assert said == real


def read_in(source: GGUFSource, packed: bool, dtype=jnp.float32) -> LM:
    config = config_from_gguf(source)
    table, kept = gguf_table(config), "stored" if packed else ""
    graphdef, params = weights.fill(config, source, table, dtype, packed=kept)
    return LM(params, graphdef, config)


@pytest.fixture(scope="module", params=["llama", "qwen2"])
def pair(request, tmp_path_factory):
    path = tmp_path_factory.mktemp("quantized") / "tiny.gguf"
    source = write(path, request.param, tied=request.param == "llama")
    return [read_in(source, packed) for packed in (True, False)]


def rows(count: int = 3) -> list[Encoded]:
    rng = np.random.default_rng(0)
    made = []
    for number in range(count):
        prompt = rng.integers(3, VOCAB, 9 + number).astype(np.int32)
        response = rng.integers(3, VOCAB, 5 + number).astype(np.int32)
        offsets = np.zeros((len(response), 2), np.int32)
        context = np.arange(len(prompt)) < 7
        made.append(Encoded(prompt, response, offsets, context, context, ~context))
    return made


def test_a_model_keeps_its_size_and_its_name(pair):
    kept, whole = pair
    held = sum(leaf.nbytes for leaf in jax.tree.leaves(kept.params))
    assert held < 0.3 * sum(leaf.nbytes for leaf in jax.tree.leaves(whole.params))
    assert repr(kept) == repr(whole)[:-1] + ", packed weights)"
    # What was fitted for one holds for the other.
    assert fingerprint(kept) == fingerprint(whole)


@pytest.mark.parametrize("most", [1 << 10, 64 << 20])
def test_logits(pair, monkeypatch, most):
    monkeypatch.setattr("jaxhal.models.decoder.VOCABULARY_BYTES", most)
    jax.clear_caches()
    tokens = np.random.default_rng(1).integers(0, VOCAB, (2, 128))
    kept, whole = (lm.forward(tokens) for lm in pair)
    assert float(jnp.std(whole)) > 0.1
    np.testing.assert_allclose(kept, whole, atol=1e-4)
    assert (kept.argmax(-1) == whole.argmax(-1)).all()


def test_bfloat16(tmp_path):
    source = write(tmp_path / "tiny.gguf")
    kept, whole = (read_in(source, packed, jnp.bfloat16) for packed in (True, False))
    assert fingerprint(kept) == fingerprint(whole)
    tokens = np.random.default_rng(1).integers(0, VOCAB, (2, 40))
    kept, whole = kept.forward(tokens), whole.forward(tokens)
    np.testing.assert_allclose(kept, whole, atol=0.05 * float(jnp.abs(whole).max()))


@pytest.mark.parametrize("pair", ["qwen2"], indirect=True)
def test_features_and_relevance(pair):
    batch = collate(rows(), 0)
    reducers = {
        "forest": jaxhal.MTopDiv(),
        "lookback": jaxhal.LookbackRatio(),
        "entropy": jaxhal.TokenEntropy(),
        "states": jaxhal.HiddenStates(layers=(0, 1, 3)),
    }
    kept, whole = (jaxhal.read(lm, batch, reducers) for lm in pair)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-4), kept, whole)
    kept, whole = (jaxhal.relevance(lm, batch).matrix for lm in pair)
    np.testing.assert_allclose(kept, whole, atol=1e-3 * float(jnp.abs(whole).max()))


@pytest.mark.parametrize(
    ("pair", "prompts"),
    [("llama", [[5, 9, 31, 77], [8, 50]]), ("qwen2", [[5, 9, 31, 77]])],
    indirect=["pair"],
)
def test_writing(pair, prompts, monkeypatch):
    monkeypatch.setattr(decoding, "_APART_FROM", 0)
    written = []
    for lm in pair:
        state = test_decoding.write(lm, prompts, 9, how())
        # XLA would make numbers of all layers that are apart, and keep them.
        assert isinstance(state.cache.key, tuple) is not lm.packed
        written.append(state)
    kept, whole = written
    assert kept.tokens.tolist() == whole.tokens.tolist()
    np.testing.assert_allclose(kept.logprob, whole.logprob, atol=1e-3)


def test_writing_makes_numbers_of_one_layer_at_a_time(tmp_path, monkeypatch):
    monkeypatch.setattr(decoding, "_APART_FROM", 0)
    kinds = {name: each * 8 for name, each in KINDS.items()}
    lm = read_in(write(tmp_path / "tiny.gguf", kinds=kinds), packed=True)
    programs, go_on = [], decoding.go_on

    def compiled(*args):
        programs.append(go_on.lower(*args).compile())
        return programs[-1](*args[:-1])  # but for what is static

    monkeypatch.setattr(decoding, "go_on", compiled)
    state = test_decoding.write(lm, [[5, 9, 31, 77], [8, 50]], 9, how())
    memory = programs[0].memory_analysis()
    numbers = 4 * sum(
        leaf.size
        for leaf in jax.tree.leaves(lm.params, is_leaf=quantized.is_stored)
        if quantized.is_stored(leaf) and leaf.places is not None
    )
    assert memory.temp_size_in_bytes < numbers / 3
    # And the cache is written where it is.
    cache = sum(leaf.nbytes for leaf in jax.tree.leaves(state.cache))
    assert memory.alias_size_in_bytes > cache > 0


@pytest.mark.parametrize("pair", ["llama"], indirect=True)
def test_a_low_rank_addition_is_learnt_over_it_and_every_weight_is_not(pair):
    from jaxhal.tuning import Tuning
    from jaxhal.tuning.classifier import TokenRows, log_loss, start

    tokens = jnp.asarray(np.random.default_rng(2).integers(3, VOCAB, (2, 24)))
    batch = TokenRows(tokens, jnp.ones(tokens.shape, bool))
    labels, weight = jnp.array([0.0, 1.0]), jnp.ones(2)
    found = []
    for lm in pair:
        tuning = Tuning(targets=("q_proj", "down_proj"))
        learned = start(lm, tuning, jax.random.key(0))
        # Away from where the upper halves are zero.
        learned = jax.tree.map(lambda leaf: leaf + 0.01, learned)
        grad = jax.value_and_grad(log_loss)
        found.append(grad(learned, lm, batch, labels, weight, tuning.scale))
    np.testing.assert_allclose(found[0][0], found[1][0], rtol=1e-4)
    gradients = (jax.tree.leaves(gradient) for _, gradient in found)
    for kept, whole in zip(*gradients, strict=True):
        assert jnp.abs(whole).max() > 0
        assert test_parity.error(kept, whole) < 1e-3
    with pytest.raises(ValueError, match="has packed weights.*method 'lora'"):
        start(pair[0], Tuning(method="full"), jax.random.key(0))


@pytest.mark.parametrize(
    "other, message",
    [
        (
            {"blk.1.ffn_up": ("Q2_K", INNER, WIDTH, 1e-3)},
            "stored as Q2_K, .*dequant",
        ),
        (
            {"blk.1.ffn_up": ("Q4_K", WIDTH, WIDTH, 1e-3)},
            r"\[256, 256\].*\[512, 2",
        ),
        (
            {"blk.1.attn_k": ("Q4_K", 90, WIDTH, 1e-3)},
            "attn_k.* does not give .*k_proj",
        ),
        ({"blk.2.attn_q": ("Q4_K", WIDTH, WIDTH, np.nan)}, "attn_q.* NaN or infinite"),
    ],
)
def test_what_cannot_stay_is_named(tmp_path, other, message):
    source = write(tmp_path / "tiny.gguf", other=other)
    with pytest.raises(ValueError, match=message):
        read_in(source, packed=True)


def test_a_matrix_that_is_not_in_blocks_in_every_layer_becomes_numbers(tmp_path):
    plain = np.full((INNER, WIDTH), 0.01, np.float32)
    source = write(tmp_path / "tiny.gguf", other={"blk.1.ffn_up": plain})
    lm = read_in(source, packed=True)
    check_outline(lm, source, gguf_table(lm.config), "stored")
    leaves = dict(weights.paths(lm.params))
    assert isinstance(leaves["blocks.mlp.up_proj.kernel"], jax.Array)
    assert quantized.is_stored(leaves["blocks.mlp.down_proj.kernel"])


def test_parts_of_a_fused_matrix_stay(tmp_path):
    kinds = {
        "attn_qkv": ("Q4_0", "Q8_0"),
        "attn_output": ("Q4_0", "Q4_0"),
        "ffn_up": ("Q8_0", "Q4_0"),
        "ffn_down": ("Q8_0", "Q8_0"),
    }
    source = write(tmp_path / "tiny.gguf", "phi3", kinds=kinds)
    kept, whole = (read_in(source, packed) for packed in (True, False))
    want = dict(weights.paths(whole.params))
    for name, leaf in weights.paths(kept.params):
        assert quantized.is_stored(leaf) == name.endswith((".kernel", ".embedding"))
        if quantized.is_stored(leaf):
            leaf = np.stack([*leaf.each()]).reshape(leaf.shape)
        np.testing.assert_array_equal(leaf, want[name])


QUANTIZED = ["llama-mha", "gpt2-mha", "gptoss-gqa", "qwen3.5moe-gqa", "phi3-mha"]
NOT_BY_DEFAULT = [c for c in tiny.ONE_EACH if c not in QUANTIZED] + ["gemma4-experts"]


@pytest.mark.shows("blocks")
@pytest.mark.parametrize(
    ("case", "kind"),
    [
        ("llama-gqa", "Q4_0"),
        *((case, "Q8_0") for case in QUANTIZED),
        *thorough.more(*((case, "Q8_0") for case in NOT_BY_DEFAULT)),
    ],
)
def test_matrices_of_a_folder_are_rounded(case, kind, tmp_path):
    want = tiny.golden(case)
    whole = test_parity.load(tmp_path, want["config"], want["shapes"])
    config, raw = whole.config, gguf.GGMLQuantizationType[kind]
    source = SafetensorsSource(tmp_path, FAMILIES[config.family].bare)
    table = huggingface_table(config)
    graphdef, params = weights.fill(config, source, table, jnp.float32, packed=kind)
    kept = LM(params, graphdef, config)
    check_outline(kept, None, table, kind)

    def rounded(name: str, leaf: np.ndarray) -> jax.Array:
        rows = leaf.swapaxes(-1, -2) if name.endswith(".kernel") else leaf
        held = gguf.quants.dequantize(gguf.quants.quantize(rows, raw), raw)
        return jnp.asarray(held.swapaxes(-1, -2) if rows is not leaf else held)

    pairs = zip(weights.paths(params), weights.paths(whole.params), strict=True)
    leaves, stay = [], set()
    for (name, leaf), (_, exact) in pairs:
        if not quantized.is_stored(leaf):
            stay.add(name)
        leaves.append(exact if name in stay else rounded(name, np.asarray(exact)))
    # Rows of 48 make no whole blocks of 32, and routers and their like stay.
    matrices = {name for name in stay if name.endswith((".kernel", ".embedding"))}
    stays = "mlp.down_proj", "mlp.router", "shared.gate"
    assert {name.partition("blocks.")[2] for name in matrices} <= {
        f"{one}.kernel" for one in stays
    }
    tree = jax.tree.structure(whole.params)
    same = dataclasses.replace(whole, params=jax.tree.unflatten(tree, leaves))
    assert fingerprint(kept) == fingerprint(same) != fingerprint(whole)
    tokens = np.random.default_rng(0).integers(0, config.vocab_size, (2, 12))
    assert test_parity.error(kept.forward(tokens), same.forward(tokens)) < 1e-4


def test_a_folder_loads_so(tmp_path):
    tiny_lm.write_lm(tmp_path)
    assert repr(jaxhal.load(tmp_path, weights="int8")).endswith(
        "float32, packed weights)"
    )
    with pytest.raises(ValueError, match="'stored', but .* is no GGUF file; use int8"):
        jaxhal.load(tmp_path, weights="stored")


def test_matrices_of_the_wrong_shape_are_not_rounded(tmp_path):
    path = tiny_lm.write_lm(tmp_path) / "model.safetensors"
    tensors, name = load_file(path), "model.layers.{}.mlp.up_proj.weight"
    tensors[name.format(0)] = np.zeros((32, 64), np.float32)
    tensors[name.format(1)] = np.zeros((64, 40), np.float32)
    save_file(tensors, path)
    message = r"0.* \[32, 64\] .* needs \[64, 32\].*1.*rows of 40 make no whole"
    with pytest.raises(ValueError, match=message):
        jaxhal.load(tmp_path, weights="int8")


def test_what_fits_is_dequantised(tmp_path, monkeypatch):
    source = write(tmp_path / "tiny.gguf")
    config, whole = config_from_gguf(source), 4 * source.size

    def chosen(given, source):
        packing, mesh = placement.choose(config, source, jnp.float32, given, None)
        assert mesh is None
        return packing

    for memory, packing in ((2 * whole + 2, ""), (2 * whole - 2, "stored")):
        monkeypatch.setattr(devices, "memory", lambda memory=memory: memory)
        assert chosen(None, source) == packing
    # No blocks that cannot stay are proposed.
    monkeypatch.setattr(type(source), "stays", False)
    assert chosen(None, source) == ""
    monkeypatch.undo()
    folder = types.SimpleNamespace(where="a folder", size=source.size)
    for given, source_, packing in (
        ("stored", source, "stored"),
        ("dequantised", source, ""),
        ("int8", folder, "Q8_0"),
        ("int4", folder, "Q4_0"),
        (None, folder, ""),
    ):
        assert chosen(given, source_) == packing
    for given, source_, message in (
        ("int2", source, "weights is 'int2'; use one of stored, deq"),
        ("stored", folder, "'stored', but a folder is no GGUF file; use int8 or int4"),
        ("int8", source, "'int8', but .*tiny.gguf is a GGUF file; use stored"),
    ):
        with pytest.raises(ValueError, match=message):
            chosen(given, source_)


def test_packed_layers_stay_together(pair):
    kept, whole = pair if pair[0].packed else pair[::-1]
    with pytest.raises(ValueError, match="has packed weights"):
        kept.apart  # noqa: B018
    assert whole.apart.config == whole.config
