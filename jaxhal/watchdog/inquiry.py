"""What an agent says to a query, and what others say of that."""

import asyncio
import dataclasses
import os
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from jaxhal.datasets.jsonl import numbered_lines, parse, write_rows
from jaxhal.llm.entailment import Entailment
from jaxhal.reading.keys import digest
from jaxhal.watchdog.agents import Agent, Reply
from jaxhal.watchdog.bounds import now
from jaxhal.watchdog.evaluators import Evaluator, Judgement
from jaxhal.watchdog.journal import Journal, answered
from jaxhal.watchdog.monitor import known_entropies
from jaxhal.watchdog.plan import Node, Plan


@dataclasses.dataclass(frozen=True)
class Inquiry:
    """Has an agent answer and an evaluator judge, and neither do so twice."""

    agent: Agent
    evaluator: Evaluator
    entailment: Entailment
    plan: Plan
    journal: Journal
    labels: Mapping[str, int]  # that a person gave to queries

    async def __call__(self, node: Node) -> None:
        """Fills in a query's answer, label and entropy, or why there is none."""
        key, plan, once = digest(node.query), self.plan, self.journal.once
        say = partial(self._said, node.query)
        said, drawn = await asyncio.gather(
            once(f"answer {key}", partial(say, 1, plan.answer_temperature), _came),
            once(f"samples {key}", partial(say, plan.samples, plan.temperature), _came),
        )
        answer = Reply(**said["replies"][0])
        samples = [Reply(**one) for one in drawn["replies"] if not one["error"]]
        node.time = said["time"]
        if answer.error is not None or not _came(drawn):
            errors = (one["error"] for one in drawn["replies"] if one["error"])
            node.why = answer.error or next(errors)
            return
        node.answer, node.context = answer.text, answer.context
        # The reward of equation (2) asks whether any answer is hallucinated.
        judged = [answer, *samples] if plan.how == "reinforced" else [answer]
        verdicts = await once(
            f"verdict {key}",
            partial(self._judged, node.query, judged),
            lambda found: not any(Judgement(*one).failed for one in found),
        )
        entropy, error = await once(
            f"entropy {key}",
            partial(self._entropy, node.query, samples),
            lambda found: found[1] is None,
        )
        judgements = [Judgement(*one) for one in verdicts]
        error = next((one.why for one in judgements if one.failed), error)
        if error is not None:
            node.why, node.answer = error, ""
            return
        node.entropy = entropy
        node.label, node.why, node.confidence, _ = judgements[0]
        if node.label is None and node.query in self.labels:
            node.label, node.confidence = self.labels[node.query], 1.0
            node.why = f"a person decided ({node.why})"
        node.clean = 1 not in [node.label, *(one.label for one in judgements[1:])]

    async def _said(self, query: str, n: int, temperature: float) -> dict[str, Any]:
        (replies,) = await self.agent.respond([query], n, temperature)
        return {"time": now(), "replies": [dataclasses.asdict(one) for one in replies]}

    async def _judged(self, query: str, replies: Sequence[Reply]) -> list[list[Any]]:
        queries = [query] * len(replies)
        return [[*one] for one in await self.evaluator.judge(queries, replies)]

    async def _entropy(self, query: str, samples: Sequence[Reply]) -> list[Any]:
        texts = [one.text for one in samples]
        (found,) = await asyncio.to_thread(
            known_entropies, [query], [texts], self.entailment
        )
        return [*found]


def _came(said: Mapping[str, Any]) -> bool:
    return answered(said["replies"])


class Review:
    """Of an exploration the answers that the evaluator is not sure of."""

    def __init__(self, path: str | os.PathLike):
        self.path = Path(path)
        self.labels = {query: row["label"] for query, row in _decided(path).items()}
        self._open: set[str] = set()

    def write(self, nodes: Iterable[Node]) -> None:
        """What waits, beside what a person decided in the meantime, as it stands."""
        decided = _decided(self.path)
        shown = ("query", "answer", "context", "why", "label")
        waiting = [
            {name: getattr(node, name) for name in shown}
            for node in nodes
            if node.label is None and node.answer and node.query not in decided
        ]
        if {one["query"] for one in waiting} - self._open:
            write_rows(self.path, [*decided.values(), *waiting])
            self._open = {one["query"] for one in waiting}


def _decided(path: str | os.PathLike) -> dict[str, dict[str, Any]]:
    """The rows that have a label, by their query."""
    found = {}
    # What people write need not end in a new line, and is not ours to change.
    for number, line in numbered_lines(path) if Path(path).is_file() else ():
        try:
            row = parse(line)
        except ValueError as error:
            raise ValueError(f"{path}, line {number}: {error}") from error
        where, label = f"{path}, line {number}", row.get("label")
        if not isinstance(row.get("query"), str):
            raise ValueError(f"{where}: 'query' is missing; keep the rows")
        if label not in (0, 1, None) or isinstance(label, bool):
            raise ValueError(f"{where}: 'label' is {label!r}; use 0, 1 or null")
        if label is not None:
            found[row["query"]] = row
    return found
