"""Bad rows become errors with a line number, good rows around them survive."""

import dataclasses
import io
import json
import os
import signal
import sys

import numpy as np
import pandas as pd
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from jaxhal.datasets.fields import NAMES
from jaxhal.datasets.jsonl import Row, read_rows, write_rows
from jaxhal.datasets.tables import from_rows
from jaxhal.io.files import replacing
from jaxhal.types import Example, Label, Turn


def read(*lines):
    return list(read_rows(io.BytesIO(b"\n".join(lines) + b"\n")))


def one(**row):
    [found] = read(json.dumps({"prompt": "Why?", "response": "So."} | row).encode())
    assert isinstance(found, Row)
    return found


def test_good_rows():
    rows = read(
        b'{"id": "a", "prompt": "Why?", "response": "Because."}',
        b"",
        b'{"id": 7, "context": "C", "question": "Q", "response": "R", "extra": [1]}\r',
        b'  {"context": "C", "prompt": null, "response": "R", "label": 1}',
    )
    assert [(row.line, row.id, row.error) for row in rows] == [
        (1, "a", None),
        (3, "7", None),
        (4, "line 4", None),
    ]
    first, second, third = (row.example for row in rows)
    assert (first.prompt, first.context, first.id) == ("Why?", None, "a")
    assert (second.context, second.question, second.label) == ("C", "Q", None)
    assert (third.question, third.label, third.labels) == (None, 1, None)


def test_labels():
    spans = [{"start": 0, "end": 2, "label": "conflict"}, {"start": 2, "end": 3}]
    row = one(labels=spans)
    assert row.example.labels == (Label(0, 2, "conflict"), Label(2, 3, "hallucination"))
    assert row.example.label == 1
    assert one(labels=[]).example.label == 0
    assert one(labels=None).example.label is None


def test_source_and_split():
    example = one(source=12, split="test").example
    assert (example.source, example.split) == ("12", "test")
    example = one(source=None, split=None).example
    assert (example.source, example.split, example.group) == ("", "", "Why?")


def test_offsets_count_characters_not_bytes():
    row = one(response="Łódź 🎉", labels=[{"start": 5, "end": 6}])
    assert row.example.response[5:6] == "🎉"
    assert "outside" in one(response="🎉", labels=[{"start": 0, "end": 2}]).error


def test_names_and_lists():
    row = one(response=None, answer="So it is.", prompt=None, context=["A.", "B."])
    assert (row.example.response, row.example.context) == ("So it is.", "A.\n\nB.")
    for contexts in (["A.", "B."], "A.\n\nB."):
        again = one(prompt=None, contexts=contexts, question="Q").example
        assert (again.context, again.question) == ("A.\n\nB.", "Q")


SAID = [
    {"role": "system", "content": "Be short."},
    {
        "role": "user",
        "content": [{"type": "text", "text": t} for t in ("It is", "red.")],
    },
    {"role": "assistant", "content": "What?"},
    {"role": "user", "content": "Which colour?"},
    {"role": "assistant", "content": "Blue, dear."},
]


def chat(messages, **more):
    return one(prompt=None, response=None, messages=messages, **more)


def test_a_chat_ends_with_the_answer():
    found = chat(SAID, labels=[{"start": 0, "end": 4}]).example
    assert found.response == "Blue, dear." and found.label == 1
    assert found.turns == (
        *(Turn("system", "Be short."), Turn("user", "It is\nred.")),
        *(Turn("assistant", "What?"), Turn("user", "Which colour?")),
    )
    assert found.prompt == "Be short.\n\nIt is\nred.\n\nWhat?\n\nWhich colour?"
    assert chat(SAID[3:]).example.turns == (Turn("user", "Which colour?"),)


@pytest.mark.parametrize(
    ("messages", "problem"),
    [
        ([], "has to end with the answer, of 'assistant', and there are none"),
        (SAID[:4], "of 'assistant', and the last is by \"user\""),
        (SAID[4:], "holds nothing but the answer"),
        ("Hi", "'messages' is text; use a list of {role, content}"),
        ([*SAID[:3], SAID[4]], "the turn before the answer is by 'assistant'"),
        (["Hi"], "'messages[0]' is text; use {role, content}"),
        (
            [{"role": "bot", "content": "x"}],
            "'messages[0].role' is \"bot\"; use sys",
        ),
        ([{"content": "x"}], "'messages[0].role' is null; use system, user, assistant"),
        (
            [{"role": "user", "content": None}],
            "'messages[0].content' is null; use text",
        ),
        (
            [{"role": "user", "content": [{"type": "image_url"}]}],
            "content[0]' is no te",
        ),
        ([{"role": "user", "content": "\udc00"}], "half of a surrogate pair"),
    ],
)
def test_bad_chats_say_what_is_wrong(messages, problem):
    found = chat(messages)
    assert found.example is None and problem in found.error


@pytest.mark.parametrize("key", ["response", "answer", "prompt", "context", "query"])
def test_a_row_has_one_form(key):
    found = one(**{"prompt": None, "response": None, "messages": SAID, key: "x"})
    assert f"'messages' and '{key}' are both given" in found.error
    assert one(answer="So.").error.endswith(
        "'response' and 'answer' both stand for the response; drop or rename all but "
        "one"
    )
    assert "both stand for the context" in one(context="C", contexts=["C"]).error
    assert "'turns' and 'templated'" in chat(SAID, templated=True).error


@pytest.mark.parametrize("key", ["questions", "contxt", "prompts", "answers", "note"])
def test_other_keys_are_left_alone(key):
    assert one(**{key: "?"}).error is None
    assert one(prompt=None, context="C", **{"Question": None}).error is None
    both = {"prompt": None, "context": "C", "question": "Q"}
    assert one(**both, **{key: "?"}).error is None


@pytest.mark.parametrize(
    ("given", "label"),
    [(1, 1), (1.0, 1), (True, 1), ("yes", 1), (0.0, 0), (False, 0), (None, None)]
    + [(float("nan"), None)],
)
def test_a_label_as_pandas_writes_it(given, label):
    assert one(label=given).example.label == label


@pytest.mark.parametrize(
    ("given", "label"),
    [(np.int64(1), 1), (np.bool_(False), 0), (np.str_("no"), 0), (np.float64(1), 1)]
    + [(np.float32("nan"), None), (pd.NA, None)],
)
def test_a_label_as_numpy_and_pandas_hold_it(given, label):
    row = {"prompt": "Why?", "response": "So.", "label": given}
    [found] = from_rows([row])
    assert found.error is None and found.example.label == label


@pytest.mark.parametrize(
    ("row", "problem"),
    [
        ({"response": None}, "'response' is missing"),
        (
            {"response": None, "respones": "A"},
            "respones' is not read; write 'response'",
        ),
        ({"prompt": None, "promt": "P"}, "promt' is not read; write 'prompt'"),
        ({"prompt": None, "contxt": "C", "question": "Q"}, "write 'context', or call"),
        ({"prompt": None, "context": "C", "Question": "Q"}, "Question' is not read"),
        ({"response": 3}, "'response' is 3; use text"),
        ({"response": ["a"]}, "'response' is a list; use text"),
        ({"response": " \n"}, "at least one visible character"),
        ({"response": "\ud83d"}, "'response' holds half of a surrogate pair"),
        ({"prompt": ""}, "prompt is ''"),
        ({"prompt": None}, "neither 'prompt' nor 'context'"),
        ({"context": "C"}, "'context' is not in 'prompt'"),
        ({"prompt": None, "context": " "}, "context is ' '"),
        ({"prompt": {}}, "'prompt' is an object; use text"),
        ({"prompt": None, "context": ["C", 3]}, "'context[1]' is 3; use text"),
        ({"prompt": None, "contexts": []}, "context is ''; it must hold text"),
        ({"context": ["So", "it"]}, "'context' is not in 'prompt'"),
        ({"question": "Q"}, "'question' is not in 'prompt'"),
        ({"source": ["u"]}, "'source' is a list; use text or a whole number"),
        ({"split": 1}, "'split' is 1; use text"),
        ({"label": 2}, "'label' is 2; use 0, 1"),
        ({"label": "1"}, "'label' is \"1\"; use 0, 1"),
        ({"label": 0.5}, "'label' is 0.5; use 0, 1"),
        ({"label": 0, "labels": [{"start": 0, "end": 1}]}, "label is 0 but 1 spans"),
        ({"labels": "none"}, "'labels' is text; use a list"),
        ({"labels": [[0, 1]]}, "'labels[0]' is a list; use {start, end, label}"),
        ({"labels": [{"start": 0}]}, "'labels[0].end' is null; use a whole number"),
        ({"labels": [{"start": "0", "end": 1}]}, "'labels[0].start' is \"0\""),
        ({"labels": [{"start": 0, "end": 4}]}, "[0, 4) lies outside the response of 3"),
        ({"labels": [{"start": -1, "end": 2}]}, "[-1, 2) lies outside"),
        ({"labels": [{"start": 2, "end": 2}]}, "[2, 2) lies outside"),
        ({"labels": [{"start": 0, "end": 1, "label": 5}]}, "'labels[0].label' is 5"),
    ],
)
def test_bad_rows_say_what_is_wrong(row, problem):
    found = one(id="q7", **row)
    assert found.example is None and found.id == "q7"
    assert found.error.startswith("line 1: ") and problem in found.error


@pytest.mark.parametrize(
    ("raw", "problem"),
    [
        (b'{"id": "a", "response": ', "not JSON at column 24: Expecting value"),
        (b"response: hello", "not JSON"),
        (b'["a"]', "expected a JSON object, got a list"),
        (b"null", "expected a JSON object, got null"),
        (b"3", "expected a JSON object, got 3"),
        (b'{"id": "a", "response": "\xff"}', "not UTF-8: byte 0xff at column 26"),
        (b"\xff\xfe{\x00}\x00", "not UTF-8: byte 0xff at column 1"),
        (b'{"id": 1.5}', "'id' is 1.5; use text or a whole number"),
        (b'{"id": true}', "'id' is true"),
        (b'{"id": "\\udc00"}', "'id' holds half of a surrogate pair"),
        (b"[" * 200_000, "not usable JSON"),
        (b'{"label": ' + b"9" * 5000 + b"}", "not usable JSON"),
    ],
)
def test_unreadable_lines_cost_nobody_else(raw, problem):
    good = b'{"id": "good", "prompt": "Why?", "response": "So."}'
    before, bad, after = read(good, raw, good)
    assert before.example and after.example and (before.line, after.line) == (1, 3)
    assert bad.example is None and bad.id == "line 2"
    assert bad.error.startswith("line 2: ") and problem in bad.error


@pytest.mark.parametrize(
    "field",
    [
        '"prompt": "Why?", "response": "So.", "tools": [%s]',
        '"prompt": "Why?", "response": "So.", "label": %s',
        '"prompt": "Why?", "response": "So.", "logprobs": {"content": [{"token": %s, '
        '"logprob": 0}]}',
        '"prompt": "Why?", "response": "So.", "logprobs": {"content": [{"token": "a", '
        '"logprob": %s}]}',
        '"messages": [{"role": "user", "content": "Hi"}, {"role": "assistant", '
        '"tool_calls": [{"function": {"name": "f", "arguments": %s}}]}, '
        '{"role": "user", "content": "So?"}, {"role": "assistant", "content": "Yes."}]',
    ],
)
def test_endless_brackets_cost_nobody_else(field):
    """At no depth, as what reads them and what writes them give up at others."""
    good = b'{"id": "good", "prompt": "Why?", "response": "So."}'
    deep = ['{"a": ' * depth + "0" + "}" * depth for depth in range(900, 1010)]
    *found, last = read(*(b"{%s}" % (field % one).encode() for one in deep), good)
    assert len(found) == 110 and last.example
    assert all("messages" in field or row.error for row in found)


def test_byte_order_mark_is_passed_over():
    [row] = read(b'\xef\xbb\xbf{"id": "a", "prompt": "Why?", "response": "So."}')
    assert row.id == "a" and row.error is None


KEYS = ["id", "response", "prompt", "context", "question", "label", "labels"]
LEAVES = st.none() | st.booleans() | st.integers() | st.floats() | st.text()
VALUES = st.recursive(
    LEAVES,
    lambda inner: (
        st.lists(inner)
        | st.dictionaries(st.sampled_from(["start", "end", "label"]) | st.text(), inner)
    ),
    max_leaves=8,
)
ROWS = st.dictionaries(st.sampled_from(KEYS), VALUES).map(
    lambda row: json.dumps(row).encode()
)


@settings(deadline=None, max_examples=300)
@given(st.lists(st.binary() | ROWS, max_size=6))
@example([b"\xef\xbb\xbf", b"\x00", b"{}"])
def test_any_bytes_give_one_row_a_line(lines):
    data = b"\n".join(lines)
    rows = list(read_rows(io.BytesIO(data)))
    full = [number for number, line in enumerate(data.split(b"\n"), 1) if line.strip()]
    if data.startswith(b"\xef\xbb\xbf") and not data.split(b"\n")[0][3:].strip():
        full = full[1:]
    assert [row.line for row in rows] == full
    for row in rows:
        assert (row.example is None) == (row.error is not None)
        assert row.id and (row.error is None or f"line {row.line}: " in row.error)
        json.dumps([row.id, row.error], ensure_ascii=False).encode()


def test_missing_file(tmp_path):
    with pytest.raises(FileNotFoundError, match="gone.jsonl: no such file"):
        read_rows(tmp_path / "gone.jsonl")
    with pytest.raises(IsADirectoryError, match="is a folder"):
        read_rows(str(tmp_path))


def test_lines_are_bytes(tmp_path):
    path = tmp_path / "rows.jsonl"
    path.write_text("{}\n")
    with path.open() as file, pytest.raises(ValueError, match="are text; give bytes"):
        list(read_rows(file))


def test_file_round_trip(tmp_path):
    path = tmp_path / "rows.jsonl"
    rows = [{"id": "ł🎉", "prompt": "Why?", "response": "a\u2028b\nc"}, {"id": "b"}]
    write_rows(path, rows)
    assert [json.loads(line) for line in path.read_bytes().splitlines()] == rows
    first, second = read_rows(path)
    assert first.example.response == rows[0]["response"] and second.error
    assert os.listdir(tmp_path) == ["rows.jsonl"]


def test_standard_streams(monkeypatch, capfdbinary):
    line = '{"id": "ł", "prompt": "Why?", "response": "So."}\n'.encode()
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(line)))
    [row] = read_rows("-")
    write_rows("-", [{"id": row.id}])
    assert capfdbinary.readouterr().out == '{"id": "ł"}\n'.encode()


def test_an_interrupted_write_keeps_the_old_file(tmp_path):
    path = tmp_path / "rows.jsonl"
    path.write_text("old\n")

    def rows():
        yield {"id": "a"}
        signal.raise_signal(signal.SIGINT)

    with pytest.raises(KeyboardInterrupt):
        write_rows(path, rows())
    with pytest.raises(ValueError, match="not JSON compliant"):
        write_rows(path, [{"score": float("nan")}])
    assert path.read_text() == "old\n" and os.listdir(tmp_path) == ["rows.jsonl"]


def test_write_needs_the_folder(tmp_path):
    with pytest.raises(FileNotFoundError, match="no such folder"):
        write_rows(tmp_path / "gone" / "rows.jsonl", [])


def test_links_and_devices_stay(tmp_path):
    target, link = tmp_path / "target", tmp_path / "link"
    target.write_text("old")
    link.symlink_to(target)
    with replacing(link) as file:
        file.write("new")
    assert link.is_symlink() and target.read_text() == "new"
    with replacing(os.devnull) as file:
        file.write("new")
    assert not os.path.isfile(os.devnull)


@pytest.mark.skipif(sys.platform == "win32", reason="no pipe has a path there")
def test_a_pipe_is_written_to_by_its_path():
    """As of -o /dev/stdout | cat, or -o >(cat): a link to what is in no folder."""
    reads, writes = os.pipe()
    with os.fdopen(reads), os.fdopen(writes, "wb"):
        with replacing(f"/dev/fd/{writes}") as file:
            file.write("new")
        assert os.read(reads, 9) == b"new"


@pytest.mark.parametrize(
    "wrong, message",
    [
        (dict(samples="one text"), "example 'x': samples is one text; give texts"),
        (dict(samples=("fine", 3)), "samples is .*; give texts"),
        (dict(labels=((0, 2),)), "labels is .*; give spans, each a Label"),
        (dict(response=5), "response is 5; give text"),
        (dict(context=b"bytes"), "context is b'bytes'; give text"),
        (dict(response=None), "response is None; give text"),
        (dict(id=5), "example 5: id is 5; give text"),
        (dict(split=None), "split is None; give text"),
        (dict(source=3), "source is 3; give text"),
        (dict(states=None), "states is None; give text"),
        (dict(samples=None), "samples is None; give texts"),
        (dict(samples=5), "samples is 5; give texts"),
        (dict(logprobs=[1]), r"logprobs is \[1\]; give those of the tokens, each a L"),
        (dict(tools=None), "tools is None; give definitions, each JSON as text"),
        (dict(tools=({"type": "function"},)), "tools is .*; give definitions, each"),
        (dict(turns=[{"role": "user"}]), "turns is .*; give turns, each a Turn"),
        (dict(templated="no"), "templated is no; give True or False"),
    ],
)
def test_fields_of_an_example_are_of_their_kinds(wrong, message):
    # Types are checked in tests alone, and before this is.
    made = Example("An answer.", context="A text.", question="Why?", id="x")
    for name, value in wrong.items():
        object.__setattr__(made, name, value)
    with pytest.raises(ValueError, match=message):
        made.__post_init__()


@pytest.mark.parametrize(("field", "names"), NAMES.items())
def test_the_names_that_data_to_fit_to_may_have(field, names):
    """What detectors are fitted to and what they judge is read alike."""
    usual = {
        "response": "A",
        "context": "C",
        "question": "Q",
        "label": 1,
        "source": "s",
    }
    want = one(**{"prompt": None, "response": None, **usual})
    assert want.example is not None
    for name in names:
        given = {key: value for key, value in usual.items() if key != field}
        row = {"prompt": None, "response": None} | given | {name: usual[field]}
        assert one(**row) == want
        (other,) = from_rows([row])
        assert other.example == dataclasses.replace(want.example, id="row 1")
