"""Reading forwards: one compiled pass turns every layer's rows into small features.

Prompt rows go through blocked attention and are dropped.  Only the ``R + 1`` rows from
the last prompt token on are shown to the reducers, which run inside the scan over
layers, so no array of heads x seq x seq exists at any time.
"""

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from jaxhal.models import decoder
from jaxhal.models.batching import check_rows
from jaxhal.models.config import Config
from jaxhal.models.lm import LM
from jaxhal.models.ops import STANDARD, Ops
from jaxhal.rows import Named, Rows, layer_indices
from jaxhal.types import Batch, Reducer


def read(lm: LM, batch: Batch, reducers: Mapping[str, Any]) -> dict[str, Any]:
    """Reads a batch once and returns every reducer's feature, by name.

    Args:
      lm: the model.
      batch: from ``lm.encode``.
      reducers: name -> reducer; frozen dataclasses, so that equal ones compile once.

    Returns:
      Features of attention reducers are ``[layer, batch, heads, ...]``, of hidden-state
      reducers ``[layer, batch, ...]``, of logit reducers ``[batch, ...]``; row-wise
      ones have a ``response`` axis that is zero on padding.

    Raises:
      TypeError: when a value is not a :class:`jaxhal.Reducer`.
      ValueError: on unknown layers, or rows longer than the model's context.
    """
    named = check(lm.config, reducers)
    check_rows(batch.valid, lm.config.context_length)
    features = read_jit(lm, batch, named)
    return {name: features[name] for name in reducers}


def check(config: Config, reducers: Mapping[str, Any]) -> Named:
    """The reducers as a hashable tuple, with errors raised before tracing."""
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
        if reducer.reads not in ("probs", "hidden", "logits"):
            raise ValueError(
                f"reducer {name!r} reads {reducer.reads!r}; use 'probs', 'hidden' or "
                "'logits'"
            )
        layer_indices(reducer, config)
    return tuple(reducers.items())


@jax.jit(static_argnames=("named", "ops"))
def read_jit(lm: LM, batch: Batch, named: Named, ops: Ops = STANDARD) -> dict[str, Any]:
    model = nnx.merge(lm.graphdef, lm.params)
    tokens, valid = jnp.asarray(batch.tokens), jnp.asarray(batch.valid)
    rows = Rows.of_batch(batch)
    tap = rows.tap(named, model)
    x, geo = decoder.begin(model, tokens, valid)
    hidden, attended, state, _ = decoder.run(model, x, geo, ops=ops, tap=tap)
    return rows.features(named, model, hidden, attended, state, ops)
