"""Which hidden state a probe looks at: one, or the best of a few in training."""

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

from jaxhal.classifiers.selection import Selected, Way, best_way
from jaxhal.detectors.base import Detector, Features, HeldOut, Targets, scores_of
from jaxhal.features.base import Feature
from jaxhal.features.hidden import HiddenStates, Layer, check_layer

# As jaxhal.features.hidden.state_number has them: two thirds up, and a few to choose
# from.
LAYER = 0.67
LAYERS = (0.33, 0.5, 0.67, 0.83)

# One, or several to choose from.
Choice = Layer | tuple[Layer, ...]


def several(layer: Choice) -> tuple[Layer, ...]:
    """A choice as a tuple; ValueError where there is none, or one is no layer."""
    layers = layer if isinstance(layer, tuple) else (layer,)
    if not layers:
        raise ValueError("layer is (); name one, or some to choose from in training")
    for one in layers:
        check_layer(one)
    return layers


def in_words(layers: tuple[Layer, ...]) -> str:
    """Which hidden state is looked at."""
    first, *others = layers
    if others:
        return f"hidden state chosen in training among {', '.join(map(str, layers))}"
    return f"hidden state {first}" + " of the way up" * isinstance(first, float)


def state_of(
    layer: Layer, tokens: Literal["response", "mean"] = "response"
) -> tuple[str, HiddenStates]:
    """A hidden state, under the name by which detectors share it."""
    name = f"hidden_{layer}" if tokens == "response" else f"hidden_{tokens}_{layer}"
    return name, HiddenStates(layers=(layer,), tokens=tokens)


def best_of(make: Callable[[Layer], Detector], layers: tuple[Layer, ...]) -> Detector:
    """The detector of the layer that suits best, chosen by grouped folds in training.

    Among equals it is the first.  All that any of them looks at is read, in one pass.

    Args:
      make: the detector of a layer, whose parameters have the same shapes for all, and
        whose summary does not name it.
      layers: to choose from; there is nothing to choose of a single one.
    """
    each = [make(layer) for layer in layers]
    first = each[0]._replace(summary=f"{each[0].summary}; {in_words(layers)}")
    if len(each) == 1:
        return first
    features: Mapping[str, Feature] = {n: f for one in each for n, f in one.features}

    def fit(inputs: tuple[Any, ...], targets: Targets) -> HeldOut:
        ways = [
            Way(partial(_fit, one, x, targets), partial(_scores, one, x))
            for one, x in zip(each, inputs, strict=True)
        ]
        known = targets.labels, targets.groups, targets.weight
        best, params, found, unseen = best_way(ways, *known)
        return HeldOut(Selected(params, {"layer": jnp.asarray(best)}, found), unseen)

    def decide(params: Selected, inputs: tuple[Any, ...]) -> Array:
        ways = [partial(_decide, one, x) for one, x in zip(each, inputs, strict=True)]
        return jax.lax.switch(params.setting["layer"], ways, params.params)

    of_tokens = [one.tokens for one in each if one.tokens is not None]

    def tokens(params: Selected, features: Features) -> Array:
        ways = [lambda inner, own=own: own(inner, features) for own in of_tokens]
        return jax.lax.switch(params.setting["layer"], ways, params.params)

    return first._replace(
        features=tuple(features.items()),
        inputs=lambda f: tuple(one.inputs(f) for one in each),
        decide=decide,
        fit=fit,
        fits=None,
        tokens=tokens if of_tokens else None,
    )


def _fit(detector: Detector, inputs: Any, targets: Targets, weight: Any) -> Any:
    assert detector.fit is not None
    return detector.fit(inputs, targets._replace(weight=weight))


def _decide(detector: Detector, inputs: Any, params: Any) -> Array:
    return detector.decide(params, inputs)


def _scores(detector: Detector, inputs: Any, params: Any) -> np.ndarray:
    return scores_of(detector, params, inputs)
