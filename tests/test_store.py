"""Features on disk: found by content, resumed bit for bit, shared between processes."""

import dataclasses
import os
import random
import resource
import signal
import subprocess
import sys
import time
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pandas as pd
import pytest

import jaxhal
from jaxhal.store import Store, column_name, encode, key_of, parts, planning
from jaxhal.store.columns import Cache, Column
from jaxhal.types import Example
from tiny_lm import answers, tiny_lm

REDUCERS = {
    "lookback": jaxhal.LookbackRatio(),
    "mtop_div": jaxhal.MTopDiv(),
    "states": jaxhal.HiddenStates(layers=(1,)),
    "mean": jaxhal.HiddenStates(tokens="mean"),
    "logprob": jaxhal.TokenLogprob(),
}


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
    stored = Store(tmp_path).read(lm, examples, REDUCERS, batch_size=4)
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
    first = store.read(lm, answers(6), REDUCERS)
    done = len(reads)
    assert done
    # Again, by another store object, in another order, under other names.
    other = {f"my {name}": reducer for name, reducer in REDUCERS.items()}
    again = Store(tmp_path).read(lm, answers(6)[::-1], other)
    assert len(reads) == done
    for name, values in first.features.items():
        for a, b in zip(values, again.features[f"my {name}"][::-1], strict=True):
            assert a.tobytes() == b.tobytes()
    # Two more answers, one of which is known: one is read.
    reads.clear()
    store.read(lm, [answers(6)[0], answers(8)[7]], REDUCERS, batch_size=1)
    assert reads == [1]
    # One more feature: only that one is read, for all.
    store.read(lm, answers(6), {**REDUCERS, "entropy": jaxhal.TokenEntropy()})
    columns = [parts._contents(path)[0] for path in parts._parts(*tmp_path.iterdir())]
    assert columns.count({"TokenEntropy()"}) == 1


def test_parts_are_plain_parquet(lm, tmp_path):
    Store(tmp_path).read(lm, answers(4), REDUCERS)
    (path,) = tmp_path.glob("*/parts/*.parquet")
    frame = pd.read_parquet(path)
    assert len(frame) == 4 and frame["tokens"].min() > 5
    ratio = frame["LookbackRatio()"].map(len)
    assert (ratio == frame["tokens"] * 2 * 4).all()


def test_features_are_read_from_disk_again_when_forgotten(lm, tmp_path):
    stored = Store(tmp_path).read(lm, answers(40), REDUCERS, batch_size=4)
    for name, column in stored.features.items():
        small = Column(column.name, column.places, Cache(budget=1))
        assert len({place.path for place in small.places}) > 1
        for number in (39, 0, 20, 0):
            assert small[number].tobytes() == column[number].tobytes()
        part = column[3:9:2]
        assert [v.tobytes() for v in part] == [column[n].tobytes() for n in (3, 5, 7)]
        assert part.axes == column.axes, name


def test_rows_that_do_not_fit_cost_no_other(lm, tmp_path):
    examples = [answers(1)[0], Example("x" * 600, prompt="long"), answers(2)[1]]
    stored = Store(tmp_path).read(lm, examples, {"logprob": REDUCERS["logprob"]})
    assert stored.kept == [0, 2] and list(stored.errors) == [1]
    assert "601 response tokens" in stored.errors[1]
    none = Store(tmp_path).read(lm, examples[1:2], {"logprob": REDUCERS["logprob"]})
    assert none.kept == [] and not len(none.features["logprob"])


def test_models_do_not_mix(lm, tmp_path):
    examples = answers(2)
    one = Store(tmp_path).read(lm, examples, REDUCERS)
    two = Store(tmp_path).read(tiny_lm(seed=1), examples, REDUCERS)
    assert len(list(tmp_path.iterdir())) == 2
    assert (one.features["mtop_div"][0] != two.features["mtop_div"][0]).any()


def test_keys_tell_masks_apart(lm):
    texts = [
        Example("yes", context="C", question="Q"),
        Example("yes", prompt="C\n\nQ"),
        Example("yes", prompt="C\n\nQ", id="another name"),
        Example("no!", prompt="C\n\nQ"),
    ]
    keys = [key_of(row) for row in encode(lm, texts)[2]]
    assert len(set(keys)) == 3 and keys[1] == keys[2]


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

    def rows(self, rows, view):
        return rows[:, view.prompt_length :]

    def finish(self, rows, view):
        return jnp.where(view.valid[view.prompt_length :], rows, 0.0)


def test_own_reducers(lm, tmp_path):
    own = column_name(Peak(2.0))
    assert "test_store.Peak(scale=2.0)@" in own and own != column_name(Peak())
    with pytest.raises(TypeError, match="gives a tuple; a store keeps single arrays"):
        Store(tmp_path).read(lm, answers(1), {"pair": Pair()})
    stored = Store(tmp_path).read(lm, answers(3), {"peak": Peak(), "square": Square()})
    for row, peak, square in zip(
        stored.rows, stored.features["peak"], stored.features["square"], strict=True
    ):
        count = len(row.response_ids)
        assert peak.shape == (2, 4, count) and square.shape == (2, 4, count, count)


def test_bad_requests(lm, tmp_path):
    store = Store(tmp_path)
    with pytest.raises(ValueError, match="batch_size is 0"):
        store.read(lm, answers(1), REDUCERS, batch_size=0)
    with pytest.raises(ValueError, match="no reducers"):
        store.read(lm, answers(1), {})
    with pytest.raises(TypeError, match="give an instance"):
        store.read(lm, answers(1), {"a": 3})


def test_a_folder_that_cannot_be_written(lm, tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(OSError, match="cannot write the feature store.*choose another"):
        Store(tmp_path / "file" / "store")


def test_a_full_disk_keeps_what_was_finished(lm, tmp_path, monkeypatch):
    """No file may grow past a few kilobytes: the plan fits, the parts do not."""
    store = Store(tmp_path)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, hard))
    try:
        with pytest.raises(OSError, match="make room or choose another folder"):
            store.read(lm, answers(8), REDUCERS)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert not list(tmp_path.glob("*/parts/*"))  # no half of a part either
    assert len(store.read(lm, answers(8), REDUCERS).kept) == 8


CHILD = """
import sys
sys.path.insert(0, {tests!r})
from test_store import small_parts, REDUCERS
from jaxhal.store import Store
from tiny_lm import answers, tiny_lm
small_parts()
print("ready", flush=True)
Store({folder!r}).read(tiny_lm(), answers({count}), REDUCERS, batch_size=2)
print("done", flush=True)
"""


def small_parts():
    planning._PART_ROWS = 4


def child(folder: Path, count: int) -> subprocess.Popen:
    code = CHILD.format(
        tests=str(Path(__file__).parent), folder=str(folder), count=count
    )
    cache = folder.parent / "compiled"
    env = {
        **os.environ,
        "JAX_COMPILATION_CACHE_DIR": str(cache),
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
    }
    return subprocess.Popen(
        [sys.executable, "-c", code], stdout=subprocess.PIPE, text=True, env=env
    )


def test_killed_at_any_moment_it_resumes_bit_for_bit(lm, tmp_path, monkeypatch):
    monkeypatch.setattr(planning, "_PART_ROWS", 4)
    count = 192
    whole = Store(tmp_path / "whole").read(lm, answers(count), REDUCERS, batch_size=2)
    folder = tmp_path / "killed"
    rng = random.Random(0)
    seen: dict[str, int] = {}
    kills = 0
    while kills < 10:
        process = child(folder, count)
        assert process.stdout is not None and process.stdout.readline() == "ready\n"
        before = len(list(folder.glob("*/parts/[!.]*")))
        target = before + rng.randrange(0, 3)
        # Until some more parts are there, and then any moment of the next one.
        while (
            len(list(folder.glob("*/parts/[!.]*"))) < target and process.poll() is None
        ):
            time.sleep(0.002)
        time.sleep(rng.random() * 0.05)
        process.send_signal(signal.SIGKILL)
        output, _ = process.communicate()
        assert "done" not in output, "it had finished before the kill"
        kills += 1
        for path in folder.glob("*/parts/[!.]*"):
            stamp = path.stat().st_mtime_ns
            assert seen.setdefault(str(path), stamp) == stamp  # never written again
    assert kills == 10
    resumed = Store(folder).read(lm, answers(count), REDUCERS, batch_size=2)
    same_bits(whole, resumed)
    for path, stamp in seen.items():
        assert Path(path).stat().st_mtime_ns == stamp


def test_two_processes_share_the_work(lm, tmp_path, monkeypatch):
    monkeypatch.setattr(planning, "_PART_ROWS", 4)
    count = 64
    whole = Store(tmp_path / "whole").read(lm, answers(count), REDUCERS, batch_size=2)
    folder = tmp_path / "both"
    both = [child(folder, count) for _ in range(2)]
    for process in both:
        output, _ = process.communicate(timeout=120)
        assert process.returncode == 0 and output.endswith("done\n")
    assert len(list(folder.glob("*/parts/[!.]*"))) == count // 4
    same_bits(whole, Store(folder).read(lm, answers(count), REDUCERS, batch_size=2))
