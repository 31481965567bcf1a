"""A loop along stacked layers: what it takes of memory, and its way back."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import thorough
from flax import nnx

import tiny
from jaxhal.models import decoder
from jaxhal.models import lm as lms
from jaxhal.models.families import from_huggingface
from jaxhal.models.ops import STANDARD

TOKENS = jnp.arange(2, 34, dtype=jnp.int32)[None]


def narrow(case: str, **changes: Any) -> lms.LM:
    """Of random weights of 16 bits."""
    config = from_huggingface(tiny.golden(case)["config"] | changes)
    return lms.random(config, jax.random.key(0), jnp.bfloat16)


def test_a_pass_makes_no_float32_copy_of_all_layers():
    lm = narrow("llama-gqa", num_hidden_layers=16, hidden_size=256)
    program = lms.forward.lower(lm, TOKENS, TOKENS > 0).compile()
    memory: Any = program.memory_analysis()
    layers = sum(leaf.nbytes for leaf in jax.tree.leaves(lm.params["blocks"]))
    assert memory.temp_size_in_bytes < layers / 2


def test_a_way_back_keeps_no_copy_of_all_layers():
    sizes = {"hidden_size": 256, "intermediate_size": 512, "head_dim": 64}
    lm = narrow("llama-gqa", num_hidden_layers=8, **sizes)
    params = jax.tree.map(lambda leaf: leaf.astype(jnp.float32), lm.params)

    @jax.jit
    def gradient(params: Any) -> Any:
        model = nnx.merge(lm.graphdef, params)
        x, geo = decoder.begin(model, TOKENS, TOKENS > 0)
        return jax.grad(lambda x: decoder.run(model, x, geo, ops=STANDARD)[0].sum())(x)

    memory: Any = gradient.lower(params).compile().memory_analysis()
    layers = sum(leaf.nbytes for leaf in jax.tree.leaves(params["blocks"]))
    assert memory.temp_size_in_bytes < layers / 2


@thorough.mark
def test_the_gradient_is_that_of_layers_written_out():
    """But for what 16 bits round away; of layers that come in periods."""
    lm = narrow("qwen3.5-gqa")

    def loss(params: Any, written_out: bool) -> Any:
        model = nnx.merge(lm.graphdef, params)
        if written_out:
            model = decoder.apart(model, on_cpu=False)
        x, geo = decoder.begin(model, TOKENS, TOKENS > 0)
        x = decoder.run(model, x, geo, ops=STANDARD)[0]
        return jnp.mean(x.astype(jnp.float32)[..., ::2])

    gradient = jax.jit(jax.grad(loss), static_argnums=1)
    ours, want = (gradient(lm.params, way)["blocks"] for way in (False, True))
    for own, other in zip(*map(jax.tree.leaves, (ours, want)), strict=True):
        own, other = np.asarray(own, np.float64), np.asarray(other, np.float64)
        assert np.linalg.norm(own - other) < 0.1 * np.linalg.norm(other)
