"""Files that grow line by line: all of what is added or none, whatever happens."""

import errno
import os
import signal
import threading
import time

import children
import pytest

from jaxhal.io import files
from jaxhal.io.files import (
    alone,
    append,
    check_apart,
    lines_after,
    lines_of,
    replacing,
    staged,
)
from jaxhal.io.interrupts import uninterrupted


def test_what_cannot_be_written_whole_is_taken_back(tmp_path, monkeypatch):
    path = tmp_path / "rows.jsonl"
    append(path, [{"a": 1}])
    before = path.read_bytes()

    def full(number):
        raise OSError("No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr(os, "fsync", full)
        with pytest.raises(OSError, match="No space"):
            append(path, [{"b": 2}, {"c": 3}])
    assert path.read_bytes() == before
    append(path, [{"d": 4}])
    assert lines_of(path) == [{"a": 1}, {"d": 4}]


@pytest.mark.parametrize("torn", [b'{"b', b"x" * 200_000])
@pytest.mark.parametrize("rows", [[], [{"a": 1}]])
def test_a_torn_line_is_left_out_and_then_cut_off(tmp_path, torn, rows):
    path = tmp_path / "rows.jsonl"
    append(path, rows)
    with path.open("ab") as file:
        file.write(torn)
    # A reader changes nothing: somebody else may be about to write the rest.
    assert lines_of(path) == rows and path.read_bytes().endswith(torn)
    append(path, [{"d": 4}])
    assert lines_of(path) == [*rows, {"d": 4}]


def test_two_processes_add_to_one_file(tmp_path):
    path = tmp_path / "rows.jsonl"
    both = [children.start(_add, path, name, 200) for name in "ab"]
    for process, line in both:
        assert children.rest(line) == ["done"]
        process.join()
    rows = lines_of(path)
    assert [number for name, number in rows if name == "a"] == list(range(200))
    assert [number for name, number in rows if name == "b"] == list(range(200))


def _add(path, name, count, line):
    for number in range(count):
        append(path, [[name, number]])
    line.send("done")


def test_alone(tmp_path):
    with alone(tmp_path):
        with pytest.raises(RuntimeError, match=f"another process writes to {tmp_path}"):
            with alone(tmp_path):
                pass
    with alone(tmp_path):
        pass


def test_a_line_that_is_not_json_is_named(tmp_path):
    path = tmp_path / "points.jsonl"
    path.write_bytes(b'{"a": 1}\n{nonsense}\n')
    for start in (0, 9):
        with pytest.raises(ValueError, match=r"points\.jsonl, line 2: not JSON"):
            lines_after(path, start)


def test_what_was_added_since(tmp_path):
    path = tmp_path / "rows.jsonl"
    append(path, [1, 2])
    rows, end = lines_after(path, 0)
    assert rows == [1, 2] and lines_after(path, end) == ([], end)
    append(path, ["ä"])
    with path.open("ab") as file:
        file.write(b"4")  # torn
    rows, after = lines_after(path, end)
    assert rows == ["ä"] and lines_after(path, after) == ([], after)


def test_what_a_killed_writer_left_goes_with_the_next(tmp_path):
    path = tmp_path / "scores.jsonl"
    process, line = children.start(_die_writing, path)
    assert line.recv() == "writing"
    process.kill()
    process.join()
    assert len(list(tmp_path.iterdir())) == 1
    with replacing(path) as file:
        file.write("whole")
        with replacing(path) as other:  # who still writes keeps what it has written
            other.write("first")
    assert [entry.name for entry in tmp_path.iterdir()] == ["scores.jsonl"]
    assert path.read_text() == "whole"


@pytest.mark.parametrize("folder", [False, True])
def test_what_another_user_left_stays(tmp_path, monkeypatch, folder):
    """Who may not open it cannot delete it either."""
    left = tmp_path / f".scores.jsonl.{'0' * 32}.new"
    left.mkdir() if folder else left.write_text("half")
    opens = os.open

    def refuse(path, *given):
        if str(path).startswith(str(left)):
            raise PermissionError(errno.EACCES, "Permission denied", str(path))
        return opens(path, *given)

    monkeypatch.setattr(os, "open", refuse)
    with replacing(tmp_path / "scores.jsonl") as file:
        file.write("whole")
    assert sorted(os.listdir(tmp_path)) == [left.name, "scores.jsonl"]


def test_two_processes_make_one_folder(tmp_path):
    path = tmp_path / "run"
    both = [children.start(_make, path, name, 150) for name in "ab"]
    for process, line in both:
        assert children.rest(line) == ["done"]
        process.join()
    assert os.listdir(tmp_path) == ["run"]
    assert [*sorted(os.listdir(path))] == ["one", "other"]
    assert (path / "one").read_text() == (path / "other").read_text()


def _make(path, name, count, line):
    for _ in range(count):
        with staged(path) as place:
            for part in ("one", "other"):
                (place / part).write_text(name)
    line.send("done")


def _die_writing(path, line):
    with replacing(path) as file:
        file.write("half")
        line.send("writing")
        time.sleep(600)


def test_a_stop_takes_no_whole_row_back(tmp_path, monkeypatch):
    def stop(handle):
        raise KeyboardInterrupt

    monkeypatch.setattr(os, "fsync", stop)
    with pytest.raises(KeyboardInterrupt):
        append(tmp_path / "rows", [1, 2])
    assert lines_of(tmp_path / "rows") == [1, 2]


@pytest.mark.parametrize("make", [replacing, staged])
def test_a_stop_as_soon_as_there_is_a_file_leaves_none(tmp_path, monkeypatch, make):
    def lock(handle, how):
        assert os.listdir(tmp_path)
        raise KeyboardInterrupt

    monkeypatch.setattr(files.fcntl, "flock", lock)
    with pytest.raises(KeyboardInterrupt), make(tmp_path / "out"):
        pass
    assert not os.listdir(tmp_path)


def test_files_have_the_permissions_they_should(tmp_path):
    path = tmp_path / "key"
    umask = os.umask(0o022)
    try:
        with replacing(path) as file:
            file.write("open")
        assert path.stat().st_mode & 0o777 == 0o644
        with replacing(path, private=True) as file:
            file.write("closed")
        assert path.stat().st_mode & 0o777 == 0o600
        with replacing(path) as file:  # what a user closed stays closed
            file.write("still")
        assert path.stat().st_mode & 0o777 == 0o600
    finally:
        os.umask(umask)


def test_files_that_must_be_apart(tmp_path):
    one, two = tmp_path / "one", tmp_path / "two"
    one.write_text("x")
    (tmp_path / "link").symlink_to(one)
    (tmp_path / "hard").hardlink_to(one)
    for spelled in (one, tmp_path / "." / "one", tmp_path / "link", tmp_path / "hard"):
        with pytest.raises(ValueError, match="--output .* is the file of --input"):
            check_apart({"--input": one}, {"--output": spelled})
    with pytest.raises(ValueError, match="--html .* is the file of --output"):
        check_apart({}, {"--output": two, "--html": two})
    check_apart({"--input": "-"}, {"--output": "-", "--html": None})
    check_apart({"--input": os.devnull}, {"--output": os.devnull})


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
@pytest.mark.parametrize("error", [None, ValueError("a fault of its own")])
def test_a_stop_waits_for_what_must_not_be_left_half_done(number, error):
    def stop(*_):
        raise KeyboardInterrupt

    before, done = signal.signal(number, stop), []
    try:
        with pytest.raises(KeyboardInterrupt) as stopped, uninterrupted():
            signal.raise_signal(number)
            signal.raise_signal(number)  # someone is impatient
            done.append(1)
            if error:
                raise error
        assert done and stopped.value.__context__ is error
        assert signal.getsignal(number) is stop
    finally:
        signal.signal(number, before)


def test_only_the_main_thread_is_stopped():
    before, heard = signal.getsignal(signal.SIGINT), []

    def work():
        with uninterrupted():
            heard.append(signal.getsignal(signal.SIGINT))

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert heard == [before]
