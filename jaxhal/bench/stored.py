"""Does a 4-bit file stay as small as it is stored, and is it read as well and as fast?

The readers are those known by name that are such files; what is measured of one is left
out where it cannot be had.  Dequantised it is float32.  Tokens are random.  A file of
Llama-2-7B's shape holds random blocks, to see what memory such a model needs.
"""

import functools
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

import jaxhal
from jaxhal.bench import interleave, row
from jaxhal.bench.read import REDUCERS, random_batch
from jaxhal.models import registry
from jaxhal.models.lm import LM

MODELS = ("qwen2.5-coder-0.5b", "qwen2.5-coder-1.5b")
SEQ, RESPONSE, REPEATS = 512, 96, 5
TOKENS = 256
_RESIDENT = """
import gc, sys
import jax, jaxhal
from jaxhal.bench.memory import own

jaxhal.load("smollm2-135m")  # what any model needs
gc.collect()
before = own()
lm = jaxhal.load(sys.argv[1], weights="stored", mesh="data=1")
jax.block_until_ready(lm.params)
gc.collect()
print(own() - before)
"""
_LARGE = """
import sys
import jax, jaxhal
from jaxhal.bench.memory import Peak
from jaxhal.bench.read import REDUCERS, random_batch
from jaxhal.generation import GREEDY

with Peak() as peak:
    lm = jaxhal.load(sys.argv[1], weights="stored", mesh="data=1")
    batch = random_batch(lm.config.vocab_size, 512, 96)
    jax.block_until_ready(jaxhal.read(lm, batch, REDUCERS))
    asked = jaxhal.Example("-", prompt="Where?", templated=True)
    [[said]] = jaxhal.generate(lm, [asked], max_new_tokens=8, sampling=GREEDY)
assert len(said.tokens) == 8, said
print(peak.bytes)
"""
MEMORY = 24.0  # GiB, of the machine that it has to fit
LLAMA = {"width": 4096, "inner": 11008, "layers": 32, "heads": 32, "tokens": 32000}


def rows() -> Iterator[dict]:
    for name in MODELS:
        try:
            path = registry.locate(name)
        except (OSError, RuntimeError, ValueError) as error:
            print(f"{name} is left out: {error}", file=sys.stderr)
            continue
        yield from _rows(name, path)
    if Path("/proc/self/statm").exists():
        yield from _large()


def _rows(name: str, path: Path) -> Iterator[dict]:
    size = path.stat().st_size
    stored = jaxhal.load(path, weights="stored", mesh="data=1")
    held = sum(leaf.nbytes for leaf in jax.tree.leaves(stored.params))
    yield row("stored", name, "bytes of weights / of the file", held / size, 1.25)
    if Path("/proc/self/statm").exists():
        metric = "memory of a process that loads it / the file"
        yield row("stored", name, metric, _resident(path) / size, 1.25)
    plain = jaxhal.load(path, weights="dequantised", mesh="data=1")
    yield from _logits(name, stored, plain)
    batch = random_batch(stored.config.vocab_size, SEQ, RESPONSE)
    functions = {
        which: functools.partial(jaxhal.read, lm, batch, REDUCERS)
        for which, lm in (("stored", stored), ("plain", plain))
    }
    times = interleave("stored", name, functions, REPEATS)
    metric = f"reading {SEQ} tokens, stored / dequantised"
    yield times.ratio(metric, "stored", "plain", 1.3)


def _resident(path: Path) -> float:
    return _said(_RESIDENT, path)


def _said(program: str, path: Path) -> float:
    """The number that a process of its own prints."""
    command = [sys.executable, "-c", program, str(path)]
    return float(subprocess.run(command, check=True, capture_output=True).stdout)


def _large() -> Iterator[dict]:
    case, metric = (
        "Llama-2-7B, random, Q4_K",
        "a process that reads 512 tokens, writes 8",
    )
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "large.gguf")
        _write(path, **LLAMA)
        peak, size = _said(_LARGE, path), path.stat().st_size
    yield row("stored", case, f"peak memory of {metric} / the file", peak / size)
    yield row("stored", case, f"GiB of {metric}", peak / 2**30, MEMORY)


def _write(
    path: Path, width: int, inner: int, layers: int, heads: int, tokens: int
) -> None:
    """Layers have the same random blocks; the tokenizer knows little but bytes."""
    import gguf
    from tokenizers.pre_tokenizers import ByteLevel

    kind = gguf.GGMLQuantizationType.Q4_K
    numbers, size = gguf.GGML_QUANT_SIZES[kind]
    rng = np.random.default_rng(0)

    def matrix(rows: int, columns: int) -> np.ndarray:
        blocks = rng.integers(0, 256, (rows, columns // numbers, size), np.uint8)
        scales = np.array([2e-5, 2e-4], np.float16)  # of the numbers, and of the least
        blocks[..., :4] = scales.view(np.uint8)
        return blocks.reshape(rows, -1)

    writer = gguf.GGUFWriter(path, "llama")
    writer.add_context_length(4096)
    writer.add_embedding_length(width)
    writer.add_feed_forward_length(inner)
    writer.add_block_count(layers)
    writer.add_head_count(heads)
    writer.add_head_count_kv(heads)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    letters = sorted(ByteLevel.alphabet())
    pair = letters[:2]  # a file without a merge is none
    others = (f"<{number}>" for number in range(len(letters) + 1, tokens))
    writer.add_token_list([*letters, "".join(pair), *others])
    writer.add_token_merges([" ".join(pair)])
    writer.add_eos_token_id(tokens - 1)
    layer = {
        "attn_q": matrix(width, width),
        "attn_k": matrix(width, width),
        "attn_v": matrix(width, width),
        "attn_output": matrix(width, width),
        "ffn_gate": matrix(inner, width),
        "ffn_up": matrix(inner, width),
        "ffn_down": matrix(width, inner),
    }
    tensors = {f"blk.{n}.{name}": x for n in range(layers) for name, x in layer.items()}
    tensors |= dict.fromkeys(("token_embd", "output"), matrix(tokens, width))
    for name, blocks in tensors.items():
        writer.add_tensor(f"{name}.weight", blocks, raw_dtype=kind)
    norms = [f"blk.{n}.{part}_norm" for n in range(layers) for part in ("attn", "ffn")]
    for name in (*norms, "output_norm"):
        writer.add_tensor(f"{name}.weight", np.ones(width, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _logits(name: str, stored: LM, plain: LM) -> Iterator[dict]:
    tokens = random_batch(stored.config.vocab_size, TOKENS, 1).tokens
    some, others = (
        np.asarray(lm.forward(jnp.asarray(tokens))) for lm in (stored, plain)
    )
    worst = float(np.abs(some - others).max())
    yield row("stored", name, "largest difference of a logit", worst, 1e-3)
    same = float((some.argmax(-1) == others.argmax(-1)).mean())
    metric = f"share of {TOKENS} tokens with the same likeliest one"
    yield row("stored", name, metric, same, 1.0, "higher")
