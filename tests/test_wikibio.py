"""WikiBio passages of GPT-3, on a tiny file of its layout and on the published one."""

import collections
import json

import pytest

from jaxhal.datasets import DATASETS, data_root, load_dataset
from jaxhal.datasets.spans import wikibio, wikibio_passages
from jaxhal.types import Label

ROW = {
    "wiki_bio_test_idx": 7,
    "sentences": ["Łukasz is.", "He is.", "He is."],
    "annotations": ["accurate", "major_inaccurate", "minor_inaccurate"],
    "gpt3_text_samples": ["Łukasz was.", "He was."],
}
FILE = "selfcheck_wikibio119_nli.json"


def write(root, *rows):
    (root / FILE).write_text(json.dumps(rows), encoding="utf-8")
    return root


def test_wikibio(tmp_path):
    right = ROW | {"wiki_bio_test_idx": 8, "annotations": ["accurate"] * 3}
    root = write(tmp_path, ROW, right)
    first, second = wikibio_passages(root)
    assert first.example.response == "Łukasz is. He is. He is."
    assert first.example.prompt == "This is a Wikipedia passage"
    # Equal sentences have places of their own.
    assert first.sentences == (
        Label(0, 10, "accurate"),
        Label(11, 17, "major_inaccurate"),
        Label(18, 24, "minor_inaccurate"),
    )
    assert first.example.labels == first.sentences[1:] and first.example.label == 1
    assert first.example.samples == ("Łukasz was.", "He was.")
    assert (second.example.labels, second.example.label) == ((), 0)
    assert (first.example.id, first.example.group, second.example.group) == (*"778",)
    assert wikibio(root) == load_dataset("wikibio", root=root)
    assert wikibio(root) == [first.example, second.example]
    assert DATASETS["wikibio"].loader is wikibio


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"annotations": ["accurate"]}, "3 sentences have 1 annotations"),
        ({"annotations": ["accurate", "wrong", "?"]}, "annotation is 'wrong'; there"),
        ({"annotations": ["accurate"] * 2 + [None]}, "'text' is null"),
        ({"sentences": ["A.", " ", "B."]}, "sentence is ' '; it must hold text"),
        ({"sentences": ["A.", 5, "B."]}, "'text' is 5; this data set has str"),
        ({"sentences": "A. B. C"}, "'sentences' is text"),
        ({"sentences": [], "annotations": []}, "response is ''"),
        ({"gpt3_text_samples": [None]}, "'text' is null"),
        ({"gpt3_text_samples": None}, "'gpt3_text_samples' is null"),
        ({"wiki_bio_test_idx": "7"}, "'wiki_bio_test_idx' is text"),
    ],
)
def test_bad_passages(tmp_path, change, message):
    with pytest.raises(ValueError, match=f"{FILE}, passage 1: .*{message}"):
        wikibio_passages(write(tmp_path, ROW, ROW | change))


def test_bad_files(tmp_path):
    with pytest.raises(FileNotFoundError, match=f"{FILE}.*no such file; put.*JAXHAL"):
        wikibio(tmp_path)
    with pytest.raises(ValueError, match="passage 0: expected an object, got a list"):
        wikibio(write(tmp_path, []))
    for text, message in (("[", "not JSON"), ("{}", "a list of passages, got an obj")):
        (tmp_path / FILE).write_text(text, encoding="utf-8")
        with pytest.raises(ValueError, match=f"{FILE}: .*{message}"):
            wikibio_passages(tmp_path)


def test_published_counts():
    try:
        rows = wikibio_passages(data_root())
    except FileNotFoundError as error:
        pytest.skip(str(error))
    assert len(rows) == len({row.example.id for row in rows}) == 119
    assert len({row.example.group for row in rows}) == 119
    assert {len(row.example.samples) for row in rows} == {20}
    assert sum(len(row.sentences) for row in rows) == 959
    kinds = collections.Counter(each.label for row in rows for each in row.sentences)
    assert kinds == {
        "major_inaccurate": 378,
        "minor_inaccurate": 327,
        "accurate": 254,
    }
    assert collections.Counter(row.example.label for row in rows) == {1: 115, 0: 4}
    marked = [row.example.labels for row in rows]
    assert sum(map(len, marked)) == 378 + 327
    raw = json.loads((data_root() / FILE).read_text("utf-8"))
    for row, given in zip(rows, raw, strict=True):
        text = row.example.response
        found = [(text[start:end], name) for start, end, name in row.sentences]
        assert found == list(zip(given["sentences"], given["annotations"], strict=True))
