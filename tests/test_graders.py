"""Graders of claims: which sentence does the source support least, as published."""

import numpy as np
import pytest
import transformers

import jaxhal
import tiny_encoders
from jaxhal import detectors
from jaxhal.detectors import build, nli_context, pair_grader
from jaxhal.llm import entailment
from jaxhal.llm.entailment import FACTCG, PUBLISHED, Inference
from jaxhal.models.encoders import load_encoder
from jaxhal.models.encoders.encoding import classify
from jaxhal.models.encoders.text_encoder import Framed
from jaxhal.types import Example
from tiny_lm import tiny_lm

GRADES = ("contradiction", "entailment")
SENTENCES = ("It holds red balls.", "A café is near.", "The tea costs $4.")
EXAMPLE = Example(" ".join(SENTENCES), context="The box holds many red balls.", id="a")


@pytest.fixture(scope="module")
def lm():
    return tiny_lm(context=4096)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    made = tmp_path_factory.mktemp("grader")
    return str(tiny_encoders.write_any_text(made, "deberta-v3", 512, classes=2))


def theirs(folder, *texts):
    """Probability of class 1 of one text, or of a pair."""
    torch = pytest.importorskip("torch", reason="torch is not installed")
    model = transformers.AutoModelForSequenceClassification.from_pretrained(folder)
    tokenizer = transformers.PreTrainedTokenizerFast.from_pretrained(folder)
    row = tokenizer(*texts, return_tensors="pt", return_token_type_ids=False)
    with torch.no_grad():
        return float(model.eval()(**row).logits.softmax(-1)[0, 1])


@pytest.mark.parametrize("template", [None, FACTCG])
def test_the_least_supported_sentence_counts_as_in_transformers(lm, folder, template):
    detector = pair_grader(folder, GRADES, template)
    (report,) = jaxhal.score(lm, [EXAMPLE], [detector], progress=False)
    premise = EXAMPLE.context
    want = [
        theirs(folder, premise, sentence)
        if template is None
        else theirs(folder, template.format(premise=premise, hypothesis=sentence))
        for sentence in SENTENCES
    ]
    assert np.ptp(want) > 1e-3
    score = report.scores["pair_grader"]
    assert score == pytest.approx(1 - min(want), abs=1e-5)
    at = EXAMPLE.response.index(SENTENCES[1])
    (token,) = (token for token in report.tokens if token.start == at)
    assert token.scores["pair_grader"] == pytest.approx(1 - want[1], abs=1e-5)


@pytest.mark.parametrize("template", [None, FACTCG])
def test_the_window_that_supports_most_counts(lm, folder, template):
    context = " ".join(f"Nr. {number} is a café, {number**2}." for number in range(60))
    example = Example(SENTENCES[1], context=context)
    detector = pair_grader(folder, GRADES, template, 300)
    (report,) = jaxhal.score(lm, [example], [detector], progress=False)
    encoder = load_encoder(folder).reading(300)
    if template is None:
        (pieces,) = encoder.tokenizer.pair_windows(context, SENTENCES[1], 300, True)
    else:
        framed = Framed.of(template, context, SENTENCES[1])
        pieces = encoder.tokenizer.framed_windows(framed, None, 300)
    texts = [
        encoder.tokenizer.decode(
            [i for i, s in zip(piece.ids, piece.sequence_ids, strict=True) if s == 0]
        )
        for piece in pieces
    ]
    if template is None:
        each = [theirs(folder, text, SENTENCES[1]) for text in texts]
    else:
        assert all(text.endswith(framed.after) for text in texts)
        each = [theirs(folder, text) for text in texts]
    assert len(each) > 2 and np.ptp(each) > 1e-4
    assert report.scores["pair_grader"] == pytest.approx(1 - max(each), abs=1e-5)


def test_what_the_reader_is_not_asked_may_be_longer_than_its_context(lm, folder):
    example = Example(SENTENCES[1], context="Nr. 7 is a box of red balls. " * 40)
    short, own = tiny_lm(context=256), pair_grader(folder, GRADES)
    (found,), (wide,) = (jaxhal.score(r, [example], [own]) for r in (short, lm))
    assert found.error is None and found.scores == wide.scores
    asking = [nli_context("reader")]
    (found,) = jaxhal.score(short, [example], asking, progress=False)
    assert "over the model's context of 256" in found.error


def test_published_graders_are_used_as_published(folder, monkeypatch):
    encoder = load_encoder(folder)
    monkeypatch.setattr(entailment, "kept_encoder", lambda source: encoder)
    pairs = [(EXAMPLE.context * 20, SENTENCES[0]), (SENTENCES[1], SENTENCES[2])]
    forms = {
        "lytang/MiniCheck-DeBERTa-v3-Large": (None, 2048),
        "yaxili96/FactCG-DeBERTa-v3-Large": (FACTCG, 800),
    }
    for source, (template, length) in forms.items():
        known = PUBLISHED[source]
        assert (known.template, known.length, known.labels) == (
            template,
            length,
            GRADES,
        )
        want = classify(
            encoder.reading(length), pairs, labels=GRADES, template=template
        )
        found = Inference(source)(pairs)
        np.testing.assert_array_equal(found[:, [0, 2]], want)
    shown = FACTCG.format(premise="A.\nB.", hypothesis="C.")
    assert shown == (
        "A.\nB.\n\nChoose your answer: based on the paragraph above can we conclude "
        'that "C."?\n\nOPTIONS:\n- Yes\n- No\nI think the answer is '
    )


def test_what_is_not_entailed_is_a_contradiction(tmp_path, folder):
    names = {"0": "entailment", "1": "not_entailment"}
    own = tiny_encoders.write_any_text(tmp_path, "deberta-v3", 512, classes=2)
    text = (own / "config.json").read_text()
    for number, name in names.items():
        text = text.replace(f"LABEL_{number}", name)
    (own / "config.json").write_text(text)
    pairs = [(EXAMPLE.context, one) for one in SENTENCES]
    found = Inference(str(own))(pairs)
    want = classify(load_encoder(folder), pairs)
    np.testing.assert_allclose(found[:, [2, 0]], want, atol=1e-6)
    assert not found[:, 1].any()


def test_a_grader_is_named_by_its_source(lm, folder):
    plain = nli_context(Inference(folder, GRADES), how="max", name="same")
    grader = build({"pair_grader": {"source": folder, "labels": list(GRADES)}})
    (report,) = jaxhal.score(lm, [EXAMPLE], [plain, grader], progress=False)
    assert report.scores["same"] == report.scores["pair_grader"]
    assert grader.by == f"natural language inference ({folder})"
    assert build({"pair_grader": "owner/name"}) is build("pair_grader:owner/name")
    assert build("pair_grader:owner/name") is pair_grader("owner/name")
    with pytest.raises(ValueError, match="'toha'.*unexpected keyword.*'source'"):
        build("toha:owner/name")
    with pytest.raises(ValueError, match="unknown detector 'pair'; did you mean"):
        detectors.get(["pair:owner/name"])


def test_graders_that_cannot(lm, folder):
    with pytest.raises(ValueError, match=r"template 'Is it.*lacks \{hypothesis\}"):
        pair_grader(folder, GRADES, "Is it in {premise}?")
    example = Example(f"{SENTENCES[0]} {'Long, ' * 400}", context="A fact.", id="long")
    rows = jaxhal.score(
        lm,
        [EXAMPLE, example],
        [pair_grader(folder, GRADES, FACTCG)],
        progress=False,
    )
    assert rows[0].error is None
    assert "example 'long'" in rows[1].error and "what is asked takes" in rows[1].error
    unnamed = jaxhal.score(lm, [EXAMPLE], [pair_grader(folder)], progress=False)
    assert "name its classes by labels=(...)" in unnamed[0].error
