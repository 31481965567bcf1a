"""What an answer rests on, from R* to the page: the same numbers, the whole text."""

import copy
import dataclasses
import json
import re
from html.parser import HTMLParser

import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import processors
from typer.testing import CliRunner

import jaxhal
from jaxhal import lrp
from jaxhal.cli import app as cli
from jaxhal.datasets.jsonl import Row
from jaxhal.models.lm import LM
from jaxhal.models.tokenizer import Tokenizer
from jaxhal.reporting.attribution import Sources, page_data, pieces
from jaxhal.reporting.page import write_html
from jaxhal.reporting.report import Report, Token
from jaxhal.scoring import results
from jaxhal.types import Example
from tiny_lm import tiny_lm

EVIL = "</script><script>alert(1)</script><!-- \u2028 &"
SHORT = Example("Red.", context="It is red.", question="Colour?", id="short")
LONGER = Example("It is ré🙂d, it seems.", prompt="What colour is a 🎈?", id="longer")
ONE = Example("5", prompt="2 + 3 =", id="one")
TEXT = ["response_length"]  # reads no model
TOO_LONG = Example("word " * 200, prompt="Write.", id="too long")


@pytest.fixture(scope="module")
def lm() -> LM:
    return tiny_lm(context=256)


@pytest.fixture(scope="module")
def with_bos(lm) -> LM:
    """The same model with a tokenizer that begins every text with a BOS."""
    hf = copy.deepcopy(lm.tokenizer.hf)
    hf.backend_tokenizer.post_processor = processors.TemplateProcessing(
        "<s> $A", special_tokens=[("<s>", hf.bos_token_id)]
    )
    return dataclasses.replace(lm, tokenizer=Tokenizer(hf))


@pytest.fixture(scope="module")
def reports(lm) -> list[Report]:
    examples = [SHORT, TOO_LONG, LONGER, ONE]
    return jaxhal.score(lm, examples, TEXT, batch_size=4, relevance="attnlrp")


@pytest.fixture
def no_passes(monkeypatch) -> list:
    """Relevance becomes all ones; collects the rules it was asked for."""
    seen = []

    def ones(lm, batch, rules):
        seen.append(rules)
        matrix = jnp.ones((*batch.response_mask.shape, batch.tokens.shape[1]))
        return lrp.Relevance(matrix, batch.valid, batch.prompt_length)

    monkeypatch.setattr("jaxhal.reporting.attribution.relevance", ones)
    return seen


def by_hand(lm: LM, example: Example, rules) -> np.ndarray:
    """R* of the answer read alone, without padding and EOS, over each row's largest."""
    batch = lm.encode([example])
    whole = np.asarray(jaxhal.relevance(lm, batch, rules).matrix)[0]
    offsets = np.asarray(batch.offsets)[0]
    rows = np.flatnonzero(offsets[:, 0] < offsets[:, 1])
    prompt = np.flatnonzero(np.asarray(batch.valid)[0, : batch.prompt_length])
    columns = [*prompt, *(batch.prompt_length + rows)]
    matrix = whole[rows][:, columns]
    return matrix / (np.abs(matrix).max(1, keepdims=True) + 1e-6)


def page(tmp_path, reports):
    path = tmp_path / "report.html"
    write_html(path, reports, "Results")
    text = path.read_text("utf-8")
    data = re.search(r'<script type="application/json".*?>(.*?)</script>', text, re.S)
    return text, [answer["relevance"] for answer in json.loads(data[1])["answers"]]


def dense(found) -> np.ndarray:
    """Rows of a page with the zeros that they lack."""
    columns = len(found["prompt"]) + len(found["response"])
    return np.array([row + [0] * (columns - len(row)) for row in found["rows"]])


@pytest.mark.parametrize("at, example", [(0, SHORT), (2, LONGER), (3, ONE)])
def test_rows_are_those_of_the_answer_read_alone(lm, reports, at, example):
    found = reports[at].relevance
    want = by_hand(lm, example, "attnlrp")
    assert found.rules == "attnlrp"
    assert found.matrix.shape == want.shape == (len(reports[at].tokens), want.shape[1])
    np.testing.assert_allclose(found.matrix, want, atol=2e-5)
    assert np.abs(want).max(1) == pytest.approx(1, abs=0.01)
    later = np.triu(np.ones((len(want), len(want)), bool))
    assert not found.matrix[:, len(found.prompt) :][later].any()


def test_prompts_join_up(lm, with_bos, reports, no_passes):
    for report, example in ((reports[0], SHORT), (reports[2], LONGER)):
        assert "".join(report.relevance.prompt) == lm.tokenizer.prompt(example).text
        count = len(lm.tokenizer.encode_example(example).prompt_ids)
        assert len(report.relevance.prompt) == count
    report = jaxhal.score(with_bos, [ONE], TEXT, relevance="attnlrp")[0]
    assert report.relevance.prompt == ["<s>", *"2 + 3 ="]


def test_an_answer_of_one_token(tmp_path, reports):
    found = reports[3].relevance
    assert found.matrix.shape == (1, len(ONE.prompt) + 1)
    (shown,) = page(tmp_path, [reports[3]])[1]
    assert shown["response"] == ["5"] and shown["units"] == [0]
    assert len(shown["rows"][0]) <= len(ONE.prompt)


def test_rows_with_an_error_have_none(tmp_path, reports):
    assert "over the model's context" in reports[1].error
    assert reports[1].relevance is None
    assert [found is None for found in page(tmp_path, reports)[1]] == [
        *(False, True, False, False)
    ]


def test_relevance_that_is_no_number_is_an_error_of_its_row(lm, monkeypatch):
    real = jaxhal.reporting.attribution.relevance
    broken = [True, False]

    def relevance(*given):
        found = real(*given)
        matrix = found.matrix * (np.nan if broken.pop(0) else 1)
        return dataclasses.replace(found, matrix=matrix)

    monkeypatch.setattr("jaxhal.reporting.attribution.relevance", relevance)
    bad, good = jaxhal.score(lm, [SHORT, SHORT], TEXT, relevance="attnlrp")
    assert "'attnlrp' holds numbers that are not finite" in bad.error
    assert bad.scores == {} and bad.tokens == [] and bad.relevance is None
    assert good.error is None and good.relevance is not None


def test_what_a_command_keeps_is_what_was_found(lm):
    options = {"token_threshold": 0.0, "relevance": "attnlrp"}
    (found,) = jaxhal.score(lm, [SHORT], ["token_entropy"], **options)
    assert found.spans[0].relevance.words
    done = results.OutputRow(found.to_dict(), found)
    record = json.loads(json.dumps(results._packed("a", 0, done)))
    kept = results._unpacked(lm, Row(1, "short", SHORT, None), record)
    assert kept.report.spans == found.spans and kept.row == done.row


def test_rules_of_ones_own(lm, no_passes):
    rules = lrp.rule_set("mine", lrp.rules_of(lrp.cp_lrp()))
    report = jaxhal.detect(
        lm, response="5", prompt="2 + 3 =", detectors=TEXT, relevance=rules
    )
    assert report.relevance.rules == "mine" and no_passes == [rules]


def test_unknown_rules_name_the_known_ones(lm):
    for call in (
        lambda: jaxhal.score(lm, [ONE], relevance="attnlpr"),
        lambda: jaxhal.detect(lm, response="5", prompt="?", relevance="attnlpr"),
    ):
        with pytest.raises(ValueError, match="unknown rules 'attnlpr'.*cp_lrp"):
            call()


def test_the_output_row_stays_as_it_was(lm, reports):
    plain = jaxhal.score(lm, [SHORT], TEXT)[0]
    assert plain.relevance is None
    assert reports[0].to_dict().keys() == plain.to_dict().keys()
    assert "script" not in reports[0]._repr_html_()


def test_the_page_holds_the_numbers(tmp_path, reports):
    _, (found, *_) = page(tmp_path, [reports[0]])
    assert found["rules"] == "attnlrp"
    assert "".join(found["prompt"]) == "It is red.\n\nColour?"
    assert found["response"] == list("Red.") and found["units"] == [0, 1, 2, 3]
    np.testing.assert_array_equal(
        dense(found), np.rint(100 * reports[0].relevance.matrix)
    )
    assert all(type(value) is int for row in found["rows"] for value in row)
    assert all(row[-1] for row in found["rows"])


def test_bytes_of_a_character_are_one_unit(tmp_path, reports):
    report = reports[2]
    _, (found,) = page(tmp_path, [report])
    assert found["prompt"] == list(LONGER.prompt)
    assert found["response"] == list(LONGER.response)
    assert len(report.tokens) == len(LONGER.response.encode())
    answer = [at for at, c in enumerate(LONGER.response) for _ in c.encode()]
    assert found["units"] == answer
    prompt = [at for at, c in enumerate(LONGER.prompt) for _ in c.encode()]
    columns = np.array([*prompt, *(len(LONGER.prompt) + np.array(answer))])
    shown, matrix = dense(found), report.relevance.matrix
    for (row, column), value in np.ndenumerate(shown):
        block = matrix[np.equal(answer, row)][:, columns == column].ravel()
        assert value == np.rint(100 * block[np.argmax(np.abs(block))])


@given(text=st.text(min_size=1, max_size=30).filter(lambda text: text.strip()))
def test_bytes_join_to_characters(text):
    ids, spans = TOKENIZER.encode_with_offsets(text)
    found = pieces(text, spans)
    assert len(found) == len(ids) and [piece for piece in found if piece] == list(text)


TOKENIZER = tiny_lm().tokenizer


@pytest.mark.parametrize(
    ("spans", "want"),
    [
        ([[0, 1], [0, 2], [1, 3]], ["abc", "", ""]),  # a chain of shared characters
        ([[0, 3], [1, 2], [2, 3]], ["abc", "", ""]),
        ([[1, 2], [2, 3]], ["ab", "c"]),  # a normalizer dropped the first character
        ([[0, 2]], ["abc"]),
    ],
)
def test_pieces(spans, want):
    assert pieces("abc", np.array(spans)) == want


def test_the_strongest_keeps_its_sign():
    matrix = np.array([[0.2, -0.5, 0.0, 0.0], [0.25, 0.1, -0.75, 0.0]])
    sources = Sources(["a", ""], matrix, "cp_lrp")
    found = page_data(sources, "🙂", np.array([[0, 1], [0, 1]]))
    assert found["rows"] == [[-50, -75]]
    assert found["units"] == [0, 0]


def test_bad_sources_are_refused():
    with pytest.raises(ValueError, match=r"shape \[1, 3\] for 1 prompt tokens"):
        Sources(["a"], np.zeros((1, 3)), "attnlrp")
    for value in (np.nan, np.inf):
        with pytest.raises(ValueError, match="'epsilon' holds numbers that are not"):
            Sources(["a"], np.array([[value, 0.0]]), "epsilon")


class Elements(HTMLParser):
    """The elements of a page."""

    def __init__(self, text):
        super().__init__()
        self.found = []
        self.feed(text)

    def handle_starttag(self, tag, attributes):
        self.found.append(tag)


def test_markup_in_tokens_stays_text(tmp_path):
    report = Report(
        id="a",
        model="tiny",
        response=EVIL,
        scores={},
        tokens=[Token(EVIL, 0, len(EVIL), {})],
        spans=[],
        heads={},
        detector="",
        prompt=EVIL,
    )
    plain, _ = page(tmp_path, [report])
    sources = Sources([EVIL], np.array([[1.0, 0.0]]), EVIL)
    text, (found,) = page(tmp_path, [dataclasses.replace(report, relevance=sources)])
    assert Elements(text).found == Elements(plain).found
    assert found["prompt"] == found["response"] == [EVIL] and found["rules"] == EVIL


def run(*arguments):
    return CliRunner().invoke(cli.app, [str(each) for each in arguments])


@pytest.fixture
def source(tmp_path, lm, monkeypatch):
    """A file of two answers; loading any model gives the tiny one."""
    monkeypatch.setattr(jaxhal, "load", lambda name, *_, **__: lm)
    path = tmp_path / "in.jsonl"
    row = {"id": "one", "prompt": ONE.prompt, "response": ONE.response}
    path.write_text(json.dumps(row) + "\n{\n", "utf-8")
    return path


def test_the_command(tmp_path, source, reports):
    out, html = tmp_path / "out.jsonl", tmp_path / "out.html"
    options = ["-d", *TEXT, "-o", out, "--html", html, "--relevance", "attnlrp"]
    found = run("detect", "-m", "m", "-i", source, *options)
    assert found.exit_code == 1 and "line 2: not JSON" in found.stderr
    first, _ = [json.loads(line) for line in out.read_text("utf-8").splitlines()]
    assert first.keys() == reports[0].to_dict().keys()
    text = html.read_text("utf-8")
    data = re.search(r'<script type="application/json".*?>(.*?)</script>', text, re.S)
    one, bad = [answer["relevance"] for answer in json.loads(data[1])["answers"]]
    assert bad is None and one["prompt"] == list(ONE.prompt)
    np.testing.assert_allclose(
        dense(one), 100 * reports[3].relevance.matrix, atol=0.5 + 1e-2
    )


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--relevance", "attnlrp"], "--relevance attnlrp is shown in the page; give"),
        (["--relevance", "lrp", "--html", "out.html"], "unknown rules 'lrp'; known"),
    ],
)
def test_wrong_use_of_the_command(tmp_path, source, monkeypatch, options, message):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(jaxhal, "load", None)  # no model is loaded
    found = run("detect", "-m", "m", "-i", source, *options)
    assert (found.exit_code, found.stdout) == (2, "")
    assert found.stderr.startswith("jaxhal: ") and message in found.stderr
    assert [path.name for path in tmp_path.iterdir()] == ["in.jsonl"]
