"""Hallucination detection for language models as pure, jit-compiled JAX transforms."""

import importlib
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

if TYPE_CHECKING:
    from jaxhal.capture.forward import read as read
    from jaxhal.features.base import Feature as Feature
    from jaxhal.features.base import OfRewrite as OfRewrite
    from jaxhal.features.base import OfText as OfText
    from jaxhal.features.base import Reducer as Reducer
    from jaxhal.features.hidden import HiddenStates as HiddenStates
    from jaxhal.features.lookback import LookbackRatio as LookbackRatio
    from jaxhal.features.lookback import lookback_ratio as lookback_ratio
    from jaxhal.features.topology import MaxPromptAttention as MaxPromptAttention
    from jaxhal.features.topology import MTopDiv as MTopDiv
    from jaxhal.features.topology import mtop_div as mtop_div
    from jaxhal.features.uncertainty import TokenEntropy as TokenEntropy
    from jaxhal.features.uncertainty import TokenLogprob as TokenLogprob
    from jaxhal.generation import GREEDY as GREEDY
    from jaxhal.generation import Generated as Generated
    from jaxhal.generation import Sampling as Sampling
    from jaxhal.generation import generate as generate
    from jaxhal.generation import prefill as prefill
    from jaxhal.generation import step as step
    from jaxhal.generation import stream as stream
    from jaxhal.models.lm import LM as LM
    from jaxhal.models.lm import load as load
    from jaxhal.reading.extract import extract as extract
    from jaxhal.reporting.report import Report as Report
    from jaxhal.scoring.detection import detect as detect
    from jaxhal.scoring.detection import score as score
    from jaxhal.scoring.streaming import stream_scores as stream_scores
    from jaxhal.types import Batch as Batch
    from jaxhal.types import Example as Example
    from jaxhal.types import Label as Label
    from jaxhal.types import View as View

# Public name -> module, imported at first use so that `jaxhal --help` needs no JAX.
_HOMES = {
    "Batch": "types",
    "Example": "types",
    "Feature": "features.base",
    "HiddenStates": "features.hidden",
    "LM": "models.lm",
    "Label": "types",
    "LookbackRatio": "features.lookback",
    "MTopDiv": "features.topology",
    "MaxPromptAttention": "features.topology",
    "GREEDY": "generation",
    "Generated": "generation",
    "OfRewrite": "features.base",
    "OfText": "features.base",
    "Reducer": "features.base",
    "Report": "reporting.report",
    "Sampling": "generation",
    "TokenEntropy": "features.uncertainty",
    "TokenLogprob": "features.uncertainty",
    "View": "types",
    "detect": "scoring.detection",
    "extract": "reading.extract",
    "generate": "generation",
    "load": "models.lm",
    "lookback_ratio": "features.lookback",
    "mtop_div": "features.topology",
    "prefill": "generation",
    "read": "capture.forward",
    "relevance": "lrp",
    "relevance_means": "lrp",
    "relevance_resampled": "lrp",
    "score": "scoring.detection",
    "step": "generation",
    "stream": "generation",
    "stream_scores": "scoring.streaming",
}
_MODULES = (
    "capture",
    "datasets",
    "detectors",
    "evaluation",
    "experiments",
    "features",
    "llm",
    "lrp",
    "models",
    "reading",
    "reporting",
    "scoring",
    "tuning",
    "watchdog",
)

__all__ = sorted([*_HOMES, *_MODULES])  # pyright: ignore[reportUnsupportedDunderAll]


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        return getattr(importlib.import_module(f"jaxhal.{_HOMES[name]}"), name)
    if name in _MODULES:
        return importlib.import_module(f"jaxhal.{name}")
    raise AttributeError(f"module 'jaxhal' has no attribute {name!r}")


def __dir__() -> list[str]:
    return [*__all__, "__version__"]
