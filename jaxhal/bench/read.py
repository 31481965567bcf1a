"""What does reading cost beside a plain forward, and what do others pay for it?

The reader is SmolLM2-135M in float32, one answer at a time, random tokens.
"""

import math
from collections.abc import Iterator

import jax
import jax.numpy as jnp
import numpy as np

import jaxhal
from jaxhal.bench import interleave, peer, peers, row
from jaxhal.capture import forward as capture
from jaxhal.features.base import Reducer
from jaxhal.models import lm as lm_lib
from jaxhal.models.batching import lengths
from jaxhal.types import Batch, Example

REDUCERS: dict[str, Reducer] = {
    "lookback": jaxhal.LookbackRatio(),
    "mtop_div": jaxhal.MTopDiv(),
    "max_prompt": jaxhal.MaxPromptAttention(),
    "hidden": jaxhal.HiddenStates(tokens="mean"),
    "logprob": jaxhal.TokenLogprob(),
    "entropy": jaxhal.TokenEntropy(),
}
SUFFIX = 5  # prompt tokens after the context


def random_batch(
    vocab: int, seq: int, response: int, answers: int = 1, copies: int = 1
) -> Batch:
    """Rows of random tokens in the seam layout, without padding; prompts repeat."""
    rng, prompt = np.random.default_rng(0), seq - response
    prompts = rng.integers(5, vocab, (answers // copies, prompt), np.int32)
    responses = rng.integers(5, vocab, (answers, response), np.int32)
    tokens = np.concatenate([np.repeat(prompts, copies, 0), responses], 1)
    valid = np.ones(tokens.shape, bool)
    context = valid & (np.arange(seq) < prompt - SUFFIX)
    offsets = np.zeros((answers, response, 2), np.int32)
    return Batch(tokens, valid, context, context, ~valid, offsets, prompt)


def rows() -> Iterator[dict]:
    lm = jaxhal.load("smollm2-135m", weights="dequantised", mesh="data=1")
    stored = jaxhal.load("smollm2-135m", weights="stored", mesh="data=1")
    models = peer(_peers, lm) or {}
    # SciPy takes minutes on 270 graphs of 2,048 vertices: once is enough there.
    for seq, response, repeats, slow in ((512, 96, 9, 3), (2048, 256, 3, 1)):
        yield from _speed(lm, stored, models, seq, response, repeats, slow)
    yield from _memory(lm)
    yield from _compilations(lm)


def _peers(lm) -> dict:
    return {kind: peers.torch_llama(lm, kind) for kind in ("sdpa", "eager")}


def _speed(
    lm,
    stored,
    models: dict,
    seq: int,
    response: int,
    repeats: int,
    slow_repeats: int,
) -> Iterator[dict]:
    case = f"S={seq} R={response}"
    batch = random_batch(lm.config.vocab_size, seq, response)
    prompt = batch.prompt_length
    hidden = jax.jit(lambda lm, *inputs: lm_lib.hidden_states(lm, *inputs)[1])
    tokens, valid = jnp.asarray(batch.tokens), jnp.asarray(batch.valid)
    functions = {
        "forward": lambda: lm.forward(batch.tokens),
        "no logits": lambda: hidden(lm, tokens, valid),
        "all": lambda: jaxhal.read(lm, batch, REDUCERS),
    }
    functions["stored"] = lambda: jaxhal.read(stored, batch, REDUCERS)
    for name, reducer in REDUCERS.items():
        functions[name] = lambda n=name, r=reducer: jaxhal.read(lm, batch, {n: r})
    attention = {name: REDUCERS[name] for name in ("mtop_div", "lookback")}
    context = prompt - SUFFIX

    def ours():
        return jaxhal.read(lm, batch, attention)

    def recipe():
        return peers.toha_and_lookback(models["eager"], batch.tokens, context, prompt)

    if models:
        functions["sdpa"] = lambda: peers.forward(models["sdpa"], batch.tokens)
        functions["ours"] = ours
    times = interleave("read", case, functions, repeats)
    metric = "all reducers / plain forward with logits"
    yield times.ratio(metric, "all", "forward", 1.10)
    yield times.ratio("all reducers / forward without logits", "all", "no logits")
    metric = "all reducers, weights as stored / dequantised"
    yield times.ratio(metric, "stored", "all", 1.3)
    for name in REDUCERS:
        yield times.ratio(f"{name} alone / forward without logits", name, "no logits")
    if models:
        metric = "plain forward / Hugging Face SDPA forward"
        yield times.ratio(metric, "forward", "sdpa", 1.0)
        yield from _recipe(case, recipe, ours, response, slow_repeats)


def _recipe(case: str, recipe, ours, response: int, repeats: int) -> Iterator[dict]:
    """Speed against the common recipe, after making sure that both give one result."""
    theirs, features = [], []
    both = {
        "recipe": lambda: theirs.append(recipe()),
        "ours": lambda: features.append(ours()) or features[-1],
    }
    slow = interleave("read", case, both, repeats, warm_up=repeats > 1)
    mtop = np.asarray(features[0]["mtop_div"])[:, 0] * response
    worst = np.abs(mtop - theirs[0][0]).max() / np.abs(theirs[0][0]).max()
    worst = max(worst, np.abs(features[0]["lookback"][:, 0] - theirs[0][1]).max())
    yield row("read", case, "largest difference from the recipe", worst, 1e-3)
    metric = "Hugging Face eager + SciPy MST / TOHA + lookback here"
    yield slow.ratio(metric, "recipe", "ours", 8.0, "higher")


def _memory(lm) -> Iterator[dict]:
    batch = random_batch(lm.config.vocab_size, 8192, 256)
    tokens, valid = jnp.asarray(batch.tokens), jnp.asarray(batch.valid)
    plain = temporary_mib(lm_lib.forward.lower(lm, tokens, valid))
    named = tuple(REDUCERS.items())
    reading = temporary_mib(capture.read_jit.lower(lm, batch, named))
    case = "S=8192 R=256"
    yield row("read", case, "temporary MiB, plain forward", plain)
    metric = "temporary MiB, all reducers"
    yield row("read", case, metric, reading, math.floor(min(plain + 256, 2048)))


def temporary_mib(lowered) -> float:
    """What a program allocates beside its inputs and outputs."""
    analysis = lowered.compile().memory_analysis()
    if analysis is None:
        raise RuntimeError("this XLA backend gives no memory analysis")
    return analysis.temp_size_in_bytes / 2**20


def _programs() -> int:
    """Programs compiled so far for reading."""
    return capture.read_jit._cache_size()  # pyright: ignore[reportAttributeAccessIssue]


def _compilations(lm) -> Iterator[dict]:
    rng = np.random.default_rng(1)
    words = "the bridge opened in March and carries two lanes of slow traffic".split()

    def text(count: int) -> str:
        return " ".join(rng.choice(words, count))

    examples = [
        Example(text(int(r)), context=text(int(c)), question="When?")
        for c, r in zip(rng.integers(20, 300, 40), rng.integers(4, 40, 40), strict=True)
    ]
    before = _programs()
    encoded = [lm.require_tokenizer().encode_example(example) for example in examples]
    buckets = len({lengths([row]) for row in encoded})
    jaxhal.score(lm, examples, ["lookback_ratio"], batch_size=4, progress=False)
    compiled = _programs() - before
    yield row("read", "40 mixed lengths", "programs compiled", compiled, buckets)
