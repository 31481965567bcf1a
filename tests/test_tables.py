"""Rows of tables under their various names, and spans to tokens."""

import json

import datasets as hf
import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxhal.datasets import (
    examples,
    from_dataset,
    from_hub,
    from_jsonl,
    from_parquet,
    from_rows,
    token_labels,
)
from jaxhal.datasets.jsonl import read_rows
from jaxhal.io import progress
from jaxhal.types import Example, Label

GOOD = {"prompt": "Why?", "response": "So."}
SAID = [{"role": "user", "content": "Why?"}, {"role": "assistant", "content": "So."}]
LETTUCE = {
    "prompt": "User request: Why?\n\nBecause.",
    "answer": "So it is.",
    "labels": [{"start": 3, "end": 5, "label": "Evident Conflict", "category": "x"}],
    "split": "dev",
    "task_type": "QA",
    "dataset": "ragtruth",
    "language": "en",
}


def one(row):
    [found] = from_rows([row])
    return found


def test_own_names():
    row = {
        "id": 7,
        "response": "So.",
        "context": "Text.",
        "question": "Why?",
        "labels": [{"start": 0, "end": 2}],
        "source": 3,
        "split": "test",
        "other": object(),
    }
    want = Example(
        "So.",
        context="Text.",
        question="Why?",
        id="7",
        labels=(Label(0, 2),),
        source="3",
        split="test",
    )
    assert one(row) == (1, "7", want, None)


def test_rows_of_lettuce_detect():
    example = one(LETTUCE).example
    assert (example.prompt, example.response) == (LETTUCE["prompt"], "So it is.")
    assert example.labels == (Label(3, 5, "Evident Conflict"),)
    assert (example.split, example.source, example.context) == ("dev", "", None)
    parts = one(LETTUCE | {"context": "Because.", "question": "Why?"}).example
    assert (parts.context, parts.question) == ("Because.", "Why?")
    assert one(LETTUCE | {"labels": []}).example.label == 0


@pytest.mark.parametrize(
    ("name", "field"),
    [
        ("answer", "response"),
        ("output", "response"),
        ("generated_answer", "response"),
        ("passages", "context"),
        ("document", "context"),
        ("knowledge", "context"),
        ("query", "question"),
        ("source_id", "source"),
    ],
)
def test_other_names(name, field):
    row = {"response": "R", "context": "C", "question": "Q", "source": "S"}
    del row[field]
    assert getattr(one(row | {name: "X"}).example, field) == "X"


@pytest.mark.parametrize("name", ["label", "hallucination", "is_hallucination"])
@pytest.mark.parametrize(
    ("value", "label"),
    [(1, 1), (0, 0), (True, 1), (False, 0), (1.0, 1), (0.0, 0), ("yes", 1), ("no", 0)],
)
def test_labels_by_other_names(name, value, label):
    found = one(GOOD | {name: value}).example
    assert found.label == label and type(found.label) is int


@pytest.mark.parametrize("empty", [None, float("nan"), np.nan])
def test_null_and_nan_mean_left_out(empty):
    row = GOOD | {"label": empty, "labels": empty, "answer": empty, "context": empty}
    assert one(row | {"id": empty}) == (1, "row 1", Example(**GOOD, id="row 1"), None)


def test_a_dict_of_lists_is_a_list_of_spans():
    labels = {"start": [0, 2], "end": [1, 3], "label": ["a", None]}
    assert one(GOOD | {"labels": labels}).example.labels == (
        Label(0, 1, "a"),
        Label(2, 3),
    )
    assert one(GOOD | {"labels": {"start": [], "end": []}}).example.label == 0


@pytest.mark.parametrize(
    ("row", "problem"),
    [
        (GOOD | {"answer": "So."}, "'response' and 'answer' both stand for the resp"),
        (GOOD | {"source": "a", "source_id": "b"}, "both stand for the source"),
        (
            {"prompt": "P", "output": "A", "generated_answer": "B"},
            "'output' and 'generated_answer' both stand for the response; drop or",
        ),
        (GOOD | {"label": "maybe"}, "'label' is \"maybe\"; use 0, 1"),
        (GOOD | {"label": 2}, "'label' is 2; use 0, 1"),
        (GOOD | {"is_hallucination": [1]}, "'is_hallucination' is [1]; use 0, 1"),
        (GOOD | {"labels": {"start": [0], "end": []}}, "use lists of one length"),
        (GOOD | {"labels": {"start": 0, "end": 1}}, "use lists of one length"),
        (GOOD | {"labels": {}}, "'labels' is an empty dict; use a list of spans"),
        (GOOD | {"labels": np.zeros(2)}, "'labels[0]' is 0.0; use {start, end"),
        (GOOD | {"labels": [{"start": 0, "end": 9}]}, "[0, 9) lies outside"),
        ({"prompt": "P", "answer": b"A"}, "'answer' is \"b'A'\"; use text"),
        ({"passages": ["a", 3], "answer": "A"}, "'passages[1]' is 3; use text"),
        (
            {"context": "C", "qestion": "Q", "answer": "A"},
            "'qestion' is not read; write 'question', or call it otherwise",
        ),
        (GOOD | {"split": 3}, "'split' is 3; use text"),
        (GOOD | {"source": 1.5}, "'source' is 1.5; use text or a whole number"),
        (GOOD | {"context": "else"}, "'context' is not in 'prompt'"),
        (GOOD | {"label": {(1, 2): 3}}, "'label' is {(1, 2): 3}; use 0, 1"),
        (GOOD | {"tools": [{"a": {1}}]}, "'tools[0]' cannot be written as JSON: Obj"),
        (GOOD | {"tools": {1}}, "'tools' is \"{1}\"; use a list of definitions"),
        ({"answer": "A"}, "neither 'prompt' nor 'context'"),
        ({}, "'response' is missing"),
        ("text", "expected a dict of columns, got text"),
        (None, "expected a dict of columns, got null"),
    ],
)
def test_a_bad_row_costs_nobody_else(row, problem):
    before, bad, after = from_rows([GOOD, row, GOOD])
    assert before.example and after.example and (before.line, after.line) == (1, 3)
    assert bad.example is None
    assert bad.error.startswith("row 2: ") and problem in bad.error
    with pytest.raises(ValueError, match="^row 2: "):
        examples(from_rows([GOOD, row, GOOD]))


FIELDS = st.fixed_dictionaries(
    {},
    optional={
        "id": st.text(max_size=3) | st.integers() | st.none(),
        "response": st.sampled_from(["So.", " ", None]),
        "prompt": st.sampled_from(["Why? Because.", None]),
        "context": st.sampled_from(["Because.", "else", None]),
        "question": st.sampled_from(["Why?", None]),
        "label": st.sampled_from([0, 1, None]),
        "labels": st.sampled_from([[], [{"start": 0, "end": 1}], [{}], None]),
        "source": st.sampled_from(["a", 3, 1.5, None]),
        "split": st.sampled_from(["test", 4, None]),
        "extra": st.integers(),
    },
)


@settings(deadline=None, max_examples=200)
@given(st.lists(FIELDS, min_size=1, max_size=4))
def test_own_names_read_as_in_json_lines(rows):
    lines = [json.dumps(row).encode() for row in rows]
    for strict, free in zip(read_rows(lines), from_rows(rows), strict=True):
        if free.error is not None:
            number = f"row {free.line}"
            assert strict.error == free.error.replace(number, f"line {free.line}")
        elif free.id != f"row {free.line}":
            assert strict == free
        else:
            assert strict.error is None and strict.id == f"line {strict.line}"


def test_what_an_engine_gave_is_kept():
    token = {"token": LETTUCE["answer"], "logprob": -0.5, "top_logprobs": []}
    known = {"content": [token]}
    row = LETTUCE | {"states": "x.safetensors", "logprobs": known}
    (free,), (strict,) = from_rows([row]), read_rows([json.dumps({
        "prompt": LETTUCE["prompt"], "response": LETTUCE["answer"], "id": "a",
        "states": "x.safetensors", "logprobs": known,
    }).encode()])  # fmt: skip
    assert free.example.states == strict.example.states == "x.safetensors"
    assert free.example.logprobs == strict.example.logprobs is not None


def test_jsonl(tmp_path):
    path = tmp_path / "rows.jsonl"
    path.write_text(json.dumps(LETTUCE) + '\n\n{"id": \n', encoding="utf-8")
    good, bad = from_jsonl(path)
    assert good.example == one(LETTUCE | {"id": "line 1"}).example
    assert bad.error.startswith("line 3: not JSON")
    with pytest.raises(FileNotFoundError, match="gone.jsonl"):
        from_jsonl(tmp_path / "gone.jsonl")


def test_parquet(tmp_path):
    rows = [LETTUCE | {"id": f"r{n}", "big": b"\0" * n} for n in range(3)]
    rows[1] |= {"answer": None, "labels": None}
    path = tmp_path / "rows.parquet"
    pq.write_table(pa.Table.from_pylist(rows), path)
    found = list(from_parquet(path))
    assert [row.id for row in found] == ["r0", "r1", "r2"]
    assert found[0].example == one(rows[0]).example
    assert found[1].error == "row 2: 'response' is missing; every row needs one"
    pd.DataFrame([GOOD | {"label": 1}, GOOD]).to_parquet(path)  # NaN beside 1.0
    assert [row.example.label for row in from_parquet(path)] == [1, None]


def test_parquet_bad_files(tmp_path):
    path = tmp_path / "rows.parquet"
    with pytest.raises(FileNotFoundError, match="rows.parquet: no such file"):
        from_parquet(path)
    with pytest.raises(IsADirectoryError, match="is a folder; give a .parquet file"):
        from_parquet(tmp_path)
    path.write_text("no")
    with pytest.raises(ValueError, match="rows.parquet is no Parquet file"):
        from_parquet(path)
    pq.write_table(pa.table({"a": [1], "b": [2]}), path)
    with pytest.raises(ValueError, match="none of the columns a, b is known; rename"):
        from_parquet(path)


def test_hugging_face_dataset():
    rows = [LETTUCE | {"picture": "x"}, LETTUCE | {"answer": None, "picture": "y"}]
    dataset = hf.Dataset.from_list(rows)
    good, bad = from_dataset(dataset.with_format("numpy"))
    assert good.example == one(LETTUCE).example
    assert bad.error.startswith("row 2: 'response' is missing")
    spans = hf.Sequence({"start": hf.Value("int64"), "end": hf.Value("int64")})
    features = hf.Features(
        prompt=hf.Value("string"), answer=hf.Value("string"), labels=spans
    )
    columns = {
        "prompt": ["P"],
        "answer": ["abc"],
        "labels": [{"start": [0, 2], "end": [1, 3]}],
    }
    [row] = from_dataset(hf.Dataset.from_dict(columns, features))
    assert row.example.labels == (Label(0, 1), Label(2, 3))


def test_hugging_face_splits():
    rows = [GOOD | {"split": None}, GOOD | {"split": "dev"}]
    dataset = hf.Dataset.from_list(rows, split=hf.Split.TEST)
    assert [row.example.split for row in from_dataset(dataset)] == ["test", "dev"]
    both = hf.DatasetDict(train=dataset, test=dataset)
    with pytest.raises(ValueError, match=r"splits train, test; .*dataset\['train'\]"):
        from_dataset(both)
    with pytest.raises(ValueError, match="none of the columns a is known"):
        from_dataset(hf.Dataset.from_dict({"a": [1]}))


@pytest.mark.parametrize(
    ("names", "labels"),
    [
        (["hallucinated", "supported"], [1, 0]),
        (["grounded", "hallucinated"], [0, 1]),
        (["no", "yes"], [0, 1]),
        (["1", "0"], [1, 0]),
        (["False", "Hallucinated"], [0, 1]),
    ],
)
@pytest.mark.parametrize("column", ["label", "is_hallucination"])
def test_hugging_face_classes_count_by_name(tmp_path, names, labels, column):
    features = hf.Features(
        {name: hf.Value("string") for name in GOOD}
        | {column: hf.ClassLabel(names=names)}
    )
    rows = [GOOD | {column: value} for value in (0, 1, None, -1)]
    dataset = hf.Dataset.from_list(rows, features)
    dataset.to_parquet(tmp_path / "rows.parquet")
    for rows in (from_dataset(dataset), from_parquet(tmp_path / "rows.parquet")):
        assert [row.example.label for row in rows] == [*labels, None, None]
    said = [GOOD | {column: names[at]} for at in (1, 0)]
    encoded = hf.Dataset.from_list(said).class_encode_column(column)
    assert [row.example.label for row in from_dataset(encoded)] == labels[::-1]


@pytest.mark.parametrize(
    "metadata",
    [{"info": {"features": {"extra": {"_type": "OfTomorrow"}}}}, {"info": 3}, "{"],
)
def test_parquet_of_what_others_wrote_down(tmp_path, metadata):
    said = metadata if isinstance(metadata, str) else json.dumps(metadata)
    table = pa.Table.from_pylist([GOOD | {"extra": 1, "label": 1}])
    pq.write_table(
        table.replace_schema_metadata({"huggingface": said}), tmp_path / "a.parquet"
    )
    (row,) = from_parquet(tmp_path / "a.parquet")
    assert row.example.label == 1


def test_parquet_of_which_columns_were_changed_later(tmp_path):
    """What was said of a column stays with the file, though it is another one."""
    features = hf.Features({name: hf.Value("string") for name in GOOD})
    features["label"] = hf.ClassLabel(names=["no", "yes"])
    rows = [GOOD | {"label": at} for at in (0, 1)]
    hf.Dataset.from_list(rows, features).to_parquet(tmp_path / "a.parquet")
    table = pq.read_table(tmp_path / "a.parquet")
    at = table.column_names.index("label")
    for changed, labels in (
        (table.drop_columns(["label"]), [None, None]),
        (table.set_column(at, "label", pa.array(["yes", "no"])), [1, 0]),
    ):
        pq.write_table(changed, tmp_path / "b.parquet")
        found = [row.example.label for row in from_parquet(tmp_path / "b.parquet")]
        assert found == labels


def test_hugging_face_classes_of_unknown_names():
    rows = [GOOD | {"label": "yes"}, GOOD | {"label": "LABEL_1"}]
    dataset = hf.Dataset.from_list(rows).class_encode_column("label")
    problem = "classes of 'label' are LABEL_1, yes; rename LABEL_1, so that each is one"
    with pytest.raises(ValueError, match=problem):
        from_dataset(dataset)


def test_definitions_of_tools_are_those_of_their_row():
    """In a column of structs each has the members of all."""

    def tool(name, **kinds):
        properties = {key: {"type": kind} for key, kind in kinds.items()}
        parameters = {"type": "object", "properties": properties}
        return {
            "type": "function",
            "function": {"name": name, "parameters": parameters},
        }

    some = tool("weather", city="string"), tool("add", a="number", b="number")
    rows = [{"messages": SAID, "tools": [one]} for one in some]
    want = [one(row).example.tools for row in rows]
    dataset = hf.Dataset.from_list(rows)
    assert [row.example.tools for row in from_dataset(dataset)] == want
    pandas = dataset.to_pandas().to_dict("records")
    assert [row.example.tools for row in from_rows(pandas)] == want
    # As JSON in a text they are whatever they are, whole or one by one.
    for text in (json.dumps(some[:1]), [json.dumps(some[0])]):
        assert one(rows[0] | {"tools": text}).example.tools == want[0]
    assert "'tools' is text and no JSON" in one(rows[0] | {"tools": "["}).error


def test_rows_of_pandas_as_they_come(tmp_path):
    """Lists come back as arrays, and numbers beside none as fractions."""
    frame = pd.DataFrame(
        {
            "id": [1.0, None],
            "contexts": [["One.", "Two."], ["Three."]],
            "answer": ["So.", "No."],
            "labels": [[{"start": 0, "end": 2}], []],
            "label": [1.0, None],
        }
    )
    frame.to_parquet(tmp_path / "rows.parquet")
    rows = pd.read_parquet(tmp_path / "rows.parquet").to_dict("records")
    assert isinstance(rows[0]["contexts"], np.ndarray)
    first, last = examples(from_rows(rows))
    assert (first.id, first.context, first.labels) == (
        "1",
        "One.\n\nTwo.",
        (Label(0, 2),),
    )
    assert (last.id, last.labels, last.label) == ("row 2", (), 0)
    assert one(GOOD | {"id": np.int64(3), "source": (1 + 0.5)}).error
    assert one(GOOD | {"id": np.int64(3)}).example.id == "3"


def test_other_columns_are_not_looked_into(tmp_path):
    deep = "[" * 600 + "]" * 600
    lines = [f'{{"response": "So.", "prompt": "Why?", "other": {deep}}}'] * 2
    (tmp_path / "rows.jsonl").write_text("\n".join(lines))
    assert [row.error for row in from_jsonl(tmp_path / "rows.jsonl")] == [None] * 2
    assert one(GOOD | {"id": np.array(3)}).example.id == "3"
    nested = {}
    for _ in range(5000):
        nested = {"tools": nested}
    assert "nested too deep" in one({"messages": SAID, "tools": [nested]}).error


def test_spans_as_lists_of_their_parts_everywhere():
    row = GOOD | {"labels": {"start": [0], "end": [2], "label": ["x"]}}
    (found,) = read_rows([json.dumps(row).encode()])
    assert found.example.labels == one(row).example.labels == (Label(0, 2, "x"),)


def test_hugging_face_rows_as_they_come():
    dataset = hf.IterableDataset.from_generator(lambda: iter([GOOD | {"other": 1}]))
    assert dataset.column_names is None
    [row] = from_dataset(dataset)
    assert row.example == Example(**GOOD, id="row 1", split="train")


@pytest.fixture
def hub_cache(tmp_path, monkeypatch):
    monkeypatch.setattr(hf.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    return tmp_path


def test_hub_reads_data_files(hub_cache):
    folder = hub_cache / "mine"
    folder.mkdir()
    (folder / "test.jsonl").write_text(json.dumps(LETTUCE | {"split": None}))
    [row] = from_hub(str(folder), "test")
    assert (row.example.split, row.example.response) == ("test", "So it is.")


def test_hub_never_runs_a_script(hub_cache):
    folder = hub_cache / "scripted"
    folder.mkdir()
    mark = hub_cache / "ran"
    (folder / "scripted.py").write_text(f"open({str(mark)!r}, 'w')\n")
    with pytest.raises(RuntimeError, match="scripts are no longer supported"):
        from_hub(str(folder), "test")
    assert not mark.exists()


def test_hub_asks_for_what_is_named(monkeypatch, capsys):
    seen = []
    progress.note.cache_clear()

    def load_dataset(*names, **options):
        seen.append((names, options))
        list(hf.utils.tqdm(range(3)))
        return hf.Dataset.from_list([GOOD])

    monkeypatch.setattr(hf, "load_dataset", load_dataset)
    assert [row.example.response for row in from_hub("a/b", "dev", "c")] == ["So."]
    assert seen == [(("a/b", "c"), {"split": "dev"})]
    said = "jaxhal: taking a/b from the Hugging Face hub or its cache\n"
    assert capsys.readouterr().err == said  # no bar
    assert not hf.are_progress_bars_disabled()


OFFSETS = st.lists(
    st.tuples(st.integers(0, 12), st.integers(0, 4)).map(lambda x: (x[0], sum(x))),
    max_size=6,
)
SPANS = st.lists(
    st.tuples(st.integers(0, 12), st.integers(1, 4)).map(lambda x: Label(x[0], sum(x))),
    max_size=4,
)


@settings(deadline=None)
@given(OFFSETS, SPANS)
def test_token_labels_equal_sets_of_characters(offsets, spans):
    bad = {at for span in spans for at in range(span.start, span.end)}
    want = [bool(bad & set(range(*offset))) for offset in offsets]
    found = token_labels(np.array(offsets, int).reshape(-1, 2), spans)
    assert found.tolist() == want and found.dtype == bool


def test_tokens_without_characters_are_never_hallucinated():
    offsets = np.array([[0, 2], [2, 6], [6, 6], [0, 0], [4, 4]])
    labels = [Label(0, 6)]
    assert token_labels(offsets, labels).tolist() == [True, True, False, False, False]
    assert not token_labels(offsets, []).any()
    with pytest.raises(ValueError, match="labels is None"):
        token_labels(offsets, None)
