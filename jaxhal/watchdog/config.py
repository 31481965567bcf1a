"""A watchdog as data: whose agent, in what domain, judged and guarded how."""

import dataclasses
import json
import os
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Int
from omegaconf import MISSING
from scipy.sparse import csr_array
from scipy.sparse.csgraph import connected_components

from jaxhal.datasets import Question
from jaxhal.datasets.named import check_questions, load_questions
from jaxhal.io.configuration import check_name, claim, structured
from jaxhal.io.files import replacing
from jaxhal.llm import entailment, hosts
from jaxhal.llm.endpoint import endpoint_of
from jaxhal.llm.judges import OverlapRule, references
from jaxhal.models.encoders.encoding import kept_encoder
from jaxhal.models.lm import DTYPES
from jaxhal.models.lm import kept_lm as model
from jaxhal.reading.keys import digest
from jaxhal.texts import sentences_of
from jaxhal.watchdog.agents import (
    FROM_PASSAGES,
    Agent,
    EndpointAgent,
    LocalAgent,
    Passages,
    RagAgent,
)
from jaxhal.watchdog.bounds import BoundaryStore, ExactStore
from jaxhal.watchdog.evaluators import (
    EndpointEvaluator,
    Evaluator,
    ReferenceEvaluator,
)
from jaxhal.watchdog.explore import Explorer, Plan
from jaxhal.watchdog.guarding import Watchdog
from jaxhal.watchdog.monitor import PRESETS, Guard
from jaxhal.watchdog.policy import Training
from jaxhal.watchdog.queries import Generator, plain

# Of a plan, what a later run of the same exploration may change.
_OPEN = ("gamma", "least", "budget", "width")
# Of an exploration's folder: says what questions it had.
_DIGEST = "questions.digest"


@dataclasses.dataclass
class Talker:
    """Something that answers.

    Attributes:
      model: of this process, or its name behind an endpoint.
      dtype: of the parameters of a model in this process.
      endpoint: the base address of an OpenAI-compatible server; the model is in this
        process where there is none.
      timeout: seconds that an attempt may wait for it to say something more.
      concurrency: requests to it that are open at a time.
      per_second: requests to it begun in a second.
      prompt: what it is told, with ``{query}`` in it, and ``{passages}`` where it
        answers from some, without which an endpoint is told the query alone; a plain
        one where left out.
      max_new_tokens: the most tokens of an answer.
      passages: of the domain that a query is answered from; 0 for none.
      words: of a passage, more or less.
    """

    model: str = "smollm2-135m"
    dtype: str = "float32"
    endpoint: str = ""
    timeout: float = 60.0
    concurrency: int = 8
    per_second: float | None = None
    prompt: str = ""
    max_new_tokens: int = 128
    passages: int = 0
    words: int = 100


@dataclasses.dataclass
class Watch:
    """A domain, an agent, and how it is explored and guarded.

    Attributes:
      name: of the folder that results go to.
      domain: what the queries are about, in words.
      questions: of :data:`jaxhal.datasets.named.QUESTIONS`, or a file of one's own
        that ends in ``.jsonl``, as :func:`jaxhal.datasets.questions_from` takes it.
      options: of their loader.
      explored: questions to explore from; those with equal words, answers or sources
        stay together.
      held_out: other questions, to judge the watchdog by.
      agent: who is watched.
      writer: who makes queries of others; the agent's model where left out.
      judge: ``reference``, of the nearest question explored from, or ``endpoint``.
      judge_similarity: from which cosine on a question is like a query.
      contained: an answer is right too if a reference stands in it by whole words, as
        suits references of a few words; of those held out as well.
      judge_endpoint, judge_model: of the model that judges.
      plan: fields of :class:`jaxhal.watchdog.Plan`.
      training: fields of :class:`jaxhal.watchdog.Training`.
      store: ``exact``; ``milvus`` for bound.db in the folder, which embedded Milvus
        Lite keeps, another file that ends in ``.db``, or the address of a Milvus
        server, whose token is in $MILVUS_TOKEN, for a server that
        :mod:`jaxhal.llm.hosts` lets have it.
      preset: of :data:`jaxhal.watchdog.PRESETS`.
      similarity: the guard's; that of the preset where left out.
      encoder: of queries.
      entailment: what decides whether two answers mean the same.
      reader: what baselines that look inside a model read with, where the agent is
        behind an endpoint.
      seed: of the questions drawn.
      out: folder that the named folder goes to.
    """

    name: str = MISSING
    domain: str = MISSING
    questions: str = MISSING
    options: dict[str, Any] = dataclasses.field(default_factory=dict)
    explored: int = 200
    held_out: int = 200
    agent: Talker = dataclasses.field(default_factory=Talker)
    writer: Talker | None = None
    judge: str = "reference"
    judge_similarity: float = 0.9
    contained: bool = False
    judge_endpoint: str = ""
    judge_model: str = ""
    plan: dict[str, Any] = dataclasses.field(default_factory=dict)
    training: dict[str, Any] = dataclasses.field(default_factory=dict)
    store: str = "exact"
    preset: str = "paper"
    similarity: float | None = None
    encoder: str = "all-minilm-l6-v2"
    entailment: str = "similarity"
    reader: str = "smollm2-135m"
    seed: int = 0
    out: str = "runs"

    @property
    def folder(self) -> Path:
        """Where results go."""
        return Path(self.out) / self.name


def load_watch(
    source: str | os.PathLike | Mapping[str, Any] | Watch, overrides: Iterable[str] = ()
) -> Watch:
    """A checked configuration.

    Args:
      source: a YAML file, a mapping or another configuration.
      overrides: dotted ``key=value`` pairs.

    Raises:
      FileNotFoundError: when the file does not exist.
      ValueError: on an unknown key, or a value that makes no sense.
    """
    config = structured(Watch, source, overrides)
    check_name(config.name)
    check_questions(config.questions)
    choices = {
        "judge": ("reference", "endpoint"),
        "preset": PRESETS,
    }
    for name, known in choices.items():
        if getattr(config, name) not in known:
            raise ValueError(
                f"{name} is {getattr(config, name)!r}; use one of {', '.join(known)}"
            )
    for one in (config.agent, config.writer):
        if one is not None and one.dtype not in DTYPES:
            raise ValueError(f"dtype is {one.dtype!r}; use one of {', '.join(DTYPES)}")
    for name in ("explored", "held_out"):
        if getattr(config, name) < 1:
            raise ValueError(f"{name} is {getattr(config, name)}; give at least 1")
    if (config.judge == "endpoint") != bool(
        config.judge_endpoint and config.judge_model
    ):
        raise ValueError(
            f"judge is {config.judge!r}, judge_endpoint {config.judge_endpoint!r} and "
            f"judge_model {config.judge_model!r}; an endpoint judges by all three"
        )
    plan_of(config)
    guard_of(config)
    return config


def plan_of(config: Watch) -> Plan:
    """How to explore.

    Raises:
      ValueError: on a field that no plan has, or a value that makes no sense.
    """
    fields = {**config.plan}
    try:
        if "ways" in fields:
            fields["ways"] = tuple(fields["ways"])
        return Plan(**fields, training=Training(**config.training))
    except TypeError as error:
        raise ValueError(f"plan or training: {error}") from error


def guard_of(config: Watch) -> Guard:
    """How queries are judged."""
    guard = PRESETS[config.preset]
    if config.similarity is None:
        return guard
    return dataclasses.replace(guard, similarity=config.similarity)


def questions_of(config: Watch) -> tuple[list[Question], list[Question]]:
    """Questions to explore from, and others; related ones are on one side.

    Raises:
      ValueError: when there are too few.
    """
    questions = load_questions(config.questions, config.options)
    several: list[list[Question]] = [[] for _ in questions]
    for one, group in zip(questions, related(questions), strict=True):
        several[group].append(one)
    several = [group for group in several if group]
    order = np.random.default_rng(config.seed).permutation(len(several))
    parts: tuple[list[Question], list[Question]] = ([], [])
    for at in order:
        side = 0 if len(parts[0]) < config.explored else 1
        parts[side].extend(several[at])
    if len(parts[1]) < config.held_out:
        total = len(parts[0]) + len(parts[1])
        raise ValueError(
            f"explored is {config.explored} and held_out {config.held_out}; there are "
            f"{total} questions, in {len(several)} groups of related ones"
        )
    return parts[0][: config.explored], parts[1][: config.held_out]


def check_unchanged(config: Watch) -> None:
    """Makes sure that the domain's questions are those that an exploration had.

    It was judged by their answers, and agents may answer from their contexts.

    Raises:
      FileNotFoundError: when it did not keep which those were.
      ValueError: when they are others.
    """
    path = config.folder / _DIGEST
    if not path.is_file():
        raise FileNotFoundError(
            f"{path} is not there, which says what questions {config.folder} was "
            "explored with; explore it again, which asks nothing twice"
        )
    if path.read_text("utf-8") != _digest(config):
        raise ValueError(
            f"{config.questions} has other questions, answers or contexts than when "
            f"{config.folder} was explored; explore under another 'name'"
        )


def _digest(config: Watch) -> str:
    questions = load_questions(config.questions, config.options)
    return digest(json.dumps([dataclasses.astuple(one) for one in questions]))


def related(questions: Sequence[Question]) -> Int[np.ndarray, " questions"]:
    """A number for each, the same for those that share words, answers or a source."""
    keys: dict[tuple, int] = {}
    pairs = []
    for at, one in enumerate(questions):
        shared: list[tuple] = [("words", plain(one.text)), ("answers", references(one))]
        shared += [("source", one.source)] if one.source else []
        pairs += [(at, keys.setdefault(key, len(keys))) for key in shared]
    rows, columns = np.array(pairs).T
    many = len(questions)
    graph = csr_array(
        (np.ones(len(rows)), (rows, many + columns)), (many + len(keys),) * 2
    )
    return connected_components(graph, directed=False)[1][:many]


def told(config: Watch, query: str, context: str) -> str:
    """The user's turn that the agent saw, as far as it is known here."""
    one = config.agent
    if one.passages:
        prompt = one.prompt or FROM_PASSAGES
        return prompt.replace("{passages}", context).replace("{query}", query)
    return (
        query
        if one.endpoint or not one.prompt
        else one.prompt.replace("{query}", query)
    )


def passages_of(config: Watch, words: int) -> list[str]:
    """What all questions of the domain come with, cut in pieces.

    That is their contexts, or else their answers, each piece below its question: an
    answer by itself seldom says what it is about.
    """
    texts: dict[str, None] = {}
    for one in load_questions(config.questions, config.options):
        head = "" if one.context else f"{one.text}\n"
        for text in [one.context] if one.context else references(one):
            for piece in _pieces(text, words):
                texts[head + piece] = None
    return list(texts)


def _pieces(text: str, words: int) -> list[str]:
    """Sentences put together up to so many words."""
    pieces: list[str] = []
    for sentence in sentences_of(text):
        longer = f"{pieces[-1]} {sentence}" if pieces else sentence
        if pieces and len(longer.split()) <= words:
            pieces[-1] = longer
        else:
            pieces.append(sentence)
    return [piece for piece in pieces if piece.strip()]


@hosts.brought("the configuration")
def agent_of(config: Watch, one: Talker, progress: bool | None = None) -> Agent:
    """Whoever answers.

    Raises:
      ValueError: on settings that make no sense.
    """
    endpoint = endpoint_of(one.endpoint or None, one.model if one.endpoint else None)
    agent: Agent
    if endpoint is None:
        prompt = "{query}" if one.passages or not one.prompt else one.prompt
        lm = model(one.model, one.dtype)
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
    """The bound, as far as it is known.

    Raises:
      ValueError: when it was made by another encoder.
      RuntimeError: when Milvus cannot be reached.
    """
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
        OverlapRule(config.contained),
        similarity=config.judge_similarity,
        encoder=config.encoder,
    )


@hosts.brought("the configuration")
def explorer_of(config: Watch, progress: bool | None = None) -> Explorer:
    """Everything that explores, in a folder that is this configuration's.

    Raises:
      ValueError: on settings that make no sense, a folder that holds another
        exploration, or questions that have changed since.
      OSError: when the folder cannot be written.
    """
    if (config.folder / "config.yaml").is_file():
        claim(config.folder, config, _explored)
    same = entailment.resolve(config.entailment)
    known, _ = questions_of(config)
    agent = agent_of(config, config.agent, progress)
    writer = agent_of(
        config,
        config.writer or dataclasses.replace(config.agent, passages=0, prompt=""),
    )
    # Not before a model was found.  Feedback may have come before an exploration.
    claim(config.folder, config, _explored, beside=("bound.db", "points.jsonl"))
    if (config.folder / _DIGEST).is_file():
        check_unchanged(config)
    else:
        with replacing(config.folder / _DIGEST) as file:
            file.write(_digest(config))
    return Explorer(
        agent,
        evaluator_of(config, known),
        Generator(writer, config.domain),
        [one.text for one in known],
        store_of(config),
        config.folder,
        plan=plan_of(config),
        encoder=config.encoder,
        entailment=same,
    )


@hosts.brought("the configuration")
def watchdog_of(config: Watch, progress: bool | None = None) -> Watchdog:
    """The watchdog of an exploration.

    Raises:
      ValueError: on settings that make no sense, or others than those of the
        exploration in the folder.
    """
    if (config.folder / "config.yaml").is_file():
        claim(config.folder, config, _explored)
    plan, same = plan_of(config), entailment.resolve(config.entailment)
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


def beside(config: Watch, name: str) -> Watch:
    """Another exploration of the same agent and questions, guarded in the same way.

    Raises:
      FileNotFoundError: when there is none of that name.
      ValueError: when it is of another agent, or began with other questions.
    """
    path = dataclasses.replace(config, name=name).folder / "config.yaml"
    if not path.is_file():
        raise FileNotFoundError(f"{path} is not there; explore {name!r} first")
    own = ("held_out", "preset", "similarity", "out")
    other = dataclasses.replace(
        load_watch(path), **{field: getattr(config, field) for field in own}
    )
    first, second = _explored(other), _explored(config)
    for field in (
        "questions",
        "options",
        "explored",
        "seed",
        "agent",
        "encoder",
        "contained",
    ):
        if getattr(first, field) != getattr(second, field):
            raise ValueError(
                f"{field} of {name!r} is {getattr(other, field)!r}, and of "
                f"{config.name!r} {getattr(config, field)!r}; compare explorations of "
                "one agent and the same questions"
            )
    return other


def _explored(config: Watch) -> Watch:
    """What an exploration depends on, which is not where things are."""
    plan = {k: v for k, v in config.plan.items() if k not in _OPEN}
    return dataclasses.replace(
        config,
        plan=plan,
        agent=_itself(config.agent),
        writer=config.writer and _itself(config.writer),
        preset=Watch.preset,
        similarity=Watch.similarity,
        held_out=Watch.held_out,
        reader=Watch.reader,
    )


def _itself(talker: Talker) -> Talker:
    """Who answers, wherever it is and however fast it may be asked."""
    return dataclasses.replace(
        talker,
        endpoint="somewhere" if talker.endpoint else "",
        timeout=Talker.timeout,
        concurrency=Talker.concurrency,
        per_second=Talker.per_second,
    )
