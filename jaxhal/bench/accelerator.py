"""How much of an accelerator do reading, relevance and writing use?

A random model of Llama-3.1-8B's shape in bfloat16 and random tokens.  Absolute figures
stand beside the device's name; peaks are those of its data sheet.
"""

import math
import os
import time
from collections.abc import Callable, Generator, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import jaxhal
from jaxhal.bench import Timed, interleave, peer, peers, row, topologies
from jaxhal.bench.bounds import Shape, flops
from jaxhal.bench.plan import plan
from jaxhal.bench.read import REDUCERS, random_batch
from jaxhal.capture import forward as capture
from jaxhal.features.base import Reducer
from jaxhal.generation import Sampling, decoding
from jaxhal.generation.decoding import Decoding
from jaxhal.lrp import PromptRelevance, ResponseRelevance, programs, resolve
from jaxhal.models import devices
from jaxhal.models import lm as lm_lib
from jaxhal.models.config import Config
from jaxhal.models.families import from_huggingface
from jaxhal.models.lm import LM

BENCH = "accelerator"
LLAMA_8B = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 128256,
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "max_position_embeddings": 131072,
    "rms_norm_eps": 1e-5,
    "rope_theta": 500000.0,
    "tie_word_embeddings": False,
}


SHAPES = (Shape(8, 2048, 256), Shape(4, 8192, 256), Shape(1, 32768, 512))
# Tokens that are written after each of them.
WRITTEN = 64
_SCORES: dict[str, Reducer] = {
    "lookback": jaxhal.LookbackRatio(),
    "entropy": jaxhal.TokenEntropy(),
}
RELEVANCE: dict[str, Reducer] = {
    "prompt": PromptRelevance(),
    "response": ResponseRelevance(),
}
_WORDS = {
    "forward": "forward without logits",
    "all": "all reducers",
    "means": "relevance means",
}


def rows() -> Iterator[dict]:
    # JAX would take most of the memory before torch asks for its part.
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    device = jax.devices()[0]
    peak = devices.peak(device.device_kind)
    if peak is None:
        raise ValueError(
            f"the peak of {device.device_kind!r} is not known, so no share of it can "
            f"be measured; known are {', '.join(devices.PEAKS)}"
        )
    began = time.perf_counter()
    config = from_huggingface(LLAMA_8B)
    yield from _ceilings(peak)  # before there are weights: it adds to no peak
    lm = _random(config)
    model = peer(_torch)
    planned = 0
    for shape in SHAPES:
        planned = yield from _reading(lm, model, shape, peak, planned)
    del model  # a cache needs its room
    for shape in SHAPES:
        yield from _writing(lm, shape._replace(response=WRITTEN), peak)
    yield row(BENCH, "all of it", "seconds", time.perf_counter() - began, 600.0)


def _random(config: Config) -> LM:
    """A model whose weights are drawn a layer at a time, in little more memory."""
    lm = jax.eval_shape(lambda: lm_lib.random(config, jax.random.key(0), jnp.bfloat16))

    @jax.jit(static_argnames="shape")
    def drawn(key: Any, shape: tuple[int, ...]) -> Any:
        def one(key: Any) -> Any:
            values = jax.random.normal(key, shape[1:], jnp.bfloat16)
            return values * jnp.bfloat16(0.02)

        return jax.lax.map(one, jax.random.split(key, shape[0]))

    leaves, tree = jax.tree.flatten(lm)
    keys = jax.random.split(jax.random.key(0), len(leaves))
    made = [
        drawn(key, leaf.shape)
        if math.prod(leaf.shape) > 1 << 20
        else jnp.ones(leaf.shape, leaf.dtype)
        for key, leaf in zip(keys, leaves, strict=True)
    ]
    return jax.tree.unflatten(tree, made)


def _ceilings(peak: devices.Peak) -> Iterator[dict]:
    """What one large product and one large copy reach."""
    a, b = jax.random.normal(jax.random.key(0), (2, 8192, 8192), jnp.bfloat16)
    vector = jax.random.normal(jax.random.key(1), (1 << 30,), jnp.bfloat16)
    product, copy, times = jax.jit(jnp.matmul), jax.jit(jnp.negative), 20

    def many(function: Callable[..., Any], *arrays: Any) -> Callable[[], Any]:
        def run() -> Any:
            out = None
            for _ in range(times):
                out = function(*arrays)
            return out

        return run

    functions = {"product": many(product, a, b), "copy": many(copy, vector)}
    timed = interleave(BENCH, "ceilings", functions, 3)
    done, moved = times * 2 * 8192**3, times * 4 * len(vector)
    yield timed.pace("TFLOP/s, bfloat16 product of 8,192 cubed", "product", done / 1e12)
    yield timed.pace("share of the peak, that product", "product", done / peak.flops)
    yield timed.pace("TB/s, copy, read and written", "copy", moved / 1e12)


def _reading(
    lm: LM, model: Any, shape: Shape, peak: devices.Peak, planned: int
) -> Generator[dict, None, int]:
    """Returns what the largest program so far takes by plan; before it ``planned``."""
    case, config = str(shape), lm.config
    batch = random_batch(config.vocab_size, shape.tokens, shape.response, shape.answers)
    batch = jax.tree.map(jnp.asarray, batch)
    hidden = jax.jit(lambda lm, *inputs: lm_lib.hidden_states(lm, *inputs)[1])
    lowered = {
        "forward": hidden.lower(lm.bare, batch.tokens, batch.valid),
        "all": capture.read_jit.lower(lm.bare, batch, tuple(REDUCERS.items())),
        "means": programs.means.lower(lm.bare, batch, resolve("attnlrp"), "logit"),
    }
    runs: dict[str, Callable[[], Any]] = {}
    most, largest = 0, ""
    for name, each in lowered.items():
        begin = time.perf_counter()
        program = each.compile()
        seconds = time.perf_counter() - begin
        yield row(BENCH, case, f"seconds to compile, {_WORDS[name]}", seconds)
        memory: Any = program.memory_analysis()  # which these devices give
        needed = memory.temp_size_in_bytes + memory.output_size_in_bytes
        yield row(
            BENCH, case, f"GiB beside the weights, {_WORDS[name]}", needed / 2**30
        )
        if needed < devices.memory():
            given = (batch.tokens, batch.valid) if name == "forward" else (batch,)
            runs[name] = lambda p=program, g=given: p(lm.bare, *g)
            if (held := needed + memory.argument_size_in_bytes) > most:
                most, largest = held, name
    means = runs.pop("means", None)
    if model is not None:
        runs["torch"] = lambda: _torch_hidden(model, batch.tokens)
    timed = interleave(BENCH, case, runs, 3)
    share = flops(config, shape) / peak.flops
    tokens = shape.answers * shape.tokens
    yield timed.pace("tokens per second, forward", "forward", tokens)
    yield timed.pace("share of the peak, forward", "forward", share)
    if model is not None:
        yield timed.pace("share of the peak, torch SDPA", "torch", share)
        yield timed.ratio("torch SDPA / forward", "torch", "forward")
    yield timed.pace("answers per second, all reducers", "all", shape.answers)
    yield timed.ratio("all reducers / forward", "all", "forward", 1.05)
    if means is not None:
        both = {"forward": runs["forward"], "means": means}
        timed = interleave(BENCH, case, both, 1, warm_up=False)
        yield timed.ratio("relevance means / forward", "means", "forward", 4.0)
    if not (used := _in_use()):
        return planned
    metric = "memory in use at most so far / predicted of these programs"
    yield row(BENCH, case, metric, used / most)
    if (topology := topologies.of_one(jax.devices()[0])) is not None:
        # A forward pass alone is no plan, and takes about what reducers do.
        reducers = RELEVANCE if largest == "means" else REDUCERS
        where = config, topology, shape, reducers
        planned = max(planned, plan(*where, mesh={"data": 1, "model": 1}).needed)
        metric = "memory in use at most so far / as jaxhal plan has it"
        yield row(BENCH, case, metric, used / planned)
    return planned


def _in_use() -> int:
    """Bytes of the first device that were taken at most; 0 where it does not say."""
    known = jax.devices()[0].memory_stats() or {}
    return known.get("peak_bytes_in_use", 0)


def _writing(lm: LM, shape: Shape, peak: devices.Peak) -> Iterator[dict]:
    """Steps of the decoding loop alone; each reads all weights and the cache once."""
    batch = random_batch(lm.config.vocab_size, shape.tokens + 1, 1, shape.answers)
    keys = jax.random.split(jax.random.key(0), shape.answers)
    limit, last = jnp.full(shape.answers, shape.response), jnp.asarray(shape.response)
    timed = Timed(BENCH, str(shape), {"plain": [], "rich": []})
    cache = 0
    for turn in range(4):
        for name, reducers in (("plain", {}), ("rich", _SCORES)):
            how = Decoding(Sampling(), tuple(reducers.items()), stop_ids=(), pad_id=0)
            state = decoding.start(
                lm.bare, batch, limit, keys, how, new_tokens=shape.response, copies=1
            )
            model, state = jax.block_until_ready(decoding.ready(lm.bare, state))
            cache = sum(leaf.nbytes for leaf in jax.tree.leaves(state.cache))
            begin = time.perf_counter()
            jax.block_until_ready(decoding.go_on(model, state, last, how).tokens)
            if turn:  # the first compiles
                timed.seconds[name].append(time.perf_counter() - begin)
    steps = shape.response - 1
    yield timed.pace("tokens per second, decoding", "plain", steps * shape.answers)
    size = sum(leaf.nbytes for leaf in jax.tree.leaves(lm.params))
    table = lm.params["embed_tokens"]["embedding"].nbytes  # of which rows are read
    metric = "share of the memory's peak, decoding by weights and cache"
    yield timed.pace(metric, "plain", steps * (size - table + cache) / peak.bytes)
    yield timed.ratio("decoding with token scores / without", "rich", "plain", 1.05)


def _torch() -> Any:
    """Hugging Face's model of that shape, with random weights of its own."""
    import torch
    import transformers

    device = peers.torch_device()
    settings = transformers.LlamaConfig(**LLAMA_8B)
    settings._attn_implementation = "sdpa"
    with torch.device("meta"):
        model = transformers.LlamaModel(settings)
    model: Any = model.to(dtype=torch.bfloat16).to_empty(device=device).eval()
    with torch.no_grad():
        for weight in model.parameters():
            weight.normal_(0, 0.02) if weight.ndim > 1 else weight.fill_(1)
    # Its buffers were emptied as well.
    model.rotary_emb = type(model.rotary_emb)(settings).to(device)
    return model


def _torch_hidden(model: Any, tokens: Any) -> None:
    """Its last hidden states, waited for."""
    import torch

    with torch.no_grad():
        read = torch.tensor(np.array(tokens), device=model.device).long()
        model(read, use_cache=False).last_hidden_state[0, -1, 0].item()
