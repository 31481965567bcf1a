"""Rewards, probabilities and states by hand; the network against a plain loop."""

import dataclasses
import math

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

from jaxhal.watchdog.policy import (
    Policy,
    Steps,
    Training,
    probabilities,
    reward,
    state,
    train,
    worth,
)


def steps(count=50, width=6, seed=0):
    """Where the entropy is high the first way is worth most, else the last."""
    rng = np.random.default_rng(seed)
    vectors = rng.normal(size=(2, count, width)).astype(np.float32)
    vectors /= np.linalg.norm(vectors, axis=-1, keepdims=True)
    entropy = rng.uniform(0, 2, count).astype(np.float32)
    high = (entropy > 1)[:, None]
    best = np.where(high, [0.8, 0.1, 0.1], [0.1, 0.1, 0.8]).astype(np.float32)
    return Steps(vectors[0], vectors[1], entropy, rng.integers(0, 5, count), best)


@pytest.mark.parametrize(
    ("entropy", "before", "reward_before", "clean", "want"),
    [
        (1.2, 0.5, 0.3, True, 0.7),  # all clean: what entropy rose by
        (0.5, 1.2, 0.3, True, -0.7),
        (2.3, 0.0, 0.3, True, 1.0),  # at most 1
        (0.0, 2.3, 0.3, True, -1.0),
        (1.2, 0.5, 0.5, False, 2.0),  # hallucinated: the inverse of the last reward
        (1.2, 0.5, -0.5, False, 2.0),
        (1.2, 0.5, 0.0, False, 10.0),  # at most 10
        (1.2, 0.5, 4.0, False, 0.25),
    ],
)
def test_reward_by_hand(entropy, before, reward_before, clean, want):
    assert float(reward(entropy, before, reward_before, clean)) == pytest.approx(want)


def test_probabilities_by_hand():
    rewards = jnp.array([2.0, 1.0, 1.0])
    np.testing.assert_allclose(probabilities(rewards, "shares"), [0.5, 0.25, 0.25])
    total = math.exp(2) + 2 * math.exp(1)
    want = [math.exp(2) / total, math.exp(1) / total, math.exp(1) / total]
    np.testing.assert_allclose(probabilities(rewards), want, rtol=1e-6)
    # A negative reward is worth a little, and all of them are worth the same.
    np.testing.assert_allclose(
        probabilities([-1.0, 0.999, -2.0], "shares"), [1e-3, 0.998, 1e-3], atol=2e-6
    )
    np.testing.assert_allclose(
        probabilities([-1.0, -1.0, -3.0], "shares"), np.full(3, 1 / 3), rtol=1e-6
    )
    with pytest.raises(ValueError, match="how is 'odd'; use one of softmax"):
        probabilities(rewards, "odd")


def test_state_by_hand():
    first, query = jnp.array([1.0, 0.0]), jnp.array([0.6, 0.8])
    # (1 - 0.6) * e / 0.1 = 10.87...
    assert int(state(first, query, 1.0)) == 10
    assert int(state(first, first, 5.0)) == 0
    assert state(jnp.eye(2), jnp.eye(2)[::-1], jnp.zeros(2)).tolist() == [10, 10]


def test_training_equals_a_plain_loop():
    """Same weights, order and steps, batch by batch."""
    data, how = steps(10), Training(learning_rate=1e-2, batch_size=4, epochs=3)
    key = jax.random.key(1)
    found = train(data, key, how)
    weights, order = jax.random.split(key)
    policy = Policy(6, rngs=nnx.Rngs(weights))
    graph, params = nnx.split(policy)
    optimizer = optax.adam(1e-2)
    inner, losses = optimizer.init(params), []
    for one in jax.random.split(order, 3):
        rows, total = np.asarray(jax.random.permutation(one, 10)), 0.0
        for start in (0, 4, 8):
            some = Steps(*(leaf[rows[start : start + 4]] for leaf in data))

            def loss(params, some=some):
                off = nnx.merge(graph, params)(some) - some.probabilities
                return jnp.mean(jnp.sum(off**2, -1))

            value, slope = jax.value_and_grad(loss)(params)
            updates, inner = optimizer.update(slope, inner, params)
            params = optax.apply_updates(params, updates)
            total += float(value) * len(some.entropy)
        losses.append(total / 10)
    np.testing.assert_allclose(found.losses, losses, rtol=1e-4)
    want = worth(nnx.merge(graph, params), data)
    np.testing.assert_allclose(worth(found.policy, data), want, atol=1e-4)


def test_a_policy_learns():
    data = steps(300)
    found = train(data, jax.random.key(0), Training(learning_rate=1e-3, epochs=100))
    assert found.losses[-1] < 0.3 * found.losses[0]
    fresh = steps(200, seed=1)
    p = np.asarray(worth(found.policy, fresh))
    np.testing.assert_allclose(p.sum(1), 1, rtol=1e-5)
    assert (p > 0).all()
    right = p.argmax(1) == fresh.probabilities.argmax(1)
    assert right.mean() > 0.8


def test_nothing_to_learn_from():
    with pytest.raises(ValueError, match="no steps to learn from"):
        train(Steps(*(leaf[:0] for leaf in steps(1))), jax.random.key(0), Training())
    with pytest.raises(ValueError, match="epochs is 0; give one above 0"):
        dataclasses.replace(Training(), epochs=0)
    with pytest.raises(dataclasses.FrozenInstanceError):
        Training().epochs = 0
