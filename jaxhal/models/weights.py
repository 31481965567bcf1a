"""Fills a decoder's parameters from named tensors, whoever stored them."""

import fnmatch
import math
import re
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import NamedSharding, PartitionSpec
from tqdm import tqdm

from jaxhal.io.progress import note
from jaxhal.models import blocks, parts, quantized
from jaxhal.models.config import Config
from jaxhal.models.decoder import Decoder
from jaxhal.models.gguf import GGUFSource
from jaxhal.models.mesh import agreed, laid
from jaxhal.models.parameter import Parameter, Source, enter, room_for
from jaxhal.models.quantized import Stored, is_stored
from jaxhal.models.safetensors import SafetensorsSource
from jaxhal.models.tables import Table

# Stored names of what sees images, or guesses several tokens ahead.
_BESIDE = (
    *("*vision_tower*", "*multi_modal_projector*", "model.visual.*", "*mtp.*"),
    *("*audio_tower*", "*embed_vision*", "*embed_audio*"),
)
# Those that carry nothing a decoder of these families computes with.
_IGNORED = (
    *_BESIDE,
    "*rotary_emb.inv_freq",
    "*attn.bias",
    "*attn.masked_bias",
    "rope_freqs.weight",
    "rope_factors_*.weight",
    "lm_head.weight",
    "output.weight",
)


Place = Callable[[str, tuple[int, ...]], NamedSharding]


def abstract(
    config: Config, dtype: Any, module: Callable[..., nnx.Module] = Decoder
) -> tuple[Any, Any]:
    """``(graphdef, params)`` with shapes only, nothing allocated."""
    model = nnx.eval_shape(lambda: module(config, dtype, nnx.Rngs(0)))
    return nnx.split(model)


def is_outline(leaf: Any) -> bool:
    """Whether a parameter was not loaded, and is a shape alone."""
    return isinstance(leaf, jax.ShapeDtypeStruct)


def paths(params: Any) -> list[tuple[str, Any]]:
    """``("blocks.mlp.up_proj.kernel", leaf)`` for every parameter."""
    keystr = jax.tree_util.keystr
    leaves = jax.tree_util.tree_leaves_with_path(params, is_leaf=is_stored)
    return [
        (".".join(re.findall(r"\['(\w+)'\]", keystr(path))), leaf)
        for path, leaf in leaves
    ]


def fill(
    config: Config,
    source: Source,
    table: Table,
    dtype: Any,
    module: Callable[..., nnx.Module] = Decoder,
    ignored: Sequence[str] = _IGNORED,
    packed: str = "",
    place: Place | None = None,
    only: tuple[str, ...] = ("",),
) -> tuple[Any, Any]:
    """``(graphdef, params)`` read from ``source``, one stored tensor at a time.

    ``place`` says over which devices a parameter of a path and shape is spread; the
    host then holds the part of one device at a time, of GGUF files the numbers of one
    layer or the blocks of all.

    ``ignored`` are patterns of stored names that ``module`` does not compute with.
    Matrices that ``source`` has in blocks stay so where ``packed`` is ``"stored"``;
    where it is a format's name they are put into blocks of that.  Parameters whose path
    begins with none of ``only`` are left as shapes.

    Raises:
      ValueError: listing together every tensor that is missing, has the wrong shape,
        holds NaN or infinity, or is stored but unknown to this architecture.
    """
    graphdef, shapes = abstract(config, dtype, module)
    ignored = *ignored, *_not_made(config)
    asked = sum(math.prod(leaf.shape) for _, leaf in paths(shapes))
    if asked > 2 * source.size:  # far more than one wrong tensor, before it is taken
        raise ValueError(
            f"the configuration of {source.where} asks for {asked:,} numbers and its "
            f"weights hold {source.size:,}; mend its sizes, such as vocab_size "
            f"{config.vocab_size}, hidden_size {config.hidden_size}, intermediate_size "
            f"{config.intermediate_size} and num_hidden_layers "
            f"{config.num_hidden_layers}, or download the weights again"
        )
    present, used, problems, arrays = source.names(), set(), [], []
    mesh = None
    for path, leaf in tqdm(paths(shapes), "reading weights", leave=False, disable=None):
        one = Parameter.of(path, leaf, table, present)
        used.update(one.names)
        if missing := [name for name in one.names if name not in present]:
            problems += [f"{name} is missing" for name in missing]
            continue
        if not path.startswith(only):
            arrays.append(leaf)
            continue
        sharding = None if place is None else place(path, leaf.shape)
        mesh = sharding and sharding.mesh
        array, found = _parameter(one, source, config, packed, sharding)
        problems += found
        arrays.append(array)
    extra = present - used
    for pattern in ignored:
        extra -= {*fnmatch.filter(extra, pattern)}
    family = config.family
    problems += [f"{x} is stored but unknown to {family}" for x in sorted(extra)]
    if problems := agreed(problems, mesh):
        listed = "; ".join(problems[:8])
        more = f"; and {len(problems) - 8} more" if len(problems) > 8 else ""
        raise ValueError(
            f"{source.where} does not fit its own configuration: {listed}{more}"
        )
    beside = {pattern: fnmatch.filter(present - used, pattern) for pattern in _BESIDE}
    if rest := ", ".join(
        f"{k.strip('*.')} ({len(of)})" for k, of in beside.items() if of
    ):
        note(f"{source.where}: not loaded, as text needs none of it: {rest}")
    return graphdef, jax.tree.unflatten(jax.tree.structure(shapes), arrays)


def _not_made(config: Config) -> list[str]:
    """Stored names of keys and values of layers that borrow those of others."""
    count = config.num_hidden_layers
    layers = range(count - config.borrowing, count)
    names = "model.layers.{}.self_attn.[kv]_*", "blk.{}.attn_[kv].*", "blk.{}.attn_k_*"
    return [name.format(layer) for layer in layers for name in names]


def laid_out(
    shapes: Any, source: GGUFSource | None, table: Table, packed: str, place: Place
) -> Any:
    """Parameters as :func:`fill` gives them, by shapes, types and places alone.

    Args:
      shapes: of the parameters as numbers, as :func:`abstract` gives them.
      source: asked for its formats alone, and only where they are kept.

    Raises:
      ValueError: on a tensor that is missing, or that cannot stay in its format.
    """
    present = set() if source is None else source.names()
    leaves = []
    for path, leaf in paths(shapes):
        one = Parameter.of(path, leaf, table, present)
        kinds = _kinds(one, source, packed)
        leaves.append(parts.outline_of(one, kinds, place(path, leaf.shape)))
    return jax.tree.unflatten(jax.tree.structure(shapes), leaves)


def _parameter(
    one: Parameter,
    source: Source,
    config: Config,
    packed: str,
    sharding: NamedSharding | None,
) -> tuple[jax.Array | Stored | None, list[str]]:
    """As numbers or in blocks, and what is wrong with it."""
    kinds = _kinds(one, source, packed)
    if sharding and isinstance(source, SafetensorsSource):
        if cut := parts.cut_of(one, source, config):
            if kinds:
                return parts.rounded_in_parts(one, cut, kinds[0], sharding)
            return parts.in_parts(one, cut, sharding)
    if kinds:
        return _packed(one, source, config, kinds, sharding)
    return _numbers(one, source, config, sharding)


def _numbers(
    one: Parameter, source: Source, config: Config, sharding: NamedSharding | None
) -> tuple[jax.Array, list[str]]:
    """A parameter as one array, and what is wrong with it."""
    shape, dtype, names = one.leaf.shape, one.leaf.dtype, one.names
    problems: list[str] = []

    def read(names: Sequence[str], array: np.ndarray) -> None:
        wanted = list(shape[one.lead :])
        for name, part in zip(names, array.reshape(-1, *wanted), strict=True):
            stored = one.stored(name, source)
            try:
                value = one.origin.turn(stored, config)
            except (ValueError, IndexError):  # a shape that cannot be split
                value = None
            if value is None or value.shape != part.shape:
                found = f"shape {list(stored.shape)}, which does not give {one.path}"
                problems.append(f"{name} has {found} {wanted}")
                continue
            enter(part, value)
            if not np.isfinite(part).all():
                problems.append(f"{name} holds NaN or infinite values")

    if sharding is None or not one.stacked:
        array: Any = room_for(shape, dtype)
        read(names, array)
        return laid(array, sharding), problems
    # A layer at a time, as the host may not have room for all of them.
    array = jnp.zeros(shape, dtype, device=sharding)
    of_layer = NamedSharding(sharding.mesh, PartitionSpec(*sharding.spec[1:]))
    update = jax.lax.dynamic_update_index_in_dim
    put = jax.jit(update, static_argnums=3, donate_argnums=0, out_shardings=sharding)
    for layer, own in enumerate(np.split(np.asarray(names), shape[0])):
        part = room_for(shape[1:], dtype)
        read(own.tolist(), part)
        array = put(array, laid(part, of_layer), layer, 0)
    return array, problems


def _kinds(one: Parameter, source: Source | None, packed: str) -> Sequence[str]:
    """The format of each of a parameter's tensors; none of one kept as numbers."""
    matrix = one.path.endswith((".kernel", ".embedding"))
    router = one.path.endswith((".router.kernel", ".gate.kernel"))
    if not packed or not matrix or router:
        return ()
    kinds, columns = [packed] * len(one.names), one.packed_shape[-1]
    if packed == "stored":
        assert isinstance(source, GGUFSource)
        kinds = [source.kind(name) for name in one.names]
    whole = (kind and columns % blocks.numbers_of_a_block(kind) == 0 for kind in kinds)
    return kinds if all(whole) else ()


def _packed(
    one: Parameter,
    source: Source,
    config: Config,
    kinds: Sequence[str],
    sharding: NamedSharding | None,
) -> tuple[Stored | None, list[str]]:
    """A parameter in blocks, or what is wrong with it."""

    def turn(rows: np.ndarray) -> np.ndarray:
        turned = one.origin.turn(rows, config)
        return turned.swapaxes(-1, -2) if one.kernel else turned

    packs, problems, wanted = [], [], list(one.packed_shape)
    for name, kind in zip(one.names, kinds, strict=True):
        try:
            if isinstance(source, GGUFSource):
                pack = source.packed(name, turn, kind)
            else:
                pack = blocks.rounded(kind, turn(one.stored(name, source)))
        except (ValueError, IndexError) as error:  # not to be split, or no blocks
            problems.append(f"{name} does not give {one.path} {wanted} ({error})")
            continue
        if (given := list(pack.shape)) != wanted:
            problems.append(f"{name} has shape {given} and {one.path} needs {wanted}")
        elif not pack.finite:
            problems.append(f"{name} holds NaN or infinite values")
        packs.append((kind, pack))
    if problems:
        return None, problems
    leaf = one.leaf
    return quantized.stored(packs, leaf.shape, leaf.dtype, one.kernel, sharding), []
