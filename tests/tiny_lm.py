"""A whole language model of a few thousand weights: random, byte by byte, offline."""

import jax
import tokenizers
import transformers
from tokenizers import decoders, models, pre_tokenizers

from jaxhal.models.config import from_huggingface
from jaxhal.models.lm import LM, random
from jaxhal.models.tokenizer import Tokenizer
from jaxhal.types import Example


def tiny_lm(seed: int = 0, context: int = 512, **changes) -> LM:
    """Two layers of four heads, a token a byte, no chat template."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {piece: number for number, piece in enumerate(["<s>", "</s>", *alphabet])}
    backend = tokenizers.Tokenizer(models.BPE(vocab, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    hf = transformers.PreTrainedTokenizerFast(
        tokenizer_object=backend, bos_token="<s>", eos_token="</s>", pad_token="</s>"
    )
    config = from_huggingface(
        {
            "model_type": "llama",
            "architectures": ["LlamaForCausalLM"],
            "vocab_size": len(vocab),
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
        | changes
    )
    lm = random(config, jax.random.key(seed))
    return LM(lm.params, lm.graphdef, config, Tokenizer(hf), f"tiny {seed}")


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
