"""GGUF files of the tiny models, as llama.cpp's converter writes them."""

import gguf
import jax.numpy as jnp
import numpy as np

import tiny
from jaxhal.models import rope
from jaxhal.models.families import from_huggingface
from jaxhal.models.gguf_families import ARCHITECTURES

_ARCHITECTURES = {one.family: name for name, one in reversed(ARCHITECTURES.items())}
_ARCHITECTURES |= {"granitemoehybrid": "granite", "mixtral": "llama", "olmo3": "olmo2"}


def _permuted(x: np.ndarray, heads: int) -> np.ndarray:
    """What llama.cpp's converter does to query and key rows."""
    halves = x.reshape(heads, 2, x.shape[0] // heads // 2, *x.shape[1:])
    return halves.swapaxes(1, 2).reshape(x.shape)


def _falcon_fused(x: np.ndarray, kv_heads: int, head_dim: int) -> np.ndarray:
    """What llama.cpp's converter does to Falcon's query_key_value."""
    groups = x.reshape(kv_heads, -1, head_dim, x.shape[-1])
    parts = (groups[:, :-2], groups[:, -2], groups[:, -1])
    return np.concatenate([part.reshape(-1, x.shape[-1]) for part in parts])


def _tiled(stored: str, x: np.ndarray, raw: dict) -> np.ndarray:
    """What llama.cpp's converter does to the value heads of linear attention.

    Of those a key serves, all first ones come first, then all second ones, and so on.
    """
    keys, heads = raw["linear_num_key_heads"], raw["linear_num_value_heads"]
    order = np.arange(heads).reshape(keys, -1).T.ravel()

    def moved(part: np.ndarray, axis: int = 0) -> np.ndarray:
        each = np.split(part, heads, axis)
        return np.concatenate([each[head] for head in order], axis)

    if stored.endswith("out_proj.weight"):
        return moved(x, 1)
    if "in_proj_qkv" in stored or "conv1d" in stored:
        own = keys * raw["linear_key_head_dim"] * 2
        return np.concatenate([x[:own], moved(x[own:])])
    return x if stored.endswith("norm.weight") else moved(x)


def _qwen3_5(stored: str, x: np.ndarray, raw: dict) -> tuple[str, np.ndarray]:
    """A tensor of a Qwen3.5, by the name that is looked up."""
    if ".linear_attn." in stored:
        x = _tiled(stored, x, raw)
        x = x.squeeze(1) if "conv1d" in stored else x
        x = -np.exp(x) if stored.endswith("A_log") else x
    elif stored.endswith("norm.weight"):
        x = x + 1
    return stored.replace("dt_bias", "dt_proj.bias"), x


def _describe_qwen3_5(writer, raw: dict):
    values = raw["linear_num_value_heads"]
    writer.add_rope_dimension_sections([11, 11, 10, 0])
    writer.add_ssm_conv_kernel(raw["linear_conv_kernel_dim"])
    writer.add_ssm_state_size(raw["linear_key_head_dim"])
    writer.add_ssm_group_count(raw["linear_num_key_heads"])
    writer.add_ssm_time_step_rank(values)
    writer.add_ssm_inner_size(raw["linear_value_head_dim"] * values)
    full = raw["layer_types"].index("full_attention")
    writer.add_full_attention_interval(full + 1)


def _describe_gemma4(writer, raw: dict):
    layers = raw["num_hidden_layers"]
    slides = [kind == "sliding_attention" for kind in raw["layer_types"]]
    inner, borrowing = raw["intermediate_size"], raw["num_kv_shared_layers"]
    writer.add_shared_kv_layers(borrowing)
    writer.add_embedding_length_per_layer_input(raw["hidden_size_per_layer_input"])
    writer.add_sliding_window(raw["sliding_window"])
    writer.add_sliding_window_pattern(slides)
    whole = raw["per_layer_config"][str(slides.index(False))]
    full = whole["head_dim"]
    for add in (writer.add_key_length, writer.add_value_length):
        add(full)
    for add in (writer.add_key_length_swa, writer.add_value_length_swa):
        add(raw["head_dim"])
    if raw["use_double_wide_mlp"]:
        last = [2 * inner] * borrowing
        writer.add_feed_forward_length([inner] * (layers - borrowing) + last)
    else:
        writer.add_feed_forward_length(inner)
    heads = raw["num_key_value_heads"]
    if fewer := whole.get("num_key_value_heads"):
        heads = [heads if one else fewer for one in slides]
    writer.add_head_count_kv(heads)
    writer.add_rope_dimension_count(full)
    writer.add_rope_dimension_count_swa(raw["head_dim"])
    writer.add_final_logit_softcapping(raw["final_logit_softcapping"])
    turns = raw["rope_parameters"]
    writer.add_rope_freq_base(turns["full_attention"]["rope_theta"])
    writer.add_rope_freq_base_swa(turns["sliding_attention"]["rope_theta"])
    pairs = int(full * turns["full_attention"]["partial_rotary_factor"] / 2)
    divisors = [1.0] * pairs + [1e30] * (full // 2 - pairs)
    writer.add_tensor("rope_freqs.weight", np.float32(divisors))


def _describe(writer, arch: str, raw: dict, config):
    """The metadata that llama.cpp's converter writes of a config.json."""
    rope_of = raw.get("rope_parameters") or {}
    rope_of = rope_of.get("full_attention", rope_of)
    writer.add_context_length(config.context_length)
    writer.add_embedding_length(config.hidden_size)
    if config.num_experts:
        writer.add_expert_count(config.num_experts)
        writer.add_expert_used_count(config.num_experts_per_tok)
    if config.shared:
        writer.add_expert_feed_forward_length(config.expert_size)
    if arch == "qwen35moe":
        writer.add_expert_shared_feed_forward_length(config.intermediate_size)
    elif arch == "qwen3moe":  # beside the width of perceptrons that it has not
        writer.add_expert_feed_forward_length(config.intermediate_size)
        writer.add_feed_forward_length(raw["intermediate_size"])
    elif arch != "gemma4":
        writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    if config.norm == "layer":
        writer.add_layer_norm_eps(config.norm_eps)
    else:
        writer.add_layer_norm_rms_eps(config.norm_eps)
    if arch == "gemma4":
        _describe_gemma4(writer, raw)
        return
    writer.add_head_count_kv(config.num_key_value_heads)
    if arch not in ("phi3", "granite"):
        writer.add_key_length(config.head_dim)
    if arch != "gemma2":
        writer.add_rope_freq_base(config.ropes[0].theta)
    if arch.startswith("qwen35"):
        _describe_qwen3_5(writer, raw)
    parts = ("llama", "granite", "smollm3", "mistral3", "phi3", "glm4")
    if arch in parts or arch.startswith("qwen35"):
        writer.add_rope_dimension_count(config.rotary_dim or config.head_dim)
    slide = ("gemma2", "gemma3", "olmo2", "phi3", "gpt-oss")
    if arch in slide and "sliding_window" in raw:
        writer.add_sliding_window(raw["sliding_window"] or 0)
    if arch == "olmo2" and "sliding_window" in raw:
        slides = [kind == "sliding_attention" for kind in raw["layer_types"]]
        writer.add_sliding_window_pattern(slides)
    if arch == "gemma2":
        writer.add_attn_logit_softcapping(raw["attn_logit_softcapping"])
        writer.add_final_logit_softcapping(raw["final_logit_softcapping"])
    if arch == "granite":
        writer.add_attention_scale(raw["attention_multiplier"])
        writer.add_embedding_scale(raw["embedding_multiplier"])
        writer.add_residual_scale(raw["residual_multiplier"])
        writer.add_logit_scale(raw["logits_scaling"])
        turned = raw.get("position_embedding_type", "rope") == "rope"
        writer.add_rope_scaling_finetuned(turned)
    if "original_max_position_embeddings" in {**raw, **rope_of}:
        original = rope_of.get("original_max_position_embeddings")
        writer.add_rope_scaling_orig_ctx_len(original or config.context_length)
    match rope_of.get("rope_type"):
        case "yarn":
            writer.add_rope_scaling_type(gguf.RopeScalingType.YARN)
            writer.add_rope_scaling_factor(rope_of["factor"])
            if "beta_fast" in rope_of:
                writer.add_rope_scaling_yarn_beta_fast(rope_of["beta_fast"])
                writer.add_rope_scaling_yarn_beta_slow(rope_of["beta_slow"])
        case "longrope":  # of which these files do not say the type
            writer.add_rope_scaling_attn_factors(rope.amplitude(config.ropes[0]))
            for which in ("long", "short"):
                factors = np.float32(rope_of[f"{which}_factor"])
                writer.add_tensor(f"rope_factors_{which}.weight", factors)
        case "llama3":
            plain = rope.Rope(theta=config.ropes[0].theta)
            base, scaled = (
                rope.frequencies(r, config.head_dim, jnp.array([1]))[0]
                for r in (plain, config.ropes[0])
            )
            writer.add_tensor("rope_freqs.weight", np.asarray(base / scaled))
    if arch == "mistral3":
        writer.add_rope_scaling_yarn_log_mul(rope_of["mscale_all_dim"])
        writer.add_attn_temperature_scale(rope_of["llama_4_scaling_beta"])


def write_gguf(path, case: str, kind: str = "F32"):
    """One tiny case as a GGUF file, converted by llama.cpp's rules."""
    want = tiny.golden(case)
    return convert(path, want["config"], want["shapes"], kind)


def convert(path, raw: dict, shapes: dict, kind="F32", beside=(), whole=False):
    """A file of settings and of the weights of these names and shapes.

    Matrices are rounded to a kind of blocks where their rows are whole ones.  `beside`
    are names of further tensors; with `.nextn.` in one there is a layer of those.
    `whole` leaves gates of experts with what they let through, as Gemma 4 does.
    """
    family = raw["model_type"]
    whole = whole or family == "gemma4_text"
    arch = _ARCHITECTURES.get(family, family)
    config, rounded = from_huggingface(raw), gguf.GGMLQuantizationType[kind]
    writer = gguf.GGUFWriter(path, arch)
    guesses = any(".nextn." in name for name in beside)
    if guesses:
        writer.add_nextn_predict_layers(1)
    writer.add_block_count(config.num_hidden_layers + guesses)
    for name in beside:
        writer.add_tensor(name, np.zeros((2, 32), np.float32))

    def put(name: str, x: np.ndarray):
        x = np.ascontiguousarray(x)
        matrix = x.ndim > 1 and name.endswith(".weight") and "gate_inp" not in name
        if matrix and x.shape[-1] % gguf.GGML_QUANT_SIZES[rounded][0] == 0:
            x = gguf.quants.quantize(x, rounded)
            writer.add_tensor(name, x, raw_dtype=rounded)
        else:
            writer.add_tensor(name, x)

    _describe(writer, arch, raw, config)
    kinds = {name: kind for kind, name in gguf.MODEL_ARCH_NAMES.items()}
    names = gguf.get_tensor_name_map(kinds[arch], config.num_hidden_layers)
    heads = {"q": config.num_attention_heads, "k": config.num_key_value_heads}
    for stored, shape in shapes.items():
        x = tiny.weight(stored, tuple(shape))
        layer = f"blk.{stored.split('.')[2]}" if ".layers." in stored else ""
        if "shared_mlp" in stored:  # what a Granite 4 calls the dense part
            parts = ("gate", "up") if "input" in stored else ("down",)
            for part, each in zip(parts, np.split(x, len(parts)), strict=True):
                put(f"{layer}.ffn_{part}.weight", each)
            continue
        if "experts" in stored:
            parts = ("gate", "up") if "gate_up" in stored else ("down",)
            parts = ("gate_up",) if whole and len(parts) == 2 else parts
            kind, count = "bias" if stored.endswith("bias") else "weight", len(parts)
            if arch == "gpt-oss":  # as [in, out], gates and the rest in turns
                x = x.swapaxes(1, 2) if kind == "weight" else x
                x = np.concatenate([x[:, at::count] for at in range(count)], 1)
            for part, each in zip(parts, np.split(x, count, 1), strict=True):
                put(f"{layer}.ffn_{part}_exps.{kind}", each)
            continue
        if stored.endswith("scale"):  # of a router, or of what experts give
            part = "down_exps" if "per_expert" in stored else "gate_inp"
            put(f"{layer}.ffn_{part}.scale", x)
            continue
        sought = stored
        if arch.startswith("qwen35"):
            sought, x = _qwen3_5(stored, x, raw)
        name = names.get_name(sought, try_suffixes=(".weight", ".bias"))
        assert name is not None, stored
        name += ".weight" * name.endswith(("sinks", "layer_output_scale"))
        part = name.rsplit(".", 2)[-2]
        paired = arch in ("llama", "granite", "smollm3", "mistral3")
        if paired and part in ("attn_q", "attn_k"):
            x = _permuted(x, heads[part[-1]])
        if arch in ("gemma2", "gemma3") and name.endswith("norm.weight"):
            x = x + 1
        if arch == "gpt2" and x.ndim == 2 and "embd" not in name:
            x = x.T
        if part == "attn_qkv" and arch == "falcon":
            x = _falcon_fused(x, config.num_key_value_heads, config.head_dim)
        put(name, x)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path
