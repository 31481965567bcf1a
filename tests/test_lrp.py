"""Relevance of whole models: parity, means, conservation, padding, bad input."""

import dataclasses
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import thorough
from test_lrp_rules import positive_linear
from test_parity import batch, load

import tiny
from jaxhal import lrp
from jaxhal.features.relevance import bin_weights
from jaxhal.lrp import programs
from jaxhal.models import families, ops, weights
from jaxhal.models.families import from_huggingface, read_config
from jaxhal.models.lm import LM, random
from jaxhal.models.safetensors import SafetensorsSource
from jaxhal.types import Batch
from tiny_lm import answers, tiny_lm

LXT = Path(__file__).parent / "golden" / "lrp"
PROMPT = 15
SEEDS = ("logit", "max_logit", "logprob")


def family(case: str, folder, dtype=jnp.float32) -> LM:
    want = tiny.golden(case)
    return load(folder, want["config"], want["shapes"], dtype)


def relative(ours, theirs) -> float:
    return float(np.abs(np.asarray(ours) - theirs).max() / np.abs(theirs).max())


def chosen(lm: LM, rows: Batch) -> np.ndarray:
    """Logits of the tokens of responses, where they are."""
    logits = np.asarray(lm.forward(rows.tokens, rows.valid))[:, PROMPT - 1 : -1]
    logits = np.take_along_axis(logits, rows.tokens[:, PROMPT:, None], -1)[..., 0]
    return np.where(rows.valid[:, PROMPT:], logits, 0)


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> LM:
    return family("llama-gqa", tmp_path_factory.mktemp("llama"))


@pytest.fixture(scope="module")
def two() -> Batch:
    """Two rows, one padded on both sides."""
    rows = batch(tiny.TOKENS, PROMPT)
    valid = np.array(rows.valid)
    valid[1, :4] = valid[1, -3:] = False
    return dataclasses.replace(rows, valid=valid)


def lxt(name: str, dtype) -> tuple[LM, Batch]:
    folder = LXT / name
    config = read_config(folder)
    source = SafetensorsSource(folder, "model.")
    table = families.huggingface_table(config)
    graphdef, params = weights.fill(config, source, table, dtype)
    with np.load(folder / "attnlrp.npz") as stored:
        tokens, prompt = stored["input_ids"].astype(np.int32), stored["prompt_length"]
    return LM(params, graphdef, config), batch(tokens, int(prompt))


@pytest.mark.parametrize("name", ["tiny_llama", "tiny_qwen2"])
@pytest.mark.parametrize("rules", ["attnlrp", "cp_lrp"])
def test_equal_to_lxt(name, rules):
    with np.load(LXT / name / f"{rules}.npz") as stored:
        theirs = stored["relevance"]
    with jax.enable_x64(True):
        lm, rows = lxt(name, jnp.float64)
        ours = np.asarray(lrp.relevance(lm, rows, rules).matrix[0])
    assert ours.dtype == np.float64
    assert relative(ours, theirs) < 1e-6
    lm, rows = lxt(name, jnp.float32)
    ours = np.asarray(lrp.relevance(lm, rows, rules).matrix[0])
    assert ours.dtype == np.float32
    cosine = (ours * theirs).sum() / np.linalg.norm(ours) / np.linalg.norm(theirs)
    assert cosine > 0.9999


# One of each way that layers are wired; of every family what it adds up to is tested.
WIRINGS = ["llama-gqa", "gpt2-mha", "gptoss-gqa", "qwen3.5moe-gqa", "gemma4-borrowing"]
OTHERS = [
    *("llama-biases", "falcon-40b", "falcon-bias-sequential", "gemma2-gqa"),
    *("ministral3-gqa", "qwen3moe-plain", "gemma4-experts"),
]


@pytest.mark.shows("relevance")
@pytest.mark.parametrize(
    ("case", "rules"),
    [(case, "attnlrp") for case in WIRINGS]
    + thorough.more(*((case, "attnlrp") for case in OTHERS))
    + [("llama-gqa", rules) for rules in lrp.RULE_SETS if rules != "attnlrp"],
)
def test_means_are_those_of_the_matrix(case, rules, tmp_path, two):
    lm = family(case, tmp_path)
    whole = lrp.relevance(lm, two, rules)
    means = lrp.relevance_means(lm, two, rules)
    assert relative(means.prompt, np.asarray(whole.prompt)) < 1e-4
    assert relative(means.response, np.asarray(whole.response)) < 1e-4
    # Written out: plain means over the tokens that are there.
    matrix, valid = np.asarray(whole.matrix), two.valid
    for row in range(2):
        block = matrix[row][valid[row, PROMPT:]][:, :PROMPT][:, valid[row, :PROMPT]]
        kept = np.asarray(means.prompt)[row][valid[row, :PROMPT]]
        np.testing.assert_allclose(kept, block.mean(0), atol=1e-5)
        kept = np.asarray(means.response)[row][valid[row, PROMPT:]]
        np.testing.assert_allclose(kept, block.mean(1), atol=1e-5)


def test_many_rows_are_as_few(tmp_path, two):
    """A compiler got the way back through normed heads wrong from five rows on."""
    lm = family("qwen3-gqa", tmp_path)
    tokens = np.concatenate([two.tokens] * 4)
    many = batch(np.where(tokens, tokens, 1), PROMPT)
    whole = lrp.relevance(lm, many, "gradient_x_input").matrix
    few = [
        lrp.relevance(lm, batch(many.tokens[at : at + 2], PROMPT), "gradient_x_input")
        for at in range(0, 8, 2)
    ]
    want = np.concatenate([one.matrix for one in few])
    assert relative(whole, want) < 1e-4


@pytest.mark.parametrize("seed", SEEDS)
def test_seeds(seed, model, two):
    logits = np.asarray(model.forward(two.tokens, two.valid))[:, PROMPT - 1 : -1]
    target = two.tokens[:, PROMPT:, None]
    chosen = np.take_along_axis(logits, target, -1)[..., 0]
    shifted = logits - logits.max(-1, keepdims=True)
    normal = np.log(np.exp(shifted).sum(-1)) + logits.max(-1)
    want = {
        "logit": chosen,
        "max_logit": logits.max(-1),
        "logprob": chosen - normal,
    }[seed]
    real = two.valid[:, PROMPT:]
    means = lrp.relevance_means(model, two, seed=seed)
    np.testing.assert_allclose(means.seed, np.where(real, want, 0), atol=2e-5)
    whole = lrp.relevance(model, two, seed=seed)
    assert relative(means.prompt, np.asarray(whole.prompt)) < 1e-4


def test_the_published_seed_divides_twice(model, two):
    once = lrp.relevance(model, two).matrix
    over = np.array([0.5, 2.0])
    twice = lrp.relevance(model, two, seed="logit_over_t2", temperature=over).matrix
    assert relative(twice, np.asarray(once) / over[:, None, None] ** 2) < 1e-6


# The 1 beside clipped gates adds to no seed; `test_sinks_take_no_relevance` is without.
_CONSERVING = [case for case in tiny.UNLIKE if case != "gptoss-gqa"]


@pytest.mark.shows("relevance")
@pytest.mark.parametrize(
    "case", [*_CONSERVING, *thorough.more("gemma4-experts", *tiny.ALIKE)]
)
def test_cp_lrp_conserves_without_biases(case, tmp_path, two):
    lm = family(case, tmp_path)
    leaves = [
        leaf * (not path.endswith(".bias")) for path, leaf in weights.paths(lm.params)
    ]
    params = jax.tree.unflatten(jax.tree.structure(lm.params), leaves)
    lm = dataclasses.replace(lm, params=params)
    whole = lrp.relevance(lm, two, "cp_lrp")
    assert relative(whole.matrix.sum(-1), chosen(lm, two)) < 1e-5


def test_attnlrp_does_not_conserve(model, two):
    """Softmax absorbs what it is given: sums are not the seed, as documented."""
    whole = lrp.relevance(model, two, "attnlrp")
    assert relative(whole.matrix.sum(-1), chosen(model, two)) > 0.01


def test_sinks_take_no_relevance(two):
    """But for its biases, and the 1 beside its gates, a GPT-OSS adds up as well."""
    config = from_huggingface(tiny.golden("gptoss-gqa")["config"])
    linear = dict.fromkeys(("qkv_bias", "o_bias", "mlp_bias"), False)
    lm = random(
        dataclasses.replace(config, gate_limit=None, **linear), jax.random.key(0)
    )
    lm.params["blocks"]["self_attn"]["sinks"].set_value(jnp.ones((3, 4)))
    whole = lrp.relevance(lm, two, "cp_lrp").matrix
    assert relative(whole.sum(-1), chosen(lm, two)) < 1e-5


@pytest.mark.parametrize(
    "case",
    [
        *("llama-gqa", "qwen3moe-gqa", "gptoss-gqa", "gemma4-borrowing"),
        *thorough.more("gemma4-experts", "qwen3.5moe-gqa"),
    ],
)
def test_gradient_x_input_by_finite_differences(case, tmp_path):
    from flax import nnx

    from jaxhal.models import decoder

    with jax.enable_x64(True):
        lm = family(case, tmp_path, jnp.float64)
        rows = batch(tiny.TOKENS[:1], PROMPT)
        model = nnx.merge(lm.graphdef, lm.params)
        x, geo = decoder.begin(model, jnp.asarray(rows.tokens), jnp.asarray(rows.valid))

        @jax.jit
        def seeds(x):
            hidden = decoder.run(model, x, geo, ops=ops.STANDARD)[0][:, PROMPT - 1 : -1]
            logits = decoder.unembed(model, hidden, ops.STANDARD)
            target = rows.tokens[:, PROMPT:, None]
            return jnp.take_along_axis(logits, target, -1)[0, :, 0]

        matrix = np.asarray(lrp.relevance(lm, rows, "gradient_x_input").matrix[0])
        for token in (0, 7, PROMPT + 2):
            # Along the token's own embedding, the directional derivative is R.
            h = 1e-6 * x * (jnp.arange(x.shape[1]) == token)[:, None]
            slope = (seeds(x + h) - seeds(x - h)) / 2e-6
            np.testing.assert_allclose(matrix[:, token], slope, atol=1e-7)


@pytest.mark.parametrize("rules", ["attnlrp", "lrp4rag"])
def test_padding_and_company_change_nothing(rules, model, two):
    together = lrp.relevance(model, two, rules).matrix
    assert (np.asarray(together)[1][:, ~two.valid[1]] == 0).all()
    assert (np.asarray(together)[1][~two.valid[1, PROMPT:]] == 0).all()
    alone = batch(two.tokens[1:, 4:-3], PROMPT - 4)
    single = np.asarray(lrp.relevance(model, alone, rules).matrix[0])
    assert relative(np.asarray(together)[1, :-3, 4:-3], single) < 1e-5


def test_no_relevance_of_later_tokens(model, two):
    matrix = np.asarray(lrp.relevance(model, two).matrix)
    for row in range(matrix.shape[1]):
        assert (matrix[:, row, PROMPT + row :] == 0).all()
        assert (matrix[0, row, : PROMPT + row] != 0).all()


def test_sums_of_rows_without_the_matrix(model, two):
    matrix = np.asarray(lrp.relevance(model, two).matrix)
    weights = np.random.default_rng(0).normal(size=(2, 3, matrix.shape[1]))
    ours = lrp.relevance_sums(model, two, weights)
    assert relative(ours, weights @ matrix) < 1e-5


def test_blocks_change_nothing(model, two, monkeypatch):
    once = np.asarray(lrp.relevance(model, two).matrix)
    for block in (1, 4):
        monkeypatch.setattr(programs, "block_size", lambda lm, batch, n=block: n)
        programs.matrix.clear_cache()
        assert relative(lrp.relevance(model, two).matrix, once) < 1e-6
    programs.matrix.clear_cache()


@pytest.mark.parametrize("shape", [(4, 3), (90, 70), (5, 30)])
@pytest.mark.parametrize("padding", ["last", "zeros"])
def test_resampled_without_the_matrix(shape, padding, model, two):
    whole = np.asarray(lrp.relevance(model, two).to_prompt)
    ours = lrp.relevance_resampled(model, two, shape, padding=padding)
    for row in range(2):
        valid = two.valid[row]
        rows = bin_weights(valid[PROMPT:], shape[0], padding)
        columns = bin_weights(valid[:PROMPT], shape[1], padding)
        assert relative(ours[row], rows @ whole[row] @ columns.T) < 1e-4


@pytest.mark.parametrize(
    ("shape", "passes", "way"),
    [((8, 3), 3, "push"), ((3, 8), 3, "pull"), ((90, 70), 9, "pull")],
)
def test_resampled_takes_the_fewest_passes(shape, passes, way, model, two, monkeypatch):
    taken = []
    probes, pulled = programs._probes, programs._pulled

    def counted(weights):
        found = probes(weights)
        taken.append(("push", len(found[0])))
        return found

    def pulls(pull, x, cotangents, block):
        taken.append(("pull", len(cotangents)))
        return pulled(pull, x, cotangents, block)

    monkeypatch.setattr(programs, "_probes", counted)
    monkeypatch.setattr(programs, "_pulled", pulls)
    programs.resampled.clear_cache()
    jax.eval_shape(lambda: lrp.relevance_resampled(model, two, shape))
    programs.resampled.clear_cache()
    assert taken[-1] == (way, passes)


def test_a_set_that_is_not_linear_has_only_the_matrix(model, two):
    own = lrp.Rule(positive_linear())
    mine = lrp.rule_set("mine", lrp.rules_of(lrp.attnlrp()) | {"linear": own})
    whole = lrp.relevance(model, two, mine)
    assert np.isfinite(whole.matrix).all() and np.asarray(whole.matrix).any()
    with pytest.raises(ValueError, match="'mine' has a custom_vjp"):
        lrp.relevance_means(model, two, mine)


def test_under_jit_and_as_a_pytree(model, two):
    inside = jax.jit(lambda lm, rows: lrp.relevance(lm, rows))(model, two)
    outside = lrp.relevance(model, two)
    assert relative(inside.matrix, np.asarray(outside.matrix)) < 1e-6
    assert len(jax.tree.leaves(outside)) == 2


def test_encoded_answers():
    lm = tiny_lm()
    rows = lm.encode(answers(3))
    whole = lrp.relevance(lm, rows)
    means = lrp.relevance_means(lm, rows)
    assert relative(means.response, np.asarray(whole.response)) < 1e-4
    assert whole.to_prompt.shape[-1] == rows.prompt_length


def test_one_response_token(model):
    whole = lrp.relevance(model, batch(tiny.TOKENS, 23))
    assert whole.matrix.shape == (2, 1, 24)
    np.testing.assert_allclose(whole.prompt, whole.matrix[:, 0, :23], rtol=1e-6)


def test_bad_input(model, two):
    with pytest.raises(ValueError, match="unknown rules 'lrp'; known are lrp4rag"):
        lrp.relevance(model, two, "lrp")
    with pytest.raises(TypeError, match="rules are 3"):
        lrp.resolve(3)
    with pytest.raises(ValueError, match="seed is 'prob'; use one of logit"):
        lrp.relevance(model, two, seed="prob")
    with pytest.raises(ValueError, match=r"temperature is 0\.0; give positive"):
        lrp.relevance(model, two, seed="logit_over_t2", temperature=0.0)
    with pytest.raises(ValueError, match="3 temperatures for 2 rows"):
        lrp.relevance(model, two, seed="logit_over_t2", temperature=[1.0, 2.0, 3.0])
    for count, width in ((0, two.tokens.shape[1] - PROMPT), (3, 2)):
        with pytest.raises(ValueError, match=r"of 2 rows, as \[2, sums, "):
            lrp.relevance_sums(model, two, np.zeros((2, count, width)))
    with pytest.raises(ValueError, match=r"shape is \(0, 3\)"):
        lrp.relevance_resampled(model, two, (0, 3))
    for part, name in ((slice(0, PROMPT), "prompt"), (slice(PROMPT, None), "response")):
        valid = np.array(two.valid)
        valid[1, part] = False
        empty = dataclasses.replace(two, valid=valid)
        with pytest.raises(ValueError, match=f"row 1 of the batch has no {name} token"):
            lrp.relevance(model, empty)
    long = batch(np.zeros((1, 80), np.int32), 40)
    with pytest.raises(ValueError, match="80"):
        lrp.relevance_means(model, long)
