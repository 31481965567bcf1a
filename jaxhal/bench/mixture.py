"""What do experts cost in blocks of one expert's tokens, and as ``ragged_dot``?

One layer's, in the time of this device, and in what programs take that are compiled for
a TPU, if its compiler is installed.
"""

import functools
import sys
from collections.abc import Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import SingleDeviceSharding
from jaxtyping import Array

from jaxhal.bench import interleave, row, topologies
from jaxhal.models.config import Config
from jaxhal.models.families import from_huggingface
from jaxhal.models.feedforward import Experts, in_order
from jaxhal.models.ops import STANDARD

BENCH, REPEATS, TOPOLOGY = "mixture", 7, "v5e:1x1"


class Size(NamedTuple):
    """Of a layer, and how many tokens go through it."""

    experts: int
    chosen: int
    width: int
    inner: int
    tokens: int

    def __str__(self) -> str:
        return f"{self.chosen} of {self.experts} experts, {self.tokens} tokens"

    @property
    def config(self) -> Config:
        return from_huggingface(
            {
                "model_type": "qwen3_moe",
                "vocab_size": 64,
                "hidden_size": self.width,
                "moe_intermediate_size": self.inner,
                "num_hidden_layers": 1,
                "num_attention_heads": 4,
                "num_key_value_heads": 4,
                "head_dim": 32,
                "num_experts": self.experts,
                "num_experts_per_tok": self.chosen,
                "max_position_embeddings": 64,
            }
        )

    @property
    def products(self) -> float:
        """Multiplications and additions of the experts that tokens go through."""
        return 6.0 * self.tokens * self.chosen * self.width * self.inner


HERE = Size(32, 4, 512, 256, 512)
THERE = Size(128, 8, 2048, 768, 4096)  # a layer of Qwen3-30B-A3B


def rows() -> Iterator[dict]:
    experts = Experts(HERE.config, jnp.float32, nnx.Rngs(0))
    x = jax.random.normal(jax.random.key(0), (1, HERE.tokens, HERE.width))
    programs = _programs(experts)
    functions = {
        name: functools.partial(run, nnx.state(experts), x)
        for name, run in programs.items()
    }
    times = interleave(BENCH, str(HERE), functions, REPEATS)
    metric = "seconds, ragged_dot / blocks"
    yield times.ratio(metric, "ragged_dot", "blocks", 1.0, "higher")
    compiled = programs["ragged_dot"].lower(nnx.state(experts), x).compile()
    yield from _products(HERE, str(HERE), compiled)
    try:
        (device,) = topologies.described(TOPOLOGY)
    except RuntimeError as error:  # its compiler is not installed
        print(f"{TOPOLOGY} is left out: {error}", file=sys.stderr)
        return
    case, place = f"{THERE}, {TOPOLOGY}", SingleDeviceSharding(device)
    experts = nnx.eval_shape(lambda: Experts(THERE.config, jnp.bfloat16, nnx.Rngs(0)))
    shape = jax.ShapeDtypeStruct((1, THERE.tokens, THERE.width), jnp.bfloat16)
    given = jax.tree.map(
        lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=place),
        (nnx.state(experts), shape),
    )
    for name, run in _programs(experts).items():
        compiled = run.lower(*given).compile()
        temporaries = compiled.memory_analysis().temp_size_in_bytes
        yield row(BENCH, case, f"MiB of temporaries, {name}", temporaries / 2**20)
    yield from _products(THERE, case, compiled)


def _products(size: Size, case: str, program: Any) -> Iterator[dict]:
    """Blocks as they are cut; XLA counts what is in a loop once, and here is none."""
    chosen = jnp.zeros((size.tokens, size.chosen), int)
    blocks = jax.eval_shape(lambda: in_order(chosen, size.experts)).source.size
    metric = "products / those of a token's experts"
    share = blocks / (size.tokens * size.chosen)
    yield row(BENCH, case, f"{metric}, blocks", share, 1.5)
    share = program.cost_analysis()["flops"] / size.products
    yield row(BENCH, case, f"{metric}, ragged_dot", share)


def _programs(experts: Experts) -> dict[str, Any]:
    definition = nnx.graphdef(experts)

    def program(ragged: bool) -> Any:
        def run(state: Any, x: Array) -> Array:
            return nnx.merge(definition, state).mixed((x,), STANDARD, ragged)

        return jax.jit(run)

    return {"blocks": program(False), "ragged_dot": program(True)}
