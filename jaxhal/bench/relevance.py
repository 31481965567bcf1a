"""What does relevance cost beside a forward pass, and what do others pay for it?

The reader is SmolLM2-135M in float32, one answer of random tokens.
"""

from collections.abc import Iterator
from typing import Any

import numpy as np

import jaxhal
from jaxhal.bench import interleave, peer, peers, row
from jaxhal.bench.read import random_batch, temporary_mib
from jaxhal.lrp import programs, resolve
from jaxhal.types import Batch

SEQ, RESPONSE = 512, 96
# Of the answer whose every token is traced, since peers take seconds for each.
FEW = 24
_CASE = f"S={SEQ} R={RESPONSE}"
_WHOLE = f"S={SEQ} R={FEW}"


def rows() -> Iterator[dict]:
    lm = jaxhal.load("smollm2-135m", mesh="data=1")
    batch = random_batch(lm.config.vocab_size, SEQ, RESPONSE)
    functions = {
        "forward": lambda: lm.forward(batch.tokens),
        "means": lambda: jaxhal.relevance_means(lm, batch),
    }
    times = interleave("relevance", _CASE, functions, 7)
    metric = "R_prompt and R_response together / forward with logits"
    yield times.ratio(metric, "means", "forward", 4.0)
    yield from _memory(lm, batch)
    yield from _whole(lm, random_batch(lm.config.vocab_size, SEQ, FEW))


def _whole(lm: Any, batch: Batch) -> Iterator[dict]:
    """All of R* against a forward and a backward for every response token."""
    functions = {
        "forward": lambda: lm.forward(batch.tokens),
        "matrix": lambda: jaxhal.relevance(lm, batch),
    }
    times = interleave("relevance", _WHOLE, functions, 3)
    metric = "all of R*, forwards per response token"
    yield times.ratio(metric, "matrix", "forward", scale=1 / FEW)
    model = peer(peers.torch_llama, lm, "eager")
    if model is None:
        return
    seen = {}

    def torch(frozen: bool):
        model.requires_grad_(not frozen)
        seen["theirs"] = peers.relevance_by_token(model, batch.tokens, SEQ - FEW)

    def ours():
        whole = jaxhal.relevance(lm, batch, "gradient_x_input")
        seen["ours"] = np.asarray(whole.matrix[0])

    runs = {"frozen": lambda: torch(True), "ours": ours, "loaded": lambda: torch(False)}
    times = interleave("relevance", _WHOLE, runs, 3)
    worst = np.abs(seen["ours"] - seen["theirs"]).max() / np.abs(seen["theirs"]).max()
    yield row("relevance", _WHOLE, "largest difference from torch", worst, 1e-3)
    for name, how in (("frozen", "weights frozen"), ("loaded", "as loaded")):
        metric = f"torch eager token by token, {how} / all of R* here"
        # The published code runs with gradients of the weights.
        target = 3.0 if name == "loaded" else None
        yield times.ratio(metric, name, "ours", target, "higher")


def _memory(lm: Any, batch: Batch) -> Iterator[dict]:
    block = programs.block_size(lm, batch)
    for name, program in (
        ("both means", programs.means),
        (f"all of R*, {block} tokens together", programs.matrix),
    ):
        value = temporary_mib(program.lower(lm, batch, resolve("attnlrp"), "logit"))
        yield row("relevance", _CASE, f"temporary MiB, {name}", value)
