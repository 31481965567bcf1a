"""A watchdog as data: whose agent, in what domain, judged and guarded how."""

import dataclasses
import operator
import os
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from jaxhal.datasets import check_questions
from jaxhal.io.checks import at_least, check_name, one_of
from jaxhal.io.configuration import MISSING, structured
from jaxhal.io.extras import need
from jaxhal.models.lm import DTYPES
from jaxhal.watchdog.index import check_cosine
from jaxhal.watchdog.monitor import PRESETS, Guard
from jaxhal.watchdog.plan import OPEN, Plan, Training

# What explorations that are compared have in common; what entropies depend on as well.
_ALIKE = ("questions", "options", "explored", "seed", "agent", "encoder", "contained")
_ALIKE += ("entailment", "plan.samples", "plan.temperature", "plan.answer_temperature")
# The stores that are no file and no server.
_STORES = ("exact", "milvus")


@dataclasses.dataclass
class Talker:
    """Something that answers.

    Attributes:
      model: of this process, or its name behind an endpoint.
      mesh: devices it is spread over, such as ``data=2,model=4``; by default all.
      endpoint: the base address of an OpenAI-compatible server; none for this process.
      timeout: seconds that an attempt may wait for it to say something more.
      concurrency: requests to it that are open at a time.
      per_second: requests to it begun in a second.
      prompt: with ``{query}`` in it, and ``{passages}`` where it answers from some;
        for an endpoint only there.
      passages: of the domain that a query is answered from; 0 for none.
      words: of a passage, more or less.
    """

    model: str = "smollm2-135m"
    dtype: str = "float32"
    mesh: str = ""
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
      domain: what the queries are about, in words.
      questions: of :data:`jaxhal.datasets.QUESTIONS`, or a ``.jsonl`` file, as
        :func:`jaxhal.datasets.questions_from` takes it; ``options`` are their loader's.
      explored: questions to explore from; related ones stay together.
      held_out: other questions, to judge the watchdog by.
      writer: who makes queries of others; the agent's model where left out.
      judge: ``reference``, of the nearest question explored from, or ``endpoint``.
      judge_similarity: from which cosine on a question is like a query.
      contained: an answer is right too if a reference stands in it by whole words.
      plan: of the exploration; ``training`` is that of its policy.
      store: ``exact``; ``milvus`` for bound.db in the folder, another file that ends in
        ``.db``, or the address of a Milvus server, whose token is in $MILVUS_TOKEN.
      preset: of :data:`jaxhal.watchdog.PRESETS`.
      similarity: the guard's; that of the preset where left out.
      reader: what baselines read with, where the agent is behind an endpoint.
      out: folder that the folder ``name`` goes to.
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
    plan: Plan = dataclasses.field(default_factory=Plan)
    training: Training = dataclasses.field(default_factory=Training)
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
        return Path(self.out) / self.name


def load_watch(
    source: str | os.PathLike | Mapping[str, Any] | Watch, overrides: Iterable[str] = ()
) -> Watch:
    """A checked configuration, from a YAML file, a mapping or another one.

    Raises:
      MissingExtra: unless all that a watchdog needs is installed.
      ValueError: on an unknown key, or a value that makes no sense.
    """
    need("watchdog")
    config = structured(Watch, source, overrides)
    check_name(config.name)
    check_questions(config.questions)
    one_of(("reference", "endpoint"), judge=config.judge)
    one_of(PRESETS, preset=config.preset)
    for name, one in (("agent", config.agent), ("writer", config.writer)):
        if one is None:
            continue
        one_of(DTYPES, dtype=one.dtype)
        if one.endpoint and one.prompt and not one.passages:
            raise ValueError(
                f"{name}.prompt is {one.prompt!r}, but an endpoint that is given no "
                "passages is sent queries as they are; leave the prompt out"
            )
    at_least(1, explored=config.explored, held_out=config.held_out)
    asked = bool(config.judge_endpoint and config.judge_model)
    if (config.judge == "endpoint") != asked:
        raise ValueError(
            f"judge is {config.judge!r}, judge_endpoint {config.judge_endpoint!r} and "
            f"judge_model {config.judge_model!r}; an endpoint judges by all three"
        )
    check_cosine(judge_similarity=config.judge_similarity)
    if not (config.store in _STORES or re.search(r"\.db$|^https?://", config.store)):
        raise ValueError(
            f"store is {config.store!r}; use {', '.join(_STORES)}, a file that ends in "
            ".db, or the address of a Milvus server, such as http://localhost:19530"
        )
    guard_of(config)
    return config


def guard_of(config: Watch) -> Guard:
    """How queries are judged."""
    guard = PRESETS[config.preset]
    if config.similarity is None:
        return guard
    return dataclasses.replace(guard, similarity=config.similarity)


def explored(config: Watch) -> Watch:
    """What an exploration depends on, which is not where things are."""
    plan = dataclasses.replace(config.plan, **{k: getattr(Plan, k) for k in OPEN})
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
        mesh=Talker.mesh,
        endpoint="somewhere" if talker.endpoint else "",
        timeout=Talker.timeout,
        concurrency=Talker.concurrency,
        per_second=Talker.per_second,
    )


def beside(config: Watch, name: str) -> Watch:
    """Another exploration of the same agent and questions, guarded in the same way."""
    path = dataclasses.replace(config, name=name).folder / "config.yaml"
    if not path.is_file():
        raise FileNotFoundError(f"{path} is not there; explore {name!r} first")
    own = ("held_out", "preset", "similarity", "out")
    other = dataclasses.replace(
        load_watch(path), **{field: getattr(config, field) for field in own}
    )
    first, second = explored(other), explored(config)
    for field in _ALIKE:
        of = operator.attrgetter(field)
        if of(first) != of(second):
            raise ValueError(
                f"{field} of {name!r} is {of(other)!r}, and of {config.name!r} "
                f"{of(config)!r}; compare explorations of one agent and the same "
                "questions, with entropies of one kind"
            )
    return other
