"""Detectors fitted beforehand, for models that the package knows by name.

``jaxhal run ragtruth`` makes them; each folder has a card that says from what.
"""

import functools
import math
from pathlib import Path
from typing import Any

from jaxhal.models.lm import LM
from jaxhal.scoring.fitting import Fitted
from jaxhal.scoring.saving import card_of, load

_ROOT = Path(__file__).parent
_CARDS = sorted(_ROOT.glob("*/*/card.json"))

# Names of the models that there are any for, and of what there is.
MODELS = tuple(dict.fromkeys(card.parent.parent.name for card in _CARDS))
NAMES = frozenset(card.parent.name for card in _CARDS)


@functools.cache
def shipped(model: str) -> dict[str, Fitted]:
    """Detector name -> detector fitted for a reader; none for most readers."""
    folders = [card.parent for card in _CARDS if card.parent.parent.name == model]
    return {folder.name: load(folder) for folder in folders}


def nearest(lm: LM) -> str:
    """Of the models that there are detectors for, the one most like another reader.

    One of its family if there is one, and then of about as many parameters.
    """

    def distance(model: str) -> tuple[bool, float]:
        card = _card(model)
        ratio = math.log(card["parameters"] / lm.size)
        return card["family"] != lm.config.family, abs(ratio)

    return min(MODELS, key=distance)


def readers(lm: LM | None = None) -> str:
    """In words, the models that there are any for, or that nearest to a reader."""
    if lm is None:
        return ", ".join(MODELS)
    return f"{nearest(lm)}, the nearest model with some"


@functools.cache
def _card(model: str) -> dict[str, Any]:
    """That of one of its detectors: all of them say the same of the model."""
    return card_of(_ROOT / model / "novel_words")
