"""How fast is writing beside Hugging Face, and what do features and guides cost?

The writer is SmolLM2-135M in float32, and no row ends before its last token.  The
prompt is random tokens, and of streaming four texts to be summarised.
"""

import sys
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import jaxhal
from jaxhal import datasets, detectors
from jaxhal.bench import interleave, peers, ratio, row
from jaxhal.bench.read import random_batch
from jaxhal.features.base import Reducer
from jaxhal.generation import Sampling, decoding, stream
from jaxhal.generation.decoding import Decoding, State
from jaxhal.models.lm import LM
from jaxhal.scoring.fitting import untrained
from jaxhal.scoring.guided import written
from jaxhal.types import Batch, Example

PROMPT, NEW, SAMPLES = 400, 32, 20
CANDIDATES, CHUNK = 8, 8
_PLAIN = Sampling(temperature=0.9, top_p=0.95)
_FEATURES = {"lookback": jaxhal.LookbackRatio(), "entropy": jaxhal.TokenEntropy()}


def rows() -> Iterator[dict]:
    lm = jaxhal.load("smollm2-135m")
    batch = random_batch(lm.config.vocab_size, PROMPT + 1, 1)
    yield from _beside_peers(lm, batch)
    yield from _features(lm)
    yield from _guided(lm, batch)


def _how(sampling: Sampling, reducers: dict[str, Reducer] | None = None) -> Decoding:
    return Decoding(sampling, tuple((reducers or {}).items()), stop_ids=(), pad_id=0)


def _start(lm: LM, batch: Batch, how: Decoding, n: int) -> tuple[LM, State]:
    keys = jax.random.split(jax.random.key(0), n)
    limit = jnp.full(n, NEW)
    state = decoding.start(lm, batch, limit, keys, how, new_tokens=NEW, copies=n)
    return decoding.ready(lm, state)


def _write(lm: LM, batch: Batch, how: Decoding, n: int) -> Any:
    lm, state = _start(lm, batch, how, n)
    return decoding.go_on(lm, state, jnp.asarray(NEW), how).tokens


def _beside_peers(lm: LM, batch: Batch) -> Iterator[dict]:
    how = _how(Sampling())
    try:
        model = peers.torch_llama(lm, "sdpa")
    except ImportError as error:
        model = None
        print(f"no peers are measured: {error}", file=sys.stderr)
    for n, target, repeats in ((1, 1.3, 5), (SAMPLES, 6.0, 3)):
        functions = {"ours": lambda n=n: _write(lm, batch, how, n)}
        if model is not None:
            functions["theirs"] = lambda n=n: peers.sampled(
                model, np.asarray(batch.tokens)[:, :PROMPT], n, NEW
            )
        times = interleave(functions, repeats)
        case = f"P={PROMPT} n={n}"
        pace = n * NEW / np.array(times["ours"])
        low, middle, high = np.percentile(pace, [25, 50, 75])
        metric = f"tokens per second, {NEW} new ones, prefill included"
        yield row("generate", case, metric, middle, None, "higher", (low, high))
        if model is not None:
            value, spread = ratio(times, "theirs", "ours")
            metric = "Hugging Face generate / generate here"
            yield row("generate", case, metric, value, target, "higher", spread)


def _features(lm: LM) -> Iterator[dict]:
    """As a stream is read, token by token."""
    texts = [example.context or "" for example in datasets.bundled()[:8:2]]
    prompt = "\n\n".join([*texts, "Summarise each of these texts in five sentences."])

    def streamed(reducers: dict[str, Reducer] | None) -> int:
        key = jax.random.key(0)
        said = stream(
            lm,
            prompt,
            max_new_tokens=NEW,
            sampling=_PLAIN,
            key=key,
            reducers=reducers,
        )
        count = sum(1 for _ in said)
        if count != NEW:
            raise RuntimeError(f"the stream ended after {count} of {NEW} tokens")
        return count

    functions = {
        "plain": lambda: streamed(None),
        "rich": lambda: streamed(_FEATURES),
    }
    value, spread = ratio(interleave(functions, 9), "rich", "plain")
    length = len(
        lm.require_tokenizer().encode_prompt(Example("-", prompt=prompt)).prompt_ids
    )
    metric = "streaming with lookback and entropy / without"
    yield row("generate", f"P={length} n=1", metric, value, 1.05, spread=spread)


def _guided(lm: LM, batch: Batch) -> Iterator[dict]:
    guide = untrained(*detectors.get(["lookback_ratio"]))
    plain, rich = _how(_PLAIN), _how(_PLAIN, guide.detector.reducers)
    functions = {
        "plain": lambda: _write(lm, batch, plain, 1),
        "guided": lambda: (
            written(
                *_start(lm, batch, rich, CANDIDATES),
                rich,
                guide,
                CANDIDATES,
                CHUNK,
            )[0].response.tokens
        ),
    }
    value, spread = ratio(interleave(functions, 5), "guided", "plain")
    metric = f"guided, {CANDIDATES} candidates of {CHUNK} tokens / plain sampling"
    yield row("generate", f"P={PROMPT} n=1", metric, value, 2.5, spread=spread)
