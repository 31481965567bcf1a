"""A text encoder as a pytree: ``TextEncoder(params, graphdef)`` with its tokenizer."""

import dataclasses
import difflib
import os
from pathlib import Path
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp

from jaxhal.models import registry
from jaxhal.models.encoders.config import EncoderConfig, read_encoder_config
from jaxhal.models.encoders.tokenizer import TextTokenizer
from jaxhal.models.encoders.weights import load_encoder_weights
from jaxhal.models.lm import _from_hub
from jaxhal.models.settings import Settings, read_json
from jaxhal.models.tokenizer import Tokenizer


class Pooling(NamedTuple):
    """How token vectors become one: which, and whether it gets unit length."""

    how: Literal["cls", "mean"]
    normalize: bool = False


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class TextEncoder:
    """A text encoder as data: parameters are leaves, everything else is static.

    Attributes:
      params: the parameters, an ``nnx`` state whose blocks are stacked over layers.
      graphdef: the static structure; ``nnx.merge(graphdef, params)`` is the module.
      config: what the model is.
      tokenizer: texts and pairs to tokens.
      pooling: how one vector is made of a text's; ``None`` when unknown.
      name: what it was loaded from.
    """

    params: Any
    graphdef: Any = dataclasses.field(metadata={"static": True})
    config: EncoderConfig = dataclasses.field(metadata={"static": True})
    tokenizer: TextTokenizer = dataclasses.field(metadata={"static": True})
    pooling: Pooling | None = dataclasses.field(default=None, metadata={"static": True})
    name: str = dataclasses.field(default="", metadata={"static": True})

    @property
    def labels(self) -> tuple[str, ...]:
        """Names of the classes, in the order of the logits; () without a classifier."""
        return self.config.labels


def load_encoder(
    source: str | os.PathLike,
    *,
    dtype: Any = jnp.float32,
    pooling: Literal["cls", "mean"] | None = None,
) -> TextEncoder:
    """Loads a BERT, RoBERTa, DeBERTa (v2, v3) or ModernBERT with its tokenizer.

    Args:
      source: a registry name, a folder with config.json and safetensors, or a Hugging
        Face hub id.  A folder comes first.
      dtype: of the parameters, ``float32`` or ``bfloat16``; softmax, norms and
        probabilities are float32 in both.
      pooling: how one vector is made of a text's, from the first token or as the mean;
        what the folder says when left out.  The folder also says whether it gets unit
        length.

    Raises:
      ValueError: on an unknown name, architecture, setting or pooling, or on weights
        that are cut short, of the wrong shape or not finite.
      FileNotFoundError: when config.json, weights or the tokenizer are missing.
    """
    if jnp.dtype(dtype) not in (jnp.dtype(jnp.float32), jnp.dtype(jnp.bfloat16)):
        raise ValueError(f"dtype is {dtype}; use float32 or bfloat16")
    folder = _folder(source)
    config = read_encoder_config(folder)
    tokenizer = TextTokenizer(Tokenizer.from_folder(folder).hf)
    tokenizer.check_ids(config.vocab_size, str(folder))
    found = _read_pooling(folder, pooling)
    graphdef, params = load_encoder_weights(folder, config, dtype)
    return TextEncoder(params, graphdef, config, tokenizer, found, str(source))


def _folder(source: str | os.PathLike) -> Path:
    name, path = str(source), Path(source)
    if path.is_dir():
        return path
    known = registry.names("encoder")
    if name in known:
        return registry.fetch(name)
    if name.count("/") == 1 and not path.is_absolute() and not name.startswith("."):
        return _from_hub(name)
    near = difflib.get_close_matches(name, known, n=1, cutoff=0.3)
    hint = f"; did you mean {near[0]!r}?" if near else ""
    raise ValueError(
        f"{name!r} is no folder, no known text encoder and no hub id ('owner/name')"
        f"{hint} (known encoders: {', '.join(known)})"
    )


def _read_pooling(folder: Path, how: Any) -> Pooling | None:
    """What the files of a sentence encoder say, ``how`` instead of theirs if given.

    Raises:
      ValueError: when they ask for another pooling or for more layers after it.
    """
    if how not in (None, "cls", "mean"):
        raise ValueError(f"pooling is {how!r}; use 'cls' or 'mean'")
    normalize = False
    if (folder / "modules.json").is_file():
        modules = read_json(folder / "modules.json")
        if not isinstance(modules, list):
            raise ValueError(f"{folder}/modules.json holds no list; download it again")
        named = [
            Settings(each, f"{folder}/modules.json").get("type") for each in modules
        ]
        kinds = [str(kind).rpartition(".")[2] for kind in named]
        more = [k for k in kinds if k not in ("Transformer", "Pooling", "Normalize")]
        if more:
            raise ValueError(f"{folder}/modules.json has {more[0]}, not computed here")
        normalize = "Normalize" in kinds
    path = folder / "1_Pooling" / "config.json"
    if how is None and path.is_file():
        modes = {"pooling_mode_cls_token": "cls", "pooling_mode_mean_tokens": "mean"}
        raw = Settings(read_json(path), str(path))
        asked = [k for k in raw if k.startswith("pooling_mode_") and raw[k] is True]
        if len(asked) != 1 or asked[0] not in modes:
            raise ValueError(
                f"{path} asks for {' and '.join(asked) or 'no pooling'}; one of "
                f"{' and '.join(modes)} is computed: choose with pooling="
            )
        how = modes[asked[0]]
    return None if how is None else Pooling(how, normalize)
