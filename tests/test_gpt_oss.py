"""GPT-OSS: experts of four bits, and what a learnt sink does to rows of attention."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import test_capture
import test_parity
from safetensors.numpy import load_file, save_file

import jaxhal
import oracles
import tiny
from jaxhal.features.graphs import VertexDegree
from jaxhal.features.knowledge import ExternalContext
from jaxhal.features.spectrum import LaplacianEigenvalues, SinkScores
from jaxhal.features.support import CopiedAttention
from jaxhal.models import mesh, placement, weights
from jaxhal.models.families import from_huggingface, huggingface_table
from jaxhal.models.ops import attend, attend_after, scores
from jaxhal.models.safetensors import SafetensorsSource, from_mxfp4

CASE = tiny.golden("gptoss-gqa")
# Of gpt-oss-20b, as published.
PUBLISHED = {
    "model_type": "gpt_oss",
    "vocab_size": 201088,
    "hidden_size": 2880,
    "intermediate_size": 2880,
    "num_hidden_layers": 24,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "num_local_experts": 32,
    "quantization_config": {"quant_method": "mxfp4"},
}


def test_the_published_sizes():
    small = from_huggingface(PUBLISHED)
    large = {"num_hidden_layers": 36, "num_local_experts": 128}
    for config, count in (
        (small, 20_914_757_184),
        (from_huggingface(PUBLISHED | large), 116_829_156_672),
    ):
        leaves = jax.tree.leaves(weights.abstract(config, jnp.bfloat16)[1])
        assert sum(leaf.size for leaf in leaves) == count
    assert (small.windows, small.context_length) == ((128, 0) * 12, 131072)
    assert (small.gate_limit, small.head_dim, small.num_experts_per_tok) == (7, 64, 4)
    (rope,) = small.ropes
    assert (rope.kind, rope.theta, rope.factor) == ("yarn", 150000, 32)
    assert (rope.original_length, rope.truncate) == (4096, False)


@pytest.mark.parametrize(
    ("changed", "match"),
    [
        (
            {"quantization_config": {"quant_method": "gptq"}},
            "quantization_config: quant_method is gptq; known: mxfp4",
        ),
        ({"swiglu_alpha": 1.0}, "only swiglu_alpha=1.702 is computed"),
        ({"swiglu_limit": 0}, "swiglu_limit is 0; give a number above 0"),
        ({"num_experts_per_tok": 33}, "num_experts_per_tok is 33; .* from 1 to 32"),
    ],
)
def test_settings_that_are_not_computed(changed, match):
    with pytest.raises(ValueError, match=match):
        from_huggingface(PUBLISHED | changed)


# -- Experts of four bits -----------------------------------------------------------


def drawn(*lead: int) -> tuple[np.ndarray, np.ndarray]:
    """Random blocks and their scales."""
    rng = np.random.default_rng(lead)
    blocks = rng.integers(0, 256, (*lead, 16), np.uint8)
    return blocks, rng.integers(120, 128, lead, np.uint8)


def test_numbers_are_those_of_transformers():
    torch = pytest.importorskip("torch", reason="torch is not installed")
    from transformers.integrations.mxfp4 import convert_moe_packed_tensors

    blocks, scales = drawn(3, 10, 4)
    scales[0, 0] = 0, 1, 127, 253
    both = map(torch.from_numpy, (blocks, scales))
    theirs = convert_moe_packed_tensors(*both, dtype=torch.float32)
    ours = from_mxfp4(blocks, scales).swapaxes(1, 2)
    np.testing.assert_array_equal(ours, theirs.numpy())


def write(folder, keep=lambda name: True) -> dict[str, np.ndarray]:
    """A checkpoint whose experts are in blocks, and the tensors of one without."""
    tiny.write_folder(folder, CASE["config"], CASE["shapes"])
    file = folder / "model.safetensors"
    whole = load_file(file)
    stored = dict(whole)
    for name, value in whole.items():
        if name.endswith(("gate_up_proj", "down_proj")):
            experts, rows, columns = value.shape
            blocks, scales = drawn(experts, columns, rows // 32)
            del stored[name]
            stored |= {f"{name}_blocks": blocks, f"{name}_scales": scales}
            whole[name] = from_mxfp4(blocks, scales).swapaxes(1, 2)
    save_file({name: x for name, x in stored.items() if keep(name)}, file)
    return {name: np.ascontiguousarray(value) for name, value in whole.items()}


@pytest.mark.parametrize("laid", [False, True])
def test_blocks_are_read_as_the_numbers_they_are(laid, tmp_path):
    whole = write(tmp_path / "blocks")
    tiny.write_folder(tmp_path / "numbers", CASE["config"], CASE["shapes"])
    save_file(whole, tmp_path / "numbers" / "model.safetensors")
    config = from_huggingface(CASE["config"])
    place = placement.on(jaxhal.make_mesh(), config, mesh.RULES) if laid else None

    def read(name: str):
        source = SafetensorsSource(tmp_path / name)
        table = huggingface_table(config)
        how = dict(place=place)
        return source, weights.fill(config, source, table, jnp.bfloat16, **how)[1]

    (source, got), (plain, want) = read("blocks"), read("numbers")
    assert all(jax.tree.leaves(jax.tree.map(np.array_equal, got, want)))
    assert source.names() == plain.names()
    counted = [name for name in whole if name.endswith(("gate_up_proj", "down_proj"))]
    scales = sum(whole[name].size for name in counted) // 32
    assert source.size == plain.size + scales
    # A device's part is that of all, wherever blocks end.
    name = "model.layers.1.mlp.experts.down_proj"
    for rows in (slice(20, 44), slice(None, 40), slice(32, None)):
        index = (slice(1, 3), rows, slice(5, 9))
        np.testing.assert_array_equal(source.part(name, index), whole[name][index])


def test_blocks_that_lack_something(tmp_path):
    config = from_huggingface(CASE["config"])

    def refused(match: str):
        source = SafetensorsSource(tmp_path)
        with pytest.raises(ValueError, match=match):
            weights.fill(config, source, huggingface_table(config), jnp.float32)

    lost = "model.layers.1.mlp.experts.down_proj"
    write(tmp_path, lambda name: name != f"{lost}_scales")
    refused(rf"{lost} is missing; .*{lost}_blocks is stored but unknown")
    write(tmp_path)
    file = tmp_path / "model.safetensors"
    tensors = load_file(file)
    save_file(tensors | {f"{lost}_scales": drawn(6, 32, 3)[1]}, file)
    with pytest.raises(ValueError, match=r"scales \[6, 32, 3\], which do not go tog"):
        SafetensorsSource(tmp_path).get(lost)
    scales = tensors[f"{lost}_scales"].copy()
    scales[2, 3] = 255
    save_file(tensors | {f"{lost}_scales": scales}, file)
    refused(f"{lost} holds NaN or infinite values")


# -- Sinks --------------------------------------------------------------------------


def attention(rng) -> tuple:
    """Queries, keys and values of two prompts and three rows of each."""
    q = rng.normal(size=(6, 2, 3, 4, 8))
    prefix, own = rng.normal(size=(2, 2, 2, 5, 8)), rng.normal(size=(2, 6, 2, 4, 8))
    seen = np.tri(4, 9, 5)[None] * np.ones((6, 1, 1))
    seen[3:, :, :2] = 0  # padding
    bias = np.where(seen > 0, 0.0, -1e30)[:, None, None]
    return q, prefix, own, bias, rng.normal(size=(1, 2, 3, 1, 1)) + 1


def test_a_sink_is_a_column_that_is_dropped():
    """After a shared prefix or not."""
    with jax.enable_x64(True):
        q, prefix, own, bias, sink = attention(np.random.default_rng(0))
        whole = np.concatenate([prefix.repeat(3, axis=1), own], axis=3)
        s = np.einsum("bngqd,bnkd->bngqk", q, whole[0]) + bias
        column = np.broadcast_to(sink, (*s.shape[:-1], 1))
        both = np.exp(np.concatenate([s, column], -1))
        want = (both / both.sum(-1, keepdims=True))[..., :-1]
        assert (want.sum(-1) < 1).all() and want.sum(-1).min() < 0.7
        keys, values = map(jnp.asarray, whole)
        q, bias, sink = map(jnp.asarray, (q, bias, sink))
        first = jnp.asarray(prefix[0]).swapaxes(-1, -2), jnp.asarray(prefix[1])
        after = first, tuple(map(jnp.asarray, own)), bias, None
        for out, rows in (
            attend(scores(q, keys), bias, values, sink),
            attend_after(q, *after, sink),
        ):
            np.testing.assert_allclose(rows, want, atol=1e-12)
            mixed = np.einsum("bngqk,bnkd->bngqd", want, whole[1])
            np.testing.assert_allclose(out, mixed, atol=1e-12)
        # Far below all scores it takes nothing, far above them everything.
        for _, rows in (
            attend(scores(q, keys), bias, values, sink - 1e4),
            attend_after(q, *after, sink - 1e4),
        ):
            np.testing.assert_allclose(rows.sum(-1), 1, atol=1e-12)
        for out, rows in (
            attend(scores(q, keys), bias, values, sink + 1e4),
            attend_after(q, *after, sink + 1e4),
        ):
            assert not np.asarray(rows).any() and not np.asarray(out).any()


@pytest.fixture(scope="module")
def lm(tmp_path_factory):
    folder = tmp_path_factory.mktemp("oss")
    return test_parity.load(folder, CASE["config"], CASE["shapes"])


def test_rows_leave_a_share_to_the_sink(lm):
    batch = test_capture.batch([(9, 5), (4, 3)], 9, 5)
    rows = jaxhal.read(lm, batch, {"row": test_capture.Row()})["row"]
    real = batch.valid[:, 9:]
    total = np.asarray(rows).sum(-1).transpose(1, 3, 0, 2)[real]
    assert (total > 0).all() and (total < 1).all() and total.min() < 0.9


def test_every_way_of_reading_says_the_same(lm, monkeypatch):
    few = {"lookback": jaxhal.LookbackRatio(), "max": jaxhal.MaxPromptAttention()}
    for name in ("ALL", "ROWWISE"):
        monkeypatch.setattr(test_capture, name, few)
    test_capture.test_decoding_equals_teacher_forcing(lm)
    test_capture.test_a_shared_prompt_changes_nothing(lm)
    test_capture.test_blocks_of_rows_and_groups_of_layers_change_nothing(
        lm, monkeypatch
    )


# -- What features of attention are when a sink takes half of each row --------------

FEATURES = [
    (jaxhal.LookbackRatio(), lambda whole: whole),
    (CopiedAttention(), lambda whole: whole),
    (ExternalContext(), lambda whole: whole),  # which tokens, a bit each
    (jaxhal.MaxPromptAttention(), lambda whole: whole / 2),
    (SinkScores(top=5), lambda whole: whole / 2),
    (LaplacianEigenvalues(top=5), lambda whole: whole / 2),
    (jaxhal.MTopDiv(), lambda whole: (1 + whole) / 2),
]


def of_maps(reducer, maps: np.ndarray):
    matrix, view = oracles.padded(maps, 8, left=2, right=1, context=5)
    view = view._replace(document=view.context)
    tokens = np.random.default_rng(0).integers(0, 5, len(view.valid))
    return oracles.reduce(reducer, matrix, view, tokens)


@pytest.mark.parametrize(("reducer", "of_whole"), FEATURES, ids=lambda x: str(x)[:12])
def test_what_counts_a_sink(reducer, of_whole):
    maps = oracles.causal_attention(0, 3, 15)
    whole, half = of_maps(reducer, maps), of_maps(reducer, maps / 2)
    np.testing.assert_allclose(half, of_whole(whole), atol=1e-6)
    assert np.asarray(whole).any()


def test_thresholds_of_graphs_are_of_all_of_a_row():
    maps = oracles.causal_attention(0, 3, 15)
    half = of_maps(VertexDegree((0.05, 0.1)), maps / 2)
    np.testing.assert_array_equal(half, of_maps(VertexDegree((0.1, 0.2)), maps))


def test_a_ratio_is_one_however_much_a_sink_takes():
    maps = oracles.causal_attention(0, 3, 15)
    want = jaxhal.lookback_ratio(maps, 5, 8)
    got = jaxhal.lookback_ratio(maps * np.float32(1e-20), 5, 8)
    np.testing.assert_allclose(got, want, rtol=1e-5)
