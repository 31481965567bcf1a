"""Other uses of an exploration than the watchdog's, by hand."""

import numpy as np
import pytest
from test_encoding import write, write_pooling

from jaxhal.evaluation import auroc
from jaxhal.models.encoders.encoding import embed, kept_encoder
from jaxhal.watchdog import changes, page


@pytest.fixture(scope="module")
def encoder(tmp_path_factory):
    folder = write(tmp_path_factory.mktemp("encoder"))
    write_pooling(folder, normalize=True, mean=True)
    return str(folder)


def asked(count, seed, paths=3):
    drawn = np.random.default_rng(seed)
    return changes.Asked(
        [f"w{n} w{n + seed} w{2 * n}" for n in range(count)],
        [f"w{n % 7} w{n % 5}" for n in range(count)],
        drawn.random(count),
        drawn.random(count) < 0.5,
        [str(n % paths) for n in range(count)],
    )


def cosines(some, others, encoder):
    vectors = [embed(kept_encoder(encoder), x, progress=False) for x in (some, others)]
    first, second = (x / np.linalg.norm(x, axis=1, keepdims=True) for x in vectors)
    return first @ second.T


def told(one):
    return [one.queries[at] + " " + one.answers[at] for at in range(len(one.queries))]


def share(near, wrong):
    """Of one query's neighbours, slowly."""
    order = sorted(range(len(near)), key=lambda at: -near[at])[:10]
    weights = [max(near[at], 0.0) for at in order]
    return sum(w * wrong[at] for w, at in zip(weights, order, strict=True)) / sum(
        weights
    )


def test_what_was_judged():
    rows = [
        {
            "query": f"q{n}",
            "answer": "a",
            "entropy": n / 2,
            "label": label,
            "first": "f",
        }
        for n, label in enumerate([1, None, 0])
    ]
    found = changes.judged(rows)
    assert (found.queries, found.wrong.tolist()) == (["q0", "q2"], [True, False])
    assert found.entropies.tolist() == [0.0, 1.0] and found.paths == ["f", "f"]


def test_each_score_is_what_it_says(encoder):
    held, bound = asked(9, 1), asked(30, 2)
    found = changes.scored(held, bound, encoder)
    alone, above, wrong, answers, regression = found.values()
    np.testing.assert_array_equal(alone, held.entropies)
    near = cosines(held.queries, bound.queries, encoder)
    with_answers = cosines(told(held), told(bound), encoder)
    points = np.flatnonzero(bound.wrong)
    for at in range(9):
        nearest = points[np.argsort(-near[at, points], kind="stable")[:10]]
        mean = bound.entropies[nearest].mean()
        assert above[at] == pytest.approx(held.entropies[at] - mean, abs=1e-6)
        assert wrong[at] == pytest.approx(share(near[at], bound.wrong), abs=1e-5)
        of_answers = share(with_answers[at], bound.wrong)
        assert answers[at] == pytest.approx(of_answers, abs=1e-5)
    assert len(np.unique(regression)) == 9


def test_a_regression_learns_of_other_paths_alone(encoder):
    """Labels that follow the path, and nothing else, are not to be seen."""
    bound = asked(40, 3, paths=2)
    wrong = np.array(bound.paths) == "1"
    bound = bound._replace(wrong=wrong, entropies=np.zeros(40))
    near = cosines(bound.queries, bound.queries, encoder)
    paths = np.array(bound.paths)
    near[paths[:, None] == paths] = -np.inf
    own = changes._columns(near, bound, bound)
    # Beside each query there are only those of the other path, all of the other kind.
    np.testing.assert_allclose(own[:, 1], ~wrong)
    assert (own[wrong, 2] == -1.0).all()


def test_one_kind_of_answers_gives_no_regression(encoder):
    bound = asked(12, 2)._replace(wrong=np.ones(12, bool))
    found = changes.scored(asked(4, 1), bound, encoder)
    assert len(found) == 4 and not any("regression" in name for name in found)
    few = changes.scored(
        asked(4, 1), asked(3, 2)._replace(wrong=np.ones(3, bool)), encoder
    )
    assert all(np.isfinite(score).all() for score in few.values())


def test_where_nothing_explored_was_wrong_there_is_nothing_to_compare(encoder):
    bound = asked(12, 2)._replace(wrong=np.zeros(12, bool))
    assert changes.compared(asked(4, 1), bound, encoder, {}, [*range(4)]) == []
    assert page._changes([]) == [
        "No explored query was answered wrongly, so there is none to go by."
    ]


def test_rows_stand_beside_what_is_known(encoder):
    held, bound = asked(20, 1), asked(30, 2)
    beside = {"above itself": held.entropies, "above nothing": np.zeros(20)}
    rows = changes.compared(held, bound, encoder, beside, [*range(20)])
    first = rows[0]
    assert first["AUROC"] == auroc(held.entropies, held.wrong)
    assert first["above itself"] == first["above itself high"] == 0.0
    assert first["above nothing"] == pytest.approx(first["AUROC"] - 0.5)
    assert first["AUROC low"] <= first["AUROC"] <= first["AUROC high"]
    assert len({row["change"] for row in rows}) == len(rows) == 5
