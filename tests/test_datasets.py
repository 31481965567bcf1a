"""Loaders of published data sets, on tiny files of their layout and on real ones."""

import collections
import csv
import dataclasses
import functools
import http.server
import json
import subprocess
import threading

import numpy as np
import pytest

from jaxhal.datasets import (
    DATASETS,
    Question,
    bundled,
    bundled_answers,
    data_root,
    halueval,
    load_dataset,
    medquad,
    ragtruth,
    spans,
    toha,
    truthfulqa,
    truthfulqa_questions,
    xsum_inputs,
)
from jaxhal.types import Example, Label


def write(path, *rows):
    path.parent.mkdir(parents=True, exist_ok=True)
    lines = (row if isinstance(row, str) else json.dumps(row) for row in rows)
    path.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
    return path


@pytest.fixture(scope="module")
def real():
    """The folder of the published files; golden counts need it."""
    try:
        return data_root()
    except FileNotFoundError as error:
        pytest.skip(str(error))


def test_data_root(tmp_path, monkeypatch):
    (tmp_path / "given").mkdir()
    (tmp_path / "work").mkdir()
    monkeypatch.chdir(tmp_path / "work")
    monkeypatch.delenv("JAXHAL_DATA", raising=False)
    with pytest.raises(FileNotFoundError, match="JAXHAL_DATA is not set, and .*data"):
        data_root()
    (tmp_path / "shared" / "data").mkdir(parents=True)
    assert data_root().resolve() == tmp_path / "shared" / "data"
    monkeypatch.setenv("JAXHAL_DATA", str(tmp_path / "given"))
    assert data_root() == tmp_path / "given"
    assert data_root(tmp_path) == tmp_path
    monkeypatch.setenv("JAXHAL_DATA", str(tmp_path / "gone"))
    with pytest.raises(FileNotFoundError, match="gone, from JAXHAL_DATA"):
        data_root()
    with pytest.raises(FileNotFoundError, match="nowhere, given as root.*set JAXHAL"):
        data_root(tmp_path / "nowhere")


LOADERS = {
    "ragtruth": (ragtruth, "ragtruth_qa"),
    "coqa": (lambda root: toha("coqa", root), "coqa_mistral7b"),
    "squad": (lambda root: toha("squad", root), "squad_mistral7b"),
    "halueval": (halueval, "qa_one-turn_500.jsonl"),
    "truthfulqa": (truthfulqa, "TruthfulQA.csv"),
    "truthfulqa_questions": (truthfulqa_questions, "TruthfulQA.csv"),
    "medquad": (medquad, "medquad"),
    "xsum": (xsum_inputs, "xsum-1000.jsonl"),
}


@pytest.mark.parametrize("name", LOADERS)
def test_missing_files_are_named(tmp_path, name):
    loader, file = LOADERS[name]
    with pytest.raises(FileNotFoundError, match=f"{file}.*no such file; put.*JAXHAL"):
        loader(tmp_path)


QA = {
    "source_id": "1",
    "task_type": "QA",
    "source_info": {"question": "why?", "passages": "passage 1: Łódź 🎉.\n\n"},
    "prompt": "Answer:\nwhy?\nFrom:\npassage 1: Łódź 🎉.\n\noutput:",
}
SUMMARY = {
    "source_id": "2",
    "task_type": "Summary",
    "source_info": "News.\n",
    "prompt": "Summarize:\nNews.\n\noutput:",
}
RECORD = {"name": "Joe's", "open": True, "stars": 3.0, "wifi": None}
DATA = {
    "source_id": "3",
    "task_type": "Data2txt",
    "source_info": RECORD,
    "prompt": f"Describe:\n{RECORD}\nOverview:",
}
SPAN = {"start": 2, "end": 6, "text": "Łódź", "label_type": "Evident Conflict"}
RESPONSE = {
    "id": "10",
    "source_id": "1",
    "model": "llama",
    "labels": [],
    "split": "train",
    "quality": "good",
    "response": "🎉 Łódź it is.",
}


def ragtruth_files(root, *responses, sources=(QA, SUMMARY, DATA), folder="ragtruth"):
    write(root / folder / "source_info.jsonl", *sources)
    write(root / folder / "response.jsonl", *(RESPONSE | each for each in responses))
    return root


def test_ragtruth(tmp_path):
    guess = SPAN | {"start": 7, "end": 9, "text": "it", "implicit_true": True}
    root = ragtruth_files(
        tmp_path,
        {"labels": [SPAN, guess]},
        {"id": "11", "labels": [guess], "split": "test"},
        {"id": "12", "model": "gpt", "quality": "truncated"},
        {"id": "13", "source_id": "2"},
        {"id": "14", "source_id": "3"},
    )
    first, second = ragtruth(root)
    assert (first.prompt, first.id, first.source) == (QA["prompt"], "10", "1")
    assert (first.question, first.context) == tuple(QA["source_info"].values())
    assert first.labels == (
        Label(2, 6, "Evident Conflict"),
        Label(7, 9, "Evident Conflict"),
    )
    assert (first.split, second.split, first.label) == ("train", "test", 1)

    def ids(**options):
        return [example.id for example in ragtruth(root, **options)]

    assert ids(quality=None) == ids(quality=("good", "truncated")) == ["10", "11", "12"]
    assert ids(quality="truncated") == ids(model="gpt", quality=None) == ["12"]
    assert ids(split="test") == ["11"]
    assert ids(task=None) == ["10", "11", "13", "14"]
    strict = ragtruth(root, implicit_true=False)
    assert [example.label for example in strict] == [1, 0]
    assert strict[0].labels == first.labels[:1]


@pytest.fixture
def published(tmp_path, monkeypatch):
    """A server that has the files as they are published, and nobody who has others."""
    ragtruth_files(tmp_path / "served", {"labels": [SPAN]}, {"id": "13"}, folder="data")
    for name in ("JAXHAL_DATA", "JAXHAL_OFFLINE"):
        monkeypatch.delenv(name, raising=False)
    (tmp_path / "work").mkdir()
    monkeypatch.chdir(tmp_path / "work")
    monkeypatch.setattr("datasets.config.DOWNLOADED_DATASETS_PATH", tmp_path / "kept")
    files = {
        name: subprocess.check_output(
            ["git", "hash-object", "--no-filters", tmp_path / "served" / "data" / name],
            text=True,
        ).strip()
        for name in spans._FILES
    }
    monkeypatch.setattr(spans, "_FILES", files)

    class Quiet(http.server.SimpleHTTPRequestHandler):
        def log_message(self, *args):
            pass

    handler = functools.partial(Quiet, directory=tmp_path / "served")
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, args=(0.01,)).start()
        address = f"http://127.0.0.1:{server.server_address[1]}/data"
        monkeypatch.setattr(spans, "_PUBLISHED", address)
        yield server
        server.shutdown()


def test_ragtruth_is_downloaded_where_it_is_not(tmp_path, published, monkeypatch):
    monkeypatch.setenv("JAXHAL_OFFLINE", "1")
    with pytest.raises(FileNotFoundError, match="JAXHAL_DATA is not set"):
        ragtruth()
    monkeypatch.delenv("JAXHAL_OFFLINE")
    found = ragtruth()
    named = ragtruth_files(tmp_path, {"labels": [SPAN]}, {"id": "13"})
    assert found == ragtruth(named) and [one.label for one in found] == [1, 0]
    monkeypatch.setenv("JAXHAL_DATA", str(tmp_path))
    ragtruth_files(tmp_path, {"id": "mine"})
    assert [one.id for one in ragtruth()] == ["mine"]
    monkeypatch.setenv("JAXHAL_DATA", str(tmp_path / "work"))  # that holds others
    published.shutdown()
    published.server_close()
    assert ragtruth() == found
    monkeypatch.setenv("JAXHAL_DATA", str(tmp_path / "gone"))
    with pytest.raises(FileNotFoundError, match="gone, from JAXHAL_DATA, is no folder"):
        ragtruth()


def test_what_cannot_be_downloaded_is_named(published, monkeypatch):
    monkeypatch.setattr(spans, "_FILES", {"gone.jsonl": "", **spans._FILES})
    said = "data/gone.jsonl could not be downl"
    with pytest.raises(FileNotFoundError, match=said) as refused:
        ragtruth()
    assert str(refused.value).count("gone.jsonl") == 1
    monkeypatch.setattr(spans, "_FILES", {"response.jsonl": "f9ae"})
    with pytest.raises(ValueError, match="response.jsonl was, whose git hash is f9ae"):
        ragtruth()


def test_ragtruth_other_tasks(tmp_path):
    root = ragtruth_files(tmp_path, {"source_id": "2"}, {"id": "11", "source_id": "3"})
    [news] = ragtruth(root, task="Summary")
    assert (news.context, news.question) == ("News.\n", None)
    [shop] = ragtruth(root, task="Data2txt")
    # As Python writes a dict: True and None, not true and null.
    assert shop.context == (
        "{'name': \"Joe's\", 'open': True, 'stars': 3.0, 'wifi': None}"
    )


def test_ragtruth_leaves_out_what_is_not_in_the_prompt(tmp_path):
    source = QA | {"source_info": {"question": "Why?", "passages": "passage 1: Lodz."}}
    root = ragtruth_files(tmp_path, {}, sources=[source], folder="ragtruth_qa")
    [example] = ragtruth(root)
    assert (example.context, example.question) == (None, None)
    assert example.prompt == QA["prompt"] == example.source_text


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"task": "qa"}, "unknown task 'qa'; .*there are: Data2txt, QA, Summary"),
        ({"model": "lama"}, "unknown model 'lama'; did you mean 'llama'\\?"),
        ({"split": "dev"}, "unknown split 'dev'; there are: train"),
        ({"quality": ("good", "fine")}, "unknown quality 'fine'"),
        ({"quality": "perfect"}, "unknown quality 'perfect'; there are: good"),
    ],
)
def test_ragtruth_names_what_there_is(tmp_path, options, message):
    with pytest.raises(ValueError, match=message):
        ragtruth(ragtruth_files(tmp_path, {}), **options)


@pytest.mark.parametrize(
    ("loader", "options", "message"),
    [
        # What the command line may pass; the checker of annotations is off there.
        (ragtruth, {"implicit_true": "flase"}, "implicit_true is 'flase'; use true"),
        (truthfulqa, {"answers": "worst"}, "answers is 'worst'; use 'best' or 'all'"),
        (toha, {"name": "xsum"}, "name is 'xsum'; use one of coqa, squad"),
    ],
)
def test_wrong_kinds_of_option(loader, options, message):
    unchecked = getattr(loader, "__wrapped__", loader)
    with pytest.raises(ValueError, match=message):
        unchecked(**options)


@pytest.mark.parametrize(
    ("responses", "message"),
    [
        ([{"labels": [SPAN | {"start": 1}]}], r"'10': characters \[1, 6\) are ' Łódź'"),
        ([{"labels": [SPAN | {"end": 99}]}], r"\[2, 99\) are 'Łódź it is.', but the"),
        ([{"labels": [SPAN | {"start": "2"}]}], "'10', label span: 'start' is text"),
        ([{"labels": [{}]}], "label span: 'start' is null; this data set has int"),
        ([{"labels": ["Łódź"]}], "label span: expected an object, got text"),
        ([{"labels": None}], "response.jsonl, line 1: 'labels' is null"),
        ([{}, {"id": "11", "response": 5}], "line 2: 'response' is 5.*has str there"),
        ([{"response": " "}], "example '10': response is ' '"),
        ([{}, {}], "id '10' comes twice"),
        ([{"source_id": "9"}], "'10' rests on source_id '9', which source_info.jsonl"),
    ],
)
def test_ragtruth_bad_responses(tmp_path, responses, message):
    with pytest.raises(ValueError, match=message):
        ragtruth(ragtruth_files(tmp_path, *responses))


@pytest.mark.parametrize(
    ("sources", "message"),
    [
        ([QA, QA], "source_id '1' comes twice"),
        ([QA | {"source_info": None}], "line 1: 'source_info' is null.*str | dict"),
        ([QA | {"source_info": {"passages": "x"}}], "'question' is null"),
        (['{"source_id": '], "source_info.jsonl, line 1: not JSON at column 14"),
        (["[]"], "line 1: expected a JSON object, got a list"),
    ],
)
def test_ragtruth_bad_sources(tmp_path, sources, message):
    with pytest.raises(ValueError, match=message):
        ragtruth(ragtruth_files(tmp_path, {}, sources=sources))


COQA = {
    "context": "A story. Q: who? A: Asta.",
    "question": "where?",
    "id": "s_1",
    "source_id": "s",
    "generated_answer": "At home.",
    "hallucination": 1,
    "split": "train",
}
SQUAD = {
    "id": "56d",
    "context": "A paragraph.",
    "question": " who?",
    "generated_answer": "Nobody.",
    "hallucination": 0,
    "prompt": "Answer briefly. \n",
    "split": "test",
}
COQA_FILE = "toha_annotated/coqa_mistral7b_instruct_v0.1.jsonl"
SQUAD_FILE = "toha_annotated/squad_mistral7b_instruct_v0.1.jsonl"


def test_toha(tmp_path):
    write(tmp_path / COQA_FILE, COQA, COQA | {"id": "s_2", "hallucination": 0})
    first, second = toha("coqa", tmp_path)
    assert first.prompt == "A story. Q: who? A: Asta. Q: where? A:"
    assert (first.context, first.question) == (COQA["context"], "where?")
    assert (first.id, first.label, second.label) == ("s_1", 1, 0)
    assert first.group == second.group == "s" and first.labels is None
    write(tmp_path / SQUAD_FILE, SQUAD)
    [example] = toha("squad", tmp_path)
    assert example.prompt == (
        "Answer briefly. \nContext: A paragraph.\nQuestion:  who?\nAnswer:"
    )
    assert (example.group, example.split) == ("A paragraph.", "test")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"hallucination": 2}, "example 's_1': label is 2"),
        ({"hallucination": None}, "line 1: 'hallucination' is null"),
        ({"hallucination": "yes"}, "'hallucination' is text"),
        ({"generated_answer": ""}, "example 's_1': response is ''"),
        ({"source_id": None}, "'source_id' is null"),
    ],
)
def test_toha_drops_nothing_silently(tmp_path, change, message):
    write(tmp_path / COQA_FILE, COQA | change)
    with pytest.raises(ValueError, match=message):
        toha("coqa", tmp_path)


def test_halueval(tmp_path):
    row = {
        "knowledge": "K",
        "question": "Q?",
        "right_answer": "right",
        "hallucinated_answer": "wrong",
    }
    write(tmp_path / "halueval" / "qa.jsonl", row)
    right, wrong = halueval(tmp_path, file="qa")
    assert (right.response, right.label, right.id) == ("right", 0, "0-right")
    assert (wrong.response, wrong.label, wrong.id) == ("wrong", 1, "0-hallucinated")
    assert right.group == wrong.group == right.context == "K"
    write(tmp_path / "halueval" / "qa.jsonl", row, {"knowledge": "K"})
    with pytest.raises(ValueError, match="qa.jsonl, line 2: 'question' is null"):
        halueval(tmp_path, file="qa")


def truthfulqa_file(root, *rows, columns=None):
    path = root / "truthfulqa" / "TruthfulQA.csv"
    path.parent.mkdir(exist_ok=True)
    columns = columns or [
        *("Type", "Category", "Question", "Best Answer"),
        *("Correct Answers", "Incorrect Answers", "Source"),
    ]
    with path.open("w", encoding="utf-8-sig", newline="") as file:
        csv.writer(file).writerows([columns, *rows])
    return root


def test_truthfulqa(tmp_path):
    root = truthfulqa_file(
        tmp_path,
        ["A", "Law", "May I? ", "No", "No; Never; No", "Unknown; Yes; Ye, s", "u"],
        ["A", "Health", "Is it,\nso?", "It is", "It is; Unknown", "Unknown;Not; ", "u"],
    )

    def answers(**options):
        return [
            (example.id, example.response, example.label)
            for example in truthfulqa(root, **options)
        ]

    assert answers() == [
        ("0-true-0", "No", 0),
        ("0-false-0", "Unknown", 1),
        ("1-true-0", "It is", 0),
        ("1-false-0", "Not", 1),  # "Unknown" stands on both sides
    ]
    assert answers(answers="all", categories="Law") == [
        ("0-true-0", "No", 0),
        ("0-true-1", "Never", 0),
        ("0-false-0", "Unknown", 1),
        ("0-false-1", "Yes", 1),
        ("0-false-2", "Ye, s", 1),
    ]
    first, *_, last = truthfulqa(root, categories=["Law", "Health"])
    assert first.prompt == first.question == first.group == "May I?"
    assert last.prompt == "Is it,\nso?"
    assert truthfulqa_questions(root, "Health") == [
        Question("Is it,\nso?", ("It is",), "Health", "1")
    ]
    assert truthfulqa_questions(root, "Law")[0].answer == ("No", "Never")


def test_truthfulqa_bad_input(tmp_path):
    truthfulqa_file(tmp_path, ["A", "Law", "May I?", "No", "No", "Yes", "u"])
    for loader in (truthfulqa, truthfulqa_questions):
        with pytest.raises(ValueError, match="unknown category 'Laws'; did you mean"):
            loader(tmp_path, categories="Laws")
    truthfulqa_file(tmp_path, columns=["Category", "Question"])
    with pytest.raises(ValueError, match="TruthfulQA.csv: no column 'Best Answer'"):
        truthfulqa(tmp_path)


def test_medquad(tmp_path):
    row = {"qid": "1-1", "qtype": "treatment", "question": "Q?", "answer": "A."}
    write(tmp_path / "medquad" / "b.jsonl", row | {"file": "b.xml"})
    write(tmp_path / "medquad" / "a.jsonl", row | {"file": "a.xml", "qtype": "causes"})
    found = medquad(tmp_path)
    assert [(each.id, each.domain) for each in found] == [
        ("a.xml:1-1", "causes"),
        ("b.xml:1-1", "treatment"),
    ]
    assert medquad(tmp_path, "treatment") == [found[1]]
    assert found[1] == Question("Q?", "A.", "treatment", "b.xml:1-1")
    with pytest.raises(ValueError, match="unknown qtype 'cause'; did you mean"):
        medquad(tmp_path, ["cause"])
    (tmp_path / "empty" / "medquad").mkdir(parents=True)
    with pytest.raises(FileNotFoundError, match="medquad holds no .jsonl file"):
        medquad(tmp_path / "empty")


def test_xsum_inputs(tmp_path):
    path = tmp_path / "lookback_lens" / "xsum-1000.jsonl"
    write(path, {"document": "Long text.", "summary": "Short.", "id": "38"})
    [found] = xsum_inputs(tmp_path)
    assert (found.context, found.answer, found.id) == ("Long text.", "Short.", "38")
    write(path, {"document": "Long text.", "summary": "", "id": "38"})
    with pytest.raises(ValueError, match="question '38': answer is ''"):
        xsum_inputs(tmp_path)


def test_answers_to_one_context_are_a_group():
    first = Example("Red.", context="A house.", question="What colour?")
    assert first.group == dataclasses.replace(first, question="Which?").group
    assert dataclasses.replace(first, source="s").group == "s"
    assert Example("Red.", prompt="What colour?").group == "What colour?"


def test_a_question_holds_text():
    with pytest.raises(ValueError, match="^text is ' '; it must hold text"):
        Question(" ", "A")


def test_load_dataset(tmp_path, monkeypatch):
    assert load_dataset("bundled") == bundled()
    assert load_dataset("bundled_answers") == bundled_answers()
    monkeypatch.setenv("JAXHAL_DATA", str(tmp_path))
    write(tmp_path / COQA_FILE, COQA)
    write(tmp_path / SQUAD_FILE, SQUAD)
    assert load_dataset("toha_coqa") == toha("coqa")
    assert load_dataset("toha_squad", root=tmp_path) == toha("squad")
    ragtruth_files(tmp_path, {}, {"id": "11", "source_id": "2"})
    [example] = load_dataset("ragtruth", task="Summary")
    assert example.id == "11"
    path = write(tmp_path / "mine.jsonl", {"prompt": "P", "answer": "A", "label": 1})
    for name in (path, str(path)):
        assert [example.label for example in load_dataset(name)] == [1]


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("ragtruht", {}, "unknown data set 'ragtruht'; did you mean 'ragtruth'\\?"),
        ("medquad", {}, "'medquad' holds questions and no answers; .* jaxhal generate"),
        ("x.csv", {}, "unknown data set 'x.csv'; give one of bundled, .*, or the path"),
        ("bundled", {"split": "x"}, "unknown option 'split' of 'bundled'; .*: none"),
        ("toha_coqa", {"name": "x"}, "unknown option 'name' of 'toha_coqa'; .*: root$"),
        ("halueval", {"fil": "x"}, "unknown option 'fil' .*: root, file"),
    ],
)
def test_load_dataset_names_what_there_is(name, options, message):
    with pytest.raises(ValueError, match=message):
        load_dataset(name, **options)


def test_load_dataset_of_bad_files(tmp_path):
    with pytest.raises(FileNotFoundError, match="gone.jsonl: no such file"):
        load_dataset(tmp_path / "gone.jsonl")
    path = write(tmp_path / "a.jsonl", {"prompt": "P", "answer": "A"}, "", {"id": 1})
    with pytest.raises(ValueError, match="^line 3: 'response' is missing"):
        load_dataset(path)
    with pytest.raises(ValueError, match="unknown option 'split' of .*a.jsonl'"):
        load_dataset(path, split="test")


def test_every_entry_says_where_it_comes_from():
    for name, (loader, *texts) in DATASETS.items():
        assert callable(loader) and name.islower()
        assert all(text and "\n" not in text for text in texts)


def counts(examples):
    labels = [example.label for example in examples]
    return labels.count(1), labels.count(0)


@pytest.mark.parametrize(
    ("model", "total", "train", "test"),
    [
        ("llama-2-7b-chat", (510, 479), (445, 377), (52, 97)),
        ("llama-2-70b-chat", (320, 669), (283, 550), (35, 114)),
    ],
)
def test_ragtruth_qa_counts(real, model, total, train, test):
    assert counts(ragtruth(real, model=model, quality=None)) == total
    assert counts(ragtruth(real, model=model, split="train")) == train
    assert counts(ragtruth(real, model=model, split="test")) == test


def test_ragtruth_qa_spans(real):
    rows = ragtruth(real, model="llama-2-7b-chat", quality=None)
    kinds = collections.Counter(span.label for row in rows for span in row.labels)
    assert kinds == {
        "Evident Baseless Info": 554,
        "Subtle Baseless Info": 264,
        "Evident Conflict": 176,
        "Subtle Conflict": 16,
    }
    strict = ragtruth(real, model="llama-2-7b-chat", quality=None, implicit_true=False)
    assert sum(len(row.labels) for row in strict) == 1010 - 251
    assert counts(strict) == (425, 989 - 425)
    assert len({row.source for row in rows}) == len({row.id for row in rows}) == 989
    # Every passage and every question stands in its prompt word for word.
    assert all(row.context and row.question for row in rows)


def test_toha_counts(real):
    coqa, squad = toha("coqa", real), toha("squad", real)
    assert counts(coqa) == (776, 776) and counts(squad) == (311, 389)
    assert len({row.group for row in coqa}) == 460
    assert len({row.group for row in squad}) == 515
    for rows in (coqa, squad):
        assert len({row.id for row in rows}) == len(rows)
        splits = {(row.group, row.split) for row in rows}
        assert len(splits) == len({row.group for row in rows})  # no source in both


def test_other_counts(real):
    for file in ("qa_one-turn_500", "qa_multi-turn_500"):
        rows = halueval(real, file)
        assert counts(rows) == (500, 500) and len({row.group for row in rows}) == 500
    assert counts(truthfulqa(real)) == (817, 817)
    # 3298 and 2589 answers listed, less 1 and 2 repeated, less 2 on both sides.
    everything = truthfulqa(real, answers="all")
    assert counts(everything) == (3298 - 1 - 2, 2589 - 2 - 2)
    assert len({row.id for row in everything}) == len(everything)
    domains = collections.Counter(each.domain for each in truthfulqa_questions(real))
    assert len(domains) == 38 and domains["Law"] == 64 and domains["Nutrition"] == 16
    medical = medquad(real)
    assert len({each.id for each in medical}) == len(medical) == 2442 + 767
    assert len(medquad(real, "treatment")) == 2442
    assert len(xsum_inputs(real)) == 1000


def test_ragtruth_offsets_are_those_of_the_file(real):
    path = next(real.glob("ragtruth*")) / "response.jsonl"
    texts = {
        row["id"]: [span["text"] for span in row["labels"]]
        for row in map(json.loads, path.read_text("utf-8").strip().split("\n"))
    }
    for row in ragtruth(real, task=None, quality=None):
        found = [row.response[start:end] for start, end, _ in row.labels]
        assert found == texts[row.id]


def test_loaded_spans_mark_tokens(real):
    from jaxhal.datasets import token_labels

    [row] = [each for each in ragtruth(real) if len(each.labels) == 5][:1]
    at = np.arange(len(row.response))
    marked = token_labels(np.stack([at, at + 1], axis=1), row.labels)
    want = np.zeros(len(at), bool)
    for start, end, _ in row.labels:
        want[start:end] = True
    np.testing.assert_array_equal(marked, want)
