"""Stores of boundary points: one contract for all of them."""

import dataclasses
import re
import types
import uuid

import bound_child
import numpy as np
import pytest
import thorough
from milvus_server import MilvusServer

from jaxhal.watchdog import BoundaryStore, ExactStore, MilvusStore, Point
from jaxhal.watchdog.index import Index, nearest

WIDTH = 5


def points(count, start=0):
    return [
        Point(
            id=f"p{n}",
            query=f"What is {n}?",
            response=f'"{n}"\nÜ',
            context="C" * n,
            entropy=n / 4,
            verdict="overlap 0.1",
            domain="numbers",
            agent="a",
            time="2026-01-01T00:00:00+00:00",
        )
        for n in range(start, start + count)
    ]


def vectors(count, seed=0):
    return np.random.default_rng(seed).normal(size=(count, WIDTH)).astype(np.float32)


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    """The address of a Milvus server."""
    pytest.importorskip("milvus_lite")
    one = MilvusServer(tmp_path_factory.mktemp("served") / "data")
    one.start()
    yield one.uri
    one.kill()


@pytest.fixture(params=["memory", "file", "milvus", "server"])
def opened(request, tmp_path):
    """Opens the same store again and again."""
    if request.param == "milvus":
        pytest.importorskip("milvus_lite")
    uri = request.getfixturevalue("server") if request.param == "server" else ""
    stores, name = [], f"bound_{uuid.uuid4().hex}"

    def make(width=WIDTH):
        if request.param == "milvus":
            stores.append(MilvusStore(width, tmp_path / "bound.db"))
        elif uri:
            stores.append(MilvusStore(width, uri, name))
        else:
            folder = tmp_path / "bound" if request.param == "file" else None
            stores.append(ExactStore(width, folder))
        return stores[-1]

    yield make
    for store in stores:
        store.close()


def test_contract(opened):
    store = opened()
    assert isinstance(store, BoundaryStore) and store.width == WIDTH
    assert len(store) == 0 and store.highest_entropy() is None
    assert store.search(vectors(2), 3) == [[], []]
    some, block = points(20), vectors(20)
    store.add(some[:3], block[:3])
    store.add(some[3:], block[3:])
    store.add([], block[:0])
    assert len(store) == 20 and store.highest_entropy() == 19 / 4
    queries = vectors(4, seed=1)
    found = store.search(queries, 3)
    normal = block / np.linalg.norm(block, axis=1, keepdims=True)
    want = queries / np.linalg.norm(queries, axis=1, keepdims=True) @ normal.T
    for hits, cosines in zip(found, want, strict=True):
        best = np.argsort(-cosines)[:3]
        assert [hit.point for hit in hits] == [some[at] for at in best]
        np.testing.assert_allclose(
            [hit.similarity for hit in hits], cosines[best], atol=1e-5
        )
        for hit, at in zip(hits, best, strict=True):
            np.testing.assert_allclose(hit.vector, normal[at], atol=1e-6)
    assert len(store.search(queries[:1], 50)[0]) == 20
    assert store.search(queries[:0], 3) == []


def test_a_known_name_is_replaced(opened):
    store = opened()
    some, block = points(3), vectors(3)
    store.add(some, block)
    other = dataclasses.replace(some[1], response="Other.", entropy=9.0)
    store.add([other], -block[:1])
    assert len(store) == 3 and store.highest_entropy() == 9.0
    ((hit,),) = store.search(-block[:1], 1)
    assert hit.point == other and hit.similarity == pytest.approx(1, abs=1e-5)


def test_a_name_is_no_filter(opened):
    store = opened()
    store.add(points(3), vectors(3))
    for name in ("o'brien", "x'] or id in ['p0','p1", 'p"0', "p\\"):
        assert name not in store and store.remove([name]) == 0
    assert len(store) == 3 and "p0" in store


def test_removal(opened):
    store = opened()
    some, block = points(6), vectors(6)
    store.add(some, block)
    assert store.remove(["p1", "p5", "p1", "nobody"]) == 2
    assert store.remove([]) == 0 and len(store) == 4
    assert store.highest_entropy() == 1.0
    for at in (1, 5):
        hits = store.search(block[[at]], 6)[0]
        assert {hit.point.id for hit in hits} == {"p0", "p2", "p3", "p4"}
    for at in (0, 2, 3, 4):
        assert store.search(block[[at]], 1)[0][0].point == some[at]
    store.add([some[5]], block[[5]])
    assert store.search(block[[5]], 1)[0][0].point == some[5]


def test_removal_does_not_walk_all_points():
    """The last one takes the place of one that goes; no other moves."""
    store = ExactStore(WIDTH)
    some, block = points(400), vectors(400)
    store.add(some, block)
    store.remove(["p3"])
    assert [*store] == [*some[:3], some[399], *some[4:399]]
    other = dataclasses.replace(some[7], response="Other.")
    store.add([some[3], other], block[[3, 8]])
    assert [*store] == [*some[:3], some[399], *some[4:7], other, *some[8:399], some[3]]
    for at in (0, 3, 399):
        assert store.search(block[[at]], 1)[0][0].point == some[at]
    assert {hit.point.id for hit in store.search(block[[8]], 2)[0]} == {"p7", "p8"}


@pytest.mark.parametrize("opened", ["file", "milvus", "server"], indirect=True)
def test_points_outlive_the_store(opened):
    store = opened()
    some, block = points(5), vectors(5)
    store.add(some, block)
    store.remove(["p2"])
    store.add([dataclasses.replace(some[0], entropy=7.0)], block[:1])
    store.close()
    again = opened()
    assert len(again) == 4 and again.highest_entropy() == 7.0
    assert again.search(block[[3]], 1)[0][0].point == some[3]
    again.close()
    with pytest.raises(ValueError, match=r"vectors of 5 numbers,\s+and 7 are asked"):
        opened(7)


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        (np.ones((2, WIDTH + 1)), r"shape \[2, 6\]; they must be \[any, 5\]"),
        (np.ones(WIDTH), r"shape \[5\]"),
        (np.full((2, WIDTH), np.nan), "not finite"),
        (np.ones((1, WIDTH)), "2 points come with 1 vectors"),
    ],
)
def test_bad_vectors(opened, bad, message):
    store = opened()
    with pytest.raises(ValueError, match=message):
        store.add(points(2), bad)
    assert len(store) == 0
    with pytest.raises(ValueError, match="k is 0; give at least 1"):
        store.search(vectors(1), 0)
    with pytest.raises(ValueError, match="share a name"):
        store.add(points(1) * 2, vectors(2))


@pytest.mark.parametrize("letter", ["a", "ä", "🙂", '"', "\n"])
def test_of_long_texts_milvus_stores_the_beginning(tmp_path, letter):
    pytest.importorskip("milvus_lite")
    store = MilvusStore(WIDTH, tmp_path / "bound.db")
    long = dict(context=letter * 70_000, response="b" * 100_000)
    huge = dataclasses.replace(points(1)[0], **long)
    wide = dataclasses.replace(points(2)[1], context="c" * 66_000, response="short")
    store.add([huge, wide], vectors(2))
    found = {hit.point.id: hit.point for hit in store.search(vectors(1), 2)[0]}
    for point in (huge, wide):
        kept = found[point.id]
        assert kept.query == point.query and kept.entropy == point.entropy
        for name in ("context", "response"):
            text, whole = getattr(kept, name), getattr(point, name)
            if text != whole:
                start, missing = re.fullmatch(
                    r"(.*) \[(\d+) characters are not stored\]", text, re.DOTALL
                ).groups()
                assert whole.startswith(start)
                assert len(start) + int(missing) == len(whole)
    assert found[wide.id].response == "short"
    assert len(found[wide.id].context) > 65_000
    assert len(found[huge.id].response) > 60_000
    with pytest.raises(
        ValueError, match="'p0' has .* bytes of text beside its context"
    ):
        store.add([dataclasses.replace(huge, query="q" * 70_000)], vectors(1))
    store.close()
    exact = ExactStore(WIDTH)
    exact.add([huge], vectors(1))
    assert exact.search(vectors(1), 1)[0][0].point == huge


def test_no_server():
    pytest.importorskip("pymilvus")
    with pytest.raises(RuntimeError, match="cannot be used .* check the address"):
        MilvusStore(WIDTH, "http://127.0.0.1:9")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"query": " "}, "query of a point is ' '"),
        ({"id": ""}, "id of a point is ''; give 1 to"),
        ({"id": "  "}, "id of a point is '  '; give 1 to .*, not all of them blank"),
        ({"id": "o'brien"}, "id of a point is .*without quotes"),
        ({"id": "\N{EURO SIGN}" * 90}, "give 1 to 256 bytes"),
        ({"entropy": float("nan")}, "entropy of point 'p0' is nan"),
    ],
)
def test_bad_points(change, message):
    with pytest.raises(ValueError, match=message):
        dataclasses.replace(points(1)[0], **change)


def test_an_entropy_of_numpy_is_one_of_python():
    """JSON holds no other.  Types are checked in tests alone, and before this is."""
    given = types.SimpleNamespace(**vars(points(1)[0]) | {"entropy": np.float32(0.5)})
    Point.__post_init__(given)
    assert given.entropy == 0.5 and type(given.entropy) is float


def test_a_server_that_ends_between_pages(monkeypatch, tmp_path):
    pytest.importorskip("milvus_lite")
    from pymilvus import MilvusException

    closed = []

    class Pages:
        def next(self):
            raise MilvusException(message="gone")

        def close(self):
            closed.append(True)

    store = MilvusStore(WIDTH, tmp_path / "bound.db")
    monkeypatch.setattr(store._client, "query_iterator", lambda *a, **o: Pages())
    with pytest.raises(RuntimeError, match="Milvus does not query .*gone"):
        store.highest_entropy()
    assert closed
    store.close()


def test_a_torn_line_is_dropped(tmp_path):
    store = ExactStore(WIDTH, tmp_path)
    store.add(points(3), vectors(3))
    path = tmp_path / "points.jsonl"
    path.write_bytes(path.read_bytes()[:-9])
    again = ExactStore(WIDTH, tmp_path)
    assert {one.id for one in again} == {"p0", "p1"}
    again.add(points(1, start=2), vectors(1))
    assert len(ExactStore(WIDTH, tmp_path)) == 3


def test_an_index_grows():
    rng = np.random.default_rng(0)
    rows = np.zeros((0, 4), np.float32)
    index = Index(rows)
    for count in (1, 15, 17, 300, 70, 1, 2000):
        more = rng.normal(size=(count, 4)).astype(np.float32)
        index.add(more)
        rows = np.concatenate([rows, more])
    assert len(index) == len(rows)
    normal = rows / np.linalg.norm(rows, axis=1, keepdims=True)
    np.testing.assert_allclose(index[np.arange(len(rows))], normal, atol=1e-6)
    cosines, found = index.search(rows[[5, 2000]], 2)
    assert found[:, 0].tolist() == [5, 2000]
    np.testing.assert_allclose(cosines[:, 0], 1, atol=1e-5)
    with pytest.raises(ValueError, match="width is 0; give at least 1"):
        ExactStore(0)


@pytest.mark.parametrize("kind", ["file", *thorough.more("milvus")])
def test_killed_again_and_again(kind, tmp_path):
    """Every kill is -9, in the middle of adding; no point that was kept is lost."""
    if kind == "milvus":
        pytest.importorskip("milvus_lite")
    kept: set[int] = set()
    for turn in range(4):
        child = bound_child.Child(kind, str(tmp_path), max(kept, default=-1) + 2)
        assert child.found >= len(kept)
        fresh = child.kill(after=3 + turn)
        assert len(fresh) >= 3 + turn
        kept |= {*fresh}
    store = bound_child.opened(kind, tmp_path)
    # One that was being added at a kill may be there or not, but nothing else.
    assert len(kept) <= len(store) <= len(kept) + 4
    for number in kept:
        assert f"p{number}" in store
        (hit,) = store.search(bound_child.vector(number), 1)[0]
        assert hit.point == bound_child.point(number)
    store.close()


@pytest.mark.parametrize(("rows", "count"), [(7, 7), (300, 280), (1024, 1000)])
def test_of_equal_ones_the_first_comes_first(rows, count):
    rng = np.random.default_rng(rows)
    # Four directions, so that a query is as near to hundreds of rows, of many groups.
    known = np.eye(4, dtype=np.float32)[rng.integers(4, size=rows)]
    queries = np.array([[0.6, 0.8, 0, 0], [0, 0, 0.8, -0.6]], np.float32)
    cosines, numbers = nearest(queries, known, count, 6)
    want = queries @ known[:count].T
    for n in range(2):
        best = np.argsort(-want[n], kind="stable")[:6]
        assert numbers[n].tolist() == best.tolist()
        assert cosines[n].tolist() == want[n][best].tolist()
    few = nearest(queries, known, 4, 6)
    assert (few[1] < 0).sum(1).tolist() == [2, 2]
    assert np.isneginf(few[0][few[1] < 0]).all()


@thorough.mark
def test_a_server_killed_again_and_again(tmp_path):
    """One client all the while; what the server took is there when it is back."""
    pytest.importorskip("milvus_lite")
    served = MilvusServer(tmp_path / "data")
    served.start()
    some, block = points(4), vectors(4)
    store = MilvusStore(WIDTH, served.uri)
    try:
        for turn in range(3):
            store.add([some[turn]], block[[turn]])
            served.kill()
            served.start()
            assert len(store) == turn + 1
            for at in range(turn + 1):
                assert store.search(block[[at]], 1)[0][0].point == some[at]
        store.add([some[3]], block[[3]])
        assert len(store) == 4
    finally:
        store.close()
        served.kill()
