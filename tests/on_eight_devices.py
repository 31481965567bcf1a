"""What one device computes, eight do: run by ``test_mesh.py`` on eight fake ones."""

import dataclasses
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import test_slots
import thorough
from eight import CROSSED, EXAMPLES, HEADS, REDUCERS, ROWS, equal
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import golden_scores
import jaxhal
from jaxhal import detectors, lrp, tuning
from jaxhal.bench import bounds, topologies
from jaxhal.bench import plan as plans
from jaxhal.capture import forward as capture
from jaxhal.features.graphs import Barcode, VertexDegree
from jaxhal.features.knowledge import ExternalContext, ParametricKnowledge
from jaxhal.features.spectrum import LaplacianEigenvalues, SinkScores
from jaxhal.features.support import ContextSupport, CopiedAttention
from jaxhal.generation import GREEDY, prefill, requests, slots
from jaxhal.generation.pieces import PIECE
from jaxhal.models import devices, kernels
from jaxhal.models import mesh as mesh_lib
from jaxhal.reading.store import Store
from jaxhal.scoring.guided import guide
from jaxhal.scoring.inputs import collect
from jaxhal.tuning.checkpoints import Checkpoints
from jaxhal.types import Label

pytest_plugins = ["eight"]

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
# One of each kind of what a detector is fitted to.
TRAINED = (
    "toha_supervised",
    "topology_probe",
    "lookback_lens",
    "linear_probe_last",
    "hidden_probe",
    "token_probe",
    "contradiction",
    "redeep",
    "lrp4rag_lstm",
)
EVERY_TRAINED = [
    name
    for name, make in detectors.CATALOGUE.items()
    if make().fit
    and make().features
    # They sample, or read with a model of their own.
    and name not in golden_scores.TAUGHT + golden_scores.OWN_MODEL
]
# And of what decides without a fit.
UNTRAINED = (
    "mtop_div",
    "context_gain",
    "detection_prompt",
    "eigenscore",
    "selfcheck_prompt",
    "selfcheck_bertscore",
    "token_classifier",
    "lrp4rag_threshold",
)
EVERY_UNTRAINED = [name for name, make in detectors.CATALOGUE.items() if not make().fit]


@pytest.mark.parametrize(
    "spread, rows",
    [(ROWS, 8), (CROSSED, 3), *thorough.more((HEADS, 8))],
    indirect=["spread"],
)
def test_every_reducer(spread, alone, rows):
    batch = alone.encode(EXAMPLES[:rows])
    want, got = (jaxhal.read(lm, batch, REDUCERS | MORE) for lm in (alone, spread))
    equal(got, want)
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
    equal(spread.forward(tokens), alone.forward(tokens))


@pytest.mark.parametrize(
    "spread, rules",
    [(ROWS, "cp_lrp"), (CROSSED, "attnlrp"), *thorough.more((HEADS, "cp_lrp"))],
    indirect=["spread"],
)
def test_relevance(spread, alone, rules):
    batch = alone.encode(EXAMPLES[:8])
    for function in (jaxhal.relevance_means, jaxhal.relevance):
        equal(function(spread, batch, rules), function(alone, batch, rules))


def test_relevance_of_rows_that_do_not_fit_together(crossed, alone, monkeypatch):
    """A row of each device goes along with those of the others; none is gathered."""
    batch = alone.encode(EXAMPLES[:8])
    want = jaxhal.relevance_means(alone, batch)
    monkeypatch.setattr(kernels, "CPU", kernels.CPU._replace(kept=0))
    lrp.programs.means.clear_cache()
    equal(jaxhal.relevance_means(crossed, batch), want)
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


@thorough.mark
def test_a_stream(crossed, alone):
    how = dict(max_new_tokens=8, key=jax.random.key(0))
    want, got = (
        [token.text for token in jaxhal.stream(lm, "Tell", **how)]
        for lm in (alone, crossed)
    )
    assert got == want


@thorough.mark
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


def test_slots_of_a_server(folder, alone):
    """One enters, then another while the first is written; then there is more room."""
    lm = jaxhal.load(folder, mesh=jaxhal.make_mesh(data=2, model=2))

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

    got = written(lm, True, (2, 1))  # of rows, and of key heads
    equal(got, written(alone, False, (4, 2)))


def test_tuning(crossed, alone, tmp_path, monkeypatch):
    rows = [
        dataclasses.replace(e, label=n % 2, source=str(n))
        for n, e in enumerate(EXAMPLES * 2)
    ]
    how = tuning.Tuning(epochs=1, batch_size=8, micro_batch=4, validation_share=0.25)
    want, got = (tuning.fit(lm, rows, how) for lm in (alone, crossed))
    equal(got.losses, want.losses)
    # Stopped after a checkpoint it goes on, and ends in the same numbers.
    real, saved = Checkpoints.save, []

    def stopping(self, step, state):
        real(self, step, state)
        saved.append(step)
        if len(saved) == 1:
            raise KeyboardInterrupt

    monkeypatch.setattr(Checkpoints, "save", stopping)
    how = dataclasses.replace(how, save_every=1)
    with pytest.raises(KeyboardInterrupt):
        tuning.fit(crossed, rows, how, tmp_path)
    again = tuning.fit(crossed, rows, how, tmp_path)
    assert saved[:2] == [1, 2]
    np.testing.assert_array_equal(again.losses, got.losses)
    done = tuning.fit(crossed, rows, how, tmp_path)
    np.testing.assert_array_equal(done.score(crossed, rows), got.score(crossed, rows))


def collected(lm, some, tmp_path_factory):
    store = Store(tmp_path_factory.mktemp("store"))
    return collect(lm, LABELLED, some, store, progress=False).inputs


@pytest.mark.parametrize("names", [TRAINED, *thorough.more([*EVERY_TRAINED])])
def test_what_detectors_are_fitted_to(crossed, alone, tmp_path_factory, names):
    """A fit is one of host arrays, whoever read them."""
    every = [detectors.build(name) for name in names]
    want, got = (collected(lm, every, tmp_path_factory) for lm in (alone, crossed))
    for one in every:
        equal(got[one.name], want[one.name])


@pytest.mark.parametrize("names", [UNTRAINED, *thorough.more([*EVERY_UNTRAINED])])
def test_scores_of_detectors(crossed, alone, names):
    """What needs no fit, samples, graders, prompts and relevance among it."""
    given = golden_scores.untaught()
    tell = [one for one in given if getattr(one, "name", one) in names]
    want, got = (
        jaxhal.score(lm, EXAMPLES[:4], tell, progress=False) for lm in (alone, crossed)
    )
    for one, other in zip(got, want, strict=True):
        assert not one.error and one.scores.keys() == {*names}
        assert one.scores == pytest.approx(other.scores, abs=1e-5)


# One of heads, one that samples as it is fitted, and one made of others.
FITTED = [
    "toha",
    {"semantic_entropy_probe": {"draw": {"n": 3, "max_new_tokens": 1}}},
    {"ensemble": {"members": ["lookback_probe", "novel_words"]}},
]


def fit_and_score(lm, tmp_path_factory):
    kept = dict(store=tmp_path_factory.mktemp("store"), progress=False)
    fitted = jaxhal.fit(lm, UNSURE, FITTED, folds=3, **kept)
    reports = jaxhal.score(lm, EXAMPLES, fitted, progress=False)
    assert not any(report.error for report in reports)
    return [report.scores for report in reports]


@thorough.mark
def test_a_fit(crossed, alone, tmp_path_factory):
    want, got = (fit_and_score(lm, tmp_path_factory) for lm in (alone, crossed))
    for one, other in zip(got, want, strict=True):
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


def test_a_key_head_lies_with_its_queries(crossed):
    batch = crossed.encode(EXAMPLES)
    _, cache, _ = prefill(crossed, batch, 4)
    layers, rows, heads, *_ = cache.key.addressable_shards[0].data.shape
    assert (layers, rows, heads) == (2, 4, 1)


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
    equal(attend(*placed), attend(*whole), 1e-2)
    text = attend.lower(*placed).compile().as_text()
    assert not re.search("all-gather|all-to-all|all-reduce|collective-permute", text)
    other = NamedSharding(jaxhal.make_mesh(model=8), P())
    few = [jax.device_put(x, other) for x in (q, q[:, :, 0])]
    alone = q, q[:, :, 0]
    takes = [kernels.splash_takes(*some, 2.0, sink) for some in (alone, few)]
    assert takes == [True, False]
