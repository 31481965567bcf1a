"""Which way to change a query: rewards, probabilities, and a network that learns them.

References:
  Liu et al., 2025, section 3.1.2; see :mod:`jaxhal.watchdog`.
"""

import collections
import functools
import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from jaxtyping import Array, Float, Int, Key

from jaxhal.io.checks import one_of
from jaxhal.reading.keys import digest
from jaxhal.watchdog.plan import SHARES, TRANSFORMATIONS, Node, Plan, Training

# Of equation (2): a reward is no larger, and the one it is the inverse of no smaller.
_MOST, _LEAST = 10.0, 0.1
# What a transformation is worth at least where rewards are shares; width of a state.
_FLOOR, _OMEGA = 1e-3, 0.1


def reward(entropy: Any, before: Any, reward_before: Any, clean: Any) -> Array:
    r"""What a query was worth, elementwise; higher = nearer to the bound.

    .. math:: R_i = H_i - H_{i-1} \text{ in } [-1, 1] \quad\text{or}\quad
      \min(1 / \max(|R_{i-1}|, 0.1), 10)

    the first where all answers are clean, the second where one is hallucinated (Liu et
    al., 2025, equation 2, which leaves the inverse unbounded).  Entropies are in nats.
    """
    gain = jnp.clip(jnp.asarray(entropy, jnp.float32) - before, -1.0, 1.0)
    hit = jnp.minimum(1 / jnp.maximum(jnp.abs(reward_before), _LEAST), _MOST)
    return jnp.where(clean, gain, hit)


def probabilities(rewards: Any, how: str = "softmax") -> Float[Array, "*batch ways"]:
    r"""How likely each transformation is taken, from the rewards of all three.

    .. math:: p_j = R_j \Big/ \sum_k R_k

    is equation (3) of Liu et al., 2025, which no negative reward fits: ``"shares"``
    takes it of rewards that are at least 0.001; ``"softmax"`` takes :math:`e^{R_j}`.
    """
    rewards = jnp.asarray(rewards, jnp.float32)
    one_of(SHARES, how=how)
    if how == "softmax":
        return jax.nn.softmax(rewards, axis=-1)
    shares = jnp.maximum(rewards, _FLOOR)
    return shares / shares.sum(-1, keepdims=True)


def state(first: Any, query: Any, entropy: Any) -> Array:
    r"""Where a query lies in the space that is explored, a whole number from 0 on.

    .. math:: s = \lfloor \Delta\mathrm{Sim} \cdot e^{H} / \omega \rfloor, \quad
      \Delta\mathrm{Sim} = 1 - \cos(P_0, P_i), \quad \omega = 0.1

    as equation (4) of Liu et al., 2025, of two ``Float[*batch width]`` at length 1.
    """
    apart = 1 - jnp.sum(jnp.asarray(first) * jnp.asarray(query), -1)
    # Rounding must not make an equal query a negative state.
    return jnp.floor(jnp.maximum(apart, 0.0) * jnp.exp(entropy) / _OMEGA).astype(int)


class Steps(NamedTuple):
    """Queries that were changed in all three ways, one a row.

    ``query`` and ``first``, with which its path began, are vectors at length 1;
    entropies are in nats; ``probabilities`` of the three ways are zeros where not
    known.
    """

    query: Float[Any, "steps width"]
    first: Float[Any, "steps width"]
    entropy: Float[Any, " steps"]
    depth: Int[Any, " steps"]
    probabilities: Float[Any, "steps 3"]


class Policy(nnx.Module):
    """A network from a query and its state to the worth of the three ways.

    Two hidden layers of ReLU; its inputs are the query's vector, its entropy, the
    logarithm of its state and its depth.
    """

    def __init__(self, width: int, hidden: int = 128, *, rngs: nnx.Rngs):
        self.first = nnx.Linear(width + 3, hidden, rngs=rngs)
        self.second = nnx.Linear(hidden, hidden, rngs=rngs)
        self.last = nnx.Linear(hidden, len(TRANSFORMATIONS), rngs=rngs)

    def __call__(self, steps: Steps) -> Float[Array, "steps 3"]:
        """Worth of each way, what :func:`probabilities` makes of rewards."""
        at = state(steps.first, steps.query, steps.entropy)
        numbers = [steps.entropy, jnp.log1p(at), jnp.log1p(jnp.asarray(steps.depth))]
        x = jnp.concatenate(
            [jnp.asarray(steps.query), jnp.stack(numbers, -1)], -1, dtype=jnp.float32
        )
        x = nnx.relu(self.second(nnx.relu(self.first(x))))
        return self.last(x)


class Trained(NamedTuple):
    """A policy that was trained, and its mean squared error in each epoch."""

    policy: Policy
    losses: Float[np.ndarray, " epochs"]


def train(steps: Steps, key: Key[Array, ""], training: Training) -> Trained:
    r"""A policy fitted to the probabilities of steps, in one compiled program.

    .. math:: L(\theta) = \sum_i \lVert Q^*(s_i) - Q(s_i; \theta) \rVert_2^2

    as equations (5) and (6) of Liu et al., 2025.
    """
    count, width = np.shape(steps.query)
    if not count:
        raise ValueError("there are no steps to learn from; explore first")
    weights, order = jax.random.split(key)
    policy = Policy(width, training.hidden, rngs=nnx.Rngs(weights))
    graph, params = nnx.split(policy)
    params, losses = _fit(
        params, jax.tree.map(jnp.asarray, steps), order, graph, training
    )
    return Trained(nnx.merge(graph, params), np.asarray(losses))


@functools.partial(jax.jit, static_argnums=(3, 4))
def _fit(
    params: Any, steps: Steps, key: Array, graph: Any, training: Training
) -> tuple[Any, Array]:
    count = len(steps.entropy)
    size = min(training.batch_size, count)
    batches = -(-count // size)
    optimizer = optax.adam(training.learning_rate)

    def loss(params: Any, rows: Array, weight: Array) -> Array:
        some = jax.tree.map(lambda leaf: leaf[rows], steps)
        off = nnx.merge(graph, params)(some) - some.probabilities
        return jnp.sum(weight * jnp.sum(off**2, -1)) / weight.sum()

    def batch(carry: Any, part: tuple[Array, Array]) -> tuple[Any, Array]:
        params, inner = carry
        value, slope = jax.value_and_grad(loss)(params, *part)
        updates, inner = optimizer.update(slope, inner, params)
        return (optax.apply_updates(params, updates), inner), value * part[1].sum()

    def epoch(carry: Any, key: Array) -> tuple[Any, Array]:
        rows = jax.random.permutation(key, count)
        # The last batch is filled up with steps that count for nothing.
        missing = batches * size - count
        rows = jnp.pad(rows, (0, missing)).reshape(batches, size)
        weight = (jnp.arange(batches * size) < count).reshape(batches, size)
        carry, values = jax.lax.scan(batch, carry, (rows, weight.astype(jnp.float32)))
        return carry, values.sum() / count

    start = (params, optimizer.init(params))
    keys = jax.random.split(key, training.epochs)
    (params, _), losses = jax.lax.scan(epoch, start, keys)
    return params, losses


@nnx.jit
def worth(policy: Policy, steps: Steps) -> Float[Array, "steps 3"]:
    """How likely each way is taken, by the network: shares of its worths."""
    return probabilities(policy(steps), "shares")


class Chooser:
    """Chooses ways by a ``policy``, once it has learnt one from enough ``steps``."""

    def __init__(
        self, plan: Plan, training: Training, vectors: Mapping[str, np.ndarray]
    ):
        self.policy: Trained | None = None
        self.steps: list[tuple[Node, list[float]]] = []
        self._plan, self.training, self._vectors = plan, training, vectors
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
        self.policy = train(steps, jax.random.fold_in(self._key, 1), self.training)

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
