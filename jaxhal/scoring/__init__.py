"""Detectors at work: score, fit, save, stream, guide."""

from jaxhal.scoring.detection import detect as detect
from jaxhal.scoring.detection import score as score
from jaxhal.scoring.fitting import Fitted as Fitted
from jaxhal.scoring.fitting import fit as fit
from jaxhal.scoring.fitting import untrained as untrained
from jaxhal.scoring.guided import Guided as Guided
from jaxhal.scoring.guided import guide as guide
from jaxhal.scoring.inputs import Inputs as Inputs
from jaxhal.scoring.inputs import collect as collect
from jaxhal.scoring.released import released_lookback as released_lookback
from jaxhal.scoring.released import released_probe as released_probe
from jaxhal.scoring.saving import load as load
from jaxhal.scoring.saving import save as save
from jaxhal.scoring.streaming import stream_scores as stream_scores
