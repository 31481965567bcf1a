"""A watchdog for agents: explores where one begins to hallucinate, and guards it there.

References:
  Liu et al., Towards Mitigation of Hallucination for LLM-empowered Agents: Progressive
  Generalization Bound Exploration and Watchdog Monitor (HalMit), 2025.
"""

from jaxhal.watchdog.agents import Agent as Agent
from jaxhal.watchdog.agents import CallableAgent as CallableAgent
from jaxhal.watchdog.agents import Reply as Reply
from jaxhal.watchdog.agents.endpoint import EndpointAgent as EndpointAgent
from jaxhal.watchdog.agents.local import LocalAgent as LocalAgent
from jaxhal.watchdog.agents.rag import Passages as Passages
from jaxhal.watchdog.agents.rag import RagAgent as RagAgent
from jaxhal.watchdog.bounds import BoundaryStore as BoundaryStore
from jaxhal.watchdog.bounds import ExactStore as ExactStore
from jaxhal.watchdog.bounds import Hit as Hit
from jaxhal.watchdog.bounds import Point as Point
from jaxhal.watchdog.config import Talker as Talker
from jaxhal.watchdog.config import Watch as Watch
from jaxhal.watchdog.conversation import Conversation as Conversation
from jaxhal.watchdog.evaluators import CallableEvaluator as CallableEvaluator
from jaxhal.watchdog.evaluators import EndpointEvaluator as EndpointEvaluator
from jaxhal.watchdog.evaluators import Evaluator as Evaluator
from jaxhal.watchdog.evaluators import Judgement as Judgement
from jaxhal.watchdog.evaluators import ReferenceEvaluator as ReferenceEvaluator
from jaxhal.watchdog.explore import Explored as Explored
from jaxhal.watchdog.explore import Explorer as Explorer
from jaxhal.watchdog.guarding import Check as Check
from jaxhal.watchdog.guarding import Watchdog as Watchdog
from jaxhal.watchdog.milvus import MilvusStore as MilvusStore
from jaxhal.watchdog.monitor import PRESETS as PRESETS
from jaxhal.watchdog.monitor import Decision as Decision
from jaxhal.watchdog.monitor import Guard as Guard
from jaxhal.watchdog.monitor import decide as decide
from jaxhal.watchdog.monitor import monitor as monitor
from jaxhal.watchdog.plan import Node as Node
from jaxhal.watchdog.plan import Plan as Plan
from jaxhal.watchdog.plan import Training as Training
from jaxhal.watchdog.queries import Generator as Generator
