"""Algorithm 1 of HalMit against a slow oracle."""

import dataclasses
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from jaxhal.watchdog import PRESETS, Guard, decide, monitor
from jaxhal.watchdog.index import unit

CLOSE = 1e-5  # float32 cannot tell


def scaled(vector):
    length = math.sqrt(sum(x * x for x in vector))
    return [x / length for x in vector] if length else list(vector)


def dot(a, b):
    return sum(x * y for x, y in zip(a, b, strict=True))


def oracle(query, entropy, vectors, entropies, guard):
    """Flagged, score, near and cosine; and what came close to a threshold."""
    query, vectors = scaled(query), [scaled(v) for v in vectors]
    results = sorted(
        ((dot(query, v), -at) for at, v in enumerate(vectors)), reverse=True
    )[:3]
    cosines, order = [s for s, _ in results], [-at for _, at in results]
    margins = []
    centroid_cosine = None
    if guard.gate:
        ready = len(cosines) == 3 and cosines[2] >= guard.similarity
        margins += [cosines[2] - guard.similarity] if len(cosines) == 3 else []
    else:
        ready = bool(cosines)
    if ready:
        weights = cosines if guard.centroid == "weighted" else [1.0] * len(cosines)
        total = sum(weights)
        margins.append(total)
        near = [vectors[at] for at in order]
        middle = [dot(weights, column) for column in zip(*near, strict=True)]
        margins.append(max(map(abs, middle)))
        middle = [x / total for x in middle] if total else [0.0 for _ in middle]
        centroid_cosine = dot(query, scaled(middle))
        margins.append(centroid_cosine - guard.similarity)
    if guard.entropy is None:
        cosine = -1.0 if centroid_cosine is None else centroid_cosine
        flagged = cosine > guard.similarity
        return (flagged, cosine, flagged, cosine), margins
    if centroid_cosine is not None and centroid_cosine >= guard.similarity:
        return (True, 1 + centroid_cosine, True, centroid_cosine), margins
    cosine = -1.0 if centroid_cosine is None else centroid_cosine
    if not cosines:
        return (False, 0.5, False, cosine), margins
    bound = entropies[order[0]] if guard.entropy == "nearest" else max(entropies)
    return (
        entropy > bound,
        1 / (1 + math.exp(bound - entropy)),
        False,
        cosine,
    ), margins


def ties(query, vectors):
    """Whether two different vectors are as near as float32 can tell."""
    rows = [(dot(scaled(query), scaled(v)), tuple(v)) for v in vectors]
    return any(
        abs(a - b) < CLOSE and v != w for a, v in rows for b, w in rows if v is not w
    )


number = st.sampled_from([-2.0, -1.0, 0.0, 0.5, 1.0, 3.0])
vector = st.lists(number, min_size=3, max_size=3)
point = st.tuples(vector, st.sampled_from([0.0, 0.5, 1.0, 2.0]))
guards = st.builds(
    Guard,
    similarity=st.sampled_from([0.0, 0.2, 0.8, 0.95]),
    gate=st.booleans(),
    centroid=st.sampled_from(["weighted", "mean"]),
    entropy=st.sampled_from(["nearest", "highest", None]),
)


@settings(max_examples=100, deadline=None)
@given(vector, st.sampled_from([0.0, 0.5, 1.0]), st.lists(point, max_size=6), guards)
def test_equals_a_slow_oracle(query, entropy, points, guard):
    # A point twice: equal vectors are a tie, and the first counts.
    points = [*points, *points[:1]] if len(points) in (2, 4) else points
    vectors, entropies = [v for v, _ in points], [h for _, h in points]
    assume(not ties(query, vectors))
    want, margins = oracle(query, entropy, vectors, entropies, guard)
    assume(all(abs(margin) > CLOSE for margin in margins))
    got = monitor(
        np.array(query),
        entropy,
        np.reshape(np.array(vectors, float), (-1, 3)),
        np.array(entropies),
        guard,
    )
    assert (bool(got.flagged), bool(got.near)) == (want[0], want[2])
    np.testing.assert_allclose([got.score, got.cosine], [want[1], want[3]], atol=1e-5)


def test_an_empty_bound_flags_nothing():
    for guard in PRESETS.values():
        found = monitor(np.ones(4), 9.0, np.zeros((0, 4)), np.zeros(0), guard)
        assert not found.flagged and not found.near
        assert float(found.score) == (-1.0 if guard.entropy is None else 0.5)


def test_vectors_of_zeros_are_near_nothing():
    bound = np.zeros((3, 4))
    found = monitor(np.ones(4), 1.0, bound, np.array([0.5, 0.1, 0.2]))
    assert found.flagged and not found.near and float(found.cosine) == -1.0
    assert float(found.score) == pytest.approx(1 / (1 + math.exp(-0.5)))
    zero = monitor(np.zeros(4), 0.5, np.eye(4), np.full(4, 0.5))
    assert not zero.flagged  # an equal entropy is no higher one
    assert float(zero.score) == 0.5


def test_the_bound_by_hand():
    """Equation 7: of (1, 0), (0.8, 0.6), (0.6, 0.8) and the query (1, 0)."""
    points = np.array([[1.0, 0.0], [0.8, 0.6], [0.6, 0.8]])
    query = np.array([2.0, 0.0])
    found = monitor(query, 0.0, points, np.ones(3), Guard(similarity=0.5))
    centroid = np.array([1 + 0.64 + 0.36, 0.48 + 0.48]) / 2.4
    cosine = centroid[0] / np.hypot(*centroid)
    assert float(found.cosine) == pytest.approx(cosine, abs=1e-6)
    assert found.near and float(found.score) == pytest.approx(1 + cosine, abs=1e-6)
    mean = monitor(query, 0.0, points, np.ones(3), PRESETS["repo"])
    assert float(mean.cosine) == pytest.approx(2.4 / np.hypot(2.4, 1.4), abs=1e-6)


def test_a_cosine_at_the_threshold():
    """The paper's gates open there, the published code's flag does not go up."""
    bound, query = np.tile([1.0, 0.0], (3, 1)), np.array([1.0, 0.0])
    for guard, flagged in ((PRESETS["paper"], True), (PRESETS["repo"], False)):
        guard = dataclasses.replace(guard, similarity=1.0)
        found = monitor(query, 0.0, bound, np.ones(3), guard)
        assert (bool(found.flagged), bool(found.near)) == (flagged, flagged)
        assert float(found.cosine) == 1.0
    # The third point decides whether the gate opens.
    third = np.array([[1.0, 0.0], [1.0, 0.0], [0.6, 0.8]])
    for similarity, near in ((0.6, True), (np.nextafter(np.float32(0.6), 1), False)):
        guard = Guard(similarity=float(similarity))
        assert bool(monitor(query, 0.0, third, np.ones(3), guard).near) == near


def test_of_equally_near_points_the_first_counts():
    """Different vectors as near as each other: the entropy is that of the first."""
    bound, query = np.eye(4), np.full(4, 0.5)
    for first in range(4):
        order = np.roll(np.arange(4), -first)
        found = monitor(query, 1.0, bound[order], np.arange(4.0)[order], Guard(0.9))
        assert not found.near and bool(found.flagged) == (1.0 > first)
        score = 1 / (1 + math.exp(first - 1.0))
        assert float(found.score) == pytest.approx(score, abs=1e-6)


def test_maps_over_queries():
    rng = np.random.default_rng(0)
    queries, points = rng.normal(size=(5, 8)), rng.normal(size=(20, 8))
    entropies, own = rng.random(20), rng.random(5)
    one = [monitor(q, h, points, entropies) for q, h in zip(queries, own, strict=True)]
    many = jax.vmap(monitor, (0, 0, None, None))(queries, own, points, entropies)
    for name in ("flagged", "score", "near", "cosine"):
        want = np.array([getattr(each, name) for each in one])
        np.testing.assert_allclose(getattr(many, name), want, atol=1e-6)
    # Of an answer's entropy the score has a derivative where entropy decides.
    slope = jax.grad(
        lambda h: (
            decide(
                unit(queries[0]),
                h,
                unit(points[:3]),
                jnp.array([0.3, 0.2, 0.1]),
                jnp.asarray(entropies[:3], jnp.float32),
                1.0,
            ).score
        )
    )(0.5)
    assert 0 < float(slope) <= 0.25


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"similarity": 1.5}, "similarity is 1.5; give a cosine"),
        ({"similarity": -1.0}, "similarity is -1.0"),
        ({"similarity": -0.5}, "similarity is -0.5; what is near has a cosine of"),
        ({"centroid": "median"}, "centroid is 'median'; use one of"),
        ({"entropy": "mean"}, "entropy is 'mean'; use one of"),
    ],
)
def test_bad_guards(change, message):
    with pytest.raises(ValueError, match=message):
        dataclasses.replace(Guard(), **change)
