"""A watchdog for agents: explores where one begins to hallucinate, and guards it there.

References:
  Liu et al., Towards Mitigation of Hallucination for LLM-empowered Agents: Progressive
  Generalization Bound Exploration and Watchdog Monitor (HalMit), 2025.
"""

from jaxhal.watchdog.bounds import BoundaryStore as BoundaryStore
from jaxhal.watchdog.bounds import ExactStore as ExactStore
from jaxhal.watchdog.bounds import Hit as Hit
from jaxhal.watchdog.bounds import Point as Point
from jaxhal.watchdog.milvus import MilvusStore as MilvusStore
from jaxhal.watchdog.monitor import PRESETS as PRESETS
from jaxhal.watchdog.monitor import Decision as Decision
from jaxhal.watchdog.monitor import Guard as Guard
from jaxhal.watchdog.monitor import decide as decide
from jaxhal.watchdog.monitor import monitor as monitor
