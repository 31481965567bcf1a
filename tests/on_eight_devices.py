"""What one device computes, eight do: run by ``test_mesh.py`` on eight fake ones."""

import collections
import dataclasses
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import test_feedforward
import test_gpt_oss
import test_parity
import test_quantized
import test_quantized_experts
import test_slots
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import golden_scores
import jaxhal
import tiny
import tiny_lm
from jaxhal import detectors, lrp, tuning
from jaxhal.bench import bounds, topologies
from jaxhal.bench import plan as plans
from jaxhal.capture import forward as capture
from jaxhal.detectors import Ragged
from jaxhal.features.graphs import Barcode, VertexDegree
from jaxhal.features.knowledge import ExternalContext, ParametricKnowledge
from jaxhal.features.spectrum import LaplacianEigenvalues, SinkScores
from jaxhal.features.support import ContextSupport, CopiedAttention
from jaxhal.generation import GREEDY, decoding, prefill, requests, slots
from jaxhal.generation.pieces import PIECE
from jaxhal.models import devices, kernels, placement, weights
from jaxhal.models import lm as lms
from jaxhal.models import mesh as mesh_lib
from jaxhal.models.families import from_huggingface, huggingface_table
from jaxhal.models.gguf_config import config_from_gguf
from jaxhal.models.gguf_families import gguf_table
from jaxhal.models.safetensors import SafetensorsSource
from jaxhal.reading.keys import fingerprint
from jaxhal.reading.store import Store
from jaxhal.scoring.guided import guide
from jaxhal.scoring.inputs import collect
from jaxhal.types import Example, Label

MESHES = [(8, 1), (2, 4), (1, 8)]  # the last two with fewer heads of keys than devices
REDUCERS = {
    "lookback": jaxhal.LookbackRatio(),
    "mtop_div": jaxhal.MTopDiv(),
    "max_prompt": jaxhal.MaxPromptAttention(),
    "states": jaxhal.HiddenStates(),
    "logprob": jaxhal.TokenLogprob(),
    "entropy": jaxhal.TokenEntropy(),
}
MORE = {
    "barcode": Barcode(),
    "degree": VertexDegree(),
    "sinks": SinkScores(),
    "eigenvalues": LaplacianEigenvalues(),
    "support": ContextSupport(),
    "copied": CopiedAttention(),
    "external": ExternalContext(),
    "parametric": ParametricKnowledge(),
}
EXAMPLES = [
    Example(
        f"It was opened in {year}.",
        context=f"Opened in {year - row}. " * 3,
        question="When was it opened?",
    )
    for row, year in enumerate(range(1830, 1838))
]
# Eight heads, two of keys: fewer than devices, so some of those share one.
SHAPE = dict(num_attention_heads=8, num_key_value_heads=2, hidden_size=64, head_dim=8)
SHAPE |= dict(vocab_size=264, intermediate_size=96, context=4096)


LABELLED = [
    dataclasses.replace(e, labels=(Label(0, 6),) if n % 2 else (), source=str(n // 2))
    for n, e in enumerate(EXAMPLES * 3)
]
# Two answers each to questions that a model is not equally sure about.
UNSURE = [
    dataclasses.replace(
        e,
        question=f"When was {chr(97 + n // 2) * (1 + n // 2)} opened?",
        labels=(Label(0, 6),) if n % 2 else (),
        source=str(n // 2),
    )
    for n, e in enumerate(EXAMPLES * 4)
]
# They sample, or read with a model of their own.
_OTHERS = golden_scores.TAUGHT + golden_scores.OWN_MODEL


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    assert jax.device_count() == 8
    return tiny_lm.write_lm(tmp_path_factory.mktemp("lm"), **SHAPE)


@pytest.fixture(scope="module")
def alone(folder):
    return jaxhal.load(folder, mesh="data=1")


def _name(sides):
    return "x".join(map(str, sides))


@pytest.fixture(scope="module", params=MESHES, ids=_name)
def spread(request, folder):
    data, model = request.param
    return jaxhal.load(folder, mesh=jaxhal.make_mesh(data=data, model=model))


@pytest.fixture(scope="module")
def crossed(folder):
    return jaxhal.load(folder, mesh=jaxhal.make_mesh(data=2, model=4))


def _equal(got, want, most=1e-5):
    """Leaf by leaf, within a share of the largest number."""
    got, want = map(_leaves, (got, want))
    for one, other in zip(got, want, strict=True):
        scale = max(1.0, np.abs(np.asarray(other, np.float32)).max())
        np.testing.assert_allclose(one, other, atol=most * scale, rtol=0)


def _leaves(tree):
    whole = jax.tree.map(lambda x: vars(x) if isinstance(x, Ragged) else x, tree)
    return jax.tree.leaves(whole)


def test_each_device_holds_its_part(spread):
    mesh = mesh_lib.mesh_of(spread.params)
    model = mesh.size // mesh.shape["data"]
    up = spread.params["blocks"]["mlp"]["up_proj"]["kernel"].get_value()
    part = up.addressable_shards[0].data.shape
    assert part == (2, 64, 96 // model)
    key = spread.params["blocks"]["self_attn"]["k_proj"]["kernel"].get_value()
    assert key.addressable_shards[0].data.shape == (2, 64, max(1, 2 // model) * 8)


@pytest.mark.parametrize("data, model", MESHES)
def test_a_part_is_read_once_for_all_devices_that_hold_it(
    folder, data, model, monkeypatch
):
    real, parts = SafetensorsSource.part, []

    def part(self, name, index):
        parts.append((name, str(index)))
        return real(self, name, index)

    monkeypatch.setattr(SafetensorsSource, "part", part)
    jaxhal.load(folder, mesh=f"data={data},model={model}")
    assert parts and len(set(parts)) == len(parts)


def test_weights_are_those_of_one_device(spread, alone):
    _equal(jax.device_get(spread.params), jax.device_get(alone.params), 0)


@pytest.mark.parametrize("rows", [8, 3])
def test_every_reducer(spread, alone, rows):
    batch = alone.encode(EXAMPLES[:rows])
    want, got = (jaxhal.read(lm, batch, REDUCERS | MORE) for lm in (alone, spread))
    _equal(got, want)
    # They stay where their rows and heads are.
    mesh = mesh_lib.mesh_of(spread.params)
    data, heads = mesh.shape["data"], spread.config.num_attention_heads
    each = rows if rows % data else rows // data
    names = "lookback", "states", "logprob"
    held = [got[name].sharding.shard_shape(got[name].shape) for name in names]
    assert held[0][1:3] == (each, heads * data // mesh.size)
    assert held[1][1] == held[2][0] == each


def test_logits(spread, alone):
    tokens = np.random.default_rng(0).integers(3, 250, (8, 40), np.int32)
    _equal(spread.forward(tokens), alone.forward(tokens))


@pytest.mark.parametrize("rules", ["attnlrp", "cp_lrp"])
def test_relevance(spread, alone, rules):
    batch = alone.encode(EXAMPLES[:8])
    for function in (jaxhal.relevance_means, jaxhal.relevance):
        _equal(function(spread, batch, rules), function(alone, batch, rules))


def test_relevance_of_rows_that_do_not_fit_together(crossed, alone, monkeypatch):
    """A row of each device goes along with those of the others; none is gathered."""
    batch = alone.encode(EXAMPLES[:8])
    want = jaxhal.relevance_means(alone, batch)
    monkeypatch.setattr(kernels, "CPU", kernels.CPU._replace(kept=0))
    lrp.programs.means.clear_cache()
    _equal(jaxhal.relevance_means(crossed, batch), want)
    laid = mesh_lib.spread(batch, crossed.params)
    again = lrp.programs.means.lower(crossed.bare, laid, lrp.attnlrp(), "logit")
    found = plans._collectives(again.compile().as_text())
    assert found.keys() == {"all-reduce"}
    lrp.programs.means.clear_cache()


@pytest.mark.parametrize(
    "answers, room, mesh",
    [
        (8, 2.0, {"data": 8, "model": 1}),
        (4, 2.0, {"data": 4, "model": 2}),  # eight rows of devices have none to read
        (8, 1.2, {"data": 4, "model": 2}),  # the whole leaves no room
        (8, 0.5, {"data": 1, "model": 8}),  # nor does any part: the last
    ],
)
def test_the_mesh_that_is_planned(alone, monkeypatch, answers, room, mesh):
    """The fewest devices along ``model`` whose part of the weights leaves room."""
    held = sum(leaf.nbytes for leaf in jax.tree.leaves(alone.params))
    peak = devices.Peak(1e12, 1e11, room * held, 1e10)
    monkeypatch.setitem(devices.PEAKS, "cpu", peak)
    monkeypatch.setattr(topologies, "described", lambda topology: jax.devices())
    read = {"states": jaxhal.HiddenStates(tokens="last")}
    shape = bounds.Shape(answers, 32, 8)
    found = plans.plan(alone.config, "-", shape, read, dtype=jnp.float32)
    assert found.mesh == mesh and found.fits == (room > 1)


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


def test_guided_decoding(crossed, alone):
    how = dict(candidates=3, chunk=4, max_new_tokens=10, key=jax.random.key(0))
    want, got = (
        guide(lm, EXAMPLES[:3], "lookback_ratio", **how) for lm in (alone, crossed)
    )
    for one, other in zip(got, want, strict=True):
        assert one.response.text == other.response.text
        assert [c.chosen for c in one.chunks] == [c.chosen for c in other.chunks]
        for chunk, same in zip(one.chunks, other.chunks, strict=True):
            np.testing.assert_allclose(chunk.scores, same.scores, atol=1e-5)


@pytest.mark.parametrize("data, model, apart", [(1, 4, False), (2, 2, True)])
def test_slots_of_a_server(folder, alone, data, model, apart):
    """One enters, then another while the first is written; then there is more room."""
    lm = jaxhal.load(folder, mesh=jaxhal.make_mesh(data=data, model=model))

    def written(lm, apart, part):
        how = requests.decoding_of(lm, GREEDY, test_slots.REDUCERS)
        model = (lm.apart if apart else lm).bare
        state = slots.empty(model, slots.Size(2, PIECE, 16), how)
        state = slots.laid(model, state, how)
        for at, number in enumerate((1, 3)):
            example, limit, sampling, _ = test_slots.ASKED[number]
            limit = min(limit, 12)
            own = {"limit": limit, "key": test_slots.keys_of(number)[0]}
            own |= {"temperature": sampling.temperature}
            prompt = test_slots.read(lm, how, example, limit)
            state = slots.enter(state, at, prompt, **own)
            state = slots.go_on(model, state, jnp.asarray(3), how)
        size = slots.Size(4, 2 * PIECE, 32)
        state = slots.resized(state, jnp.array([1, 0, 9, 9]), size, how)
        state = slots.laid(model, state, how)
        state = slots.go_on(model, state, jnp.asarray(99), how)
        key = jax.tree.leaves(state.cache.key)[0]
        assert key.addressable_shards[0].data.shape[-4:-2] == part
        return [test_slots.of_slot(state, how, at) for at in range(2)]

    got = written(lm, apart, (4 // data, 1))  # of rows, and of key heads
    _equal(got, written(alone, False, (4, 2)))


def test_tuning(crossed, alone):
    rows = [
        dataclasses.replace(e, label=n % 2, source=str(n))
        for n, e in enumerate(EXAMPLES * 2)
    ]
    how = tuning.Tuning(epochs=1, batch_size=8, micro_batch=4, validation_share=0.25)
    want, got = (tuning.fit(lm, rows, how) for lm in (alone, crossed))
    _equal(got.losses, want.losses)


@pytest.fixture(scope="module")
def taught(alone, tmp_path_factory):
    """What is fitted to answers, and what it is fitted to.

    A fit is one of host arrays, whoever read them.
    """
    every = [make() for make in detectors.CATALOGUE.values()]
    every = [d for d in every if d.fit and d.features and d.name not in _OTHERS]
    return every, collected(alone, every, tmp_path_factory)


def collected(lm, some, tmp_path_factory):
    store = Store(tmp_path_factory.mktemp("store"))
    return collect(lm, LABELLED, some, store, progress=False).inputs


def test_what_detectors_are_fitted_to(spread, taught, tmp_path_factory):
    every, want = taught
    got = collected(spread, every, tmp_path_factory)
    assert len(every) > 20
    for one in every:
        _equal(got[one.name], want[one.name])


@pytest.fixture(scope="module")
def scored(alone):
    """What needs no fit, samples, graders, prompts and relevance among it."""
    tell = golden_scores.untaught()
    return tell, jaxhal.score(alone, EXAMPLES[:4], tell, progress=False)


def test_scores_of_detectors(spread, scored):
    tell, want = scored
    got = jaxhal.score(spread, EXAMPLES[:4], tell, progress=False)
    for one, other in zip(got, want, strict=True):
        assert not one.error and len(one.scores) == len(tell) > 25
        assert one.scores == pytest.approx(other.scores, abs=1e-5)


# One of heads, one that samples as it is fitted, and two made of others.
FITTED = [
    "toha",
    {"semantic_entropy_probe": {"draw": {"n": 3, "max_new_tokens": 1}}},
    "lrp4rag_comb",
    {"ensemble": {"members": ["lookback_probe", "novel_words"]}},
]


@pytest.fixture(scope="module")
def fits(alone, tmp_path_factory):
    return fit_and_score(alone, tmp_path_factory)


def fit_and_score(lm, tmp_path_factory):
    kept = dict(store=tmp_path_factory.mktemp("store"), progress=False)
    fitted = jaxhal.fit(lm, UNSURE, FITTED, folds=3, **kept)
    reports = jaxhal.score(lm, EXAMPLES, fitted, progress=False)
    assert not any(report.error for report in reports)
    return [report.scores for report in reports]


def test_a_fit(spread, fits, tmp_path_factory):
    got = fit_and_score(spread, tmp_path_factory)
    for one, other in zip(got, fits, strict=True):
        assert len(one) >= len(FITTED)
        assert one == pytest.approx(other, abs=1e-5)


def test_attention_rows_stay_on_their_device(spread, alone):
    """Nothing leaves a device but what is summed over ``model``.

    Of external context, a bit says of each number whether it is among the highest; the
    bits of heads go through one after the other, on every device.
    """
    batch = mesh_lib.spread(alone.encode(EXAMPLES), spread.params)
    every = tuple((REDUCERS | MORE).items())
    reading = capture.read_jit.lower(spread.bare, batch, every)
    relevance = lrp.programs.means.lower(spread.bare, batch, lrp.attnlrp(), "logit")
    for program in (reading, relevance):
        text = program.compile().as_text()
        moved = (
            r"= \(?(\w+)\[.* (all-gather|all-to-all|collective-permute)(?:-start)?\("
        )
        assert {*re.findall(moved, text)} <= {("u8", "all-gather")}
        mesh = mesh_lib.mesh_of(spread.params)
        assert ("all-reduce(" in text) == (mesh.size > mesh.shape["data"])


@pytest.mark.shows("mesh")
@pytest.mark.parametrize("case", [*tiny.ONE_EACH, "gemma4-experts"])
def test_every_family(case, tmp_path):
    want, mesh = tiny.golden(case), jaxhal.make_mesh(data=2, model=2)
    lm = test_parity.load(tmp_path, want["config"], want["shapes"], mesh=mesh)
    _equal(lm.forward(tiny.TOKENS), want["logits"], 1e-4)


def test_heads_of_two_sizes():
    """Fewer key heads than devices, and fewer still where all keys are seen."""
    family, settings = tiny.CASES["gemma4-borrowing"]
    settings = settings | {"vocab_size": 300, "vocab_size_per_layer_input": 300}
    settings |= {"attention_k_eq_v": True, "num_global_key_value_heads": 1}
    settings |= {"max_position_embeddings": 512}
    alone = tiny_lm.tiny_lm(model_type=family, **settings)
    mesh = jaxhal.make_mesh(data=2, model=4)
    place = placement.on(mesh, alone.config, mesh_lib.RULES)
    leaves = [
        jax.device_put(leaf, place(path, leaf.shape))
        for path, leaf in weights.paths(alone.params)
    ]
    params = jax.tree.unflatten(jax.tree.structure(alone.params), leaves)
    lm = dataclasses.replace(alone, params=params)
    batch = alone.encode(EXAMPLES)
    want, got = (jaxhal.read(one, batch, REDUCERS) for one in (alone, lm))
    _equal(got, want)
    how = dict(max_new_tokens=8, key=jax.random.key(0))
    want, got = (jaxhal.generate(one, EXAMPLES, **how) for one in (alone, lm))
    assert [row[0].text for row in got] == [row[0].text for row in want]


def test_fully_sharded_weights_are_the_same(folder, alone):
    mesh = jaxhal.make_mesh(data=4, model=2)
    lm = jaxhal.load(folder, mesh=mesh, rules=mesh_lib.FULLY_SHARDED)
    up = lm.params["blocks"]["mlp"]["up_proj"]["kernel"].get_value()
    assert up.addressable_shards[0].data.shape == (2, 16, 48)
    tokens = np.random.default_rng(0).integers(3, 250, (8, 40), np.int32)
    _equal(lm.forward(tokens), alone.forward(tokens))


def test_a_key_head_lies_with_its_queries(crossed):
    batch = crossed.encode(EXAMPLES)
    _, cache, _ = prefill(crossed, batch, 4)
    layers, rows, heads, *_ = cache.key.addressable_shards[0].data.shape
    assert (layers, rows, heads) == (2, 4, 1)


def test_rounded_weights(folder, monkeypatch):
    """Blocks of int8; rows of 64 and 96 are two and three of them."""
    alone, lm = (
        jaxhal.load(folder, mesh=mesh, weights="int8")
        for mesh in ("data=1", "data=4,model=2")
    )
    held = dict(weights.paths(lm.params))
    for name, part in {
        "mlp.gate_proj": (2, 48, 2),
        "self_attn.k_proj": (2, 8, 2),
        "self_attn.o_proj": (2, 64, 1),
        "mlp.down_proj": (2, 64, 3),
    }.items():
        (pack,) = held[f"blocks.{name}.kernel"].packs
        assert pack.scale.addressable_shards[0].data.shape == part
    table, mesh = huggingface_table(lm.config), jaxhal.make_mesh(data=4, model=2)
    test_quantized.check_outline(lm, None, table, "Q8_0", mesh)
    batch, reducers = alone.encode(EXAMPLES), {"lookback": jaxhal.LookbackRatio()}
    want, got = (jaxhal.read(one, batch, reducers) for one in (alone, lm))
    _equal(got, want)
    rows, named = mesh_lib.spread(batch, lm.params), tuple(reducers.items())
    text = capture.read_jit.lower(lm.bare, rows, named).compile().as_text()
    texts, go_on = [text], decoding.go_on

    def compiled(*args):
        program = go_on.lower(*args).compile()
        texts.append(program.as_text())
        return program(*args[:-1])  # but for what is static

    monkeypatch.setattr(decoding, "go_on", compiled)
    how = dict(max_new_tokens=8, key=jax.random.key(0))
    want, got = (jaxhal.generate(one, EXAMPLES, **how) for one in (alone, lm))
    assert [row[0].text for row in got] == [row[0].text for row in want]
    assert fingerprint(lm) == fingerprint(alone)
    moved = r"= \(?\w+\[([\d,]*)\]\S* (?:all-gather|all-to-all|collective-permute)\("
    for sizes in re.findall(moved, " ".join(texts)):  # weights stay, tokens are chosen
        assert np.prod([int(size) for size in sizes.split(",") if size]) < 512


@pytest.mark.parametrize(
    "case, packed",
    [("mixtral-gqa", ""), ("qwen3moe-gqa", ""), ("qwen3moe-gqa", "Q8_0")],
)
def test_experts(case, packed, tmp_path, monkeypatch):
    """Widths are shared out, and tokens are sorted where they are."""
    meta = test_feedforward.write_by_expert(tmp_path, case)
    config = from_huggingface(meta["config"])
    source, table = SafetensorsSource(tmp_path), huggingface_table(config)

    def load(mesh):
        place = placement.on(mesh, config, mesh_lib.RULES)
        how = dict(place=place, packed=packed)
        filled = weights.fill(config, source, table, jnp.float32, **how)
        return lms.LM(*reversed(filled), config)

    alone, lm = load(jaxhal.make_mesh()), load(jaxhal.make_mesh(data=2, model=4))
    up = dict(weights.paths(lm.params))["blocks.mlp.up_proj.kernel"]
    inner, up = config.intermediate_size // 4, up.packs[0].low if packed else up
    part = (inner, 32) if packed else (32, inner)
    shape = up.addressable_shards[0].data.shape
    assert shape == (3, config.num_experts, *part)
    _equal(jax.device_get(lm.params), jax.device_get(alone.params), 0)
    tokens = np.random.default_rng(0).integers(3, 60, (4, 20), np.int32)
    _equal(lm.forward(tokens), alone.forward(tokens))
    rows = mesh_lib.spread((tokens, np.ones(tokens.shape, bool)), lm.params)
    text = lms.forward.lower(lm.bare, *rows).compile().as_text()
    assert "all-reduce(" in text and "all-gather(" not in text
    if packed:
        return
    monkeypatch.setattr(kernels, "CPU", kernels.CPU._replace(ragged=True))
    lms.forward.clear_cache()
    _equal(lm.forward(tokens), alone.forward(tokens))
    traced = lms.forward.trace(lm.bare, *rows)
    assert "ragged_dot" in str(traced.jaxpr)
    text = traced.lower().compile().as_text()
    assert "all-reduce(" in text and "all-gather(" not in text
    lms.forward.clear_cache()


@pytest.mark.parametrize(
    "case, fused",
    [
        ("phi3-mha", "qkv_proj gate_up_proj"),
        ("glm4-gqa", "gate_up_proj"),
        ("falcon-40b", "query_key_value"),
        ("falcon-bias-sequential", "query_key_value"),
        ("qwen3.5-gqa", "q_proj in_proj_qkv"),
        ("qwen3moe-gqa", "experts.gate_up_proj experts.down_proj"),
    ],
)
def test_of_fused_tensors_each_device_reads_its_rows(
    case, fused, tmp_path, monkeypatch
):
    meta = tiny.golden(case)
    tiny.write_folder(tmp_path, meta["config"], meta["shapes"])
    config = from_huggingface(meta["config"])
    source, table = SafetensorsSource(tmp_path), huggingface_table(config)
    read, part = collections.defaultdict(list), SafetensorsSource.part

    def whole(self, name):
        read[name].append(1.0)
        return part(self, name, (slice(None),) * len(self.shape(name)))

    def some(self, name, index):
        value = part(self, name, index)
        read[name].append(value.size / np.prod(self.shape(name)))
        return value

    monkeypatch.setattr(SafetensorsSource, "get", whole)
    monkeypatch.setattr(SafetensorsSource, "part", some)
    how = mesh_lib.RULES
    place = placement.on(jaxhal.make_mesh(data=2, model=4), config, how)
    params = weights.fill(config, source, table, jnp.float32, place=place)[1]
    for name in fused.split():
        shares = [x for full, each in read.items() if name in full for x in each]
        assert shares and max(shares) <= 0.5, (name, max(shares, default=None))
    alone = weights.fill(config, source, table, jnp.float32)[1]
    _equal(jax.device_get(params), jax.device_get(alone), 0)


@pytest.mark.parametrize("case", ["qwen3.5moe-gqa", "gemma4-experts"])
def test_experts_lie_as_the_perceptron_beside_them(case):
    """Along their widths; norms, routers and gates are copied."""
    config = from_huggingface(tiny.golden(case)["config"])
    mesh = jaxhal.make_mesh(data=2, model=4)
    place = placement.on(mesh, config, mesh_lib.RULES)
    shared = {
        path: tuple(
            np.divide(leaf.shape, place(path, leaf.shape).shard_shape(leaf.shape))
        )
        for path, leaf in weights.paths(weights.abstract(config, jnp.float32)[1])
        if path.startswith(("blocks.mlp.", "blocks.shared."))
    }
    assert {path: ways for path, ways in shared.items() if max(ways) > 1} == {
        f"blocks.{part}_proj.kernel": ways
        for part, ways in {
            "mlp.gate": (1, 1, 1, 4),
            "mlp.up": (1, 1, 1, 4),
            "mlp.down": (1, 1, 4, 1),
            "shared.mlp.gate": (1, 1, 4),
            "shared.mlp.up": (1, 1, 4),
            "shared.mlp.down": (1, 4, 1),
        }.items()
    }


def test_sinks_and_biases_of_experts(tmp_path):
    """Sinks lie along heads; of experts in blocks each device reads its own."""
    test_gpt_oss.write(tmp_path)
    config = from_huggingface(test_gpt_oss.CASE["config"])
    source, table = SafetensorsSource(tmp_path), huggingface_table(config)

    def load(mesh):
        place = placement.on(mesh, config, mesh_lib.FULLY_SHARDED)
        params = weights.fill(config, source, table, jnp.float32, place=place)[1]
        return dict(weights.paths(params))

    alone, held = load(jaxhal.make_mesh()), load(jaxhal.make_mesh(data=2, model=4))
    _equal(jax.device_get(held), jax.device_get(alone), 0)
    for name, part in {
        "self_attn.sinks": (3, 1),
        "mlp.up_proj.bias": (3, 6, 16),
        "mlp.down_proj.bias": (3, 6, 16),
        "mlp.down_proj.kernel": (3, 6, 16, 16),
    }.items():
        assert held[f"blocks.{name}"].addressable_shards[0].data.shape == part


def test_blocks_of_a_file(tmp_path, monkeypatch):
    """Formats differ by layer; the vocabulary is made numbers a part at a time."""
    monkeypatch.setattr("jaxhal.models.decoder.VOCABULARY_BYTES", 1 << 14)
    source = test_quantized.write(tmp_path / "tiny.gguf", tied=False)
    config, table = config_from_gguf(source), gguf_table(config_from_gguf(source))

    def load(mesh, packed):
        place = placement.on(mesh, config, mesh_lib.RULES)
        how = dict(packed=packed, place=place)
        graphdef, params = weights.fill(config, source, table, jnp.float32, **how)
        return lms.LM(params, graphdef, config)

    alone, mesh = load(jaxhal.make_mesh(), "stored"), jaxhal.make_mesh(data=2, model=4)
    tokens = np.random.default_rng(1).integers(0, test_quantized.VOCAB, (4, 40))
    want = alone.forward(tokens)
    for packed in ("stored", ""):
        lm = load(mesh, packed)
        test_quantized.check_outline(lm, source, table, packed, mesh)
        _equal(lm.forward(tokens), want)
        assert fingerprint(lm) == fingerprint(alone)
        held = dict(weights.paths(lm.params))
        up = held["blocks.mlp.up_proj.kernel"]
        up = up.packs[0].scale if packed else up
        part = (3, 128, 8) if packed else (3, 256, 128)
        assert up.addressable_shards[0].data.shape == part


@pytest.mark.parametrize("data, model, shares", [(4, 2, (1, 1, 8)), (2, 4, (2, 2, 4))])
def test_experts_of_a_file(data, model, shares, tmp_path):
    """Widths of 512 are two blocks of 256, which four devices copy, or 16 of 32."""
    kinds = test_quantized_experts.KINDS
    source = test_quantized.write(tmp_path / "tiny.gguf", kinds=kinds)
    config = config_from_gguf(source)
    table = gguf_table(config)

    def load(mesh):
        place = placement.on(mesh, config, mesh_lib.RULES)
        how = dict(packed="stored", place=place)
        graphdef, params = weights.fill(config, source, table, jnp.float32, **how)
        return lms.LM(params, graphdef, config)

    mesh = jaxhal.make_mesh(data=data, model=model)
    alone, lm = load(jaxhal.make_mesh()), load(mesh)
    test_quantized.check_outline(lm, source, table, "stored", mesh)
    tokens = np.random.default_rng(1).integers(0, test_quantized.VOCAB, (4, 40))
    _equal(lm.forward(tokens), alone.forward(tokens))
    down = dict(weights.paths(lm.params))["blocks.mlp.down_proj.kernel"].packs
    held = [pack.scale.addressable_shards[0].data.shape for pack in down]
    assert held == [(1, 4, test_quantized.WIDTH, blocks) for blocks in shares]
    rows = mesh_lib.spread((tokens, np.ones(tokens.shape, bool)), lm.params)
    text = lms.forward.lower(lm.bare, *rows).compile().as_text()
    assert not re.search(r"= \(?(u8|s8|f16)\[\S* all-gather\(", text)


def test_by_default_it_lies_on_as_few_as_it_fits(folder, tmp_path, monkeypatch):
    source = test_quantized.write(tmp_path / "tiny.gguf")
    config = config_from_gguf(source)

    def chosen(room, weights=None, mesh=None):
        monkeypatch.setattr(devices, "memory_of_each", lambda devices: room)
        how = (config, source, jnp.float32, weights, mesh)
        packed, over = placement.choose(*how)
        return packed, tuple(over.shape.values())

    whole, blocks = 4 * source.size, source.bytes
    assert chosen(2.1 * whole) == ("", (8, 1))
    assert chosen(1.9 * whole) == ("", (4, 2))
    assert chosen(0.9 * whole) == ("", (2, 4))
    # Four heads are not for eight devices, and smaller is nothing but blocks.
    assert chosen(2.1 * blocks) == ("stored", (8, 1))
    assert chosen(2.1 * blocks, "dequantised") == ("", (2, 4))
    assert chosen(2.1 * blocks, None, jaxhal.make_mesh(model=2)) == ("stored", (1, 2))
    assert chosen(1.0) == ("stored", (2, 4))
    monkeypatch.undo()
    lm = jaxhal.load(folder)
    assert dict(mesh_lib.mesh_of(lm.params).shape) == {"data": 8, "model": 1}


def test_half_precision(folder):
    lm = jaxhal.load(folder, mesh=jaxhal.make_mesh(model=4), dtype=jnp.bfloat16)
    want = jaxhal.load(folder, mesh="data=1", dtype=jnp.bfloat16)
    _equal(jax.device_get(lm.params), jax.device_get(want.params), 0)


@pytest.mark.parametrize("data, model, group", [(8, 1, 1), (2, 4, 1), (1, 4, 2)])
def test_a_kernel_is_given_its_own_heads(data, model, group):
    names, types = (*mesh_lib.AXES, "group"), (AxisType.Auto,) * 3
    mesh = jax.make_mesh((data, model, group), names, axis_types=types)
    shape = 6, 4, 2, 40, 8  # rows that eight devices copy
    q = jax.random.normal(jax.random.key(0), shape, jnp.bfloat16)
    valid = jnp.arange(40) >= 5 * jnp.arange(6)[:, None]
    sink = jax.random.normal(jax.random.key(1), (1, 4, 2, 1, 1))

    @jax.jit
    def attend(q, k, v, valid, sink):
        how = valid, (0,), jnp.asarray(0), 2.0, sink
        return kernels.splash(q, k, v, *how, interpret=True)

    rows = "data" if data == 2 else None
    queries = NamedSharding(mesh, P(rows, "model", "group"))
    heads = NamedSharding(mesh, P(rows, "model"))
    whole = q, q[:, :, 0], q[:, :, 1], valid, sink
    sinks = NamedSharding(mesh, P(None, "model", "group"))
    places = queries, heads, heads, NamedSharding(mesh, P(rows)), sinks
    placed = tuple(map(jax.device_put, whole, places))
    _equal(attend(*placed), attend(*whole), 1e-2)
    text = attend.lower(*placed).compile().as_text()
    assert not re.search("all-gather|all-to-all|all-reduce|collective-permute", text)
    other = NamedSharding(jaxhal.make_mesh(model=8), P())
    few = [jax.device_put(x, other) for x in (q, q[:, :, 0])]
    alone = q, q[:, :, 0]
    takes = [kernels.splash_takes(*some, 2.0, sink) for some in (alone, few)]
    assert takes == [True, False]
