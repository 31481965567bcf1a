"""A whole language model of a few thousand weights: random, byte by byte, offline."""

import json
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
import tokenizers
import transformers
from safetensors.numpy import save_file
from tokenizers import decoders, models, pre_tokenizers

import tiny
from jaxhal.detectors.series import Ragged
from jaxhal.models.families import from_huggingface
from jaxhal.models.lm import LM, random
from jaxhal.models.tokenizer import Tokenizer
from jaxhal.reading.extract import extract
from jaxhal.reading.store import Store
from jaxhal.types import Example


def tiny_lm(seed: int = 0, context: int = 512, **changes) -> LM:
    """Two layers of four heads, a token a byte, no chat template."""
    config = from_huggingface(_config(context) | changes)
    lm = random(config, jax.random.key(seed))
    return LM(lm.params, lm.graphdef, config, Tokenizer(_bytes()), f"tiny {seed}")


def lm_of(case: str, context: int = 512, **changes) -> LM:
    """A model of a case of :mod:`tiny`, of random weights, a token a byte.

    ``changes`` are of settings that it has.
    """
    about = tiny.golden(case)["config"]
    about |= {name: value for name, value in changes.items() if about.get(name)}
    tokenizer = _bytes()
    about |= dict.fromkeys(("max_position_embeddings", "n_positions"), context)
    for name in {"vocab_size", "vocab_size_per_layer_input"} & {*about}:
        about[name] = len(tokenizer)
    config = from_huggingface(about)
    lm = random(config, jax.random.key(0))
    return LM(lm.params, lm.graphdef, config, Tokenizer(tokenizer), case)


def ordered(inputs: Any, order: Any) -> Any:
    """What detectors decide on, its rows in another order."""
    rows = np.asarray(order)
    return jax.tree.map(
        lambda leaf: Ragged.of(leaf[rows]) if isinstance(leaf, Ragged) else leaf[rows],
        inputs,
    )


def write_lm(
    folder: Path, seed: int = 0, context: int = 512, tokenizer: Any = None, **changes
) -> Path:
    """Such a model as a folder of Hugging Face, with weights of its own."""
    config = _config(context) | changes
    wide, tall = config["hidden_size"], config["intermediate_size"]
    heads = config["num_attention_heads"]
    head = config.get("head_dim", wide // heads)
    narrow = head * config["num_key_value_heads"]
    layer = {
        "input_layernorm": (wide,),
        "post_attention_layernorm": (wide,),
        "self_attn.q_proj": (heads * head, wide),
        "self_attn.k_proj": (narrow, wide),
        "self_attn.v_proj": (narrow, wide),
        "self_attn.o_proj": (wide, heads * head),
        "mlp.gate_proj": (tall, wide),
        "mlp.up_proj": (tall, wide),
        "mlp.down_proj": (wide, tall),
    }
    shapes = {
        "model.embed_tokens": (config["vocab_size"], wide),
        "model.norm": (wide,),
        "lm_head": (config["vocab_size"], wide),
    } | {
        f"model.layers.{number}.{name}": shape
        for number in range(config["num_hidden_layers"])
        for name, shape in layer.items()
    }
    draw = np.random.default_rng(seed)
    weights = {
        f"{name}.weight": np.float32(len(shape) == 1)
        + draw.normal(0, 0.3, shape).astype(np.float32)
        for name, shape in shapes.items()
    }
    (tokenizer or _bytes()).save_pretrained(folder)
    save_file(weights, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def _bytes() -> transformers.PreTrainedTokenizerFast:
    """A token a byte."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {piece: number for number, piece in enumerate(["<s>", "</s>", *alphabet])}
    backend = tokenizers.Tokenizer(models.BPE(vocab, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=backend, bos_token="<s>", eos_token="</s>", pad_token="</s>"
    )


def _config(context: int) -> dict[str, Any]:
    return {
        "model_type": "llama",
        "architectures": ["LlamaForCausalLM"],
        "vocab_size": 2 + len(pre_tokenizers.ByteLevel.alphabet()),
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": context,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "tie_word_embeddings": False,
    }


def answers(count: int, per_prompt: int = 2) -> list[Example]:
    """Short answers over contexts of different lengths, every other one made up."""
    return [
        Example(
            id=str(number),
            context=f"The box {group} holds {'many ' * (group % 5)}red balls.",
            question="What is inside?",
            response=f"Balls{' and more' * (number % 4)}, {number}.",
            label=number % 2,
        )
        for number in range(count)
        for group in [number // per_prompt]
    ]


class Stored(NamedTuple):
    """Answers read into a store: which, why not others, their tokens and features."""

    kept: list[int]
    errors: dict[int, str]
    rows: list[Any]
    features: dict[str, Any]


def read_into(store, lm, examples, reducers, **options) -> Stored:
    """Features of answers, by way of a store or the folder of one."""
    store = store if isinstance(store, Store) else Store(store)
    found = extract(lm, examples, reducers, cache=store)
    features = store.columns(lm, found.rows, reducers, **options)
    return Stored(found.kept, found.errors, found.rows, features)
