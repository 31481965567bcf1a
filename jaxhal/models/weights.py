"""Fills a decoder's parameters from named tensors, whoever stored them."""

import fnmatch
import math
import re
from collections.abc import Callable, Collection, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import NamedSharding, PartitionSpec
from tqdm import tqdm

from jaxhal.io.progress import note
from jaxhal.models import blocks, quantized
from jaxhal.models.config import STACKS, Config
from jaxhal.models.decoder import Decoder
from jaxhal.models.gguf import GGUFSource
from jaxhal.models.quantized import Stored, is_stored
from jaxhal.models.safetensors import SafetensorsSource
from jaxhal.models.tables import Origin, Table, same, transpose

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
    source: SafetensorsSource | GGUFSource,
    table: Table,
    dtype: Any,
    module: Callable[..., nnx.Module] = Decoder,
    ignored: Sequence[str] = _IGNORED,
    packed: str = "",
    place: Callable[[str, tuple[int, ...]], NamedSharding] | None = None,
    only: tuple[str, ...] = ("",),
) -> tuple[Any, Any]:
    """``(graphdef, params)`` read from ``source``, one stored tensor at a time.

    ``place`` says over which devices a parameter of a path and shape is spread; the
    host then holds one layer's numbers of it at a time, or the blocks of all layers.

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
    for path, leaf in tqdm(paths(shapes), "reading weights", leave=False, disable=None):
        origin = _origin(path, leaf, table, present)
        names = _names(path, origin, leaf)
        used.update(names)
        if missing := [f"{name} is missing" for name in names if name not in present]:
            problems += missing
            continue
        if not path.startswith(only):
            arrays.append(leaf)
            continue
        sharding = None if place is None else place(path, leaf.shape)
        if kinds := _kinds(path, leaf, origin, source, packed):
            array, found = _packed(path, leaf, origin, source, config, kinds, sharding)
        else:
            array, found = _numbers(path, leaf, origin, source, config, sharding)
        problems += found
        arrays.append(array)
    extra = sorted(
        name
        for name in present - used
        if not any(fnmatch.fnmatch(name, pattern) for pattern in ignored)
    )
    problems += [f"{name} is stored but unknown to {config.family}" for name in extra]
    if problems:
        listed = "; ".join(problems[:8])
        more = f"; and {len(problems) - 8} more" if len(problems) > 8 else ""
        raise ValueError(
            f"{source.where} does not fit its own configuration: {listed}{more}"
        )
    beside = {pattern: fnmatch.filter(present - used, pattern) for pattern in _BESIDE}
    parts = [f"{key.strip('*.')} ({len(of)})" for key, of in beside.items() if of]
    if parts:
        rest = ", ".join(parts)
        note(f"{source.where}: not loaded, as text needs none of it: {rest}")
    return graphdef, jax.tree.unflatten(jax.tree.structure(shapes), arrays)


def _not_made(config: Config) -> list[str]:
    """Stored names of keys and values of layers that borrow those of others."""
    count = config.num_hidden_layers
    layers = range(count - config.borrowing, count)
    names = "model.layers.{}.self_attn.[kv]_*", "blk.{}.attn_[kv].*", "blk.{}.attn_k_*"
    return [name.format(layer) for layer in layers for name in names]


def laid_out(
    shapes: Any,
    source: GGUFSource | None,
    table: Table,
    packed: str,
    place: Callable[[str, tuple[int, ...]], NamedSharding],
) -> Any:
    """Parameters as :func:`fill` gives them, by shapes, types and places alone.

    Args:
      shapes: of the parameters as numbers, as :func:`abstract` gives them.
      source: asked for its formats alone, and only where they are kept.

    Raises:
      ValueError: on a tensor that is missing, or that cannot stay in its format.
    """

    present = set() if source is None else source.names()

    def one(path: str, leaf: Any) -> Any:
        sharding, origin = place(path, leaf.shape), _origin(path, leaf, table, present)
        kinds = _kinds(path, leaf, origin, source, packed)
        if not kinds:
            return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding)
        shape = _packed_shape(path, leaf, origin)
        made = {kind: blocks.outline(kind, shape) for kind in set(kinds)}
        packs, kernel = [(kind, made[kind]) for kind in kinds], path.endswith(".kernel")
        return quantized.stored(packs, leaf.shape, leaf.dtype, kernel, sharding)

    leaves = [one(path, leaf) for path, leaf in paths(shapes)]
    return jax.tree.unflatten(jax.tree.structure(shapes), leaves)


def _numbers(
    path: str,
    leaf: Any,
    origin: Origin,
    source: SafetensorsSource | GGUFSource,
    config: Config,
    sharding: NamedSharding | None,
) -> tuple[jax.Array, list[str]]:
    """A parameter as one array, and what is wrong with it."""
    if sharding is not None and isinstance(source, SafetensorsSource):
        if _cuts(path, leaf, origin, source):
            return _in_parts(path, leaf, origin, source, sharding)
    names, lead, problems = _names(path, origin, leaf), _lead(path, origin), []

    def read(names: Sequence[str], array: np.ndarray) -> None:
        parts = array.reshape(-1, *leaf.shape[lead:])
        for name, target in zip(names, parts, strict=True):
            stored = _stored(name, origin, source)
            if found := _into(target, stored, origin, config):
                problems.append(f"{name} {found.format(path=path)}")

    if sharding is None or not _stacked(path):
        array: Any = np.empty(leaf.shape, leaf.dtype)
        read(names, array)
        return jax.device_put(array, sharding), problems
    # A layer at a time, as the host may not have room for all of them.
    array = jnp.zeros(leaf.shape, leaf.dtype, device=sharding)
    of_layer = NamedSharding(sharding.mesh, PartitionSpec(*sharding.spec[1:]))
    put = jax.jit(_with_layer, donate_argnums=0, out_shardings=sharding)
    for layer in range(leaf.shape[0]):
        one, each = np.empty(leaf.shape[1:], leaf.dtype), len(names) // leaf.shape[0]
        read(names[layer * each :][:each], one)
        array = put(array, jax.device_put(one, of_layer), layer)
    return array, problems


def _with_layer(array: jax.Array, one: jax.Array, layer: Any) -> jax.Array:
    return jax.lax.dynamic_update_index_in_dim(array, one, layer, 0)


def _cuts(path: str, leaf: Any, origin: Origin, source: SafetensorsSource) -> bool:
    """Whether a part of a parameter is a part of what is stored, of the right shape."""
    if origin.turn not in (same, transpose):
        return False
    shape = leaf.shape[_lead(path, origin) :]
    wanted = shape[::-1] if origin.turn is transpose else shape
    return all(source.shape(name) == wanted for name in _names(path, origin, leaf))


def _in_parts(
    path: str,
    leaf: Any,
    origin: Origin,
    source: SafetensorsSource,
    sharding: NamedSharding,
) -> tuple[jax.Array, list[str]]:
    """A parameter of which each device's part alone is read, and what is wrong."""
    names, turn, problems = _names(path, origin, leaf), origin.turn is transpose, []

    def one(name: str, index: tuple[slice, ...]) -> np.ndarray:
        value = source.part(name, index[::-1] if turn else index)
        value = (value.T if turn else value).astype(leaf.dtype)
        if not np.isfinite(value).all() and name not in problems:
            problems.append(name)
        return value

    def part(index: Any) -> np.ndarray:
        lead = _lead(path, origin)
        of_each = np.reshape(names, leaf.shape[:lead])[index[:lead]]
        parts = [one(str(name), index[lead:]) for name in of_each.ravel()]
        return np.stack(parts).reshape(of_each.shape + parts[0].shape)

    where = sharding.addressable_devices_indices_map(leaf.shape)
    alike: dict[str, list[Any]] = {}  # slices have no hash before Python 3.12
    for device, index in where.items():
        alike.setdefault(str(index), []).append(device)
    # A part at a time, as what is read is there twice until it lies on its devices.
    put = []
    for devices in alike.values():
        value = part(where[devices[0]])
        put += [jax.device_put(value, device) for device in devices]
    array = jax.make_array_from_single_device_arrays(leaf.shape, sharding, put)
    return array, [f"{name} holds NaN or infinite values" for name in problems]


def _stacked(path: str) -> bool:
    """Whether a parameter leads with an axis of layers."""
    return path.startswith(STACKS)


def _lead(path: str, origin: Origin) -> int:
    """How many axes a parameter leads with that a stored tensor of it has not."""
    return _stacked(path) + ("{expert}" in origin.name)


def _stored(
    name: str, origin: Origin, source: SafetensorsSource | GGUFSource
) -> np.ndarray:
    if origin.half is None:
        return source.get(name)
    assert isinstance(source, SafetensorsSource)
    return source.half(name, origin.half)


def _kinds(
    path: str,
    leaf: Any,
    origin: Origin,
    source: SafetensorsSource | GGUFSource | None,
    packed: str,
) -> Sequence[str]:
    """The format of each of a parameter's tensors; none of one kept as numbers."""
    matrix = path.endswith((".kernel", ".embedding"))
    if not packed or not matrix or path.endswith((".router.kernel", ".gate.kernel")):
        return ()
    names, columns = _names(path, origin, leaf), _packed_shape(path, leaf, origin)[-1]
    kinds = [packed] * len(names)
    if packed == "stored":
        assert isinstance(source, GGUFSource)
        kinds = [source.kind(name) for name in names]
    whole = (kind and columns % blocks.numbers_of_a_block(kind) == 0 for kind in kinds)
    return kinds if all(whole) else ()


def _packed_shape(path: str, leaf: Any, origin: Origin) -> tuple[int, ...]:
    """Of what one tensor gives: rows and columns as they are packed, of each expert
    where it has those of a layer."""
    *lead, rows, columns = leaf.shape[_lead(path, origin) :]
    turned = path.endswith(".kernel")
    return (*lead, columns, rows) if turned else (*lead, rows, columns)


def _packed(
    path: str,
    leaf: Any,
    origin: Origin,
    source: SafetensorsSource | GGUFSource,
    config: Config,
    kinds: Sequence[str],
    sharding: NamedSharding | None,
) -> tuple[Stored | None, list[str]]:
    """A parameter in blocks, or what is wrong with it."""
    kernel, shape = path.endswith(".kernel"), _packed_shape(path, leaf, origin)

    def turn(rows: np.ndarray) -> np.ndarray:
        turned = origin.turn(rows, config)
        return turned.swapaxes(-1, -2) if kernel else turned

    def packs_of(name: str, kind: str) -> quantized.Packed:
        if isinstance(source, GGUFSource):
            return source.packed(name, turn, kind)
        return blocks.rounded(kind, turn(_stored(name, origin, source)))

    packs, problems = [], []
    for name, kind in zip(_names(path, origin, leaf), kinds, strict=True):
        try:
            pack = packs_of(name, kind)
        except (ValueError, IndexError) as error:  # not to be split, or no blocks
            problems.append(f"{name} does not give {path} {list(shape)} ({error})")
            continue
        if pack.shape != shape:
            given, wanted = list(pack.shape), list(shape)
            problems.append(f"{name} has shape {given} and {path} needs {wanted}")
        elif not pack.finite:
            problems.append(f"{name} holds NaN or infinite values")
        packs.append((kind, pack))
    if problems:
        return None, problems
    made = quantized.stored(packs, leaf.shape, leaf.dtype, kernel, sharding)
    return made, []


def _into(
    target: np.ndarray, stored: np.ndarray, origin: Origin, config: Config
) -> str | None:
    """Fills a parameter from a stored tensor, or says what is wrong with it."""
    try:
        value = origin.turn(stored, config)
    except (ValueError, IndexError):  # a shape that cannot be split
        value = None
    if value is None or value.shape != target.shape:
        given, wanted = list(stored.shape), list(target.shape)
        return f"has shape {given}, which does not give {{path}} {wanted}"
    with np.errstate(over="ignore"):
        target[...] = value
    return None if np.isfinite(target).all() else "holds NaN or infinite values"


def _origin(path: str, leaf: Any, table: Table, present: Collection[str]) -> Origin:
    """Where a parameter comes from, of the stored tensors that there are."""
    origin = table[path]
    if other := origin.instead:
        return other if _names(path, other, leaf)[0] in present else origin
    return origin


def _names(path: str, origin: Origin, leaf: Any) -> list[str]:
    if not _stacked(path):
        return [origin.name]
    layers = range(leaf.shape[0]) if origin.layers is None else origin.layers
    experts = range(leaf.shape[1] if "{expert}" in origin.name else 1)
    return [
        origin.name.format(layer, next=layer + 1, expert=expert)
        for layer in layers
        for expert in experts
    ]
