"""Linear attention: the delta rule, and what goes on from a state."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import test_capture
import test_parity
import test_slots
import thorough

import golden_scores
import jaxhal
import tiny
from jaxhal import detectors, lrp, plotting
from jaxhal.generation import GREEDY, pieces, requests, slots
from jaxhal.generation.slots import Size
from jaxhal.models import recurrence
from jaxhal.models.families import from_huggingface
from jaxhal.models.lm import LM
from jaxhal.types import Example
from tiny_lm import answers, tiny_lm

SEQ = 2 * recurrence.CHUNK + 22


@pytest.fixture(scope="module")
def inputs() -> list:
    """Queries, keys of length 1, values, decay, beta and a state; some tokens empty."""
    rng = np.random.default_rng(0)
    q, k = rng.normal(size=(2, 2, 3, SEQ, 8))
    k /= np.linalg.norm(k, axis=-1, keepdims=True)
    v, state = rng.normal(size=(2, 3, SEQ, 5)), rng.normal(size=(2, 3, 8, 5))
    decay = -rng.exponential(0.3, (2, 3, SEQ))
    beta = rng.uniform(size=decay.shape)
    empty = rng.uniform(size=SEQ) < 0.2
    decay[..., empty] = beta[..., empty] = 0
    return [np.float32(x) for x in (q, k, v, decay, beta, state)]


def one_by_one(q, k, v, decay, beta, state):
    """Token by token, as the rule is written."""
    out = []
    for t in range(q.shape[2]):
        state = state * np.exp(decay[..., t])[..., None, None]
        known = np.einsum("bhde,bhd->bhe", state, k[:, :, t])
        new = (v[:, :, t] - known) * beta[..., t, None]
        state = state + k[:, :, t, :, None] * new[:, :, None]
        out.append(np.einsum("bhde,bhd->bhe", state, q[:, :, t]))
    return np.stack(out, 2), state


@pytest.mark.parametrize("seq", [1, 7, recurrence.CHUNK, SEQ])
def test_chunks_are_as_one_token_after_another(inputs, seq):
    some = [x[:, :, :seq] for x in inputs[:5]]
    want, after = one_by_one(*(np.float64(x) for x in (*some, inputs[5])))
    out, state = recurrence.delta(*map(jnp.asarray, (*some, inputs[5])))
    np.testing.assert_allclose(out, want, atol=1e-5)
    np.testing.assert_allclose(state, after, atol=1e-5)


def test_one_key_again_and_again(inputs):
    """Powers of what a chunk overlaps by would be far beyond float32."""
    q, k, v, decay, beta, state = inputs
    k, decay, beta = np.zeros_like(k) + k[:, :, :1], 0 * decay, 0 * beta + 1
    some = q, k, v, decay, beta, state
    want, after = one_by_one(*map(np.float64, some))
    out, last = recurrence.delta(*map(jnp.asarray, some))
    np.testing.assert_allclose(out, want, atol=1e-4)
    np.testing.assert_allclose(last, after, atol=1e-4)


def test_no_system_is_solved(inputs):
    """On CPU solvers in a loop may wait for each other forever."""
    program = str(jax.make_jaxpr(recurrence.delta)(*inputs))
    assert "dot_general" in program and "solve" not in program


def test_the_delta_rule_is_linear_in_values(inputs):
    """As relevance takes it: what it passes back times the values is what came."""
    q, k, v, decay, beta, state = map(jnp.asarray, inputs)
    ops = lrp.cp_lrp().ops()
    args = q, k, v, decay, beta, 0 * state
    (out, _), pull = jax.vjp(lambda *args: ops.delta(*args), *args)
    slot = jnp.asarray(np.random.default_rng(1).normal(size=out.shape), out.dtype)
    slots = pull((slot, 0 * state))
    np.testing.assert_allclose((slots[2] * v).sum(), (slot * out).sum(), rtol=1e-4)
    assert not any(jnp.abs(slots[at]).max() for at in (0, 1, 3, 4))


@pytest.fixture(scope="module")
def linear() -> LM:
    """A model without a layer of attention."""
    family, settings = tiny.CASES["qwen3.5-gqa"]
    kinds = {"num_hidden_layers": 3, "layer_types": ["linear_attention"] * 3}
    sizes = {"vocab_size": 300, "max_position_embeddings": 4096}
    return tiny_lm(model_type=family, **(settings | kinds | sizes))


def test_a_model_without_attention(linear):
    batch = test_capture.batch(test_capture.LENGTHS, 16, 8)
    shown = {"hidden": jaxhal.HiddenStates(), "logprob": jaxhal.TokenLogprob()}
    found = jaxhal.read(linear, batch, shown)
    assert found["hidden"].shape == (4, 3, 8, 32)
    response = batch.tokens[:, 16:]
    logits, cache, _ = jaxhal.prefill(linear, batch, 8)
    logits = [logits[:, None]]
    for at in (0, 1, 4):
        some, *_ = jaxhal.step(linear, cache, response[:, : at + 1])
        logits.append(some)
    whole = np.asarray(linear.forward(batch.tokens, batch.valid))
    np.testing.assert_allclose(logits[0][:, 0], whole[:, 15], atol=1e-5)
    # A row whose response has ended.
    np.testing.assert_allclose(logits[-1][0], whole[0, 16:21], atol=1e-5)
    with pytest.raises(ValueError, match="'m' reads attention, and all layers"):
        jaxhal.read(linear, batch, {"m": jaxhal.MTopDiv()})


def test_what_reads_attention_is_left_out_unless_named(linear, capsys):
    rows = answers(20)
    (found,) = jaxhal.score(linear, rows[:1])
    left = "mtop_div", "lookback_ratio"
    assert found.scores.keys() == {*detectors.AT_ONCE} - {*left, "max_prompt_attention"}
    said = f"rows of it: {', '.join(left)}, max_prompt_attention\n"
    assert capsys.readouterr().err.endswith(said)
    ready = jaxhal.fit(linear, rows, ["novel_words"], folds=2, progress=False)
    controls = {"response_length", "novel_words", "novel_word_share", "tfidf"}
    assert ready.fitted.keys() == controls
    assert capsys.readouterr().err.endswith("rows of it: max_prompt_attention\n")


ATTENDS = [name for name in detectors.CATALOGUE if detectors.build(name).attends]


@pytest.mark.parametrize("name", ATTENDS)
def test_what_reads_attention_says_so_before_anything_compiles(linear, name, caplog):
    trained = detectors.build(name).fit is not None
    with (
        jax.log_compiles(),
        pytest.raises(ValueError, match=f"'{name}' reads attention") as refused,
    ):
        (jaxhal.fit if trained else jaxhal.score)(linear, answers(20), [name])
    assert "use detectors of hidden states or probabilities" in str(refused.value)
    assert "Compiling" not in caplog.text
    with jax.log_compiles():
        jax.jit(lambda x: x + 1)(0)
    assert "Compiling" in caplog.text


@thorough.mark
def test_all_else_scores_without_attention(linear):
    """With fits and without, by samples, graders, prompts and relevance too."""
    tell = [one for one in golden_scores.untaught() if one not in ATTENDS]
    rows, quiet = answers(20), {"progress": False}
    (found,) = jaxhal.score(linear, rows[:1], tell, **quiet)
    assert not found.error and len(found.scores) == len(tell) > 20
    taught = ["linear_probe", "attention_pooling", "lrp4rag_comb"]
    ready = jaxhal.fit(linear, rows, taught, folds=2, **quiet)
    (found,) = jaxhal.score(linear, rows[:1], ready, **quiet)
    assert not found.error and found.scores.keys() >= {*taught}


@pytest.mark.parametrize("rules", ["attnlrp", "cp_lrp"])
def test_relevance_of_linear_attention_adds_up(linear, rules):
    rows = test_parity.batch(tiny.TOKENS, 15)
    matrix = lrp.relevance(linear, rows, rules).matrix
    seed = lrp.relevance_means(linear, rows, rules).seed
    assert test_parity.error(matrix.sum(-1), np.asarray(seed)) < 1e-5


@thorough.mark
def test_what_is_written_in_slots_is_as_if_written_alone():
    """Where another row was, beside one that is written, in pieces; none is kept."""
    family, settings = tiny.CASES["qwen3.5-gqa"]
    sizes = {"vocab_size": 300, "max_position_embeddings": 512}
    lm = tiny_lm(model_type=family, **(settings | sizes))
    how = requests.decoding_of(lm, GREEDY, test_slots.REDUCERS)
    model, prefixes, new = lm.apart.bare, pieces.Prefixes(), 5
    state = slots.empty(model, Size(2, 8 * pieces.PIECE, 8), how)
    own, key = test_slots.keys_of(0)
    for at, text in ((0, "Before."), (1, "Beside."), (0, test_slots.LONG)):
        example = Example("-", prompt=text)
        prompt = test_slots.read(lm, how, example, new, prefixes)
        assert not prompt.reused
        prefixes.add(prompt)
        state = slots.enter(state, at, prompt, limit=new, key=own)
        state = slots.go_on(model, state, jnp.asarray(2 if at else 9), how)
    found = test_slots.of_slot(state, how, 0)
    test_slots.check_alone(lm, example, new, GREEDY, key, found)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"layer_types": ["attention"] * 6}, "layer_types is"),
        ({"linear_num_value_heads": 3}, "give a multiple of the 2"),
        ({"linear_conv_kernel_dim": 1}, "linear_conv_kernel_dim is 1"),
    ],
)
def test_settings_that_are_not_computed(settings, message):
    family, known = tiny.CASES["qwen3.5-gqa"]
    with pytest.raises(ValueError, match=message):
        from_huggingface({"model_type": family, **known, **settings})


@pytest.mark.parametrize(
    ("case", "kind"),
    [
        ("qwen3.5-gqa", "qwen3_5"),
        ("qwen3.5moe-gqa", "qwen3_5_moe"),
        ("ministral3-gqa", "mistral3"),
        ("mistral-gqa", "mistral3"),
    ],
)
def test_the_text_part_of_a_model_that_sees(case, kind):
    family, settings = tiny.CASES[case]
    text = {"model_type": family, **settings}
    whole = {"model_type": kind, "text_config": text, "vision_config": {}}
    assert from_huggingface(whole) == from_huggingface(text)
    tied = from_huggingface(whole | {"tie_word_embeddings": True})
    assert tied.tie_word_embeddings
    with pytest.raises(ValueError, match=f"lacks text_config; give that .*{family}"):
        from_huggingface({"model_type": kind, **settings})
    with pytest.raises(ValueError, match=r"model_type is qwen2; known: "):
        from_huggingface(whole | {"text_config": text | {"model_type": "qwen2"}})


def test_a_map_of_heads_names_layers_by_their_own_numbers():
    values = np.arange(6.0).reshape(2, 3)
    (ax, *_) = plotting.head_map(values, layers=(3, 7), framed=[(1, 2)]).axes
    assert [label.get_text() for label in ax.get_yticklabels()] == ["3", "7"]
