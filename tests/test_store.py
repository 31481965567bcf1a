"""Features on disk: found by content, resumed bit for bit, shared between processes."""

import dataclasses
import random
import resource
import time
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pandas as pd
import pyarrow.parquet as pq
import pytest

import jaxhal
from jaxhal.reading import parts
from jaxhal.reading import store as store_module
from jaxhal.reading.keys import column_name
from jaxhal.reading.parts import Column, ColumnCache
from jaxhal.reading.store import Store
from jaxhal.types import Example
from store_child import PART_ROWS, REDUCERS, Child
from tiny_lm import answers, read_into, tiny_lm


@pytest.fixture(scope="module")
def lm():
    return tiny_lm()


@pytest.fixture
def reads(monkeypatch):
    """How many answers the model reads from here on."""
    counted = []
    real = parts.read

    def read(lm, batch, reducers, **options):
        counted.append(len(batch.tokens))
        return real(lm, batch, reducers, **options)

    monkeypatch.setattr(parts, "read", read)
    return counted


def same_bits(one, other):
    assert one.features.keys() == other.features.keys()
    for name, values in one.features.items():
        for a, b in zip(values, other.features[name], strict=True):
            assert a.shape == b.shape and a.tobytes() == b.tobytes(), name


def test_features_equal_a_plain_read(lm, tmp_path):
    examples = answers(7)
    stored = read_into(tmp_path, lm, examples, REDUCERS, batch_size=4)
    assert stored.kept == list(range(7)) and not stored.errors
    for number, example in enumerate(examples):
        count = len(stored.rows[number].response_ids)
        alone = jaxhal.read(lm, lm.encode([example]), REDUCERS)
        for name, tokens in (("lookback", 2), ("mtop_div", None), ("states", 1)):
            expected = np.asarray(alone[name])[:, 0]
            if tokens is not None:
                expected = np.take(expected, range(count), axis=tokens)
            value = stored.features[name][number]
            assert value.shape == expected.shape
            np.testing.assert_allclose(value, expected, atol=1e-5)
        expected = np.asarray(alone["logprob"])[0, :count]
        np.testing.assert_allclose(
            stored.features["logprob"][number], expected, atol=1e-4
        )


def test_nothing_is_read_twice(lm, tmp_path, reads):
    store = Store(tmp_path)
    first = read_into(store, lm, answers(6), REDUCERS)
    done = len(reads)
    assert done
    # Again, by another store object, in another order, under other names.
    other = {f"my {name}": reducer for name, reducer in REDUCERS.items()}
    again = read_into(tmp_path, lm, answers(6)[::-1], other)
    assert len(reads) == done
    for name, values in first.features.items():
        for a, b in zip(values, again.features[f"my {name}"][::-1], strict=True):
            assert a.tobytes() == b.tobytes()
    # Two more answers, one of which is known: one is read.
    reads.clear()
    read_into(store, lm, [answers(6)[0], answers(8)[7]], REDUCERS, batch_size=1)
    assert reads == [1]
    # One more feature: only that one is read, for all.
    read_into(store, lm, answers(6), {**REDUCERS, "entropy": jaxhal.TokenEntropy()})
    names = [set(pq.read_schema(path).names) for path in tmp_path.glob("*/parts/*.p*")]
    assert names.count({"key", "tokens", "TokenEntropy()"}) == 1


def test_parts_are_plain_parquet(lm, tmp_path):
    read_into(tmp_path, lm, answers(4), REDUCERS)
    (path,) = tmp_path.glob("*/parts/*.parquet")
    frame = pd.read_parquet(path)
    assert len(frame) == 4 and frame["tokens"].min() > 5
    ratio = frame["LookbackRatio()"].map(len)
    assert (ratio == frame["tokens"] * 2 * 4).all()


def test_features_are_read_from_disk_again_when_forgotten(lm, tmp_path):
    stored = read_into(tmp_path, lm, answers(40), REDUCERS, batch_size=4)
    for name, column in stored.features.items():
        small = Column(column.name, column.places, ColumnCache(budget=1))
        assert len({place.path for place in small.places}) > 1
        for number in (39, 0, 20, 0):
            assert small[number].tobytes() == column[number].tobytes()
        part = column[3:9:2]
        assert [v.tobytes() for v in part] == [column[n].tobytes() for n in (3, 5, 7)]
        assert part.axes == column.axes, name


def test_the_oldest_features_are_forgotten(lm, tmp_path):
    stored = read_into(tmp_path, lm, answers(40), REDUCERS, batch_size=4)
    keys = [
        (path, column.name)
        for column in stored.features.values()
        for path in {place.path: None for place in column.places}
    ]
    last = [ColumnCache()[key].flat.nbytes for key in keys[-2:]]
    cache = ColumnCache(budget=sum(last))
    assert all(cache[key] is cache[key] for key in keys)
    assert [*cache][-2:] == keys[-2:] and keys[0] not in cache


def test_rows_that_do_not_fit_cost_no_other(lm, tmp_path):
    examples = [answers(1)[0], Example("x" * 600, prompt="long"), answers(2)[1]]
    stored = read_into(tmp_path, lm, examples, {"logprob": REDUCERS["logprob"]})
    assert stored.kept == [0, 2] and list(stored.errors) == [1]
    assert "601 response tokens" in stored.errors[1]
    none = read_into(tmp_path, lm, examples[1:2], {"logprob": REDUCERS["logprob"]})
    assert none.kept == [] and not len(none.features["logprob"])


def test_models_do_not_mix(lm, tmp_path):
    examples = answers(2)
    one = read_into(tmp_path, lm, examples, REDUCERS)
    two = read_into(tmp_path, tiny_lm(seed=1), examples, REDUCERS)
    assert len(list(tmp_path.iterdir())) == 2
    assert (one.features["mtop_div"][0] != two.features["mtop_div"][0]).any()


@dataclasses.dataclass(frozen=True)
class Peak(jaxhal.Reducer):
    """The largest attention of a row."""

    scale: float = 1.0

    def rows(self, rows, view):
        return rows.max(-1) * self.scale


@dataclasses.dataclass(frozen=True)
class Pair(jaxhal.Reducer):
    """Not an array."""

    def rows(self, rows, view):
        return rows.max(-1), rows.min(-1)


@dataclasses.dataclass(frozen=True)
class Square(jaxhal.Reducer):
    """Response by response."""

    values = ("response", "response")

    def rows(self, rows, view):
        return rows[:, view.prompt_length :]

    def finish(self, rows, view):
        return jnp.where(view.valid[view.prompt_length :], rows, 0.0)


def test_own_reducers(lm, tmp_path):
    own = column_name(Peak(2.0))
    assert "test_store.Peak(scale=2.0)@" in own and own != column_name(Peak())
    with pytest.raises(TypeError, match="gives a tuple; a store keeps single arrays"):
        read_into(tmp_path, lm, answers(1), {"pair": Pair()})
    stored = read_into(tmp_path, lm, answers(3), {"peak": Peak(), "square": Square()})
    for row, peak, square in zip(
        stored.rows, stored.features["peak"], stored.features["square"], strict=True
    ):
        count = len(row.response_ids)
        assert peak.shape == (2, 4, count) and square.shape == (2, 4, count, count)


@dataclasses.dataclass(frozen=True)
class Odd(jaxhal.Reducer):
    """What a store cannot keep."""

    kind: str

    @property
    def values(self):
        return ("response", "key") if self.kind in ("keys", "prompt") else ("response",)

    def rows(self, rows, view):
        return {
            "keys": rows,
            "prompt": rows[:, : view.prompt_length],
            "twice": rows.max(-1),
            "bfloat16": rows.max(-1).astype(jnp.bfloat16),
            "bool": rows.max(-1),
        }[self.kind]

    def finish(self, rows, view):
        if self.kind == "twice":
            return jnp.repeat(rows, 2, 0)
        return rows > 0.5 if self.kind == "bool" else rows


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        (
            "keys",
            r"Odd\(kind='keys'\).* gives .*503, 1512\] for a prompt of 1009 tokens",
        ),
        ("prompt", r"gives .* 503, 1009\] .* cut it to the response"),
        ("twice", r"declares the axes layer, heads, response and gives .* 1006\]"),
        ("bfloat16", r"Odd.* gives bfloat16; .* end it with .astype\(jnp.float32\)"),
        ("bool", "gives bool; a store keeps float32, float16, int32: end it"),
    ],
)
def test_features_a_store_cannot_keep(lm, tmp_path, kind, message):
    with pytest.raises(TypeError, match=message):
        read_into(tmp_path, lm, answers(1), {"odd": Odd(kind)})
    assert not list(tmp_path.glob("*/parts/*"))


def one(name):
    return {name: REDUCERS[name]}


def test_a_deleted_part_is_read_again(lm, tmp_path, reads):
    store = Store(tmp_path)
    whole = read_into(store, lm, answers(2), one("mean"))
    read_into(store, lm, answers(4), one("mean"))
    # The first two are in no part of the four: they were there when it was planned.
    read_into(store, lm, answers(4), one("mean"))
    kept = [value.tobytes() for value in whole.features["mean"]]
    for place in whole.features["mean"].places:
        place.path.unlink(missing_ok=True)
    reads.clear()
    again = read_into(store, lm, answers(4), one("mean"))
    assert len(reads) == 1
    assert kept == [value.tobytes() for value in again.features["mean"]][:2]
    for path in tmp_path.glob("*/parts/*"):
        path.unlink()
    assert len(read_into(store, lm, answers(4), one("mean")).kept) == 4


def emptied(data):
    return b""


def cut(data):
    return data[: len(data) // 2]


@pytest.mark.parametrize("damage", [emptied, cut])
def test_a_damaged_part_is_named(lm, tmp_path, damage):
    store = Store(tmp_path)
    whole = read_into(store, lm, answers(2), one("mean"))
    (path,) = tmp_path.glob("*/parts/*")
    path.write_bytes(damage(path.read_bytes()))
    with pytest.raises(ValueError, match=f"part .*{path.name}.* damaged.*delete it"):
        read_into(store, lm, answers(2), one("mean"))
    path.unlink()
    same_bits(whole, read_into(store, lm, answers(2), one("mean")))


def test_damage_inside_a_part_is_named(lm, tmp_path):
    column = read_into(tmp_path, lm, answers(2), one("mean")).features["mean"]
    path = column.places[0].path
    data = bytearray(path.read_bytes())
    data[100:-2000] = b"\xff" * len(data[100:-2000])  # what lies before the schema
    path.write_bytes(data)
    with pytest.raises(ValueError, match=f"part .*{path.name}.* damaged.*delete it"):
        Column(column.name, column.places, ColumnCache())


def test_bad_requests(lm, tmp_path):
    store = Store(tmp_path)
    with pytest.raises(ValueError, match="batch_size is 0"):
        store.columns(lm, [], REDUCERS, batch_size=0)
    with pytest.raises(ValueError, match="no reducers"):
        store.columns(lm, [], {})
    with pytest.raises(TypeError, match="give an instance"):
        store.columns(lm, [], {"a": 3})


def test_a_folder_that_cannot_be_written(lm, tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(OSError, match="cannot write the feature store.*choose another"):
        Store(tmp_path / "file" / "store")


def test_errors_of_reading_are_their_own(lm, tmp_path, monkeypatch):
    def failing(*args):
        raise FileNotFoundError(2, "no such model file")

    monkeypatch.setattr("jaxhal.reading.store.make_table", failing)
    with pytest.raises(FileNotFoundError, match="no such model file$"):
        read_into(tmp_path, lm, answers(1), one("mean"))


def test_a_full_disk_keeps_what_was_finished(lm, tmp_path, monkeypatch):
    """No file may grow past a few kilobytes, in which no part fits."""
    read_into(tmp_path / "before", lm, answers(8), REDUCERS)  # what compiles is kept
    store = Store(tmp_path / "full")
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, hard))
    try:
        with pytest.raises(OSError, match="make room or choose another folder"):
            read_into(store, lm, answers(8), REDUCERS)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert not list(store.root.glob("*/parts/*"))  # no half of a part either
    assert len(read_into(store, lm, answers(8), REDUCERS).kept) == 8


def test_killed_at_any_moment_it_resumes_bit_for_bit(lm, tmp_path, monkeypatch):
    monkeypatch.setattr(store_module, "_PART_ROWS", PART_ROWS)
    count = 96
    whole = read_into(tmp_path / "whole", lm, answers(count), REDUCERS, batch_size=2)
    folder = tmp_path / "killed"
    rng = random.Random(0)
    seen: dict[str, int] = {}
    for _ in range(3):
        child = Child(folder, count)
        child.go()
        before = len(list(folder.glob("*/parts/[!.]*")))
        target = before + rng.randrange(0, 3)
        # Until some more parts are there, and then any moment of the next one.
        while (
            len(list(folder.glob("*/parts/[!.]*"))) < target
            and child.process.is_alive()
        ):
            time.sleep(0.002)
        time.sleep(rng.random() * 0.05)
        child.process.kill()
        assert "done" not in child.said(), "it had finished before the kill"
        for path in folder.glob("*/parts/[!.]*"):
            stamp = path.stat().st_mtime_ns
            assert seen.setdefault(str(path), stamp) == stamp  # never written again
    resumed = read_into(folder, lm, answers(count), REDUCERS, batch_size=2)
    same_bits(whole, resumed)
    for path, stamp in seen.items():
        assert Path(path).stat().st_mtime_ns == stamp


def test_two_processes_share_the_work(lm, tmp_path, monkeypatch):
    monkeypatch.setattr(store_module, "_PART_ROWS", PART_ROWS)
    count = 32
    whole = read_into(tmp_path / "whole", lm, answers(count), REDUCERS, batch_size=2)
    folder = tmp_path / "both"
    both = [Child(folder, count) for _ in range(2)]
    for child in both:
        child.go()
    said = [child.said(timeout=120) for child in both]
    assert all(words[-1] == "done" for words in said)
    # No part was made by both: a second one would have the same name and bits.
    assert sum(words.count("made") for words in said) == count // PART_ROWS
    assert len(list(folder.glob("*/parts/[!.]*"))) == count // PART_ROWS
    same_bits(whole, read_into(folder, lm, answers(count), REDUCERS, batch_size=2))
