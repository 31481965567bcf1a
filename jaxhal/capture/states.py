"""Hidden states that are there already: what reducers make of them, no layer run."""

import dataclasses
from collections.abc import Iterable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

from jaxhal.capture.forward import check
from jaxhal.capture.taps import Named, Rows, layer_indices
from jaxhal.features.base import Reducer
from jaxhal.models.config import Config
from jaxhal.models.lm import LM
from jaxhal.models.mesh import spread
from jaxhal.models.ops import STANDARD
from jaxhal.models.weights import is_outline, paths
from jaxhal.types import Batch


def looked_at(reducers: Iterable[Reducer], config: Config) -> set[int]:
    """Numbers of the hidden states that reducers of these and of logits look at."""
    found = set()
    for one in reducers:
        last = (config.num_hidden_layers,)
        found.update(layer_indices(one, config) if one.reads == "hidden" else last)
    return found


def needed(reducers: Iterable[Reducer], config: Config) -> tuple[str, ...]:
    """Which weights that takes, as the beginnings of their paths: the final norm of the
    last state, and what makes logits of it.
    """
    reducers, found = [*reducers], []
    if config.num_hidden_layers in looked_at(reducers, config):
        found.append("norm.")
    if any(one.reads == "logits" for one in reducers):
        found.append("embed_tokens." if config.tie_word_embeddings else "lm_head.")
    return tuple(found)


def read_states(
    lm: LM,
    batch: Batch,
    reducers: Mapping[str, Any],
    numbers: tuple[int, ...],
    states: Float[Any, "batch explicit layer width"],
) -> dict[str, Any]:
    """The features that :func:`jaxhal.read` would make, of hidden states at hand.

    Args:
      lm: the reader; of its weights those that are :func:`needed` have to be loaded.
      reducers: of hidden states and, where the last of all is there, of logits.
      numbers: of the states, as :func:`jaxhal.features.hidden.state_number` has them;
        all that are looked at, and no others.
      states: rows of the last prompt token and of the response, what enters a layer;
        the last of all as it comes out of the layers, before the final norm.
    """
    named, known = check(lm.config, reducers), needed(reducers.values(), lm.config)
    for path, leaf in paths(lm.params) if known else ():
        if is_outline(leaf) and path.startswith(known):
            raise ValueError(
                f"weights {path!r} of {lm.name!r} were not loaded, and the last hidden "
                "state goes through them; use jaxhal.load, or give its name instead"
            )
    leaves, tree = jax.tree.flatten(lm.params)
    known = {at: x for at, x in enumerate(leaves) if not is_outline(x)}
    shapes = tuple(x if is_outline(x) else None for x in leaves)
    outline = lm.graphdef, tree, shapes
    batch, states = spread((batch, states), lm.params)
    features = _read_states(outline, known, batch, named, numbers, states)
    return {name: features[name] for name in reducers}


@jax.jit(static_argnames=("outline", "named", "numbers"))
def _read_states(
    outline: tuple[Any, Any, tuple[Any, ...]],
    known: dict[int, Array],
    batch: Batch,
    named: Named,
    numbers: tuple[int, ...],
    states: Array,
) -> dict[str, Any]:
    graphdef, tree, shapes = outline
    leaves = [known.get(at, shape) for at, shape in enumerate(shapes)]
    model = nnx.merge(graphdef, jax.tree.unflatten(tree, leaves))
    entering = dict(zip(numbers, jnp.moveaxis(states, 2, 0), strict=True))
    if (last := model.config.num_hidden_layers) in entering:
        entering[last] = model.norm(entering[last], STANDARD)
    rows = dataclasses.replace(Rows.of_batch(batch), first=0)
    return rows.of_states(named, model, entering)
