"""How fast does a data set become features, and what does sharing prompts save?

The reader is SmolLM2-135M in float32; two answers to each prompt, random tokens of the
lengths of a retrieval data set, eight answers a batch.
"""

from collections.abc import Iterator

import numpy as np

import jaxhal
from jaxhal.bench import interleave, pace, peer, peers, ratio
from jaxhal.bench.read import REDUCERS
from jaxhal.capture.forward import read_jit
from jaxhal.types import Batch

PROMPT, RESPONSE, ANSWERS, COPIES = 512, 192, 8, 2
_SUFFIX = 5  # prompt tokens after the context


def _batch(vocab: int) -> Batch:
    rng = np.random.default_rng(0)
    prompts = rng.integers(5, vocab, (ANSWERS // COPIES, PROMPT), np.int32)
    responses = rng.integers(5, vocab, (ANSWERS, RESPONSE), np.int32)
    tokens = np.concatenate([np.repeat(prompts, COPIES, 0), responses], 1)
    valid = np.ones(tokens.shape, bool)
    context = valid & (np.arange(tokens.shape[1]) < PROMPT - _SUFFIX)
    offsets = np.zeros((ANSWERS, RESPONSE, 2), np.int32)
    return Batch(tokens, valid, context, context, ~valid, offsets, PROMPT)


def rows() -> Iterator[dict]:
    lm = jaxhal.load("smollm2-135m")
    batch, named = _batch(lm.config.vocab_size), tuple(REDUCERS.items())
    attention = tuple((n, r) for n, r in named if n in ("mtop_div", "lookback"))
    functions = {
        "shared": lambda: read_jit(lm, batch, named, copies=COPIES),
        "alone": lambda: read_jit(lm, batch, named),
    }
    case = f"{PROMPT}+{RESPONSE}"
    times = interleave(functions, 5)
    metric = "prompts read alone / shared, two answers each"
    yield ratio("extract", case, metric, times, "alone", "shared", 1.3, "higher")
    metric = "answers per second, all reducers, prompts shared"
    yield pace("extract", case, metric, times["shared"], ANSWERS)
    model = peer(peers.torch_llama, lm, "eager")
    if model is None:
        return
    one = np.asarray(batch.tokens)[:1]
    functions = {
        "peer": lambda: peers.toha_and_lookback(model, one, PROMPT - _SUFFIX, PROMPT),
        "ours": lambda: read_jit(lm, batch, attention, copies=COPIES),
    }
    times = interleave(functions, 3)
    metric = "answers per second, TOHA + lookback / Hugging Face + SciPy"
    yield ratio("extract", case, metric, times, "peer", "ours", None, "higher", ANSWERS)
