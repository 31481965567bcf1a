"""INSIDE: how far apart sampled answers lie in the reader's middle layer."""

import dataclasses
import functools
from typing import Any, Literal

import jax
import numpy as np

from jaxhal.detectors.base import Detector, Features, factory, measured
from jaxhal.detectors.settings import Settings, draw_of
from jaxhal.features import eigenscore as spread
from jaxhal.features.hidden import HiddenStates
from jaxhal.generation import Sampling
from jaxhal.reading.bulk import Bulk, Measure
from jaxhal.reading.samples import Draw

# How the published codes sample, by preset.
_PUBLISHED = {
    "official": Draw(
        n=10,
        max_new_tokens=256,
        sampling=Sampling(temperature=0.5, top_p=0.99, top_k=10),
    ),
    "lm_polygraph": Draw(n=10, max_new_tokens=256),
    "toha": Draw(n=20, max_new_tokens=256),
}


@dataclasses.dataclass(frozen=True)
class Embedded(Measure):
    """A hidden state of each sample, ``{"values", "valid"}``."""

    draw: Draw
    tokens: Literal["last", "before_last", "mean"]

    @property
    def axes(self) -> dict[str, tuple[str, ...]]:
        return {"values": ("samples", "width"), "valid": ("samples",)}

    def prepare(self, bulk: Bulk) -> None:
        self(bulk)  # which reads the samples, too

    def __call__(self, bulk: Bulk) -> dict[str, np.ndarray]:
        reducer = HiddenStates(layers=(0.5,), tokens=self.tokens)
        shape = (1, bulk.lm.config.hidden_size)
        values, valid = bulk.read_samples(self.draw, reducer, shape)
        few = f"fewer than two of {self.draw.n} samples hold text"
        bulk.refuse((valid.sum(1) < 2).tolist(), few)
        return {"values": values[:, :, 0], "valid": valid}


@factory
def eigenscore(
    preset: str = "official",
    alpha: float | None = None,
    base: float | None = None,
    per_feature: bool | None = None,
    tokens: Literal["last", "before_last", "mean"] | None = None,
    draw: Settings = None,
) -> Detector:
    """INSIDE: how far apart the samples lie in the reader's middle layer.

    Fewer samples that hold text give higher scores; an answer with less than two is in
    error.

    Args:
      preset: of :data:`jaxhal.features.eigenscore.PRESETS`; ``"official"`` reads the
        last word of a sample, the others the end of the sequence.
      alpha, base, per_feature, tokens: instead of the preset's; which token stands for
        a sample is that of :class:`jaxhal.HiddenStates`.
      draw: how to sample, see :func:`jaxhal.detectors.settings.draw_of`.
    """
    form = spread.form_of(preset, alpha=alpha, base=base, per_feature=per_feature)
    how = draw_of(draw, _PUBLISHED[preset])
    if how.n < 2:
        raise ValueError(f"n is {how.n}; samples lie apart from two on")
    if tokens is None:
        tokens = "before_last" if preset == "official" else "last"
    states = Embedded(how, tokens)

    def inputs(features: Features) -> Any:
        found = features[states.feature]
        score = functools.partial(spread.eigenscore, preset=form)
        return jax.vmap(score)(found["values"], found["valid"])

    return Detector(
        "eigenscore",
        f"spread of {how} in the middle layer, {preset} preset",
        "mean log eigenvalue",
        "Chen et al., INSIDE, ICLR 2024",
        measured(states),
        inputs,
    )
