"""What do large models take of accelerators that are not here?

Programs are compiled for described devices, those whose compiler is installed, and none
is run.  Models of Llama 3.1's and Gemma 2's shapes in bfloat16, and in int4 of Llama's,
Qwen3-30B-A3B's and GPT-OSS 20B's.
"""

import sys
from collections.abc import Iterator, Mapping
from typing import NamedTuple

import jaxhal
from jaxhal.bench import row, topologies
from jaxhal.bench.accelerator import LLAMA_8B, RELEVANCE
from jaxhal.bench.bounds import Shape
from jaxhal.bench.plan import Plan, plan
from jaxhal.bench.read import REDUCERS
from jaxhal.features.base import Reducer
from jaxhal.models.config import Config
from jaxhal.models.families import from_huggingface

BENCH = "compiled"
LLAMA_70B = LLAMA_8B | {
    "hidden_size": 8192,
    "intermediate_size": 28672,
    "num_hidden_layers": 80,
    "num_attention_heads": 64,
}
QWEN3_30B = {
    "model_type": "qwen3_moe",
    "vocab_size": 151936,
    "hidden_size": 2048,
    "moe_intermediate_size": 768,
    "num_hidden_layers": 48,
    "num_attention_heads": 32,
    "num_key_value_heads": 4,
    "head_dim": 128,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "norm_topk_prob": True,
    "max_position_embeddings": 40960,
    "rope_theta": 1e6,
    "tie_word_embeddings": False,
}


GEMMA2_9B = {
    "model_type": "gemma2",
    "vocab_size": 256000,
    "hidden_size": 3584,
    "intermediate_size": 14336,
    "num_hidden_layers": 42,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 256,
    "query_pre_attn_scalar": 256,
    "sliding_window": 4096,
    "attn_logit_softcapping": 50.0,
    "final_logit_softcapping": 30.0,
    "hidden_activation": "gelu_pytorch_tanh",
    "max_position_embeddings": 8192,
}
GPT_OSS_20B = {
    "model_type": "gpt_oss",
    "vocab_size": 201088,
    "hidden_size": 2880,
    "intermediate_size": 2880,
    "num_hidden_layers": 24,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "head_dim": 64,
    "sliding_window": 128,
    "num_local_experts": 32,
    "num_experts_per_tok": 4,
    "max_position_embeddings": 131072,
    "rope_theta": 150000.0,
    "attention_bias": True,
    "tie_word_embeddings": False,
}


class Case(NamedTuple):
    """A model, where it is read, and what; the format of its blocks, if any."""

    name: str
    config: Mapping[str, object]
    topology: str
    shape: Shape
    packed: str = ""


CASES = (
    Case("8B", LLAMA_8B, "v5e:2x4", Shape(1, 32768, 512)),
    Case("70B", LLAMA_70B, "v5p:2x2x2", Shape(4, 2048, 256)),
    Case("8B int4", LLAMA_8B, "v5e:1x1", Shape(1, 2048, 256), "Q4_0"),
    Case("Gemma 2 9B", GEMMA2_9B, "v5e:2x2", Shape(4, 4096, 256)),
    Case("GPT-OSS 20B int4", GPT_OSS_20B, "v5e:2x2", Shape(4, 4096, 256), "Q4_0"),
    Case("8B", LLAMA_8B, "h100", Shape(8, 2048, 256)),
    Case("8B", LLAMA_8B, "h100", Shape(1, 32768, 512)),
    Case("30B-A3B int4", QWEN3_30B, "v5e:4x4", Shape(16, 2048, 256), "Q4_0"),
    Case("30B-A3B int4", QWEN3_30B, "h100", Shape(8, 2048, 256), "Q4_0"),
)
# A forward pass and no more: the last state of each response.
_FORWARD: dict[str, Reducer] = {
    "last": jaxhal.HiddenStates(layers=(-1,), tokens="last")
}


def rows() -> Iterator[dict]:
    for case in CASES:
        try:
            topologies.described(case.topology)
        except RuntimeError as error:  # its compiler is not installed
            print(f"{case.topology} is left out: {error}", file=sys.stderr)
            continue
        yield from _rows(case)


def _rows(case: Case) -> Iterator[dict]:
    config = from_huggingface(dict(case.config))
    # On the first mesh that has room for relevance, which takes the most.
    means = _plan(config, case, RELEVANCE)
    forward = _plan(config, case, _FORWARD, means.mesh)
    mesh = ",".join(f"{axis}={count}" for axis, count in forward.mesh.items())
    about = BENCH, f"{case.name}, {case.shape}, {case.topology}, {mesh}"
    yield row(*about, "GiB of weights a device", forward.weights / 2**30)
    yield row(*about, "GiB of temporaries, forward", forward.temporaries / 2**30)
    every = _plan(config, case, REDUCERS, forward.mesh)
    metric = "temporaries, all reducers / forward and their features"
    beside = forward.temporaries + every.outputs
    yield row(*about, metric, every.temporaries / beside, target=1.15)
    yield row(*about, "GiB of features", every.outputs / 2**30)
    others = every.collectives.keys() - {"all-reduce"}
    moved = float(sum(every.collectives[kind] for kind in others))
    summed = float(every.collectives.get("all-reduce", 0))
    yield row(*about, "all-reduces, a layer's once", summed)
    yield row(*about, "other collectives", moved, target=0.0)
    metric = "calls of fused attention, a layer's once"
    yield row(*about, metric, float(every.kernels), target=1.0, better="higher")
    metric = "arrays of heads x tokens x tokens"
    yield row(*about, metric, float(every.squares), target=0.0)
    metric = "GiB of temporaries, relevance means"
    yield row(*about, metric, means.temporaries / 2**30)
    metric = "share of memory, relevance means"
    yield row(*about, metric, means.needed / means.memory, target=0.9)


def _plan(
    config: Config,
    case: Case,
    reducers: Mapping[str, Reducer],
    mesh: Mapping[str, int] | None = None,
) -> Plan:
    where = config, case.topology, case.shape, reducers
    return plan(*where, mesh=mesh, packed=case.packed)
