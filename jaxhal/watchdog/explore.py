"""Exploring an agent's generalization bound by queries that grow out of each other."""

import asyncio
import collections
import dataclasses
import itertools
import json
import math
import os
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from jaxhal.datasets.jsonl import write_rows
from jaxhal.io.files import alone, replacing
from jaxhal.io.progress import Bar, progress_bar
from jaxhal.llm.entailment import Entailment, Similarity
from jaxhal.models.encoders.encoding import embed, kept_encoder
from jaxhal.reading.keys import digest
from jaxhal.watchdog.agents import Agent, Reply, together
from jaxhal.watchdog.bounds import BoundaryStore, Point, now, point_id
from jaxhal.watchdog.evaluators import Evaluator, Judgement
from jaxhal.watchdog.journal import Journal, Review, answered
from jaxhal.watchdog.monitor import known_entropies
from jaxhal.watchdog.plan import OPEN, Node, Plan, Training
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

    Everything that agents say is in ``journal.jsonl`` of the folder before it is used.
    An exploration that was killed begins again, finds what is known there, and so comes
    to where it was without asking anything twice.

    Answers that the evaluator is not sure of go to ``review.jsonl``: give a row a
    ``"label"`` of 0 or 1 there, explore again, and the label counts.  What an earlier
    run put into the bound and this one does not leaves it; what someone took out since
    (:meth:`~jaxhal.watchdog.Watchdog.learn`) stays out, unless the bound is empty.

    Args:
      generator: makes queries of others.
      seeds: queries of the domain to begin with, and to go on from.
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
        plan: Plan | None = None,
        training: Training | None = None,
        encoder: str = "all-minilm-l6-v2",
        entailment: Entailment | None = None,
    ):
        known = {name: query for query in seeds if (name := plain(query))}
        if not known:
            raise ValueError(
                "there are no seeds with a word in them; give queries of the domain"
            )
        self.agent, self.evaluator, self.generator = agent, evaluator, generator
        self.plan = plan = plan or Plan()
        self.store, self.encoder = store, encoder
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
        self._chooser = Chooser(plan, training or Training(), self._vectors)
        self._useless = 0
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
        plan, stopped, rounds = self.plan, "", itertools.count(1)
        with alone(self.folder):
            self.journal = Journal(self.folder / "journal.jsonl")
            await self._check_journal()
            # Until this one has come to its end, there is none.
            (self.folder / "summary.json").unlink(missing_ok=True)
            self._review = Review(self.folder / "review.jsonl")
            self._empty = not len(self.store)
            for _ in range(plan.starts):
                self._sow()
            with progress_bar(plan.budget, "exploring", "query", progress) as bar:
                while not stopped:
                    room = min(plan.width, plan.budget - len(self._nodes))
                    count = min(room, len(self._queue))
                    some = [self._queue.popleft() for _ in range(count)]
                    await self._round(some, next(rounds))
                    bar.update(len(some))
                    self._show(bar)
                    stopped = self._ended()
            self._settle()
            self._write(stopped)
        nodes, policy = [*self._nodes.values()], self._chooser.policy
        return Explored(nodes, self.counts(), stopped, policy)

    async def _check_journal(self) -> None:
        """What others said, or was drawn otherwise, is not this exploration's.

        What an earlier version did not note is not compared.
        """
        plan = dataclasses.asdict(self.plan)
        about = {
            "agent": self.agent.name,
            "writer": self.generator.agent.name,
            "domain": self.generator.domain,
            "evaluator": self.evaluator.name,
            "entailment": self.entailment.name,
            "encoder": self.encoder,
            "training": dataclasses.asdict(self._chooser.training),
            **{
                f"settings of the {of}": getattr(one, "settings", None)
                for of, one in (
                    ("agent", self.agent),
                    ("writer", self.generator.agent),
                    ("evaluator", self.evaluator),
                    ("entailment", self.entailment),
                )
            },
            **{name: value for name, value in plan.items() if name not in OPEN},
        }
        known = await self.journal.once("about", lambda: _now(about))
        for name, value in about.items():
            if known.get(name, value) != value:
                raise ValueError(
                    f"{self.folder} holds an exploration whose {name} is "
                    f"{known[name]!r}, and not {value!r}; give another folder"
                )

    async def _round(self, some: Sequence[Node], number: int) -> None:
        """Asks queries, keeps what was found out, and makes others of them."""
        for node in some:
            node.round = number
        await together(*map(self._ask, some))
        if fresh := [one.query for one in some if one.query not in self._vectors]:
            vectors = embed(kept_encoder(self.encoder), fresh, progress=False)
            self._vectors.update(zip(fresh, vectors, strict=True))
        for node in some:
            self._take(node)
        self._chooser.learn()
        made = await together(*map(self._follow, some))
        for node, children in zip(some, made, strict=True):
            new = [self._enqueue(child) for child in children]
            for child, is_new in zip(children, new, strict=True):
                if not is_new:
                    self._useless += 1
                    self._chooser.tried(node, child.way, _USELESS)
            if not any(new):
                self._sow()
        self._review.write(self._nodes.values())

    async def _ask(self, node: Node) -> None:
        """Fills in a query's answer, label and entropy, or why there is none."""
        key, plan, once = digest(node.query), self.plan, self.journal.once
        said = partial(self._said, node.query)
        own, drawn = await together(
            once(f"answer {key}", partial(said, 1, plan.answer_temperature), _came),
            once(
                f"samples {key}", partial(said, plan.samples, plan.temperature), _came
            ),
        )
        answer = Reply(**own["replies"][0])
        samples = [Reply(**one) for one in drawn["replies"] if not one["error"]]
        node.time = own["time"]
        if answer.error is not None or not _came(drawn):
            errors = (one["error"] for one in drawn["replies"] if one["error"])
            node.why = answer.error or next(errors)
            return
        # The reward of equation (2) asks whether any answer is hallucinated.
        judged = [answer, *samples] if plan.how == "reinforced" else [answer]

        async def judge() -> list[list[Any]]:
            return [*map(list, await self.evaluator.judge(node.query, judged))]

        async def entropy_of() -> list[Any]:
            texts = [[one.text for one in samples]]
            known = asyncio.to_thread(
                known_entropies, [node.query], texts, self.entailment
            )
            return [*(await known)[0]]

        verdicts = await once(
            f"verdict {key}",
            judge,
            lambda found: not any(Judgement(*one).failed for one in found),
        )
        entropy, error = await once(
            f"entropy {key}", entropy_of, lambda found: found[1] is None
        )
        first, *others = judgements = [Judgement(*one) for one in verdicts]
        error = next((one.why for one in judgements if one.failed), error)
        if error is not None:
            node.why = error
            return
        node.answer, node.context, node.entropy = answer.text, answer.context, entropy
        node.label, node.why, node.confidence, _ = first
        decided = self._review.label_of(node.query, node.answer)
        if node.label is None and decided is not None:
            node.label, node.confidence = decided, 1.0
            node.why = f"a person decided ({node.why})"
        node.clean = 1 not in [node.label, *(one.label for one in others)]

    async def _said(self, query: str, n: int, temperature: float) -> dict[str, Any]:
        (replies,) = await self.agent.respond([query], n, temperature)
        return {"time": now(), "replies": [*map(dataclasses.asdict, replies)]}

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
            "changes": len(self._failures),
            "useless changes": self._useless,
            "failed changes": sum(error is not None for error in self._failures),
            "steps": len(self._chooser.steps),
            "by the policy": 0 if self._chooser.policy is None else sum(chosen),
        }

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
        if node.label == 1:
            self._keep(node, point_id(self.agent.name, node.query))

    def _keep(self, node: Node, name: str) -> None:
        """Has a point in the bound, unless it was there and someone took it out."""
        if name not in self.store:
            if self.journal.kept.get(name) and not self._empty:
                return
            said = node.query, node.answer, node.context, node.entropy, node.why
            about = self.generator.domain, self.agent.name, node.time
            vector = self._vectors[node.query]
            self.store.add([Point(name, *said, *about)], vector[None])
        self.journal.keep(name, True)

    def _settle(self) -> None:
        """Takes out of the bound what an earlier run alone put there."""
        agent, nodes = self.agent.name, self._nodes.values()
        now = {point_id(agent, node.query) for node in nodes if node.label == 1}
        past = [name for name, ours in self.journal.kept.items() if ours]
        stale = [name for name in past if name not in now]
        self.store.remove(stale)
        for name in stale:
            self.journal.keep(name, False)

    async def _follow(self, node: Node) -> list[Node]:
        """What was made of a query, if the agent hallucinated at it."""
        if node.label != 1:
            return []
        key, once = digest(node.query), self.journal.once
        choose = self._chooser.chosen
        ways, node.chances = await once(f"ways {key}", lambda: _now(choose(node)))

        async def change(way: str) -> dict[str, Any]:
            return dataclasses.asdict(await self.generator.change(node.query, way))

        def kept(made: dict[str, Any]) -> bool:
            return made["error"] is None

        asked = (once(f"{way} {key}", partial(change, way), kept) for way in ways)
        found = await together(*asked)
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
        enough = min(max(plan.starts, _OUTAGE), plan.budget)
        begun = len(self._nodes) >= enough or not self._queue
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


def _came(said: dict[str, Any]) -> bool:
    return answered(said["replies"])


async def _now(value: Any) -> Any:
    return value
