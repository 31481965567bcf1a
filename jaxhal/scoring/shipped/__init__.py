"""Detectors fitted beforehand, for models that the package knows by name.

``jaxhal run ragtruth`` makes them; each folder has a card that says from what.
"""

import functools
from pathlib import Path

from jaxhal.scoring.fitting import Fitted
from jaxhal.scoring.saving import load

_ROOT = Path(__file__).parent
_CARDS = sorted(_ROOT.glob("*/*/card.json"))

# Names of the models that there are any for.
MODELS = tuple(dict.fromkeys(card.parent.parent.name for card in _CARDS))


@functools.cache
def shipped(model: str) -> dict[str, Fitted]:
    """Detector name -> detector fitted for a reader; none for most readers."""
    folders = [card.parent for card in _CARDS if card.parent.parent.name == model]
    return {folder.name: load(folder) for folder in folders}
