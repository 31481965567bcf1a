"""Agents as the watchdog sees them: asked in words, they answer in words."""

from jaxhal.watchdog.agents.base import LONGEST as LONGEST
from jaxhal.watchdog.agents.base import Agent as Agent
from jaxhal.watchdog.agents.base import CallableAgent as CallableAgent
from jaxhal.watchdog.agents.base import Gate as Gate
from jaxhal.watchdog.agents.base import Pieces as Pieces
from jaxhal.watchdog.agents.base import Reply as Reply
from jaxhal.watchdog.agents.base import Streaming as Streaming
from jaxhal.watchdog.agents.base import ahead as ahead
from jaxhal.watchdog.agents.base import ask as ask
from jaxhal.watchdog.agents.base import failed as failed
from jaxhal.watchdog.agents.base import named as named
from jaxhal.watchdog.agents.base import streamed as streamed
from jaxhal.watchdog.agents.base import together as together
from jaxhal.watchdog.agents.endpoint import EndpointAgent as EndpointAgent
from jaxhal.watchdog.agents.local import LocalAgent as LocalAgent
from jaxhal.watchdog.agents.rag import FROM_PASSAGES as FROM_PASSAGES
from jaxhal.watchdog.agents.rag import Passages as Passages
from jaxhal.watchdog.agents.rag import RagAgent as RagAgent
