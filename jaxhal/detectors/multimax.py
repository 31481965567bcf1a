"""MultiMax: each head of a probe looks at the most suspicious place of a response."""

from typing import Any

from jaxtyping import Array

from jaxhal.classifiers import multimax
from jaxhal.detectors import base
from jaxhal.detectors.layers import LAYER, Choice, best_of, several, state_of
from jaxhal.detectors.series import Series, flat
from jaxhal.features.hidden import Layer
from jaxhal.io.checks import at_least


@base.factory
def multimax_probe(layer: Choice = LAYER, window: int = 1) -> base.Detector:
    """Heads on the hidden state of every token, each by its highest value.

    A few made-up words in a long answer are not averaged away.

    Args:
      layer: which hidden state, as :mod:`~jaxhal.detectors.probes` has it.
      window: tokens whose values a head averages before it takes the highest, by
        learned attention: 1 is MultiMax; 10 the paper's max of rolling means.
    """
    at_least(1, window=window)

    def one(layer: Layer) -> base.Detector:
        name, state = state_of(layer)

        def decide(params: Any, x: Series) -> Array:
            return multimax.multimax_logits(params, *x, window=window)

        return base.Detector(
            "multimax_probe",
            f"ten heads, each by the highest mean of {window} tokens"
            if window > 1
            else "ten heads on hidden states, each by its highest token",
            base.LOG_ODDS,
            "Kramár et al. 2026, MultiMax and max of rolling means",
            features=((name, state),),
            inputs=lambda f: Series(f[name][0], f["valid"]),
            decide=decide,
            fit=lambda x, to: multimax.fit_multimax(
                *base.early_stopping(to, *flat(x)), window=window
            ),
        )

    return best_of(one, several(layer))
