"""What reading or writing takes of devices that are not here, by compiling for them.

XLA compiles for a described topology: memory and collectives are those of the real
program, and time is a bound by the devices' data sheets.
"""

import collections
import dataclasses
import math
import re
from collections.abc import Collection, Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxhal.bench import bounds, topologies
from jaxhal.bench.bounds import Bound, Shape
from jaxhal.bench.read import random_batch
from jaxhal.capture import forward as capture
from jaxhal.capture.taps import Named
from jaxhal.features.base import Reducer
from jaxhal.generation import Sampling, decoding
from jaxhal.generation.decoding import Decoding
from jaxhal.generation.steps import rowwise
from jaxhal.io.checks import at_least, one_of
from jaxhal.models import devices, placement, weights
from jaxhal.models import lm as lm_lib
from jaxhal.models import mesh as mesh_lib
from jaxhal.models.config import Config
from jaxhal.models.families import huggingface_table
from jaxhal.models.gguf import GGUFSource
from jaxhal.models.gguf_families import gguf_table
from jaxhal.models.lm import LM

# What there is to plan: `jaxhal.read` of answers, or `jaxhal.generate` of responses.
TASKS = ("read", "generate")
# Of a device's memory, what programs and weights may take.
_USABLE = 0.9
_COLLECTIVES = re.compile(
    r" (all-reduce|all-gather|all-to-all|collective-permute|reduce-scatter)"
    r"(?:-start)?\("
)
_SHAPE = re.compile(r"\b\w+\[(\d+(?:,\d+)+)\]")
# Fused attention, as compilers of TPUs and GPUs are asked for it; there experts'
# products are calls of that kind too.
_KERNEL = re.compile(
    r"%(?!ragged-dot)\S+ = .*"
    r'custom_call_target="(?:tpu_custom_call|__cudnn\$fmha\w*)"'
)


@dataclasses.dataclass(frozen=True)
class Plan:
    """What a task takes of each device; bytes and seconds."""

    kind: str  # of the devices
    mesh: Mapping[str, int]
    shape: Shape
    weights: int  # a device, as the following
    memory: float
    # To read whole answers, or prompts.
    first: Bound
    # To write one more token of every response; what it reads of memory is the weights
    # and the cache.
    step: Bound | None = None
    temporaries: int = 0
    outputs: int = 0  # features, and of responses the cache and what else is kept
    # In the program that reads answers or writes tokens; those of a layer count once.
    collectives: Mapping[str, int] = dataclasses.field(default_factory=dict)
    # Calls of fused attention, as many, and arrays with a number for every head and two
    # tokens, in the program that reads answers.
    kernels: int = 0
    squares: int = 0
    refused: str = ""  # what the compiler said of a program that is too large

    @property
    def fits(self) -> bool:
        """Whether nine tenths of the memory hold it."""
        return not self.refused and self.needed <= _USABLE * self.memory

    @property
    def needed(self) -> int:
        """Bytes of a device."""
        return self.weights + self.temporaries + self.outputs

    @property
    def seconds(self) -> float:
        """No batch is read, or read and answered, in less."""
        if self.step is None:
            return self.first.seconds
        # The first token comes with the prompts.
        return self.first.seconds + (self.shape.response - 1) * self.step.seconds

    @property
    def pace(self) -> float:
        """Answers a second, at most."""
        return self.shape.answers / self.seconds

    @property
    def an_answer(self) -> tuple[float, float]:
        """FLOP and bytes read of memory for one answer, by all devices together."""
        peak, new = devices.peak(self.kind), self.shape.response - 1
        assert peak is not None  # or there is no plan
        steps = () if self.step is None else (self.step,) * new
        passes = (self.first, *steps)
        read = sum(one.moving for one in passes) * peak.bytes
        flops, many = sum(one.flops for one in passes), math.prod(self.mesh.values())
        return flops / self.shape.answers, many * read / self.shape.answers


def plan(
    config: Config,
    topology: str,
    shape: Shape,
    reducers: Mapping[str, Reducer],
    *,
    task: str = "read",
    mesh: Mapping[str, int] | None = None,
    dtype: Any = jnp.bfloat16,
    packed: str = "",
    file: GGUFSource | None = None,
) -> Plan:
    """Compiles a task for a topology such as ``"v5e:2x4"`` or ``"h100:8"``.

    To ``read`` is one pass over prompts and responses, with relevance where a reducer
    asks for it; to ``generate`` is to read the prompts and then to write the responses,
    while row-wise reducers ride along.

    Without a ``mesh`` the one with the fewest devices along ``model`` that shares out
    the answers and fits; if none does, the last that was tried.

    Weights are numbers of ``dtype``, or where ``packed`` is a format such as ``"Q8_0"``
    in blocks of it; where it is ``"stored"``, in those of ``file``.

    Raises:
      ValueError: on an unknown task, a topology that does not exist, a shape without
        prompt or answers, reducers that the task has no use for, a mesh that does not
        divide the heads or is not of all devices, or a format that ``file`` has and
        weights cannot stay in.
      RuntimeError: without libtpu, or without JAX's CUDA plugin.
    """
    one_of(TASKS, task=task)
    at_least(1, answers=shape.answers, response=shape.response)
    if not shape.response < shape.tokens <= config.context_length:
        raise ValueError(
            f"tokens is {shape.tokens}; give more than the {shape.response} of the "
            f"response and at most the model's context of {config.context_length}"
        )
    if task == "read" and not reducers:
        raise ValueError("there are no reducers; name detectors that read a model")
    lm = jax.eval_shape(lambda: lm_lib.random(config, jax.random.key(0), dtype)).bare
    if task == "read":
        named = capture.check(config, reducers)
    else:
        named = rowwise(lm, reducers)
        decoding.check_sampled(reducers)
    table = huggingface_table(config) if file is None else gguf_table(config)
    found = None
    for one in topologies.meshes(topology, config, shape.answers, mesh):
        place = placement.on(one, config, mesh_lib.RULES)
        params = weights.laid_out(lm.params, file, table, packed, place)
        laid_out = dataclasses.replace(lm, params=params)
        found = _planned(laid_out, one, shape, named, task)
        if found.fits:
            break
    if found is None:
        raise ValueError(
            f"no mesh of {topology} shares {config.num_attention_heads} attention "
            f"heads and {shape.answers} answers; take other numbers of either"
        )
    return found


def _planned(lm: LM, mesh: Mesh, shape: Shape, named: Named, task: str) -> Plan:
    device, config = mesh.devices.flat[0], lm.config
    peak = devices.peak(device.device_kind)
    if peak is None:
        raise ValueError(
            f"the peak of {device.device_kind!r} is not known; known are "
            f"{', '.join(devices.PEAKS)}"
        )
    held = _bytes(lm.params)
    # Rows that cannot be shared are read by every row of devices.
    along, model = shape.answers % mesh.shape["data"] == 0, mesh.shape["model"]
    rows = shape.answers // (mesh.shape["data"] if along else 1)
    size = jax.tree.leaves(lm.params["norm"])[0].dtype.itemsize

    def bound(flops: int, logits: bool, tokens: int, passes: float = 1.0) -> Bound:
        speed = peak.flops * (mesh.size if along else model)
        read = _read_once(lm, logits, shape.answers * tokens)
        sent = passes * size * bounds.sent(config, rows * tokens, model)
        return Bound(flops, flops / speed, read / peak.bytes, sent / peak.links)

    if task == "read":
        logits = any(reducer.reads in ("logits", "lens") for _, reducer in named)
        flops = bounds.reading(config, shape, dict(named))
        passes = bounds.passes(shape, dict(named))
        first, step = bound(flops, logits, shape.tokens, passes), None
    else:
        prompt = shape.tokens - shape.response
        first = bound(bounds.prompts(config, shape), True, prompt)
        step = bound(bounds.step(config, shape), True, 1)
    made = Plan(
        kind=device.device_kind,
        mesh=dict(mesh.shape),
        shape=shape,
        weights=held,
        memory=peak.memory,
        first=first,
        step=step,
    )
    if held > peak.memory:
        return dataclasses.replace(made, refused="the weights alone are too large")
    spec = PartitionSpec("data") if along else PartitionSpec()
    batch = NamedSharding(mesh_lib.by_heads(mesh, config), spec)
    options = topologies.options(device)
    try:
        if step is None:
            return _reading(made, lm, named, batch, options)
        return _generating(made, step, lm, named, batch, options, peak)
    except jax.errors.JaxRuntimeError as error:
        if "RESOURCE_EXHAUSTED" not in str(error):
            raise
        return dataclasses.replace(made, refused=str(error).splitlines()[0])


def _reading(
    made: Plan, lm: LM, named: Named, rows: NamedSharding, options: dict[str, Any]
) -> Plan:
    batch = _batch(lm, made.shape, rows)
    program = capture.read_jit.lower(lm, batch, named).compile(options)
    memory: Any = program.memory_analysis()  # which these compilers give
    text, leaves = program.as_text() or "", jax.tree.leaves(lm.params)
    heads = lm.config.num_attention_heads // made.mesh["model"]
    held = {leaf.sharding.shard_shape(leaf.shape) for leaf in leaves}
    return dataclasses.replace(
        made,
        temporaries=memory.temp_size_in_bytes,
        outputs=memory.output_size_in_bytes,
        collectives=_collectives(text),
        kernels=_kernels(text),
        squares=_squares(text, heads, made.shape.tokens, held),
    )


def _generating(
    made: Plan,
    step: Bound,
    lm: LM,
    named: Named,
    rows: NamedSharding,
    options: dict[str, Any],
    peak: devices.Peak,
) -> Plan:
    """Of a loop that goes on without a second copy of the weights."""
    answers, tokens, new = made.shape
    alone = NamedSharding(rows.mesh, PartitionSpec())
    how = Decoding(Sampling(), named, stop_ids=(), pad_id=0)
    limit, until = (
        jax.ShapeDtypeStruct(shape, jnp.int32, sharding=alone)
        for shape in ((answers,), ())
    )
    keys = jax.eval_shape(lambda: jax.random.split(jax.random.key(0), answers))
    keys = jax.ShapeDtypeStruct(keys.shape, keys.dtype, sharding=alone)
    batch = _batch(lm, Shape(answers, tokens - new + 1, 1), rows)
    begin = decoding.start.lower(lm, batch, limit, keys, how, new_tokens=new, copies=1)
    begun = begin.compile(options)
    state = jax.tree.map(
        lambda leaf, at: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=at),
        begin.out_info,
        begun.output_shardings,
    )
    # As `cache.laid` puts them before the loop.
    key, value = jax.tree.map(
        lambda leaf, at: jax.ShapeDtypeStruct(
            leaf.shape, leaf.dtype, sharding=at.sharding
        ),
        (state.cache.key, state.cache.value),
        (state.cache.prefix[1], state.cache.prefix[1]),
    )
    cache = dataclasses.replace(state.cache, key=key, value=value)
    state = dataclasses.replace(state, cache=cache)
    going = decoding.go_on.lower(lm, state, until, how).compile(options)
    # States are written as well.
    moved = _bytes((cache.prefix, cache.key, cache.value, cache.states, cache.states))
    before: Any = begun.memory_analysis()
    after: Any = going.memory_analysis()
    # Of the state, what is not written in its place.
    again = after.output_size_in_bytes - after.alias_size_in_bytes
    return dataclasses.replace(
        made,
        step=step._replace(moving=step.moving + moved / peak.bytes),
        temporaries=max(before.temp_size_in_bytes, after.temp_size_in_bytes + again),
        outputs=before.output_size_in_bytes,
        collectives=_collectives(going.as_text() or ""),
    )


def _collectives(text: str) -> Mapping[str, int]:
    return collections.Counter(_COLLECTIVES.findall(text))


def _kernels(text: str) -> int:
    """Calls of fused attention in a program.

    >>> call = '{} = bf16[8] custom-call(), custom_call_target="tpu_custom_call"'
    >>> _kernels("\\n".join(map(call.format, ("%splash_mha.1", "%ragged-dot-none.2"))))
    1
    """
    return len(_KERNEL.findall(text))


def _squares(
    text: str, heads: int, tokens: int, held: Collection[tuple[int, ...]] = ()
) -> int:
    """Arrays of a program that have a number for each of some heads and two tokens.

    But for weights, whose shapes are ``held``.

    >>> _squares("f32[2,4,64,64]{3,2,1,0} bf16[64,64] f32[8,8,64]", 4, 64)
    1
    """
    found = (tuple(map(int, one.split(","))) for one in _SHAPE.findall(text))
    shapes = {tuple(side for side in shape if side > 1) for shape in found}
    least = heads * tokens**2
    return sum(
        shape.count(tokens) >= 2 and math.prod(shape) >= least
        for shape in shapes.difference(held)
    )


def _bytes(arrays: Any) -> int:
    """Those of one device."""
    return sum(
        math.prod(leaf.sharding.shard_shape(leaf.shape)) * leaf.dtype.itemsize
        for leaf in jax.tree.leaves(arrays)
    )


def _read_once(lm: LM, logits: bool, tokens: int) -> float:
    """Bytes of weights that a pass over some tokens has to read.

    Of tables it takes a few rows, and of experts those that its tokens go through.
    """
    vocabulary = "embed_tokens" if lm.config.tie_word_embeddings else "lm_head"
    needed = {"blocks", "borrowing_blocks", "norm", *([vocabulary] * logits)}
    parts = weights.paths(lm.params)
    leaves = [leaf for path, leaf in parts if path.partition(".")[0] in needed]
    experts = _bytes([leaf for leaf in leaves if len(leaf.shape) == 4])
    unread = 1 - bounds.experts_read(lm.config, tokens)
    return _bytes(leaves) - unread * experts


def _batch(lm: LM, shape: Shape, rows: NamedSharding) -> Any:
    """A batch by shape, type and place alone."""
    answers, tokens, response = shape
    batch = random_batch(lm.config.vocab_size, tokens, response, answers)
    return jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=rows), batch
    )
