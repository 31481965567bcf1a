"""From a configuration to what it names: agents, bounds, evaluators, watchdogs."""

import dataclasses
import os
import re
from collections.abc import Sequence

from jaxhal.datasets import Question
from jaxhal.io.configuration import claim
from jaxhal.llm import entailment, hosts
from jaxhal.llm.endpoint import endpoint_of
from jaxhal.models.encoders.encoding import kept_encoder
from jaxhal.models.lm import kept_lm as model
from jaxhal.reading.keys import digest
from jaxhal.texts import filled
from jaxhal.watchdog.agents import Agent
from jaxhal.watchdog.agents.endpoint import EndpointAgent
from jaxhal.watchdog.agents.local import LocalAgent
from jaxhal.watchdog.agents.rag import FROM_PASSAGES, Passages, RagAgent
from jaxhal.watchdog.bounds import BoundaryStore, ExactStore
from jaxhal.watchdog.config import Talker, Watch, explored, guard_of
from jaxhal.watchdog.domain import check_unchanged, passages_of, questions_of
from jaxhal.watchdog.evaluators import EndpointEvaluator, Evaluator, ReferenceEvaluator
from jaxhal.watchdog.explore import Explorer
from jaxhal.watchdog.guarding import Watchdog
from jaxhal.watchdog.queries import Generator


def told(config: Watch, query: str, context: str) -> str:
    """The user's turn that the agent saw, as far as it is known here."""
    one = config.agent
    if one.passages:
        return filled(one.prompt or FROM_PASSAGES, passages=context, query=query)
    return filled(one.prompt or "{query}", query=query)


@hosts.brought("the configuration")
def agent_of(config: Watch, one: Talker, progress: bool | None = None) -> Agent:
    """Whoever answers."""
    endpoint = endpoint_of(one.endpoint or None, one.model if one.endpoint else None)
    agent: Agent
    if endpoint is None:
        prompt = "{query}" if one.passages or not one.prompt else one.prompt
        lm = model(one.model, one.dtype, one.mesh)
        agent = LocalAgent(lm, prompt, max_new_tokens=one.max_new_tokens)
    else:
        agent = EndpointAgent(
            dataclasses.replace(endpoint, timeout=one.timeout),
            concurrency=one.concurrency,
            per_second=one.per_second,
            max_tokens=one.max_new_tokens,
        )
    if not one.passages:
        return agent
    texts = passages_of(config, one.words)
    found = Passages(texts, config.encoder, progress=progress)
    return RagAgent(agent, found, k=one.passages, prompt=one.prompt or FROM_PASSAGES)


@hosts.brought("the configuration")
def store_of(config: Watch) -> BoundaryStore:
    """The bound, as far as it is known."""
    width = kept_encoder(config.encoder).config.hidden_size
    if config.store == "exact":
        return ExactStore(width, config.folder)
    from jaxhal.watchdog.milvus import MilvusStore

    # One collection for each exploration, in Milvus' own letters.
    letters = re.sub(r"\W", "_", config.name, flags=re.ASCII)
    name = f"boundary_{letters[:64]}_{digest(str(config.folder.resolve()))[:8]}"
    if config.store == "milvus":
        config.folder.mkdir(parents=True, exist_ok=True)
        return MilvusStore(width, config.folder / "bound.db", name)
    if config.store.endswith(".db"):
        return MilvusStore(width, config.store, name)
    token = os.environ.get("MILVUS_TOKEN", "") if hosts.keyed(config.store) else ""
    return MilvusStore(width, config.store, name, token)


@hosts.brought("the configuration")
def evaluator_of(config: Watch, known: Sequence[Question]) -> Evaluator:
    """Who judges answers."""
    endpoint = endpoint_of(config.judge_endpoint or None, config.judge_model or None)
    if endpoint is not None:
        return EndpointEvaluator(endpoint)
    return ReferenceEvaluator(
        known,
        contained=config.contained,
        similarity=config.judge_similarity,
        encoder=config.encoder,
    )


@hosts.brought("the configuration")
def explorer_of(config: Watch, progress: bool | None = None) -> Explorer:
    """Everything that explores, in a folder that is this configuration's."""
    if (config.folder / "config.yaml").is_file():
        claim(config.folder, config, explored)
    same = entailment.resolve(config.entailment)
    known, _ = questions_of(config)
    agent = agent_of(config, config.agent, progress)
    writer = agent_of(
        config,
        config.writer or dataclasses.replace(config.agent, passages=0, prompt=""),
    )
    evaluator = evaluator_of(config, known)
    kept_encoder(config.encoder)
    # Not before models were found.  Feedback may have come before an exploration.
    claim(config.folder, config, explored, beside=("bound.db", "points.jsonl"))
    check_unchanged(config, keep=True)
    return Explorer(
        agent,
        evaluator,
        Generator(writer, config.domain),
        [one.text for one in known],
        store_of(config),
        config.folder,
        plan=config.plan,
        training=config.training,
        encoder=config.encoder,
        entailment=same,
    )


@hosts.brought("the configuration")
def watchdog_of(config: Watch, progress: bool | None = None) -> Watchdog:
    """The watchdog of an exploration."""
    if (config.folder / "config.yaml").is_file():
        claim(config.folder, config, explored)
    plan, same = config.plan, entailment.resolve(config.entailment)
    return Watchdog(
        agent_of(config, config.agent, progress),
        store_of(config),
        guard=guard_of(config),
        encoder=config.encoder,
        samples=plan.samples,
        temperature=plan.temperature,
        answer_temperature=plan.answer_temperature,
        entailment=same,
        domain=config.domain,
    )
