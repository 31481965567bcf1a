"""A language model as a pytree: ``LM(graphdef, params)`` with its tokenizer."""

import dataclasses
import difflib
import functools
import hashlib
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.core import Tracer
from jaxtyping import Array, Bool, Float, Int

from jaxhal.io import sealing
from jaxhal.io.files import staged
from jaxhal.models import decoder, registry, tables, weights
from jaxhal.models.batching import check_length, check_rows, collate
from jaxhal.models.config import Config, Rope, read_config
from jaxhal.models.gguf import GGUFSource, config_from_gguf, gguf_table
from jaxhal.models.ops import STANDARD
from jaxhal.models.tokenizer import Tokenizer
from jaxhal.types import Batch, Example

#: Of parameters, as configurations name them.
DTYPES = ("float32", "bfloat16")


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class LM:
    """A decoder as data: parameters are leaves, everything else is static.

    Attributes:
      params: the parameters, an ``nnx`` state whose blocks are stacked over layers.
      graphdef: the static structure; ``nnx.merge(graphdef, params)`` is the module.
      config: what the model is.
      tokenizer: text to tokens and back; ``None`` for a model without one.
      name: what it was loaded from.
    """

    params: Any
    graphdef: Any = dataclasses.field(metadata={"static": True})
    config: Config = dataclasses.field(metadata={"static": True})
    tokenizer: Tokenizer | None = dataclasses.field(
        default=None, metadata={"static": True}
    )
    name: str = dataclasses.field(default="", metadata={"static": True})

    def __repr__(self) -> str:
        count = sum(leaf.size for leaf in jax.tree.leaves(self.params))
        dtypes = {str(leaf.dtype) for leaf in jax.tree.leaves(self.params)}
        return (
            f"LM({self.name!r}, {self.config.family}, "
            f"{self.config.num_hidden_layers} layers, {count:,} parameters, "
            f"{' and '.join(sorted(dtypes))})"
        )

    def forward(
        self,
        tokens: Int[Array | np.ndarray, "batch seq"],
        valid: Bool[Array | np.ndarray, "batch seq"] | None = None,
    ) -> Float[Array, "batch seq vocab"]:
        """Next-token logits of every position, float32.

        Args:
          tokens: token ids.
          valid: False on padding (left or right); all True by default.

        Raises:
          ValueError: when a row is longer than the model's context or an id is not in
            the vocabulary.
        """
        if not isinstance(tokens, Tracer) and tokens.size:
            low, high = int(tokens.min()), int(tokens.max())
            if low < 0 or high >= self.config.vocab_size:
                raise ValueError(
                    f"token id {low if low < 0 else high} is outside the vocabulary of "
                    f"{self.config.vocab_size}; encode with this model's tokenizer"
                )
        if valid is None:
            valid = np.ones(tokens.shape, bool)
        check_rows(valid, self.config.context_length)
        return forward(self, jnp.asarray(tokens), jnp.asarray(valid))

    def encode(
        self,
        examples: Sequence[Example],
        *,
        eos: bool = True,
        prompt_length: int | None = None,
        response_length: int | None = None,
    ) -> Batch:
        """Tokens of the examples in one seam-layout batch, padded to buckets.

        Args:
          examples: answers with their prompts.
          eos: append the end-of-sequence token to each response, as the TOHA code does.
          prompt_length: the column ``P``; a bucket that fits by default.
          response_length: response columns ``R``; a bucket that fits by default.

        Raises:
          ValueError: naming both lengths when a prompt with its response is over the
            model's context, or when there is nothing to encode.
        """
        if not examples:
            raise ValueError("no examples to encode; give at least one")
        tokenizer = self.require_tokenizer()
        encoded = [tokenizer.encode_example(example, eos=eos) for example in examples]
        for row in encoded:
            check_length(row, self.config.context_length)
        return collate(encoded, tokenizer.pad_id, prompt_length, response_length)

    @functools.cached_property
    def apart(self) -> "LM":
        """The same model, each layer's weights in arrays of their own.

        Made once and kept as long as this one: a second copy of the layers.  See
        :func:`jaxhal.models.decoder.apart`.
        """
        model = decoder.apart(nnx.merge(self.graphdef, self.params))
        graphdef, params = nnx.split(model)
        return dataclasses.replace(self, graphdef=graphdef, params=params)

    def require_tokenizer(self) -> Tokenizer:
        """The tokenizer, or an error that says how to get one."""
        if self.tokenizer is None:
            raise ValueError(
                f"model {self.name!r} has no tokenizer; load it from a folder with "
                "tokenizer.json or from a GGUF file"
            )
        return self.tokenizer


@jax.jit
def forward(lm: LM, tokens: Array, valid: Array) -> Array:
    return decoder.unembed(*hidden_states(lm, tokens, valid), STANDARD)


def hidden_states(lm: LM, tokens: Array, valid: Array) -> tuple[decoder.Decoder, Array]:
    model = nnx.merge(lm.graphdef, lm.params)
    x, geo = decoder.begin(model, tokens, valid)
    return model, decoder.run(model, x, geo, ops=STANDARD)[0]


def random(config: Config, key: Array, dtype: Any = jnp.float32) -> LM:
    """A model of the given shape with random weights, for tests and benches."""
    model = decoder.Decoder(config, dtype, nnx.Rngs(key))
    graphdef, params = nnx.split(model)
    return LM(params, graphdef, config, name=f"random {config.family}")


def load(source: str | os.PathLike, *, dtype: Any = jnp.float32) -> LM:
    """Loads a checkpoint as a pure function with its tokenizer.

    Args:
      source: a registry name (``jaxhal list models``), a folder with config.json and
        safetensors, a ``.gguf`` file, or a Hugging Face hub id.  A folder comes first,
        and one that is called like a registry model is named ``./`` and its name.
      dtype: of the parameters, ``float32`` or ``bfloat16``; softmax, norms and
        log-probabilities are float32 in both.

    Raises:
      ValueError: on an unknown name, architecture, quantisation, or on weights that are
        cut short, of the wrong shape or not finite.
      FileNotFoundError: when config.json, weights or the tokenizer are missing.
    """
    if jnp.dtype(dtype) not in (jnp.dtype(jnp.float32), jnp.dtype(jnp.bfloat16)):
        raise ValueError(f"dtype is {dtype}; use float32 or bfloat16")
    name, path = str(source), Path(source)
    if path.is_dir():
        # By its name alone a model gets the detectors that were fitted for it.
        name = f"./{name}" if name in registry.names() else name
        return _load_folder(path, name, dtype)
    if path.suffix == ".gguf":
        if not path.is_file():
            raise FileNotFoundError(f"{path} does not exist")
        return _load_gguf(path, name, dtype, sealing.sha256(path))
    if name in registry.names():
        known = registry.entry(name).files[0].sha256
        return _load_gguf(registry.fetch(name), name, dtype, known)
    if name.count("/") == 1 and not path.is_absolute() and not name.startswith("."):
        return _load_folder(_from_hub(name), name, dtype)
    near = difflib.get_close_matches(name, registry.names(), n=1, cutoff=0.3)
    hint = f"; did you mean {near[0]!r}?" if near else ""
    raise ValueError(
        f"{name!r} is no folder, no .gguf file, no known model and no hub id "
        f"('owner/name'){hint} (known models: {', '.join(registry.names())})"
    )


@functools.lru_cache(maxsize=1)
def kept_lm(name: str, dtype: str) -> LM:
    """The model of a name, loaded once however many ask for it."""
    return load(name, dtype=jnp.dtype(dtype))


def _from_hub(repo: str) -> Path:
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError

    try:
        return Path(
            snapshot_download(
                repo, allow_patterns=["*.json", "*.safetensors", "*.model", "*.jinja"]
            )
        )
    except (HfHubHTTPError, LocalEntryNotFoundError, OSError) as error:
        raise ValueError(
            f"could not get {repo!r} from the Hugging Face hub ({error}); check the "
            "name, log in for gated models, or give a local folder"
        ) from error


def _load_folder(folder: Path, name: str, dtype: Any) -> LM:
    config = read_config(folder)
    tokenizer = Tokenizer.from_folder(folder)
    tokenizer.check_ids(config.vocab_size, str(folder))
    bare = "transformer." if config.family in ("gpt2", "falcon") else "model."
    source = weights.SafetensorsSource(folder, bare)
    graphdef, params = weights.fill(
        config, source, tables.huggingface_table(config), dtype
    )
    return LM(params, graphdef, config, tokenizer, name)


# The cache of GGUF files, one folder each, named by the file's content.
_CACHE_FORMAT = 3
_PARAMS, _ABOUT = "params.safetensors", "about.json"


def _load_gguf(path: Path, name: str, dtype: Any, content: str) -> LM:
    """Dequantises once and keeps the result, so that a second load reads arrays."""
    import filelock

    folder = registry.cache_dir() / "gguf" / f"{content}-{_CACHE_FORMAT}"
    about = _proved(folder)
    if about is None:
        folder.parent.mkdir(parents=True, exist_ok=True)
        with filelock.FileLock(folder.with_name(f".{folder.name}.lock")):
            about = _proved(folder)  # another process may have been first
            if about is None:
                if folder.is_dir():
                    print(f"jaxhal: {folder} is damaged; made anew", file=sys.stderr)
                about = _dequantise(path, folder)
    config = _config_from_json(about["config"])
    graphdef, params = weights.load_flat(folder / _PARAMS, config, dtype)
    return LM(params, graphdef, config, Tokenizer.from_folder(folder), name)


def _proved(folder: Path) -> dict[str, Any] | None:
    """What a folder of the cache says of itself, if it and all its files are whole."""
    try:
        about = sealing.read(folder / _ABOUT)
        sums = about["files"].items()
        return about if all(_sum(folder / each) == sum for each, sum in sums) else None
    except (FileNotFoundError, ValueError):
        return None


def _sum(path: Path) -> str:
    """Against accidents alone, at the speed of memory: weights are large."""
    import xxhash

    with path.open("rb") as file:
        return hashlib.file_digest(file, xxhash.xxh3_128).hexdigest()


def _dequantise(path: Path, folder: Path) -> dict[str, Any]:
    source = GGUFSource(path)
    config = config_from_gguf(source)
    tokenizer = Tokenizer.from_gguf(source.reader)
    tokenizer.check_ids(config.vocab_size, str(path))
    _, params = weights.fill(config, source, gguf_table(config), jnp.float32)
    with staged(folder) as made:
        tokenizer.save(made)
        weights.save_flat(made / _PARAMS, params)
        about = {
            "config": dataclasses.asdict(config),
            "files": {each: _sum(made / each) for each in os.listdir(made)},
        }
        sealing.write(made / _ABOUT, about)
    return about


def _config_from_json(raw: dict[str, Any]) -> Config:
    ropes = tuple(
        Rope(**{**rope, "divisors": tuple(rope["divisors"])}) for rope in raw["ropes"]
    )
    layers = {name: tuple(raw[name]) for name in ("rope_of_layer", "windows")}
    return Config(**{**raw, "ropes": ropes, **layers})
