"""HHEM-2.1-Open: what its config.json leaves to that of another model.

Its weights are those of a classifier of tokens on T5's encoder, of which it reads the
first token's logits.  Its config.json has no sizes, and its repository no tokenizer:
both are those of the foundation that it names.  Here sizes come from the weights; what
they do not tell is the same in every FLAN-T5.

References:
  Li, Luo and Mendelevitch, `HHEM-2.1-Open <https://doi.org/10.57967/hf/3240>`_, 2024;
  Chung et al., `FLAN-T5 <https://arxiv.org/abs/2210.11416>`_, 2022.
"""

import os
import re
from pathlib import Path
from typing import Any

from jaxhal.io.showing import shown
from jaxhal.models import hub
from jaxhal.models.safetensors import SafetensorsSource
from jaxhal.models.settings import Settings

MODEL_TYPES = ("HHEMv2Config", "HHEMv2")  # in its config.json, and in its code
_FOUNDATION = "google/flan-t5-base"
_PROMPT = (
    "<pad> Determine if the hypothesis is true given the premise?\n\n"
    "Premise: {text1}\n\nHypothesis: {text2}"
)
_FIELDS = {"{text1}": "{premise}", "{text2}": "{hypothesis}"}
_INSIDE = "t5.transformer."
_ATTENTION = "encoder.block.{}.layer.0.SelfAttention"


def described(raw: Settings, folder: Path) -> tuple[Settings, dict[str, Any]]:
    """Settings of the T5 inside a folder of HHEM, and what T5's do not hold of it.

    Raises:
      FileNotFoundError: when the folder has no weights.
      ValueError: when they are not such a T5's, or the prompt lacks a text.
    """
    source = SafetensorsSource(folder, rename=lambda name: name.removeprefix(_INSIDE))

    def sizes(name: str) -> tuple[int, int]:
        shape = source.shape(name) if name in source.names() else ()
        if len(shape) != 2 or not all(shape):
            found = f"has shape {list(shape)}" if shape else "is missing"
            raise ValueError(
                f"{folder} does not hold HHEM-2.1-Open: {_INSIDE}{name} {found}; "
                "download the checkpoint again"
            )
        return shape

    inner, width = sizes(f"{_ATTENTION.format(0)}.q.weight")
    buckets, heads = sizes(f"{_ATTENTION.format(0)}.relative_attention_bias.weight")
    vocabulary, _ = sizes("shared.weight")
    gated, _ = sizes("encoder.block.0.layer.1.DenseReluDense.wi_0.weight")
    block = re.compile(r"encoder\.block\.(\d+)\.")
    layers = {int(found[1]) for name in source.names() if (found := block.match(name))}
    prompt = raw.get("prompt", _PROMPT)
    if not isinstance(prompt, str) or not all(map(prompt.count, _FIELDS)):
        raw.refuse("prompt", f"give a text with {' and '.join(_FIELDS)}")
    for theirs, ours in _FIELDS.items():
        prompt = prompt.replace(theirs, ours)
    t5 = {
        "model_type": "t5",
        "architectures": raw.get("architectures", ["HHEMv2ForSequenceClassification"]),
        "vocab_size": vocabulary,
        "d_model": width,
        "d_ff": gated,
        "d_kv": inner // heads,
        "num_layers": len(layers),
        "num_heads": heads,
        "feed_forward_proj": "gated-gelu",
        "relative_attention_num_buckets": buckets,
        # Called hallucinated and consistent there.
        "id2label": {"0": "contradiction", "1": "entailment"},
    }
    foundation = raw.get("foundation", _FOUNDATION)
    if not isinstance(foundation, str):
        raw.refuse("foundation", f"give the name of a model, such as {_FOUNDATION}")
    return Settings(t5, raw.where), {"template": prompt, "foundation": foundation}


def tokenizer_folder(source: str | os.PathLike, folder: Path, foundation: str) -> Path:
    """Where its tokenizer is: in its folder, else at its foundation on the hub.

    Raises:
      FileNotFoundError: when it has to be put in a folder of the user's own.
      ValueError: when the hub does not give it.
    """
    if (folder / "tokenizer.json").is_file():
        return folder
    if Path(source).is_dir():
        raise FileNotFoundError(
            f"{folder} has no tokenizer.json; copy that of {shown(foundation)} beside "
            "the weights, with its tokenizer_config.json"
        )
    return hub.folder(foundation, ("tokenizer*.json", "special_tokens_map.json"))
