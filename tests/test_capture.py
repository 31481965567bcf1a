"""One pass, every feature: against whole maps, padding, blocks and decoding."""

import dataclasses
import json
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import thorough

import jaxhal
import oracles
import tiny
import tiny_lm
from jaxhal.capture import forward as capture
from jaxhal.features.forest import Forest
from jaxhal.features.knowledge import ExternalContext, ParametricKnowledge
from jaxhal.models import kernels
from jaxhal.models.families import from_huggingface
from jaxhal.models.lm import random
from jaxhal.types import Batch, View

ALL = {
    "lookback": jaxhal.LookbackRatio(),
    "mtop_div": jaxhal.MTopDiv(),
    "max_prompt": jaxhal.MaxPromptAttention(),
    "states": jaxhal.HiddenStates(layers=(0, 2, -1)),
    "last": jaxhal.HiddenStates(tokens="last"),
    "mean": jaxhal.HiddenStates(layers=(1,), tokens="mean"),
    "logprob": jaxhal.TokenLogprob(),
    "entropy": jaxhal.TokenEntropy(),
    "external": ExternalContext(),
    "parametric": ParametricKnowledge(),
}
ROWWISE = {name: r for name, r in ALL.items() if r.rowwise}
LENGTHS = [(9, 5), (4, 1), (13, 8)]  # (prompt, response) of three samples


def families(*names: str):
    return pytest.mark.parametrize("lm", names, indirect=True)


ANY = families("llama-gqa")  # where it does not depend on the family
MIXED = families("llama-gqa", "qwen3.5-gqa")


# What could differ between families is shown of those where it would: plain, with
# windows, with learned positions, with linear attention.
@pytest.fixture(
    scope="module",
    params=[
        *("llama-gqa", "gemma4-borrowing", "qwen3.5-gqa"),
        *thorough.more("gemma3-gqa", "gpt2-mha"),
    ],
)
def lm(request):
    meta = json.loads((tiny.GOLDEN / "parity.json").read_text("utf-8"))
    config = from_huggingface(meta[request.param]["config"])
    return random(config, jax.random.key(0))


def batch(lengths, prompt: int, response: int, seed: int = 0) -> Batch:
    """Samples whose tokens follow from their lengths, padded to the given columns."""
    shape = (len(lengths), prompt + response)
    tokens, valid = np.zeros(shape, np.int32), np.zeros(shape, bool)
    context = np.zeros(shape, bool)
    for row, (p, r) in enumerate(lengths):
        rng = np.random.default_rng([seed, p, r])
        columns = slice(prompt - p, prompt + r)
        tokens[row, columns] = rng.integers(3, 61, p + r)
        valid[row, columns] = True
        context[row, prompt - p : prompt - 2] = True
    offsets = np.zeros((len(lengths), response, 2), np.int32)
    return Batch(tokens, valid, context, context, context & False, offsets, prompt)


def unpadded(feature, name: str, row: int, response: int):
    """One sample's own part of a batched feature."""
    reducer = ALL[name]
    feature = np.asarray(feature)
    feature = feature[row] if reducer.reads == "logits" else feature[:, row]
    if "response" not in reducer.axes:
        return feature
    axis = {"probs": 2, "hidden": 1, "lens": 1, "logits": 0}[reducer.reads]
    rest = np.take(feature, range(response, feature.shape[axis]), axis)
    assert not rest.any(), f"{name} is not zero on padding"
    return np.take(feature, range(response), axis)


# The next three read six rows of one shape, which is one program of a model.
def test_padded_batch_equals_rows_alone(lm):
    together = jaxhal.read(lm, batch(LENGTHS * 2, 16, 8), ALL)
    for row, (p, r) in enumerate(LENGTHS[:2]):
        alone = jaxhal.read(lm, batch([(p, r)], p, r), ALL)
        for name in ALL:
            want = unpadded(alone[name], name, 0, r)
            got = unpadded(together[name], name, row, r)
            np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-5, err_msg=name)


def test_decoding_equals_teacher_forcing(lm):
    sample = batch([(9, 8), (4, 8)] * 3, 16, 8)
    forced = jaxhal.read(lm, sample, ALL)
    response = sample.tokens[:, 16:]
    _, cache, seen = jaxhal.prefill(lm, sample, 8, ROWWISE, target=response[:, 0])
    parts, at = [seen], 0
    logits = []
    for size in (1, 3, 3, 1):
        following = response[:, (at + size) % 8]
        out, cache, seen = jaxhal.step(
            lm, cache, response[:, at : at + size], ROWWISE, target=following
        )
        logits.append(out)
        parts.append(seen)
        at += size
    whole = np.asarray(lm.forward(sample.tokens, sample.valid))[:, 16:]
    np.testing.assert_allclose(np.concatenate(logits, 1), whole, atol=1e-4)
    for name, reducer in ROWWISE.items():
        axis = {"probs": 3, "hidden": 2, "lens": 2, "logits": 1}[reducer.reads]
        rows = np.concatenate([np.asarray(part[name]) for part in parts], axis)
        own = reducer.row == "token"
        rows = np.take(rows, range(int(own), 8 + int(own)), axis)
        if reducer.reads == "probs":
            assert rows.shape == forced[name].shape
        np.testing.assert_allclose(rows, forced[name], atol=1e-4, err_msg=name)


def test_features_of_several_parts_come_row_by_row():
    """A forest is parents and weights, here of three answers and two layers."""
    lm = tiny_lm.tiny_lm()
    encode = lm.require_tokenizer().encode_example
    rows = [encode(one) for one in tiny_lm.answers(3)]
    found = capture.read_rows(lm, rows, Forest(), batch_size=2)
    for one, row in zip(found, rows, strict=True):
        (alone,) = capture.read_rows(lm, [row], Forest(), batch_size=1)
        length = len(row.response_ids)
        layers, heads = lm.config.num_hidden_layers, lm.config.num_attention_heads
        for part, other in zip(*map(jax.tree.leaves, (one, alone)), strict=True):
            assert part.shape[:2] == (layers, heads)
            part, other = part[..., :length], other[..., :length]
            np.testing.assert_allclose(part, other, atol=1e-5)


@ANY
def test_a_prompt_of_one_column_is_read_with_each_answer(lm):
    rows = batch([(1, 5), (1, 5)], 1, 5)
    want, got = (jaxhal.read(lm, rows, ALL, copies=copies) for copies in (1, 2))
    for name, feature in want.items():
        np.testing.assert_array_equal(got[name], feature, err_msg=name)


def test_a_shared_prompt_changes_nothing(lm):
    """Six answers of different lengths to two prompts, one of them a token."""
    samples = []
    for prompt in (9, 1):
        own = batch([(prompt, r) for r in (5, 2, 8)], 16, 8, seed=prompt)
        head = np.asarray(own.tokens)[:1, :16]
        np.asarray(own.tokens)[:, :16] = head
        samples.append(own)
    both = jax.tree.map(lambda *parts: np.concatenate(parts), *samples)
    alone = jaxhal.read(lm, both, ALL)
    shared = jaxhal.read(lm, both, ALL, copies=3)
    for name, feature in alone.items():
        np.testing.assert_allclose(
            shared[name], feature, rtol=1e-4, atol=2e-5, err_msg=name
        )


@dataclasses.dataclass(frozen=True)
class Row(jaxhal.Reducer):
    """The attention row itself: what the other reducers are checked against."""

    def rows(self, probs, view: View):
        return probs


@MIXED
def test_features_equal_functions_of_whole_maps(lm):
    p, r = 11, 7
    rows = jaxhal.read(lm, batch([(p, r)], p, r), {"row": Row(), **ALL})
    maps = np.zeros((*rows["row"].shape[:3], p + r, p + r), np.float32)
    maps[..., p:, :] = rows["row"]
    np.testing.assert_allclose(maps[..., p:, :].sum(-1), 1, atol=1e-5)
    np.testing.assert_allclose(
        rows["mtop_div"] * r, jaxhal.mtop_div(maps, p), atol=1e-5
    )
    np.testing.assert_allclose(rows["max_prompt"], maps[..., p:, :p].max(-1), atol=1e-6)
    # Row P - 1 predicts the first response token and is not a token's own row.
    maps[..., p - 1, :p] = 1.0
    ratio = jaxhal.lookback_ratio(maps, p - 2, p)[..., 1:]
    np.testing.assert_allclose(rows["lookback"][..., 1:], ratio, atol=1e-5)


@families("gemma3-gqa")
def test_beyond_a_window_there_is_no_attention(lm):
    """And every reducer makes of that what it makes of any 0."""
    p, r = 6, 12
    named = {name: ALL[name] for name in ("lookback", "mtop_div", "max_prompt")}
    found = jaxhal.read(lm, batch([(p, r)], p, r), {"row": Row(), **named})
    maps = np.zeros((*found["row"].shape[:3], p + r, p + r), np.float32)
    maps[..., p:, :] = found["row"]
    maps[..., p - 1, :p] = 1  # whose row is not a token's own
    # Rows before it, and how far back: context is four tokens, of six of a prompt.
    back = np.arange(p + r)[:, None] - np.arange(p + r)
    whole = lm.config.windows.index(0)
    assert {*lm.config.windows} == {0, 8}
    for layer, window in enumerate(lm.config.windows):
        seen = (back >= 0) & (back < (window or p + r))
        assert ((maps[layer, 0] > 0) == seen)[:, p:].all()
        for head, rows in enumerate(maps[layer, 0]):
            got = {name: found[name][layer, 0, head] for name in named}
            want = oracles.max_prompt(rows, p)
            np.testing.assert_array_equal(got["max_prompt"], want)
            assert float(got["mtop_div"]) * r == pytest.approx(
                oracles.mtop_div(rows, p), abs=1e-5
            )
            want = oracles.lookback_ratio(rows, p - 2, p)[1:]
            np.testing.assert_allclose(got["lookback"][1:], want, atol=1e-6)
    # The sixth token of a response is the first that is read where no context is seen,
    # and eight behind the prompt none of it is.
    unseen = np.array(lm.config.windows) > 0
    lookback, prompt = (np.asarray(found[n]) for n in ("lookback", "max_prompt"))
    assert not lookback[unseen][..., 6:].any() and lookback[whole][..., 6:].all()
    assert not prompt[unseen][..., 7:].any() and prompt[whole][..., 7:].all()


@families("granite4-nope")
def test_without_positions_only_what_tokens_are_counts(lm):
    """Of the first layer: later ones see what tokens before them made of a token."""
    sample, order = batch([(11, 7)], 11, 7), np.random.default_rng(0).permutation(11)
    moved = np.r_[order, np.arange(11, 18)]
    changed = dataclasses.replace(sample, tokens=sample.tokens[:, moved])
    rows, others = (
        np.asarray(jaxhal.read(lm, one, {"row": Row()})["row"])[0]
        for one in (sample, changed)
    )
    np.testing.assert_allclose(others, rows[..., moved], atol=1e-6)
    assert np.abs(others - rows).max() > 0.01


@ANY
def test_logits_belong_to_the_predicting_rows(lm):
    p, r = 6, 4
    sample = batch([(p, r)], p, r)
    logits = np.asarray(lm.forward(sample.tokens))[0, p - 1 : -1]
    logp = (
        logits - np.log(np.exp(logits - logits.max(-1, keepdims=True)).sum(-1))[:, None]
    )
    logp = logp - logits.max(-1, keepdims=True)
    read = jaxhal.read(lm, sample, {n: ALL[n] for n in ("logprob", "entropy")})
    want = logp[np.arange(r), sample.tokens[0, p:]]
    np.testing.assert_allclose(read["logprob"][0], want, atol=1e-4)
    np.testing.assert_allclose(
        read["entropy"][0], -(np.exp(logp) * logp).sum(-1), atol=1e-4
    )


@families("gemma3-gqa", "qwen3.5-gqa")
def test_blocks_of_rows_and_groups_of_layers_change_nothing(lm, monkeypatch):
    sample = batch([(34, 30), (21, 23)], 34, 30)
    want = jaxhal.read(lm, sample, ALL)
    small = dict.fromkeys(("plain", "tapped", "logits", "waiting"), 1)
    monkeypatch.setattr(kernels, "CPU", kernels.CPU._replace(**small))
    capture.read_jit.clear_cache()
    got = jaxhal.read(lm, sample, ALL)
    capture.read_jit.clear_cache()
    for name in ALL:
        np.testing.assert_allclose(got[name], want[name], atol=1e-5, err_msg=name)


def _largest(jaxpr) -> int:
    """Elements of the largest array anywhere inside a jaxpr."""
    sizes = [0]
    for equation in jaxpr.eqns:
        sizes += [v.aval.size for v in equation.outvars if hasattr(v.aval, "size")]
        for parameter in jax.tree.leaves(
            equation.params, is_leaf=lambda x: hasattr(x, "eqns") or hasattr(x, "jaxpr")
        ):
            inner = getattr(parameter, "jaxpr", parameter)
            if hasattr(inner, "eqns"):
                sizes.append(_largest(inner))
    return max(sizes)


@MIXED
def test_no_array_of_heads_by_seq_by_seq(lm, monkeypatch):
    small = kernels.CPU._replace(plain=1 << 20)
    monkeypatch.setattr(kernels, "CPU", small)
    config = dataclasses.replace(lm.config, context_length=2048)
    wide = random(config, jax.random.key(0))
    sample = batch([(1000, 24)], 1000, 24)
    named = tuple(ALL.items())
    closed = jax.make_jaxpr(lambda b: capture.read_jit(wide, b, named))(sample)
    whole = config.num_attention_heads * 1024 * 1024
    assert _largest(closed.jaxpr) < whole / 4


@dataclasses.dataclass(frozen=True)
class Sink(jaxhal.Reducer):
    """Attention on the first real token, per head and response token."""

    def rows(self, probs, view: View):
        return probs[:, jnp.argmax(view.valid)]


@dataclasses.dataclass(frozen=True)
class Norms(jaxhal.Reducer):
    """A reducer that returns a tree."""

    reads = "hidden"
    layers: Any = None

    def rows(self, hidden, view: View):
        return {"l2": jnp.linalg.norm(hidden, axis=-1), "token": view.target}


class Misread(Sink):
    reads = "prob"


@ANY
def test_own_reducer_under_jit_and_vmap(lm):
    sample = batch(LENGTHS, 16, 8)
    plain = jaxhal.read(lm, sample, {"sink": Sink(), "norms": Norms()})
    assert plain["norms"]["l2"].shape == (lm.config.num_hidden_layers + 1, 3, 8)
    jitted = jax.jit(lambda b: jaxhal.read(lm, b, {"sink": Sink()})["sink"])(sample)
    np.testing.assert_allclose(jitted, plain["sink"], atol=1e-6)

    def one(tokens):
        row = dataclasses.replace(batch([(13, 8)], 16, 8), tokens=tokens[None])
        return jaxhal.read(lm, row, {"sink": Sink()})["sink"][:, 0]

    alone = batch([(13, 8)], 16, 8).tokens
    mapped = jax.vmap(one)(np.concatenate([alone, alone]))
    np.testing.assert_allclose(mapped[1], plain["sink"][:, 2], atol=1e-5)


@ANY
def test_gradients_are_finite(lm):
    sample = batch(LENGTHS, 16, 8)

    @jax.jit
    @jax.grad
    def gradient(params):
        model = dataclasses.replace(lm, params=params)
        features = jaxhal.read(model, sample, ALL | {"sink": Sink()})
        return sum(jnp.sum(leaf) for leaf in jax.tree.leaves(features))

    gradients = gradient(lm.params)
    assert all(jnp.isfinite(leaf).all() for leaf in jax.tree.leaves(gradients))
    assert any(jnp.abs(leaf).max() > 0 for leaf in jax.tree.leaves(gradients))


@ANY
def test_equal_reducers_compile_once(lm):
    sample = batch([(5, 3)], 8, 4)
    jaxhal.read(lm, sample, {"a": jaxhal.MTopDiv()})
    before = capture.read_jit._cache_size()
    jaxhal.read(lm, sample, {"a": jaxhal.MTopDiv()})
    assert capture.read_jit._cache_size() == before


@ANY
def test_results_keep_the_order_of_the_request(lm):
    sample = batch([(5, 3)], 8, 4)
    names = ["z", "a", "m"]
    assert list(jaxhal.read(lm, sample, dict.fromkeys(names, Sink()))) == names


@ANY
def test_bad_requests(lm):
    sample = batch([(5, 3)], 8, 4)
    # Types are checked in tests alone, and before these are.
    bare, check = (getattr(f, "__wrapped__", f) for f in (jaxhal.read, capture.check))
    with pytest.raises(TypeError, match=r"batch is a list; give lm.encode\(examples"):
        bare(lm, [], {})
    with pytest.raises(TypeError, match=r"reducers are \[3\]; give them by name"):
        check(lm.config, [3])
    with pytest.raises(TypeError, match="'x' is 3"):
        jaxhal.read(lm, sample, {"x": 3})
    with pytest.raises(ValueError, match="layer 99 is outside"):
        jaxhal.read(lm, sample, {"x": jaxhal.HiddenStates(layers=(99,))})
    with pytest.raises(TypeError, match="tuples instead of lists"):
        jaxhal.read(lm, sample, {"x": Norms(layers=np.array([1]))})
    with pytest.raises(ValueError, match="reads 'prob'; use 'probs'"):
        jaxhal.read(lm, sample, {"x": Misread()})
    with pytest.raises(ValueError, match="one hidden state twice"):
        jaxhal.read(lm, sample, {"x": jaxhal.HiddenStates(layers=(-1, 0, -1))})
    with pytest.raises(ValueError, match="all response rows at once"):
        jaxhal.prefill(lm, sample, 4, {"x": jaxhal.MTopDiv()})
    with pytest.raises(ValueError, match="pass it as target"):
        jaxhal.prefill(lm, sample, 4, {"x": jaxhal.TokenLogprob()})
    with pytest.raises(ValueError, match="new_tokens is 0"):
        jaxhal.prefill(lm, sample, 0)
    with pytest.raises(ValueError, match="new ones are over"):
        jaxhal.prefill(lm, sample, 10_000)
    _, cache, _ = jaxhal.prefill(lm, sample, 1)
    _, cache, _ = jaxhal.step(lm, cache, np.array([[3]], np.int32))
    with pytest.raises(ValueError, match="no room"):
        jaxhal.step(lm, cache, np.array([[3]], np.int32))
    long = batch([(lm.config.context_length, 1)], lm.config.context_length, 1)
    with pytest.raises(ValueError, match="over the model's context"):
        jaxhal.read(lm, long, {"sink": Sink()})
    with pytest.raises(ValueError, match="over the model's context"):
        lm.forward(long.tokens)
    with pytest.raises(ValueError, match="token id 61 is outside"):
        lm.forward(np.full((1, 3), 61, np.int32))


@ANY
def test_copies_must_share_their_prompt(lm):
    rows = batch([(9, 5), (9, 2), (4, 3)], 13, 8)
    with pytest.raises(ValueError, match="copies is 2 for a batch of 3 rows"):
        jaxhal.read(lm, rows, ALL, copies=2)
    with pytest.raises(ValueError, match="different prompts"):
        jaxhal.read(lm, rows, ALL, copies=3)
    scaled = dataclasses.replace(lm.config.ropes[0], kind="dynamic", factor=2.0)
    dynamic = dataclasses.replace(
        lm, config=dataclasses.replace(lm.config, ropes=(scaled,))
    )
    with pytest.raises(ValueError, match="'dynamic' rope"):
        jaxhal.read(dynamic, rows, ALL, copies=3)
