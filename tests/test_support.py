"""What the context offers in the place of each token, against slow loops."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import oracles
from jaxhal.capture.forward import read
from jaxhal.features.support import COLUMNS, ContextSupport, CopiedAttention
from jaxhal.types import Example
from tiny_lm import tiny_lm

PROMPT, LENGTH, VOCAB = 30, 62, 9


def sample(seed, vocab=VOCAB):
    """Logits, tokens that repeat themselves, and which of the prompt are a document."""
    rng = np.random.default_rng(seed)
    logits = (3 * rng.normal(size=(LENGTH, vocab))).astype(np.float32)
    tokens = rng.integers(vocab, size=LENGTH)
    tokens[PROMPT + 5 : PROMPT + 17] = tokens[8:20]  # copied, longer than a run
    tokens[PROMPT + 10] = (tokens[PROMPT + 10] + 1) % vocab  # but for one token
    document = np.zeros(LENGTH, bool)
    document[4:25] = True
    return logits, tokens, document


def found(reducer, matrix, tokens, document, left=0, right=0, heads=False):
    """What the reducer makes of a padded sample whose padding holds anything."""
    view = oracles.padded(np.eye(LENGTH), PROMPT, left=left, right=right)[1]
    column = np.arange(left + LENGTH + right)
    marked = np.pad(document, (left, right)) | (column < left)
    view = view._replace(document=jnp.asarray(marked))
    edges = [(0, 0)] * heads + [(left, right)] + [(left, right) if heads else (0, 0)]
    matrix = jnp.asarray(np.pad(matrix, edges, constant_values=7.0))
    tokens = np.pad(tokens, (left, right), constant_values=3)
    return oracles.reduce(reducer, matrix, view, tokens)


@pytest.mark.parametrize("seed", range(3))
def test_support_equals_loops(seed):
    logits, tokens, document = sample(seed)
    got = found(ContextSupport(), logits, tokens, document)
    want = oracles.context_support(logits, tokens, PROMPT, document)
    assert got.shape == (LENGTH - PROMPT, len(COLUMNS))
    for at, name in enumerate(COLUMNS):
        np.testing.assert_allclose(
            got[:, at], want[:, at], rtol=1e-4, atol=2e-4, err_msg=name
        )
    run = dict(zip(COLUMNS, got.T, strict=True))
    assert run["run"].max() >= 4 and (run["other_run"] > run["run"]).any()


@pytest.mark.parametrize("vocab, document", [(200, True), (VOCAB, False)])
def test_support_where_the_context_lacks_tokens(vocab, document):
    logits, tokens, marked = sample(1, vocab)
    marked &= document
    got = found(ContextSupport(), logits, tokens, marked)
    want = oracles.context_support(logits, tokens, PROMPT, marked)
    np.testing.assert_allclose(got, want, rtol=1e-4, atol=2e-4)
    assert (got[:, COLUMNS.index("present")] == 0).any() and np.isfinite(got).all()


def test_padding_changes_nothing_and_is_zero():
    logits, tokens, document = sample(2)
    alone = found(ContextSupport(), logits, tokens, document)
    padded = found(ContextSupport(), logits, tokens, document, left=5, right=7)
    np.testing.assert_array_equal(padded[:-7], alone)
    assert not padded[-7:].any()


@pytest.mark.parametrize("left, right", [(0, 0), (3, 2)])
def test_copied_attention_equals_loops(left, right):
    _, tokens, document = sample(4)
    attention = oracles.causal_attention(4, 2, LENGTH)
    args = CopiedAttention(), attention, tokens, document
    got = found(*args, left=left, right=right, heads=True)
    for head, one in zip(got, attention, strict=True):
        want = oracles.copied_attention(one, tokens, PROMPT, document)
        np.testing.assert_allclose(head[: len(want)], want, rtol=1e-4, atol=1e-6)
        assert not head[len(want) :].any()
    assert 0 <= got.min() and got.max() <= 1


def test_a_batch_is_its_rows_and_sees_the_document_alone():
    """Read by a model: the question is no context, and company changes nothing."""
    lm = tiny_lm()
    examples = [
        Example(
            "It holds 12 pears.", context="Crate 12 holds pears.", question="Zebra?"
        ),
        Example(
            "Pears, zebras.", context="The crate holds plums.", question="What is?"
        ),
    ]
    reducers = {"support": ContextSupport(), "copied": CopiedAttention()}
    together = jax.device_get(read(lm, lm.encode(examples), reducers))
    for at, one in enumerate(examples):
        alone = jax.device_get(read(lm, lm.encode([one]), reducers))
        n = len(one.response) + 1
        np.testing.assert_allclose(
            together["support"][at, :n], alone["support"][0, :n], rtol=1e-4, atol=1e-4
        )
        np.testing.assert_allclose(
            together["copied"][:, at, :, :n], alone["copied"][:, 0, :, :n], atol=1e-5
        )
        present = alone["support"][0, :n, COLUMNS.index("present")]
        assert present.tolist() == [c in one.context for c in one.response] + [0]
