"""Reading forwards: one compiled pass turns every layer's rows into small features.

Prompt rows go through blocked attention and are dropped.  Only the ``R + 1`` rows from
the last prompt token on are shown to the reducers, which run inside the scan over
layers, so no array of heads x seq x seq exists at any time.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.core import Tracer

from jaxhal import lrp
from jaxhal.capture.taps import Named, Rows, at_depth
from jaxhal.features.base import Reducer
from jaxhal.io.showing import shown
from jaxhal.models import decoder
from jaxhal.models.batching import (
    Encoded,
    Planned,
    check_rows,
    collate,
    plan,
    plan_shared,
    rows_together,
)
from jaxhal.models.cache import positions, turned
from jaxhal.models.config import ATTENTION, Config
from jaxhal.models.lm import LM
from jaxhal.models.mesh import here, rows_at_once, spread
from jaxhal.models.ops import STANDARD
from jaxhal.types import Batch


def read(
    lm: LM, batch: Batch, reducers: Mapping[str, Any], *, copies: int = 1
) -> dict[str, Any]:
    """Reads a batch once and returns every reducer's feature, by name.

    Features of attention reducers are ``[layer, batch, heads, ...]``, of hidden-state
    reducers ``[layer, batch, ...]``, of logit and relevance reducers ``[batch, ...]``;
    row-wise ones have a ``response`` axis, zero on padding.

    Args:
      batch: from ``lm.encode``.
      reducers: name -> reducer; frozen dataclasses, so that equal ones compile once.
      copies: how many consecutive rows share a prompt, which is then read once for all.

    Raises:
      TypeError: when a value is not a :class:`jaxhal.Reducer`.
      ValueError: on unknown layers, on rows longer than the model's context, or on
        ``copies`` whose prompts differ.
    """
    if not isinstance(batch, Batch):
        raise TypeError(f"batch is a {type(batch).__name__}; give lm.encode(examples)")
    named = check(lm.config, reducers)
    check_rows(batch.valid, lm.config.context_length)
    if copies != 1:
        _check_copies(lm.config, batch, copies)
    batch = spread(batch, lm.params, copies)
    features = read_jit(lm.bare, batch, named, copies=copies)
    return {name: features[name] for name in reducers}


def read_rows(
    lm: LM, rows: Sequence[Encoded], reducer: Reducer, *, batch_size: int = 8
) -> list[Any]:
    """One feature of each of many answers, in order, read in batches of like length.

    Padding of the response is not cut off.
    """
    pad_id, found = lm.require_tokenizer().pad_id, {}
    for group in plan_reading(lm, rows, batch_size):
        some = [rows[place] for place in group.rows]
        batch = collate(
            some, pad_id, group.prompt_length, group.response_length, group.size
        )
        values = read(lm, batch, {"it": reducer}, copies=group.copies)["it"]
        leaves, tree = jax.tree.flatten(jax.device_get(here(values)))
        leaves = [np.moveaxis(leaf, reducer.batch_axis, 0) for leaf in leaves]
        for at, place in enumerate(group.rows):
            found[place] = jax.tree.unflatten(tree, [leaf[at] for leaf in leaves])
    return [found[place] for place in range(len(rows))]


def plan_reading(lm: LM, rows: Sequence[Encoded], batch_size: int) -> list[Planned]:
    """Batches of answers, whose prompts are read once each where the model allows it.

    The batch size is that of each device along ``data`` of a mesh; ValueError when it
    is below 1.
    """
    ways = rows_at_once(lm.params)
    if shares_prompts(lm.config):
        return plan_shared(rows, batch_size, ways)
    return plan(rows, rows_together(max(1, len(rows)), batch_size, ways))


def shares_prompts(config: Config) -> bool:
    """Whether a prompt's keys are the same whatever response follows it."""
    return not any(rope.by_length for rope in config.ropes)


def _check_copies(config: Config, batch: Batch, copies: int) -> None:
    rows = len(batch.tokens)
    if copies < 1 or rows % copies:
        raise ValueError(
            f"copies is {copies} for a batch of {rows} rows; it must divide them"
        )
    if not shares_prompts(config):
        raise ValueError(
            f"copies is {copies}, but this model's 'dynamic' rope turns a prompt by "
            "the length of its response; read it with copies=1"
        )
    if isinstance(batch.tokens, Tracer):
        return
    for name in ("tokens", "valid"):
        prompts = np.asarray(getattr(batch, name))[:, : batch.prompt_length]
        if (prompts != np.repeat(prompts[::copies], copies, axis=0)).any():
            raise ValueError(
                f"copies is {copies}, but rows of one run of {copies} have different "
                "prompts; put answers to one prompt next to each other"
            )


def check(config: Config, reducers: Mapping[str, Any]) -> Named:
    """The reducers as a hashable tuple, with errors raised before tracing.

    Shares of the layers become numbers, so that programs and stores know the same
    hidden state by one name.
    """
    if not isinstance(reducers, Mapping):
        raise TypeError(f"reducers are {shown(reducers)}; give them by name, in a dict")
    for name, reducer in reducers.items():
        if not isinstance(reducer, Reducer):
            raise TypeError(
                f"reducer {name!r} is {reducer!r}; give an instance of a "
                "jaxhal.Reducer subclass"
            )
        try:
            hash(reducer)
        except TypeError as error:
            raise TypeError(
                f"reducer {name!r} is no static value ({error}); give it tuples "
                "instead of lists or arrays"
            ) from error
        if reducer.reads not in ("probs", "hidden", "logits", "lens", "relevance"):
            raise ValueError(
                f"reducer {name!r} reads {reducer.reads!r}; use 'probs', 'hidden', "
                "'logits' or 'lens'"
            )
        if reducer.reads == "probs" and not config.layers_with(*ATTENTION):
            raise ValueError(
                f"reducer {name!r} reads attention, and all layers of this model have "
                "linear attention, which has no rows of it; use detectors of hidden "
                "states or probabilities"
            )
    return tuple((name, at_depth(one, config)) for name, one in reducers.items())


@jax.jit(static_argnames=("named", "copies"))
def read_jit(lm: LM, batch: Batch, named: Named, copies: int = 1) -> dict[str, Any]:
    backwards = {n: r for n, r in named if r.reads == "relevance"}
    forwards = tuple((n, r) for n, r in named if n not in backwards)
    out = lrp.features(lm, batch, backwards) if backwards else {}
    return out | _forwards(lm, batch, forwards, copies) if forwards else out


def _forwards(lm: LM, batch: Batch, named: Named, copies: int) -> dict[str, Any]:
    model = nnx.merge(lm.graphdef, lm.params)
    tokens, valid = jnp.asarray(batch.tokens), jnp.asarray(batch.valid)
    rows, prefix, before = Rows.of_batch(batch), None, None
    shared = batch.prompt_length - 1  # the last token is the first explicit row
    if copies == 1 or not shared:
        x, geo = decoder.begin(model, tokens, valid)
    else:  # rows of their own, after the keys and values of their prompts
        prompts = tokens[::copies, :shared], valid[::copies, :shared]
        x, geo = decoder.begin(model, *prompts)
        before, *_, kept = decoder.run(model, x, geo, ops=STANDARD, keep=True)
        keys, values, *states = kept
        before = jnp.repeat(before, copies, axis=0)
        states = (jnp.repeat(state, copies, axis=1) for state in states)
        prefix = turned(keys), values, *states
        position, length = positions(valid), jnp.sum(valid, axis=1, dtype=jnp.int32)
        own = position[:, shared:]
        geo = decoder.geometry(model.config, own, position, valid, length)
        x, geo = decoder.embed(model, tokens[:, shared:], geo)
        rows = dataclasses.replace(rows, first=0)
    tap = rows.tap(named, model)
    hidden, attended, state, _ = decoder.run(
        model, x, geo, ops=STANDARD, tap=tap, prefix=prefix
    )
    return rows.features(named, model, hidden, attended, state, before)
