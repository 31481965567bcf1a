"""Exploring an agent's generalization bound by queries that grow out of each other."""

import asyncio
import collections
import dataclasses
import itertools
import json
import math
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from jaxhal.datasets.jsonl import write_rows
from jaxhal.io.files import alone, replacing
from jaxhal.io.progress import Bar, progress_bar
from jaxhal.llm.entailment import Entailment, Similarity
from jaxhal.models.encoders.encoding import embed, kept_encoder
from jaxhal.reading.keys import digest
from jaxhal.watchdog.agents import Agent
from jaxhal.watchdog.bounds import BoundaryStore, Point, point_id
from jaxhal.watchdog.evaluators import Evaluator
from jaxhal.watchdog.inquiry import Inquiry, Review
from jaxhal.watchdog.journal import Journal
from jaxhal.watchdog.plan import Node, Plan
from jaxhal.watchdog.policy import Chooser, Trained, reward
from jaxhal.watchdog.queries import Generator, plain

# Of the last queries that the progress bar's entropy is of, as in the paper's figure 6.
_RECENT = 30
# The reward of a way that gave no new query: as of one that brings no entropy.  Without
# it a writer that often fails would never be learnt from.
_USELESS = 0.0
# Queries without an answer, one after the other, that are an outage.
_OUTAGE = 10


class Explored(NamedTuple):
    """What an exploration found.

    ``nodes`` are its queries in order, ``counts`` as :meth:`Explorer.counts` has them;
    it was ``stopped`` by ``"gamma"``, ``"budget"``, or ``"queries"`` where none were
    left.
    """

    nodes: list[Node]
    counts: dict[str, Any]
    stopped: str
    policy: Trained | None


class Explorer:
    """The core agent: sends queries out, has answers judged, keeps the bound.

    Everything that agents say is in ``journal.jsonl`` before it is used.  An
    exploration that was killed begins again, finds what is known there, and so comes to
    where it was without asking anything twice.

    Answers that the evaluator is not sure of go to ``review.jsonl``: give a row a
    ``"label"`` of 0 or 1 there, explore again, and the label counts.

    Args:
      agent: whose bound is explored.
      generator: makes queries of others.
      seeds: queries of the domain to begin with, and to go on from.
      folder: of the journal.
      encoder: of queries, as :func:`jaxhal.models.encoders.load_encoder` takes it.
      entailment: what decides whether two answers mean the same.
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
        order = np.random.default_rng(plan.seed).permutation(len(known))
        every = list(known.values())
        self._seeds = collections.deque(every[at] for at in order)
        self._seen: set[str] = set()
        self._queue: collections.deque[Node] = collections.deque()
        self._nodes: dict[str, Node] = {}
        self._vectors: dict[str, np.ndarray] = {}
        self._chooser = Chooser(plan, self._vectors)
        self._changes = self._useless = 0
        self._failures: list[str | None] = []  # of each change

    def run(self, progress: bool | None = None) -> Explored:
        """Explores to the end.

        Raises:
          ValueError: on a folder that holds another exploration.
          RuntimeError: when an agent answers nothing; when another process explores
            there.
        """
        return asyncio.run(self.explore(progress))

    async def explore(self, progress: bool | None = None) -> Explored:
        """See :meth:`run`."""
        with alone(self.folder):
            self.journal = Journal(self.folder / "journal.jsonl")
            await self._check_journal()
            review = Review(self.folder / "review.jsonl")
            asked = self.agent, self.evaluator, self.entailment, self.plan
            ask = Inquiry(*asked, self.journal, review.labels)
            return await self._explore(ask, review, progress)

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
        known = await self.journal.once("about", lambda: _now(about))
        for name, value in about.items():
            if known.get(name) != value:
                raise ValueError(
                    f"{self.folder} holds an exploration whose {name} is "
                    f"{known.get(name)!r}, and not {value!r}; give another folder"
                )

    async def _explore(
        self, ask: Inquiry, review: Review, progress: bool | None
    ) -> Explored:
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
                await asyncio.gather(*map(ask, some))
                self._embed([node.query for node in some])
                for node in some:
                    self._take(node)
                self._chooser.learn()
                made = await asyncio.gather(*map(self._follow, some))
                for node, children in zip(some, made, strict=True):
                    self._branch(node, children)
                review.write(self._nodes.values())
                bar.update(len(some))
                self._show(bar)
                stopped = self._ended()
        self._write(stopped)
        nodes, policy = [*self._nodes.values()], self._chooser.policy
        return Explored(nodes, self.counts(), stopped, policy)

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
            "steps": len(self._chooser.steps),
            "by the policy": 0 if self._chooser.policy is None else sum(chosen),
        }

    def _branch(self, node: Node, children: Sequence[Node]) -> None:
        """Has what is new among a query's children asked, else another seed."""
        new = [self._enqueue(child) for child in children]
        for child, is_new in zip(children, new, strict=True):
            if not is_new:
                self._useless += 1
                self._chooser.tried(node, child.way, _USELESS)
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

    def _embed(self, queries: Sequence[str]) -> None:
        fresh = [query for query in queries if query not in self._vectors]
        if fresh:
            vectors = embed(kept_encoder(self.encoder), fresh, progress=False)
            self._vectors.update(zip(fresh, vectors, strict=True))

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
            self._chooser.tried(parent, node.way, node.reward)
        name = point_id(self.agent.name, node.query)
        if node.label == 1 and name not in self.store:
            point = Point(
                name,
                node.query,
                node.answer,
                node.context,
                node.entropy,
                node.why,
                self.generator.domain,
                self.agent.name,
                node.time,
            )
            self.store.add([point], self._vectors[node.query][None])

    async def _follow(self, node: Node) -> list[Node]:
        """What was made of a query, if the agent hallucinated at it."""
        if node.label != 1:
            return []
        key = digest(node.query)

        choose = self._chooser.chosen
        ways, node.chances = await self.journal.once(
            f"ways {key}", lambda: _now(choose(node))
        )

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

    def _write(self, stopped: str) -> None:
        """queries.jsonl and summary.json, for people."""
        nodes = [*self._nodes.values()]
        write_rows(self.folder / "queries.jsonl", map(_row, nodes))
        policy = self._chooser.policy
        losses = None if policy is None else policy.losses.tolist()
        summary = {**self.counts(), "stopped": stopped, "losses": losses}
        with replacing(self.folder / "summary.json") as file:
            json.dump(summary, file, indent=1)


def _row(node: Node) -> dict[str, Any]:
    row = dataclasses.asdict(node)
    numbers = ("entropy", "reward")
    return row | {n: row[n] if math.isfinite(row[n]) else None for n in numbers}


async def _now(value: Any) -> Any:
    return value
