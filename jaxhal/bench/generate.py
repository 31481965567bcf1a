"""How fast is writing beside Hugging Face, and what do features and guides cost?

The writer is SmolLM2-135M in float32, and no row ends before its last token.  The
prompt is random tokens, and of streaming four texts to be summarised.
"""

from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import jaxhal
from jaxhal import datasets, detectors
from jaxhal.bench import interleave, peer, peers
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
    lm = jaxhal.load("smollm2-135m", mesh="data=1")
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
    model = peer(peers.torch_llama, lm, "sdpa")
    for n, target, repeats in ((1, 1.3, 5), (SAMPLES, 6.0, 3)):
        functions = {"ours": lambda n=n: _write(lm, batch, how, n)}
        if model is not None:
            functions["theirs"] = lambda n=n: peers.sampled(
                model, np.asarray(batch.tokens)[:, :PROMPT], n, NEW
            )
        times = interleave("generate", f"P={PROMPT} n={n}", functions, repeats)
        metric = f"tokens per second, {NEW} new ones, prefill included"
        yield times.pace(metric, "ours", n * NEW)
        if model is not None:
            metric = "Hugging Face generate / generate here"
            yield times.ratio(metric, "theirs", "ours", target, "higher")


def _features(lm: LM) -> Iterator[dict]:
    """As a stream is read, token by token."""
    texts = [example.context or "" for example in datasets.bundled()[:8:2]]
    prompt = "\n\n".join([*texts, "Summarise each of these texts in five sentences."])

    def streamed(reducers: dict[str, Reducer] | None) -> int:
        how: Any = {"key": jax.random.key(0), "sampling": _PLAIN}
        said = stream(lm, prompt, max_new_tokens=NEW, reducers=reducers, **how)
        count = sum(1 for _ in said)
        if count != NEW:
            raise RuntimeError(f"the stream ended after {count} of {NEW} tokens")
        return count

    runs = {"plain": lambda: streamed(None), "rich": lambda: streamed(_FEATURES)}
    row = lm.require_tokenizer().encode_prompt(Example("-", prompt=prompt))
    times = interleave("generate", f"P={len(row.prompt_ids)} n=1", runs, 9)
    metric = "streaming with lookback and entropy / without"
    yield times.ratio(metric, "rich", "plain", 1.05)


def _guided(lm: LM, batch: Batch) -> Iterator[dict]:
    guide = untrained(*detectors.get(["lookback_ratio"]))
    plain, rich = _how(_PLAIN), _how(_PLAIN, guide.detector.reducers)

    def guided() -> Any:
        begun = _start(lm, batch, rich, CANDIDATES)
        return written(*begun, rich, guide, CANDIDATES, CHUNK)[0].response.tokens

    runs = {"plain": lambda: _write(lm, batch, plain, 1), "guided": guided}
    times = interleave("generate", f"P={PROMPT} n=1", runs, 5)
    metric = f"guided, {CANDIDATES} candidates of {CHUNK} tokens / plain sampling"
    yield times.ratio(metric, "guided", "plain", 2.5)
