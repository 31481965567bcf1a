"""A language model as a pytree: ``LM(graphdef, params)`` with its tokenizer."""

import ctypes
import dataclasses
import functools
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.core import Tracer
from jax.sharding import Mesh
from jaxtyping import Array, Bool, Float, Int

from jaxhal.models import decoder, families, hub, placement, registry, tables
from jaxhal.models import mesh as mesh_lib
from jaxhal.models.batching import check_length, check_rows, collate
from jaxhal.models.config import Config
from jaxhal.models.families import read_config
from jaxhal.models.gguf import GGUFSource
from jaxhal.models.gguf_config import config_from_gguf
from jaxhal.models.gguf_families import gguf_table
from jaxhal.models.ops import STANDARD
from jaxhal.models.quantized import is_stored
from jaxhal.models.safetensors import SafetensorsSource
from jaxhal.models.tokenizer import Tokenizer
from jaxhal.models.weights import abstract, fill
from jaxhal.types import Batch, Example

#: Of parameters, as configurations name them.
DTYPES = ("float32", "bfloat16")
_NO_WEIGHTS = tuple(one for one in hub.WANTED if one != "*.safetensors")


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class LM:
    """A decoder as data: parameters are leaves, everything else is static.

    ``params`` is an ``nnx`` state whose blocks are stacked over layers;
    ``nnx.merge(graphdef, params)`` is the module.
    """

    params: Any
    graphdef: Any = dataclasses.field(metadata={"static": True})
    config: Config = dataclasses.field(metadata={"static": True})
    tokenizer: Tokenizer | None = dataclasses.field(
        default=None, metadata={"static": True}
    )
    name: str = dataclasses.field(default="", metadata={"static": True})

    def __repr__(self) -> str:
        leaves = jax.tree.leaves(self.params, is_leaf=is_stored)
        dtypes = " and ".join(sorted({str(leaf.dtype) for leaf in leaves}))
        stored = ", packed weights" if self.packed else ""
        return (
            f"LM({self.name!r}, {self.config.family}, "
            f"{self.config.num_hidden_layers} layers, {self.size:,} parameters, "
            f"{dtypes}{stored})"
        )

    @property
    def size(self) -> int:
        """How many parameters there are."""
        leaves = jax.tree.leaves(self.params, is_leaf=is_stored)
        return sum(leaf.size for leaf in leaves)

    @property
    def dtype(self) -> str:
        """Of the parameters: that of the largest array."""
        leaves = jax.tree.leaves(self.params, is_leaf=is_stored)
        return str(max(leaves, key=lambda leaf: leaf.size).dtype)

    @property
    def packed(self) -> bool:
        """Whether weights are kept as blocks of whole numbers, as a GGUF file's are."""
        return any(map(is_stored, jax.tree.leaves(self.params, is_leaf=is_stored)))

    def forward(
        self,
        tokens: Int[Array | np.ndarray, "batch seq"],
        valid: Bool[Array | np.ndarray, "batch seq"] | None = None,
    ) -> Float[Array, "batch seq vocab"]:
        """Next-token logits of every position, float32; ``valid`` is False on padding.

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
        rows = jax.device_put((tokens, valid))
        return forward(self.bare, *mesh_lib.spread(rows, self.params))

    def encode(self, examples: Sequence[Example], *, eos: bool = True) -> Batch:
        """Tokens of the examples in one seam-layout batch, padded to buckets.

        With ``eos`` each response ends with that token, as in the TOHA code.

        Raises:
          ValueError: on no examples, and naming both lengths when one is over the
            model's context.
        """
        if not examples:
            raise ValueError("no examples to encode; give at least one")
        tokenizer = self.require_tokenizer()
        encoded = [tokenizer.encode_example(example, eos=eos) for example in examples]
        for row in encoded:
            check_length(row, self.config.context_length)
        return collate(encoded, tokenizer.pad_id)

    @functools.cached_property
    def apart(self) -> "LM":
        """The same model, each layer's weights in arrays of their own; kept once made.

        See :func:`jaxhal.models.decoder.apart`.  ValueError where weights are packed.
        """
        if self.packed:
            raise ValueError(
                f"model {self.name!r} has packed weights, whose numbers would all be "
                "made at once with layers apart; use it as it is"
            )
        model = nnx.merge(self.graphdef, self.params)
        held = jax.tree.leaves(self.params)[0].devices()
        model = decoder.apart(model, next(iter(held)).platform == "cpu")
        graphdef, params = nnx.split(model)
        return dataclasses.replace(self, graphdef=graphdef, params=params)

    @functools.cached_property
    def bare(self) -> "LM":
        """The same model without tokenizer and name.

        What is compiled for one serves every model of its shapes, loaded from anywhere.
        """
        return dataclasses.replace(self, tokenizer=None, name="")

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
    graphdef, params = nnx.split(decoder.Decoder(config, dtype, nnx.Rngs(key)))
    return LM(params, graphdef, config, name=f"random {config.family}")


def load(
    source: str | os.PathLike,
    *,
    dtype: Any = jnp.float32,
    weights: str | None = None,
    mesh: Mesh | str | None = None,
    rules: Mapping[str, str | None] = mesh_lib.RULES,
) -> LM:
    """Loads a checkpoint as a pure function with its tokenizer.

    Args:
      source: a registry name (``jaxhal list models``), a folder with config.json and
        safetensors, a ``.gguf`` file, or a Hugging Face hub id.  A folder comes first,
        and one that is called like a registry model is named ``./`` and its name.
      dtype: of the parameters, ``float32`` or ``bfloat16``; softmax, norms and
        log-probabilities are float32 in both.
      weights: ``"stored"`` keeps a GGUF file's blocks of few bits, and makes numbers of
        them where they are used; ``"dequantised"`` makes all of them now, which takes
        more memory and less time.  By default what fits into half the memory at hand,
        that of all devices of a mesh; the numbers are the same.  ``"int8"`` and
        ``"int4"`` round the matrices of a folder to such blocks (Q8_0, Q4_0), 8.5 and
        4.5 bits a parameter.
      mesh: devices to spread the model over, :func:`jaxhal.make_mesh` or such as
        ``"data=2,model=4"``; everything then runs on all of them.  Of safetensors each
        device's part alone is read; devices may be those of several processes, which
        then all make the same calls.  By default all devices of this process, along
        ``model`` as few of them as the weights fit on; ``"data=1"`` is the first alone.
      rules: along which axis of the mesh parameters lie, by what they count;
        ``jaxhal.models.mesh.FULLY_SHARDED`` keeps one copy of each on the whole mesh.

    Raises:
      ValueError: on an unknown name, architecture, quantisation, on weights that are
        cut short, of the wrong shape or not finite, or on a mesh that does not divide
        the heads.
      FileNotFoundError: when config.json, weights or the tokenizer are missing.
    """
    check_dtype(dtype)
    mesh = mesh_lib.parse_mesh(mesh) if isinstance(mesh, str) else mesh
    found = _opened(source)
    config, stored = found.config, found.weights()
    packed, mesh = placement.choose(config, stored, dtype, weights, mesh, rules)
    place = None if mesh is None else placement.on(mesh, config, rules)
    graphdef, params = fill(
        config, stored, found.table, dtype, packed=packed, place=place
    )
    lm = LM(params, graphdef, config, found.tokenizer, found.name)
    del found, stored
    _give_back()
    return lm


def _give_back() -> None:
    """What reading took for a while, which glibc would keep for the process."""
    if sys.platform == "linux":
        trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
        if trim is not None:  # other libraries have none
            trim(0)


def outline(
    source: str | os.PathLike,
    *,
    dtype: Any = jnp.float32,
    only: tuple[str, ...] = (),
) -> LM:
    """A checkpoint's tokenizer and configuration, its parameters as shapes alone.

    Enough to look at states that an engine wrote.  Weights are opened, and asked of the
    hub, where parameters are loaded whose path begins with one of ``only``, such as
    ``"norm."``.  What is given and raised is as in :func:`load`.
    """
    check_dtype(dtype)
    found = _opened(source, hub.WANTED if only else _NO_WEIGHTS)
    if only:
        weights = found.weights()
        graphdef, params = fill(found.config, weights, found.table, dtype, only=only)
    else:
        graphdef, params = abstract(found.config, dtype)
    return LM(params, graphdef, found.config, found.tokenizer, found.name)


class _Checkpoint(NamedTuple):
    """What :func:`load` makes a model of; its weights are opened when asked for."""

    name: str
    config: Config
    tokenizer: Tokenizer
    table: tables.Table
    weights: Callable[[], SafetensorsSource | GGUFSource]


def _opened(
    source: str | os.PathLike, wanted: Sequence[str] = hub.WANTED
) -> _Checkpoint:
    path = registry.locate(source, wanted=wanted)
    found = registry.known_as(path)
    name = str(source) if found == str(path) else found
    if Path(source).is_dir() and name in registry.names():
        # By its name alone a model gets the detectors that were fitted for it.
        name = f"./{name}"
    if path.is_dir():
        config, tokenizer = read_config(path), Tokenizer.from_folder(path)
        bare = families.FAMILIES[config.family].bare
        weights = functools.partial(SafetensorsSource, path, bare)
        table = families.huggingface_table(config)
    else:
        stored = GGUFSource(path)
        config, tokenizer = config_from_gguf(stored), Tokenizer.from_gguf(stored)
        table, weights = gguf_table(config), lambda: stored
    tokenizer.check_ids(config.vocab_size, str(path))
    return _Checkpoint(name, config, tokenizer, table, weights)


def check_dtype(dtype: Any) -> None:
    """Raises ValueError on a type that parameters cannot have."""
    name = dtype if isinstance(dtype, str) else jnp.dtype(dtype).name
    if name not in DTYPES:
        raise ValueError(f"dtype is {dtype}; use {' or '.join(DTYPES)}")


def kept_lm(name: str, dtype: str, mesh: str = "") -> LM:
    """The model of a name, loaded once however many ask for it.

    Its files may change meanwhile: then it is loaded again.
    """
    return _kept(name, dtype, mesh, registry.stamp(name))


@functools.lru_cache(maxsize=1)
def _kept(name: str, dtype: str, mesh: str, files: tuple[Any, ...]) -> LM:
    del files
    return load(name, dtype=jnp.dtype(dtype), mesh=mesh or None)
