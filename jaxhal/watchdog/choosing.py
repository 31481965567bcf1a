"""Which ways a query is changed in: all, until a policy has learnt from them."""

import collections
import math
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np

from jaxhal.reading.keys import digest
from jaxhal.watchdog.plan import Node, Plan
from jaxhal.watchdog.policy import (
    TRANSFORMATIONS,
    Steps,
    Trained,
    probabilities,
    train,
    worth,
)


class Chooser:
    """Chooses ways by a ``policy``, once it has learnt one from enough ``steps``."""

    def __init__(self, plan: Plan, vectors: Mapping[str, np.ndarray]):
        self.policy: Trained | None = None
        self.steps: list[tuple[Node, list[float]]] = []
        self._plan, self._vectors = plan, vectors
        self._key = jax.random.key(plan.seed)
        self._allowed = np.isin(TRANSFORMATIONS, plan.ways)
        self._ways = [way for way in TRANSFORMATIONS if way in plan.ways]
        self._trials: dict[str, dict[str, float]] = collections.defaultdict(dict)

    def tried(self, parent: Node, way: str, value: float) -> None:
        """The reward of a way; those of all allowed ones are a step to learn from."""
        tried = self._trials[parent.query]
        tried[way] = value
        rewards = [tried.get(way, math.nan) for way in self._ways]
        if all(map(math.isfinite, rewards)):
            self.steps.append((parent, rewards))

    def learn(self) -> None:
        """Trains the policy once enough is known."""
        plan = self._plan
        if plan.how == "random" or self.policy or len(self.steps) < plan.steps:
            return
        nodes, rewards = zip(*self.steps, strict=True)
        steps = self._states(nodes)
        steps.probabilities[:, self._allowed] = probabilities(rewards, plan.shares)
        self.policy = train(steps, jax.random.fold_in(self._key, 1), plan.training)

    def chosen(self, node: Node) -> list[Any]:
        """The ways that a query is changed in, and the chances they had."""
        plan = self._plan
        if plan.how == "reinforced" and self.policy is None:
            return [[*self._ways], []]  # all of them, to learn from
        number = int(digest(node.query)[:8], 16)
        key = jax.random.fold_in(jax.random.fold_in(self._key, 2), np.uint32(number))
        draw, pick = jax.random.split(key)
        if self.policy is None:
            chances = jax.random.dirichlet(draw, np.ones(len(TRANSFORMATIONS)))
        else:
            chances = worth(self.policy.policy, self._states([node]))[0]
        chances = np.where(self._allowed, chances, 0.0)
        chances = chances / chances.sum()
        picked = jax.random.choice(
            pick, len(TRANSFORMATIONS), (plan.branch,), replace=False, p=chances
        )
        return [[TRANSFORMATIONS[at] for at in picked], chances.tolist()]

    def _states(self, nodes: Sequence[Node]) -> Steps:
        return Steps(
            np.stack([self._vectors[node.query] for node in nodes]),
            np.stack([self._vectors[node.first] for node in nodes]),
            np.array([node.entropy for node in nodes], np.float32),
            np.array([node.depth for node in nodes]),
            np.zeros((len(nodes), len(TRANSFORMATIONS)), np.float32),
        )
