"""Trained classifiers of tokens: parity, windows, forms, characters, errors."""

import itertools

import numpy as np
import pytest
import transformers

import jaxhal
import tiny_encoders
from jaxhal import detectors
from jaxhal.detectors import lettucedetect, token_classifier
from jaxhal.detectors.lettucedetect import framed, highest
from jaxhal.models.encoders import load_encoder
from jaxhal.models.encoders.encoding import classify, token_probabilities
from jaxhal.models.encoders.text_encoder import Framed
from jaxhal.reading.store import Store
from jaxhal.scoring.inputs import collect
from jaxhal.types import Example, Label
from tiny_lm import tiny_lm

CASES = ["modernbert-tokens", "eurobert-tokens", "deberta-tokens", "roberta-tokens"]
ANSWER = "Un café naïve 🙂 by 猫\u0301, in 2021.\n\tIt’s  👩‍👩‍👧 fine"
ASKED = [
    (Framed("Read this: ", "The box holds red balls.", " Then say."), "It is red."),
    (Framed("", "A café."), ANSWER),
    (Framed("", "A much longer text of many words, said twice. " * 4), "Tea 🙂"),
]


@pytest.fixture(scope="module")
def lm():
    return tiny_lm(context=4096)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tiny_encoders.write_any_text(
        tmp_path_factory.mktemp("modern"), "modernbert-tokens", 512
    )


@pytest.fixture(scope="module")
def detector(folder):
    return token_classifier(str(folder))


def theirs(folder, pairs):
    """Of each second text's tokens ``(start, end, probability of class 1)``."""
    torch = pytest.importorskip("torch", reason="torch is not installed")
    model = transformers.AutoModelForTokenClassification.from_pretrained(folder).eval()
    tokenizer = transformers.PreTrainedTokenizerFast.from_pretrained(folder)
    for first, second in pairs:
        row = tokenizer(first, second, return_tensors="pt", return_offsets_mapping=True)
        of_second = np.array(row.sequence_ids(0)) == 1
        offsets = row.pop("offset_mapping")[0].numpy()[of_second]
        given = {name: row[name] for name in ("input_ids", "attention_mask")}
        with torch.no_grad():
            found = model(**given).logits.softmax(-1)[0, :, 1].numpy()[of_second]
        yield offsets, found


@pytest.mark.parametrize("case", CASES)
def test_probabilities_are_those_of_transformers(case, tmp_path):
    asked, context = ASKED, 1024
    roberta = case == "roberta-tokens"
    if roberta:  # whose learned positions are few
        asked = [(Framed("", "A ", "box"), "a tea"), (Framed("", "Red"), "猫🙂")]
        context = 40
    folder = tiny_encoders.write_any_text(tmp_path, case, context, roberta)
    found = token_probabilities(load_encoder(folder), asked, progress=False)
    pairs = [(text.around(text.middle), answer) for text, answer in asked]
    for ours, (_, want) in zip(found, theirs(folder, pairs), strict=True):
        assert ours.shape == want.shape and np.ptp(want) > 0.01
        np.testing.assert_allclose(ours, want, atol=1e-5)


def test_a_row_of_a_batch_is_the_row_alone(folder):
    encoder = load_encoder(folder)
    together = token_probabilities(encoder, [*ASKED, ASKED[0]], progress=False)
    assert together[3] is together[0]
    for row, one in zip(together, ASKED, strict=False):
        (alone,) = token_probabilities(encoder, [one], progress=False)
        np.testing.assert_allclose(row, alone, atol=2e-6)


def test_windows_hold_all_of_a_text_and_everything_around_it(folder):
    encoder = load_encoder(folder)
    middle = " ".join(f"Nr. {number} is a naïve café 🙂." for number in range(60))
    text, answer = Framed("Question: why?\n", middle, "\noutput:"), "It is 猫."
    pieces = encoder.tokenizer.framed_windows(text, answer, 256)
    tokenizer = encoder.tokenizer
    seen = []
    for piece in pieces:
        ids = np.array(piece.ids)
        of = np.array([-1 if s is None else s for s in piece.sequence_ids])
        first, second = (tokenizer.decode(ids[of == side]) for side in (0, 1))
        assert len(ids) <= 256 and second == answer
        assert first.startswith(text.before) and first.endswith(text.after)
        seen.append(first[len(text.before) : -len(text.after)])
    assert len(pieces) > 3 and all(part in middle for part in seen)
    starts = [middle.index(part) for part in seen]
    ends = [start + len(part) for start, part in zip(starts, seen, strict=True)]
    assert starts[0] == 0 and ends[-1] == len(middle)
    for (start, end), after in zip(itertools.pairwise(starts), ends, strict=False):
        assert start < end < after  # the next begins before this one ends
    # A quarter of each is in the next one too.
    shared = [end - start for end, start in zip(ends[:-1], starts[1:], strict=True)]
    assert 0.15 < np.mean(shared) / np.mean([len(part) for part in seen[:-1]]) < 0.35


def test_one_window_supports_a_token(folder):
    encoder = load_encoder(folder).reading(256)
    middle = " ".join(f"Nr. {number} is a naïve café." for number in range(60))
    text, answer = Framed("Why?\n", middle, "\noutput:"), "It is 猫 and 7."
    pieces = encoder.tokenizer.framed_windows(text, answer, 256)
    of_first = [np.array([s == 0 for s in piece.sequence_ids]) for piece in pieces]
    texts = [
        encoder.tokenizer.decode(np.array(piece.ids)[first])
        for piece, first in zip(pieces, of_first, strict=True)
    ]
    each = token_probabilities(
        encoder, [(Framed("", one), answer) for one in texts], progress=False
    )
    (found,) = token_probabilities(encoder, [(text, answer)], progress=False)
    assert len(each) > 3 and np.ptp(each, axis=0).max() > 1e-3
    np.testing.assert_allclose(found, np.min(each, axis=0), atol=2e-6)


def test_what_is_read_before_an_answer():
    example = Example("Yes.", context="A fact.\nMore.", question="Is {it}?")
    asked = framed(example)
    assert asked.middle == "A fact.\nMore."
    assert asked.around(asked.middle) == (
        "Briefly answer the following question:\nIs {it}?\nBear in mind that your "
        "response should be strictly based on the following 1 passages:\npassage 1: "
        "A fact.\nMore.\nIn case the passages do not contain the necessary "
        'information to answer the question, please reply with: "Unable to answer '
        'based on given passages."\noutput:'
    )
    summary = framed(Example("Yes.", context="A fact."))
    assert summary == Framed(
        "Summarize the following text:\npassage 1: ", "A fact.", "\noutput:"
    )
    prompt = "Sum up:\nA fact.\nNow:"
    assert framed(Example("Yes.", prompt=prompt)) == Framed("", prompt, "")
    both = framed(Example("Yes.", prompt=prompt, context="A fact."))
    assert both == Framed("Sum up:\n", "A fact.", "\nNow:")
    # What a chat template wrote is not for this model.
    chat = Example("Yes.", prompt=f"<s>{prompt}", context="A fact.", templated=True)
    assert framed(chat) == summary


def test_scores_are_those_of_transformers_by_character(lm, folder, detector):
    pytest.importorskip("torch", reason="torch is not installed")
    example = Example(ANSWER, context="A café in 2021.", question="Where?")
    (report,) = jaxhal.score(lm, [example], [detector], progress=False)
    asked = framed(example)
    ((offsets, want),) = theirs(folder, [(asked.around(asked.middle), ANSWER)])
    assert report.scores["token_classifier"] == pytest.approx(want.max(), abs=1e-5)
    assert len(report.tokens) > len(want)  # a byte each
    for token in report.tokens:
        inside = (offsets[:, 0] < token.end) & (token.start < offsets[:, 1])
        score = token.scores["token_classifier"]
        assert score == pytest.approx(want[inside].max(), abs=1e-5)
    assert report.detector == "token_classifier"
    assert report.helpers == {"token_classifier": f"token classifier ({folder})"}


# What is marked in an answer, and the span that a report should have.
GOLDEN = [
    ("It is 猫 and tea.", "猫", "猫"),
    ("Une cafe\u0301 noire", "e\u0301", "cafe\u0301"),
    ("👩‍👩‍👧 came in 2021", "2021", "2021"),
    ("Say 🙂🙃 twice", "🙃", "🙃"),
    ("مرحبا بالعالم", "بالعالم", "بالعالم"),
    ("line\r\n\ttab  end", "end", "end"),
]


@pytest.mark.parametrize(("answer", "marked", "span"), GOLDEN)
def test_spans_are_whole_characters(lm, detector, monkeypatch, answer, marked, span):
    start = answer.index(marked)
    seen = []

    def probabilities(encoder, asked, progress):
        offsets = encoder.tokenizer.encode_with_offsets(answer)[1]
        inside = (offsets[:, 0] < start + len(marked)) & (start < offsets[:, 1])
        seen.append((offsets[inside, 0].min(), offsets[inside, 1].max()))
        return [np.where(inside, 0.9, 0.1) for _ in asked]

    monkeypatch.setattr(lettucedetect, "token_probabilities", probabilities)
    example = Example(answer, context="A text.")
    how = {"token_threshold": 0.5, "progress": False}
    (report,) = jaxhal.score(lm, [example], [detector], **how)
    (found,) = report.spans
    low, high = seen[0]
    assert answer[low:high].strip() in found.text == answer[found.start : found.end]
    assert (found.start, found.text) == (answer.index(span), span)
    assert found.confidence == pytest.approx(0.9)


def test_the_highest_of_what_is_shared_by_hand():
    rng = np.random.default_rng(0)
    cuts = [np.unique(rng.integers(0, 60, 14)) for _ in range(2)]
    spans, others = (np.stack([c[:-1], c[1:]], 1) for c in cuts)
    values = rng.random(len(others))
    for (start, end), got in zip(spans, highest(spans, others, values), strict=True):
        some = [
            v
            for (a, b), v in zip(others, values, strict=True)
            if set(range(a, b)) & set(range(start, end))
        ]
        assert got == max(some, default=0.0)


def test_an_answer_that_does_not_fit_costs_no_other(lm, detector):
    long = Example("Very long words. " * 60, context="A fact.", question="Why?", id="b")
    rows = [Example("Red.", context="A fact.", id="a"), long]
    rows.append(Example("Blue.", context="Red balls. " * 120, question="Why?"))
    a, b, c = jaxhal.score(lm, rows, [detector], progress=False)
    assert a.error is None and c.error is None
    assert "example 'b': answer 0: what is asked takes" in b.error
    assert "of the encoder's 512, and its source has" in b.error
    assert "shorten the answer" in b.error
    alone = jaxhal.score(lm, [rows[2]], [detector], progress=False)
    assert c.scores == pytest.approx(alone[0].scores, abs=1e-5)


@pytest.mark.parametrize("unit", ["sentence", "span"])
def test_parts_of_answers_have_their_own_tokens(lm, detector, tmp_path, unit):
    answer = "It is red. A dragon is in it."
    start = answer.index("A dragon")
    example = Example(
        answer, context="A box.", labels=(Label(start, len(answer)),), source="s"
    )
    found = collect(lm, [example], [detector], Store(tmp_path), unit=unit)
    (report,) = jaxhal.score(lm, [example], [detector], progress=False)
    by_part = {part.example.response: part.tokens for part in found.source.parts}
    assert len(by_part) == 2
    values = np.array([t.scores["token_classifier"] for t in report.tokens])
    scores = found.inputs["token_classifier"]
    for tokens, score in zip(by_part.values(), scores, strict=True):
        assert score == pytest.approx(values[tokens[: len(values)]].max(), abs=1e-6)


def test_encoders_that_do_not_classify_tokens(lm, folder, tmp_path):
    of_texts = tiny_encoders.write_any_text(tmp_path / "texts", "deberta-v3")
    example = Example("Red.", context="A fact.")
    (found,) = jaxhal.score(
        lm, [example], [token_classifier(str(of_texts))], progress=False
    )
    assert "has no classifier of tokens into two classes" in found.error
    with pytest.raises(ValueError, match="no classifier of texts; load a checkpoint"):
        classify(load_encoder(folder), [("A fact.", "Red.")])
    short = tiny_encoders.write_any_text(tmp_path / "short", "roberta-tokens", 40)
    with pytest.raises(ValueError, match=r"length is 64, and encoder .* up to 38"):
        load_encoder(short).reading(64)
    with pytest.raises(ValueError, match="length is -1"):
        load_encoder(folder).reading(-1)
    assert "token_classifier" not in detectors.AT_ONCE


def test_what_the_reader_does_not_read_may_be_longer_than_its_context(detector):
    short = tiny_lm(context=256)
    context = "Nr. 7 is a box of red balls. " * 40
    rows = [Example("It is red.", context=context, id="a")]
    (found,) = jaxhal.score(short, rows, [detector, "novel_words"], progress=False)
    assert found.error is None and set(found.scores) == {detector.name, "novel_words"}
    (wide,) = jaxhal.score(tiny_lm(context=4096), rows, [detector], progress=False)
    assert found.scores[detector.name] == wide.scores[detector.name]
    samples = detectors.selfcheck_ngram(draw={"n": 2})
    for one in ("token_entropy", samples):
        (found,) = jaxhal.score(short, rows, [detector, one], progress=False)
        assert "over the model's context of 256; shorten the context" in found.error
