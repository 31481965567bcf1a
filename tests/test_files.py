"""Files that grow line by line: all of what is added or none, whatever happens."""

import os

import children
import pytest

from jaxhal.files import alone, append, lines_of


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
