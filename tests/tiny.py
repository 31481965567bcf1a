"""Tiny models of every family whose weights follow from their names alone."""

import json
import zlib
from pathlib import Path

import numpy as np
from safetensors.numpy import save_file

GOLDEN = Path(__file__).parent / "golden"

_BASE = dict(
    vocab_size=61,
    hidden_size=32,
    intermediate_size=48,
    num_hidden_layers=3,
    num_attention_heads=4,
    num_key_value_heads=2,
    max_position_embeddings=64,
    bos_token_id=1,
    eos_token_id=2,
)
_MHA, _MQA = {"num_key_value_heads": 4}, {"num_key_value_heads": 1}
_UNTIED = {"tie_word_embeddings": False}


def _rope(kind: str, **extra) -> dict:
    settings = {"rope_type": kind, "rope_theta": 10000.0, "factor": 4.0, **extra}
    return {"rope_parameters": settings}


_FALCON = {k: v for k, v in _BASE.items() if k not in ("intermediate_size",)}
_GPT2 = dict(
    vocab_size=61,
    n_embd=32,
    n_layer=3,
    n_head=4,
    n_positions=64,
    bos_token_id=1,
    eos_token_id=2,
)
_GEMMA = dict(
    _BASE,
    head_dim=16,
    num_hidden_layers=4,
    sliding_window=8,
    query_pre_attn_scalar=24,
    layer_types=["sliding_attention", "sliding_attention", "full_attention"] * 2,
)
_GEMMA["layer_types"] = _GEMMA["layer_types"][:4]
_MULTIPLIERS = dict(
    embedding_multiplier=3.0,
    attention_multiplier=0.2,
    residual_multiplier=0.5,
    logits_scaling=4.0,
)
_DENSE = dict(
    num_local_experts=0,
    layer_types=["attention"] * 3,
    shared_intermediate_size=48,
    position_embedding_type="rope",
    mamba_n_heads=8,
)
_PADDED = {"pad_token_id": 0}
_SPARSE = dict(
    num_experts=8, num_experts_per_tok=3, moe_intermediate_size=24, head_dim=16
)

_HYBRID = _BASE | dict(
    num_hidden_layers=6,
    layer_types=["linear_attention", "linear_attention", "full_attention"] * 2,
    head_dim=16,
    rms_norm_eps=0.1,  # or what is small comes out of a norm as noise
    linear_key_head_dim=16,
    linear_value_head_dim=8,
    linear_num_key_heads=2,
    linear_num_value_heads=4,
    partial_rotary_factor=0.5,
)

_GEMMA4 = _BASE | dict(
    num_hidden_layers=6,
    layer_types=["sliding_attention", "sliding_attention", "full_attention"] * 2,
    sliding_window=8,
    head_dim=8,
    global_head_dim=16,
    hidden_size_per_layer_input=0,
    rms_norm_eps=0.1,  # as in hybrids
    final_logit_softcapping=2.0,
)
_INPUTS = {"hidden_size_per_layer_input": 12, "vocab_size_per_layer_input": 61}

# name -> (model_type, settings)
CASES = {
    "llama-mha": ("llama", _BASE | _MHA | _UNTIED),
    "llama-gqa": ("llama", _BASE | _UNTIED),
    "llama-mqa": ("llama", _BASE | _MQA | {"tie_word_embeddings": True}),
    "llama-biases": ("llama", _BASE | {"attention_bias": True, "mlp_bias": True}),
    "llama-head-dim": ("llama", _BASE | {"head_dim": 16}),
    "llama-llama3": (
        "llama",
        _BASE
        | _rope(
            "llama3",
            low_freq_factor=1.0,
            high_freq_factor=4.0,
            original_max_position_embeddings=16,
        ),
    ),
    "llama-linear": ("llama", _BASE | _rope("linear")),
    "llama-dynamic": (
        "llama",
        _BASE | _rope("dynamic") | dict(max_position_embeddings=16),
    ),
    "llama-yarn": (
        "llama",
        _BASE
        | _rope("yarn", original_max_position_embeddings=16)
        | dict(max_position_embeddings=16),
    ),
    "mistral-gqa": ("mistral", _BASE | {"sliding_window": 8}),
    "mistral-mha": ("mistral", _BASE | _MHA | {"sliding_window": None}),
    "mistral-mqa": ("mistral", _BASE | _MQA | {"sliding_window": 5}),
    "qwen2-mha": ("qwen2", _BASE | _MHA | _UNTIED),
    "qwen2-gqa": ("qwen2", _BASE | {"tie_word_embeddings": True}),
    "qwen2-mqa": ("qwen2", _BASE | _MQA),
    "qwen2-window": (
        "qwen2",
        _BASE | dict(use_sliding_window=True, sliding_window=7, max_window_layers=1),
    ),
    "qwen3-mha": ("qwen3", _BASE | _MHA | {"head_dim": 8}),
    "qwen3-gqa": ("qwen3", _BASE | {"head_dim": 16, "tie_word_embeddings": True}),
    "qwen3-mqa": ("qwen3", _BASE | _MQA | {"head_dim": 16}),
    "falcon-7b": ("falcon", _FALCON | dict(multi_query=True, parallel_attn=True)),
    "falcon-bias-sequential": (
        "falcon",
        _FALCON | dict(multi_query=False, parallel_attn=False, bias=True),
    ),
    "falcon-40b": (
        "falcon",
        _FALCON | dict(new_decoder_architecture=True, num_kv_heads=2),
    ),
    "falcon-11b": (
        "falcon",
        _FALCON
        | dict(
            new_decoder_architecture=True, num_kv_heads=2, num_ln_in_parallel_attn=1
        ),
    ),
    "gpt2-mha": ("gpt2", _GPT2),
    "gemma3-gqa": ("gemma3_text", _GEMMA),
    "gemma3-mqa": ("gemma3_text", _GEMMA | _MQA),
    "gemma3-scaled": (
        "gemma3_text",
        _GEMMA
        | _MHA
        | {
            "rope_parameters": {
                "full_attention": {
                    "rope_type": "linear",
                    "rope_theta": 50000.0,
                    "factor": 4.0,
                },
                "sliding_attention": {"rope_type": "default", "rope_theta": 1000.0},
            }
        },
    ),
    "gemma2-gqa": ("gemma2", _GEMMA | {"attn_logit_softcapping": 2.0}),
    "gemma2-uncapped": (
        "gemma2",
        _GEMMA | {"attn_logit_softcapping": None, "final_logit_softcapping": None},
    ),
    "gemma4-borrowing": (
        "gemma4_text",
        _GEMMA4
        | _INPUTS
        | dict(
            num_hidden_layers=8,
            layer_types=["sliding_attention", "full_attention"] * 4,
            num_kv_shared_layers=4,
            use_double_wide_mlp=True,
            hidden_size_per_layer_input=64,  # whole blocks of few bits
        ),
    ),
    "gemma4-plain": (
        "gemma4_text",
        _GEMMA4 | dict(attention_k_eq_v=True, num_global_key_value_heads=1),
    ),
    "gemma4-uneven": (
        "gemma4_text",
        _GEMMA4
        | _INPUTS
        | dict(
            layer_types=["sliding_attention"] * 2
            + ["full_attention", "sliding_attention"] * 2
            + ["full_attention"],
            num_hidden_layers=7,
            num_kv_shared_layers=3,
            attention_bias=True,
            final_logit_softcapping=None,
        ),
    ),
    "gemma4-experts": (
        "gemma4_text",
        _GEMMA4
        | _INPUTS
        | {
            "hidden_size_per_layer_input": 32,  # whole blocks, as those below
            "intermediate_size": 64,
            "num_hidden_layers": 3,
            "layer_types": ["sliding_attention", *["full_attention"] * 2],
            "num_kv_shared_layers": 1,
            "enable_moe_block": True,
            "num_experts": 6,
            "top_k_experts": 2,
            "moe_intermediate_size": 32,
        },
    ),
    "granite-gqa": ("granite", _BASE | _MULTIPLIERS),
    "granite4-dense": ("granitemoehybrid", _BASE | _MULTIPLIERS | _DENSE),
    "granite4-nope": (
        "granitemoehybrid",
        _BASE | _DENSE | {"position_embedding_type": None},
    ),
    "smollm3-gqa": ("smollm3", _BASE | _PADDED | {"no_rope_layer_interval": 2}),
    "smollm3-window": (
        "smollm3",
        _BASE
        | _PADDED
        | dict(no_rope_layers=[1, 0, 0], use_sliding_window=True, sliding_window=6),
    ),
    "olmo2-gqa": ("olmo2", _BASE),
    "olmo2-mha": ("olmo2", _BASE | _MHA | {"attention_bias": True}),
    "olmo3-gqa": ("olmo3", _BASE | {"num_hidden_layers": 4, "sliding_window": 8}),
    "olmo3-yarn": (
        "olmo3",
        _BASE
        | {
            "num_hidden_layers": 4,
            "sliding_window": 8,
            "rope_parameters": {
                "full_attention": {
                    **_rope("yarn", original_max_position_embeddings=16)[
                        "rope_parameters"
                    ]
                },
                "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
            },
        },
    ),
    "phi3-mha": ("phi3", _BASE | _MHA | _PADDED | {"sliding_window": 8}),
    "phi3-long": (
        "phi3",
        _BASE
        | _PADDED
        | {
            "head_dim": 8,
            "original_max_position_embeddings": 16,
            "rope_parameters": {
                "rope_type": "longrope",
                "rope_theta": 10000.0,
                "partial_rotary_factor": 0.75,
                "short_factor": [1.0, 1.1, 1.2],
                "long_factor": [1.5, 2.0, 3.0],
            },
        },
    ),
    "phi3-short": (
        "phi3",
        _BASE
        | _PADDED
        | {
            "original_max_position_embeddings": 32,
            "rope_parameters": {
                "rope_type": "longrope",
                "rope_theta": 10000.0,
                "short_factor": [1.0, 1.1, 1.2, 1.4],
                "long_factor": [1.5, 2.0, 3.0, 4.0],
            },
        },
    ),
    "mixtral-gqa": (
        "mixtral",
        _BASE | {"num_local_experts": 4, "num_experts_per_tok": 2},
    ),
    "qwen3moe-gqa": ("qwen3_moe", _BASE | _SPARSE | {"norm_topk_prob": True}),
    "qwen3moe-plain": (
        "qwen3_moe",
        _BASE | _SPARSE | {"norm_topk_prob": False, "num_experts_per_tok": 2},
    ),
    "gptoss-gqa": (
        "gpt_oss",
        _BASE
        | {"num_local_experts": 6, "num_experts_per_tok": 3, "swiglu_limit": 1.0}
        | {"intermediate_size": 64, "head_dim": 16, "sliding_window": 8}
        | _rope("yarn", original_max_position_embeddings=16, truncate=False),
    ),
    "qwen3.5-gqa": ("qwen3_5_text", _HYBRID),
    "qwen3.5-uneven": (
        "qwen3_5_text",
        _HYBRID
        | {
            "num_hidden_layers": 3,
            "layer_types": ["full_attention", *["linear_attention"] * 2],
            "linear_num_value_heads": 2,
            "attention_bias": True,
        },
    ),
    "qwen3.5moe-gqa": (
        "qwen3_5_moe_text",
        _HYBRID
        | _SPARSE
        | {
            "num_hidden_layers": 2,
            "layer_types": ["linear_attention", "full_attention"],
            "moe_intermediate_size": 32,
            "shared_expert_intermediate_size": 64,
        },
    ),
    "glm4-gqa": ("glm4", _BASE | {"head_dim": 16, "pad_token_id": 0}),
    "ministral3-gqa": (
        "ministral3",
        _BASE
        | {"head_dim": 16, "pad_token_id": 0}
        | _rope(
            "yarn",
            original_max_position_embeddings=8,
            llama_4_scaling_beta=0.1,
            beta_fast=32.0,
            beta_slow=1.0,
            mscale=1.0,
            mscale_all_dim=1.0,
        ),
    ),
}
# One case of each family.
ONE_EACH = [*{family: case for case, (family, _) in reversed(CASES.items())}.values()]
# Of these, those that differ from a Llama by norms, ropes, windows and sizes alone.
ALIKE = [
    *("ministral3-gqa", "glm4-gqa", "olmo3-gqa", "olmo2-gqa", "granite-gqa"),
    *("granite4-dense", "smollm3-gqa", "phi3-mha", "qwen3-mha", "mistral-gqa"),
]
UNLIKE = [case for case in ONE_EACH if case not in ALIKE]
# Files of Mistral say that they are of a Llama.
THE_OTHERS = [case for case in CASES if case not in ONE_EACH]
IN_FILES = [case for case in ONE_EACH if case != "mistral-gqa"]
TOKENS = (np.arange(2 * 24).reshape(2, 24) * 37 % 59 + 2).astype(np.int32)
# To go on from, and how far.
PROMPTS = [TOKENS[0, :10].tolist(), TOKENS[1, :7].tolist()]
NEW = 12


def weight(name: str, shape: tuple[int, ...]) -> np.ndarray:
    """The tensor every party to a comparison uses under this name."""
    rng = np.random.default_rng(zlib.crc32(name.encode()))
    values = rng.standard_normal(shape).astype(np.float32)
    if len(shape) == 1:
        ones = name.endswith(("weight", "layer_scalar", "scale"))
        return values * 0.1 + ones
    return values * 0.25


def golden(case: str) -> dict:
    """Config, tensor shapes and Hugging Face's outputs of one case."""
    meta = json.loads((GOLDEN / "parity.json").read_text("utf-8"))[case]
    with np.load(GOLDEN / "parity.npz") as arrays:
        outputs = {key: arrays[f"{case}/{key}"] for key in ("hidden", "logits")}
    return {**meta, **outputs}


def write_folder(folder: Path, config: dict, shapes: dict[str, list[int]]) -> Path:
    """A checkpoint folder (without a tokenizer) of one case."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    tensors = {name: weight(name, tuple(shape)) for name, shape in shapes.items()}
    save_file(tensors, folder / "model.safetensors")
    return folder
