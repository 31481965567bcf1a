"""Exploring an agent's generalization bound by queries that grow out of each other."""

import asyncio
import collections
import dataclasses
import datetime
import itertools
import json
import math
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np

from jaxhal.datasets.jsonl import numbered_lines, parse, write_rows
from jaxhal.io.files import alone, replacing
from jaxhal.io.progress import Bar, progress_bar
from jaxhal.llm.entailment import Entailment, Similarity
from jaxhal.models.encoders.encoding import embed, kept_encoder
from jaxhal.reading.keys import digest
from jaxhal.watchdog.agents import Agent, Reply
from jaxhal.watchdog.bounds import BoundaryStore, Point
from jaxhal.watchdog.entropy import known_entropies
from jaxhal.watchdog.evaluators import Evaluator, Judgement
from jaxhal.watchdog.journal import Journal, answered
from jaxhal.watchdog.policy import (
    SHARES,
    TRANSFORMATIONS,
    Steps,
    Training,
    probabilities,
    reward,
    train,
    worth,
)
from jaxhal.watchdog.queries import Generator, plain

# Of the last queries that the progress bar's entropy is of, as in the paper's figure 6.
_RECENT = 30
# The reward of a way that gave no new query: as of one that brings no entropy.  Without
# it a writer that often fails would never be learnt from.
_USELESS = 0.0
# Queries without an answer, one after the other, that are an outage.
_OUTAGE = 10


@dataclasses.dataclass(frozen=True)
class Plan:
    """How an exploration goes on, and when it ends.

    Args:
      gamma: it ends once this share of the judged answers is hallucinated.
      least: but not before this many queries.
      budget: it ends after this many in any case.
      starts: queries it begins with.
      width: queries in a round, answered and judged at the same time.
      branch: queries made of one that the agent hallucinated at, once a policy chooses
        the ways; before, it is changed in all.
      samples: answers to a query that its entropy is of.
      temperature: at which those are drawn.
      answer_temperature: of the answer that is judged.
      ways: that a query is changed in after a hallucination; the paper's text names
        the first two, its equation (1) all three.
      how: ways are ``"reinforced"`` or taken at ``"random"``.
      shares: how rewards become probabilities, as
        :func:`jaxhal.watchdog.policy.probabilities` has it.
      steps: queries changed in all ``ways`` before a policy is trained on what came of
        it.
      training: of the policy.
      seed: of all chance.

    Raises:
      ValueError: on a number or word that makes no sense.
    """

    gamma: float = 0.6
    least: int = 50
    budget: int = 500
    starts: int = 10
    width: int = 8
    branch: int = 1
    samples: int = 10
    temperature: float = 1.0
    answer_temperature: float = 0.1
    ways: tuple[str, ...] = TRANSFORMATIONS
    how: str = "reinforced"
    shares: str = "softmax"
    steps: int = 8
    training: Training = Training()
    seed: int = 0

    def __post_init__(self):
        counts = ("least", "budget", "starts", "width", "branch", "samples", "steps")
        for name in counts:
            if getattr(self, name) < 1:
                raise ValueError(f"{name} is {getattr(self, name)}; give at least 1")
        if not 0 < self.gamma <= 1:
            raise ValueError(f"gamma is {self.gamma}; give a share in (0, 1]")
        if self.how not in ("reinforced", "random"):
            raise ValueError(f"how is {self.how!r}; use 'reinforced' or 'random'")
        if self.shares not in SHARES:
            raise ValueError(
                f"shares is {self.shares!r}; use {' or '.join(map(repr, SHARES))}"
            )
        if not self.ways or set(self.ways) - set(TRANSFORMATIONS):
            raise ValueError(
                f"ways are {', '.join(self.ways)}; use some of "
                f"{', '.join(TRANSFORMATIONS)}"
            )
        if self.branch > len(self.ways):
            raise ValueError(
                f"branch is {self.branch}, and there are {len(self.ways)} ways"
            )


@dataclasses.dataclass
class Node:
    """A query of an exploration.

    Attributes:
      query: what is asked.
      way: how it came about; ``"seed"`` where it is given.
      depth: changes since its path began.
      parent: the query that it was made of.
      first: the query that its path began with.
      answer: what the agent said; empty where it said nothing of use.
      context: what it answered from.
      label: 1 hallucinated, 0 not, ``None`` unknown.
      why: the reason, or the error.
      confidence: in the label.
      clean: whether none of its answers is known to be hallucinated.
      entropy: of its answers, in nats; not a number where there are none.
      reward: of equation (2); of a seed the entropy that it found, up to 1.
      chances: that each way had when it was changed.
      time: when it was answered, ISO 8601.
      round: of the exploration that it was asked in, from 1.
    """

    query: str
    way: str
    depth: int
    parent: str
    first: str
    answer: str = ""
    context: str = ""
    label: int | None = None
    why: str = ""
    confidence: float = 0.0
    clean: bool = False
    entropy: float = math.nan
    reward: float = math.nan
    chances: Sequence[float] = ()
    time: str = ""
    round: int = 0


class Explored(NamedTuple):
    """What an exploration found.

    Attributes:
      nodes: every query, in the order it was asked.
      counts: queries, judged, hallucinated, unsure and failed ones, points in the
        store, and what it cost.
      stopped: ``"gamma"``, ``"budget"``, or ``"queries"`` where none were left.
      policy: the network that chose the ways, and its losses, if one was trained.
    """

    nodes: list[Node]
    counts: dict[str, Any]
    stopped: str
    policy: Any


class Explorer:
    """The core agent: sends queries out, has answers judged, keeps the bound.

    Everything that agents say is in ``journal.jsonl`` before it is used.  An
    exploration that was killed begins again, finds what is known there, and so comes to
    where it was without asking anything twice.  Where queries had failed and now are
    answered it goes on from them in another way: what it had found after them stays in
    the store and in the journal, and is none of its queries unless it comes back to it.

    Answers that the evaluator is not sure of go to ``review.jsonl``: give a row a
    ``"label"`` of 0 or 1 there, explore again, and the label counts.

    Args:
      agent: whose bound is explored.
      evaluator: judges its answers.
      generator: makes queries of others.
      seeds: queries of the domain to begin with, and to go on from where an answer is
        not hallucinated.
      store: where points go.
      folder: of the journal.
      plan: how to explore.
      encoder: of queries, as :func:`jaxhal.models.encoders.load_encoder` takes it.
      entailment: what decides whether two answers mean the same.

    Raises:
      ValueError: when there are no seeds.
    """

    def __init__(
        self,
        agent: Agent,
        evaluator: Evaluator,
        generator: Generator,
        seeds: Sequence[str],
        store: BoundaryStore,
        folder: str | os.PathLike,
        *,
        plan: Plan = Plan(),  # noqa: B008  (an immutable default)
        encoder: str = "all-minilm-l6-v2",
        entailment: Entailment | None = None,
    ):
        known = {name: query for query in seeds if (name := plain(query))}
        if not known:
            raise ValueError(
                "there are no seeds with a word in them; give queries of the domain"
            )
        self.agent, self.evaluator, self.generator = agent, evaluator, generator
        self.store, self.plan, self.encoder = store, plan, encoder
        self.entailment = entailment or Similarity()
        self.folder = Path(folder)
        self.folder.mkdir(parents=True, exist_ok=True)
        self._open: set[str] = set()  # waiting for a person
        self._key = jax.random.key(plan.seed)
        order = np.random.default_rng(plan.seed).permutation(len(known))
        every = list(known.values())
        self._seeds = collections.deque(every[at] for at in order)
        self._seen: set[str] = set()
        self._queue: collections.deque[Node] = collections.deque()
        self._nodes: dict[str, Node] = {}
        self._trials: dict[str, dict[str, float]] = collections.defaultdict(dict)
        self._steps: list[tuple[Node, list[float]]] = []
        self._policy: Any = None
        self._ways = [way for way in TRANSFORMATIONS if way in plan.ways]
        self._vectors: dict[str, np.ndarray] = {}
        self._changes = self._useless = 0
        self._failures: list[str | None] = []  # of each change

    def run(self, progress: bool | None = None) -> Explored:
        """Explores to the end.

        Args:
          progress: show a progress bar; ``None`` shows it on a terminal.

        Raises:
          ValueError: on a journal or a list of reviews that is none; on a journal of
            another agent, writer, evaluator, entailment or choice of ways, or of other
            samples or temperatures.
          RuntimeError: when an agent takes no query at all, or answers none of the
            first ones; when another process explores in the folder.
          OSError: when the folder cannot be written.
        """
        return asyncio.run(self.explore(progress))

    async def explore(self, progress: bool | None = None) -> Explored:
        """See :meth:`run`."""
        with alone(self.folder):
            self.journal = Journal(self.folder / "journal.jsonl")
            await self._check_journal()
            self._reviewed = reviewed(self.folder / "review.jsonl")
            return await self._explore(progress)

    async def _check_journal(self) -> None:
        """What others said, or was drawn otherwise, is not this exploration's."""
        plan = self.plan
        about = {
            "agent": self.agent.name,
            "writer": self.generator.agent.name,
            "evaluator": self.evaluator.name,
            "entailment": self.entailment.name,
            "how": plan.how,
            "samples": plan.samples,
            "temperature": plan.temperature,
            "answer_temperature": plan.answer_temperature,
        }

        async def make() -> dict[str, Any]:
            return about

        known = await self.journal.once("about", make)
        for name, value in about.items():
            if known.get(name) != value:
                raise ValueError(
                    f"{self.folder} holds an exploration whose {name} is "
                    f"{known.get(name)!r}, and not {value!r}; give another folder"
                )

    async def _explore(self, progress: bool | None) -> Explored:
        plan, stopped, rounds = self.plan, "", itertools.count(1)
        for _ in range(plan.starts):
            self._sow()
        with progress_bar(plan.budget, "exploring", "query", progress) as bar:
            while not stopped:
                room = min(plan.width, plan.budget - len(self._nodes))
                some = [
                    self._queue.popleft() for _ in range(min(room, len(self._queue)))
                ]
                number = next(rounds)
                for node in some:
                    node.round = number
                await asyncio.gather(*map(self._ask, some))
                self._embed([node.query for node in some])
                for node in some:
                    self._take(node)
                self._learn()
                made = await asyncio.gather(*map(self._follow, some))
                for node, children in zip(some, made, strict=True):
                    self._branch(node, children)
                self._write_review()
                bar.update(len(some))
                self._show(bar)
                stopped = self._ended()
        self._write(stopped)
        return Explored([*self._nodes.values()], self.counts(), stopped, self._policy)

    def counts(self) -> dict[str, Any]:
        """How far it has come, and what it cost."""
        nodes = [*self._nodes.values()]
        labels = collections.Counter(node.label for node in nodes)
        failed = sum(not node.answer for node in nodes)
        judged = labels[0] + labels[1]
        parents = (self._nodes.get(node.parent) for node in nodes)
        chosen = (parent is not None and bool(parent.chances) for parent in parents)
        return {
            "queries": len(nodes),
            "judged": judged,
            "hallucinated": labels[1],
            "gamma": labels[1] / judged if judged else 0.0,
            "unsure": labels[None] - failed,
            "failed": failed,
            "points": len(self.store),
            "answers": (1 + self.plan.samples) * len(nodes),
            "changes": self._changes,
            "useless changes": self._useless,
            "failed changes": sum(error is not None for error in self._failures),
            "steps": len(self._steps),
            "by the policy": 0 if self._policy is None else sum(chosen),
        }

    def _branch(self, node: Node, children: Sequence[Node]) -> None:
        """Has what is new among a query's children asked, else another seed."""
        new = [self._enqueue(child) for child in children]
        for child, is_new in zip(children, new, strict=True):
            if not is_new:
                self._useless += 1
                self._tried(node, child.way, _USELESS)
        if not any(new):
            self._sow()

    def _sow(self) -> None:
        """Begins a path with the next seed, if one is left."""
        while self._seeds:
            query = self._seeds.popleft()
            if self._enqueue(Node(query, "seed", 0, "", query)):
                return

    def _enqueue(self, node: Node) -> bool:
        """Has a query asked that was not asked before, and is one."""
        name = plain(node.query)
        if not name or name in self._seen:
            return False
        self._seen.add(name)
        self._queue.append(node)
        return True

    async def _ask(self, node: Node) -> None:
        """Has the agent answer and the evaluator judge."""
        key, plan = digest(node.query), self.plan

        async def say(n: int, temperature: float) -> dict[str, Any]:
            (replies,) = await self.agent.respond([node.query], n, temperature)
            now = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
            return {
                "time": now,
                "replies": [dataclasses.asdict(one) for one in replies],
            }

        def kept(said: Mapping[str, Any]) -> bool:
            return answered(said["replies"])

        said, drawn = await asyncio.gather(
            self.journal.once(
                f"answer {key}", lambda: say(1, plan.answer_temperature), kept
            ),
            self.journal.once(
                f"samples {key}", lambda: say(plan.samples, plan.temperature), kept
            ),
        )
        answer = Reply(**said["replies"][0])
        samples = [Reply(**one) for one in drawn["replies"] if not one["error"]]
        node.time = said["time"]
        if answer.error is not None or not answered(drawn["replies"]):
            errors = (one["error"] for one in drawn["replies"] if one["error"])
            node.why = answer.error or next(errors)
            return
        node.answer, node.context = answer.text, answer.context
        # The reward of equation (2) asks whether any answer is hallucinated.
        judged = [answer, *samples] if plan.how == "reinforced" else [answer]

        async def judge() -> list[list[Any]]:
            queries = [node.query] * len(judged)
            return [[*one] for one in await self.evaluator.judge(queries, judged)]

        async def unsure() -> list[Any]:
            texts = [one.text for one in samples]
            (found,) = await asyncio.to_thread(
                known_entropies, [node.query], [texts], self.entailment
            )
            return [*found]

        def known(found: Sequence[Any]) -> bool:
            return found[1] is None

        def given(found: Sequence[Sequence[Any]]) -> bool:
            return not any(Judgement(*one).failed for one in found)

        verdicts = await self.journal.once(f"verdict {key}", judge, given)
        entropy, error = await self.journal.once(f"entropy {key}", unsure, known)
        judgements = [Judgement(*one) for one in verdicts]
        error = next((one.why for one in judgements if one.failed), error)
        if error is not None:
            node.why, node.answer = error, ""
            return
        node.entropy = entropy
        node.label, node.why, node.confidence, _ = judgements[0]
        if node.label is None and node.query in self._reviewed:
            node.label, node.confidence = self._reviewed[node.query], 1.0
            node.why = f"a person decided ({node.why})"
        labels = [node.label, *(one.label for one in judgements[1:])]
        node.clean = 1 not in labels

    def _embed(self, queries: Sequence[str]) -> None:
        fresh = [query for query in queries if query not in self._vectors]
        if fresh:
            vectors = embed(kept_encoder(self.encoder), fresh, progress=False)
            self._vectors |= dict(zip(fresh, vectors, strict=True))

    def _take(self, node: Node) -> None:
        """Keeps what was found out about a query."""
        self._nodes[node.query] = node
        parent = self._nodes.get(node.parent)
        if node.label is not None:
            # A path begins with the entropy it finds, for there is none before it.
            gain = reward(node.entropy, 0.0, 1.0, True)
            if parent is not None:
                gain = reward(node.entropy, parent.entropy, parent.reward, node.clean)
            node.reward = float(gain)
        if parent is not None:
            self._tried(parent, node.way, node.reward)
        name = digest(f"{self.agent.name}\n{node.query}")
        if node.label == 1 and name not in self.store:
            point = Point(
                id=name,
                query=node.query,
                response=node.answer,
                context=node.context,
                entropy=node.entropy,
                verdict=node.why,
                domain=self.generator.domain,
                agent=self.agent.name,
                time=node.time,
            )
            self.store.add([point], self._vectors[node.query][None])

    def _tried(self, parent: Node, way: str, value: float) -> None:
        """The reward of a way; those of all allowed ones are a step to learn from."""
        tried = self._trials[parent.query]
        tried[way] = value
        rewards = [tried.get(way, math.nan) for way in self._ways]
        if all(map(math.isfinite, rewards)):
            self._steps.append((parent, rewards))

    def _learn(self) -> None:
        """Trains the policy once enough is known."""
        plan = self.plan
        if plan.how == "random" or self._policy is not None:
            return
        if len(self._steps) >= plan.steps:
            nodes = [node for node, _ in self._steps]
            known = probabilities([rewards for _, rewards in self._steps], plan.shares)
            steps = self._states(nodes)
            steps.probabilities[:, np.isin(TRANSFORMATIONS, plan.ways)] = known
            key = jax.random.fold_in(self._key, 1)
            self._policy = train(steps, key, plan.training)

    def _states(self, nodes: Sequence[Node]) -> Steps:
        return Steps(
            np.stack([self._vectors[node.query] for node in nodes]),
            np.stack([self._vectors[node.first] for node in nodes]),
            np.array([node.entropy for node in nodes], np.float32),
            np.array([node.depth for node in nodes]),
            np.zeros((len(nodes), len(TRANSFORMATIONS)), np.float32),
        )

    async def _follow(self, node: Node) -> list[Node]:
        """What was made of a query that the agent hallucinated at, be it of use or not.

        Nothing is made of another.
        """
        if node.label != 1:
            return []
        key = digest(node.query)

        async def choose() -> list[Any]:
            return self._chosen(node)

        ways, node.chances = await self.journal.once(f"ways {key}", choose)

        async def change(way: str) -> dict[str, Any]:
            (made,) = await self.generator.change([node.query], [way])
            return dataclasses.asdict(made)

        def kept(made: Mapping[str, Any]) -> bool:
            return made["error"] is None

        found = await asyncio.gather(
            *(
                self.journal.once(f"{way} {key}", lambda w=way: change(w), kept)
                for way in ways
            )
        )
        self._changes += len(ways)
        self._failures += [made["error"] for made in found]
        return [
            Node(made["text"], way, node.depth + 1, node.query, node.first)
            for way, made in zip(ways, found, strict=True)
            if made["error"] is None
        ]

    def _chosen(self, node: Node) -> list[Any]:
        """The ways that a query is changed in, and the chances they had."""
        plan = self.plan
        if plan.how == "reinforced" and self._policy is None:
            return [[*self._ways], []]  # all of them, to learn from
        number = int(digest(node.query)[:8], 16)
        key = jax.random.fold_in(jax.random.fold_in(self._key, 2), np.uint32(number))
        draw, pick = jax.random.split(key)
        if plan.how == "random":
            chances = jax.random.dirichlet(draw, np.ones(len(TRANSFORMATIONS)))
        else:
            chances = worth(self._policy.policy, self._states([node]))[0]
        chances = np.where(np.isin(TRANSFORMATIONS, plan.ways), chances, 0.0)
        chances = chances / chances.sum()
        picked = jax.random.choice(
            pick, len(TRANSFORMATIONS), (plan.branch,), replace=False, p=chances
        )
        return [[TRANSFORMATIONS[at] for at in picked], chances.tolist()]

    def _show(self, bar: Bar) -> None:
        found = self.counts()
        last = [node.entropy for node in [*self._nodes.values()][-_RECENT:]]
        known = [entropy for entropy in last if math.isfinite(entropy)]
        bar.set_postfix(
            hits=found["hallucinated"],
            gamma=f"{found['gamma']:.2f}",
            entropy=f"{np.mean(known):.2f}" if known else "?",
            answers=found["answers"],
        )

    def _ended(self) -> str:
        """Why it is over, empty while it is not."""
        plan, found = self.plan, self.counts()
        last = [*self._nodes.values()][-max(_OUTAGE, 2 * plan.width) :]
        begun = len(self._nodes) >= min(plan.starts, plan.budget) or not self._queue
        if begun and not any(one.answer for one in last):
            raise RuntimeError(
                f"{self.agent.name} answered none of the last {len(last)} queries, or "
                f"{self.evaluator.name} judged none; the first failed so: "
                f"{last[0].why}; explore again when it answers: they are asked anew"
            )
        failures = self._failures[-_OUTAGE:]
        if len(failures) == _OUTAGE and all(failures):
            raise RuntimeError(
                f"{self.generator.agent.name} changed none of the last {_OUTAGE} "
                f"queries, the first of which failed so: {failures[0]}; explore again "
                "when it answers: they are asked anew"
            )
        if found["queries"] >= plan.least and found["gamma"] >= plan.gamma:
            return "gamma"
        if found["queries"] >= plan.budget:
            return "budget"
        return "" if self._queue else "queries"

    def _write_review(self) -> None:
        """review.jsonl, with what a person decided while it went on, as it stands."""
        path = self.folder / "review.jsonl"
        decided = _decided(path)
        open_ = [
            {
                "query": node.query,
                "answer": node.answer,
                "context": node.context,
                "why": node.why,
                "label": None,
            }
            for node in self._nodes.values()
            if node.label is None and node.answer and node.query not in decided
        ]
        if {one["query"] for one in open_} - self._open:
            write_rows(path, [*decided.values(), *open_])
            self._open = {one["query"] for one in open_}

    def _write(self, stopped: str) -> None:
        """queries.jsonl and summary.json, for people."""
        nodes = [*self._nodes.values()]
        write_rows(self.folder / "queries.jsonl", map(_row, nodes))
        losses = None if self._policy is None else self._policy.losses.tolist()
        summary = {**self.counts(), "stopped": stopped, "losses": losses}
        with replacing(self.folder / "summary.json") as file:
            json.dump(summary, file, indent=1)


def reviewed(path: str | os.PathLike) -> dict[str, int]:
    """The labels that a person gave to queries in a review file.

    Raises:
      ValueError: on a row without a query, or a label that is not 0, 1 or null.
    """
    return {query: row["label"] for query, row in _decided(path).items()}


def _decided(path: str | os.PathLike) -> dict[str, dict[str, Any]]:
    """The rows that have a label, by their query."""
    found = {}
    # What people write need not end in a new line, and is not ours to change.
    for number, line in numbered_lines(path) if Path(path).is_file() else ():
        try:
            row = parse(line)
        except ValueError as error:
            raise ValueError(f"{path}, line {number}: {error}") from error
        if not isinstance(row.get("query"), str):
            raise ValueError(
                f"{path}, line {number}: 'query' is missing; keep the rows"
            )
        label = row.get("label")
        if label not in (0, 1, None) or isinstance(label, bool):
            raise ValueError(
                f"{path}, line {number}: 'label' is {label!r}; use 0, 1 or null"
            )
        if label is not None:
            found[row["query"]] = row
    return found


def _row(node: Node) -> dict[str, Any]:
    row = dataclasses.asdict(node)
    numbers = ("entropy", "reward")
    return row | {n: row[n] if math.isfinite(row[n]) else None for n in numbers}
