"""From answers to reports with the real small model."""

import dataclasses

import jax
import numpy as np
import pytest

import jaxhal
from jaxhal import detectors, texts
from jaxhal.capture import forward as capture
from jaxhal.models.batching import lengths
from jaxhal.scoring.detection import resolve
from jaxhal.scoring.fitting import untrained
from jaxhal.scoring.results import settings_of
from jaxhal.types import Example
from tiny_lm import tiny_lm

CONTEXT = "The Marlow bridge opened in 1832 and spans 72 metres over the Thames."
GOOD = Example("It opened in 1832.", context=CONTEXT, question="When?", id="good")
LONGER = Example(
    "The bridge, which crosses the Thames at Marlow, has been open since 1932, and it "
    "is 310 metres long. Äußerst schön!",
    context=CONTEXT + " " + CONTEXT.replace("1832", "1840") * 3,
    question="When did it open, and how long is it?",
    id="longer",
)
PROMPT = Example("Paris.", prompt="What is the capital of France?", id="prompt")
TOO_LONG = Example("word " * 9000, prompt="Write a lot.", id="too long")


@pytest.fixture(scope="module")
def reports(smollm2):
    return jaxhal.score(smollm2, [LONGER, TOO_LONG, GOOD, PROMPT], batch_size=2)


def test_order_and_errors(reports):
    assert [r.id for r in reports] == ["longer", "too long", "good", "prompt"]
    assert [r.error is None for r in reports] == [True, False, True, True]
    error = reports[1].error
    assert "9002 response tokens" in error and "8192" in error
    assert reports[1].scores == {} and reports[1].tokens == []


def test_scores_do_not_depend_on_company(smollm2, reports):
    for report, example in ((reports[0], LONGER), (reports[2], GOOD)):
        alone = jaxhal.score(smollm2, [example], batch_size=1)[0]
        at_once = list(detectors.AT_ONCE)
        assert list(alone.scores)[: len(at_once)] == at_once
        for name, value in alone.scores.items():
            assert report.scores[name] == pytest.approx(value, abs=2e-4), name
        for ours, theirs in zip(report.tokens, alone.tokens, strict=True):
            assert ours[:3] == theirs[:3]
            assert ours.scores == pytest.approx(theirs.scores, abs=2e-4)


def test_tokens_cover_the_response(reports):
    for report in (reports[0], reports[2], reports[3]):
        covered = set()
        for token in report.tokens:
            assert token.text == report.response[token.start : token.end]
            assert all(0 <= value <= 1 for value in token.scores.values())
            covered |= set(range(token.start, token.end))
        spaces = {i for i, c in enumerate(report.response) if c.isspace()}
        assert covered | spaces == set(range(len(report.response)))


def test_scores_equal_the_features_by_hand(smollm2, reports):
    batch = smollm2.encode([GOOD])
    named = {"m": jaxhal.MTopDiv(), "l": jaxhal.LookbackRatio()}
    named |= {"p": jaxhal.TokenLogprob(), "e": jaxhal.TokenEntropy()}
    features = jaxhal.read(smollm2, batch, named)
    count = int(np.asarray(batch.response_mask).sum())
    logprob = np.asarray(features["p"])[0, :count]
    entropy = np.asarray(features["e"])[0, :count]
    lookback = np.asarray(features["l"])[:, 0, :, :count]
    want = {
        "mtop_div": float(np.asarray(features["m"]).mean()),
        "lookback_ratio": 1 - lookback.mean(),
        "predictive_probability": -logprob.mean(),
        "predictive_probability_max": -logprob.min(),
        "token_entropy": entropy.max(),
        "token_entropy_mean": entropy.mean(),
        "response_length": 4,
        "novel_words": 1,  # "It"; the question counts as source text
        "novel_word_share": 0.25,
    }
    for name, value in want.items():
        assert reports[2].scores[name] == pytest.approx(float(value), abs=2e-4), name
    shape = (smollm2.config.num_hidden_layers, smollm2.config.num_attention_heads)
    assert {m.shape for m in reports[2].heads.values()} == {shape}
    np.testing.assert_allclose(
        reports[2].heads["lookback"], lookback.mean(-1), atol=2e-4
    )


def test_one_program_per_bucket(smollm2):
    rng = np.random.default_rng(0)
    examples = [
        Example("yes " * int(r), prompt="word " * int(p))
        for p, r in zip(rng.integers(5, 90, 12), rng.integers(2, 30, 12), strict=True)
    ]
    encode = smollm2.tokenizer.encode_example
    buckets = {lengths([encode(example)]) for example in examples}
    assert len(buckets) > 1
    before = capture.read_jit._cache_size()
    reports = jaxhal.score(smollm2, examples, ["max_prompt_attention"], batch_size=3)
    assert all(report.error is None for report in reports)
    assert capture.read_jit._cache_size() - before <= len(buckets)


def test_detect(smollm2):
    report = jaxhal.detect(
        smollm2,
        context=CONTEXT,
        question="When?",
        response="It opened in 1832.",
        detectors=["mtop_div", "novel_words"],
    )
    assert list(report.scores) == ["mtop_div", "novel_words"]
    with pytest.raises(ValueError, match="response is ' '"):
        jaxhal.detect(smollm2, prompt="Why?", response=" ")
    with pytest.raises(ValueError, match="over the model's context"):
        jaxhal.detect(smollm2, prompt="Why?", response="word " * 9000)
    with pytest.raises(ValueError, match="did you mean 'mtop_div'"):
        jaxhal.detect(smollm2, prompt="Why?", response="So.", detectors=["mtopdiv"])
    with pytest.raises(ValueError, match="batch_size is 0"):
        jaxhal.score(smollm2, [GOOD], batch_size=0)
    assert jaxhal.score(smollm2, []) == []


def test_text_detectors_alone_need_no_reading(smollm2, monkeypatch):
    monkeypatch.setattr("jaxhal.reading.extract.read", None)
    report = jaxhal.score(smollm2, [GOOD], ["response_length"])[0]
    assert report.scores == {"response_length": 4.0}
    assert report.spans == []


@dataclasses.dataclass(frozen=True)
class Lengths:
    """The longer a text, the less is it entailed."""

    name: str = "lengths"

    def __call__(self, pairs):
        wrong = np.array([len(text) / 200 for _, text in pairs])
        return np.stack([wrong, 0 * wrong, 1 - wrong], 1)


def test_sentences_are_coloured(smollm2):
    listed = "It did.\n\n- In 1832?\n- No:so.Yes!  Äh."
    examples = [LONGER, GOOD, dataclasses.replace(GOOD, response=listed)]
    context = untrained(detectors.nli_context(Lengths()))
    chosen = [context, "predictive_probability"]
    reports = jaxhal.score(smollm2, examples, chosen, batch_size=2)
    for report, sentences in zip(reports, (2, 1, 4), strict=True):
        scores = [token.scores["nli_context"] for token in report.tokens]
        assert scores == pytest.approx(of_last_sentence(report), abs=1e-6)
        assert len({round(score, 4) for score in scores if score}) == sentences
        assert report.detector == "predictive_probability"
    (alone,) = jaxhal.score(smollm2, [LONGER], [context])
    assert alone.spans == []  # nobody knows what it is worth
    (alone,) = jaxhal.score(smollm2, [LONGER], [context], token_threshold=0.5)
    (span,) = alone.spans
    assert span.text == texts.sentences(LONGER.response)[0].text
    assert alone.detector == "nli_context"
    assert span.confidence == pytest.approx(len(span.text) / 200, abs=1e-6)


def of_last_sentence(report):
    """The score of the last sentence that a token has a character of, or 0."""
    found = []
    for token in report.tokens:
        inside = [
            len(sentence.text) / 200
            for sentence in texts.sentences(report.response)
            if any(sentence.start <= at < sentence.end for at in range(*token[1:3]))
        ]
        found.append(inside[-1] if inside else 0.0)
    return found


def test_names_are_given_once():
    assert len(resolve("tiny", None)) == len(detectors.AT_ONCE)
    mine = untrained(detectors.mtop_div()._replace(summary="mine"))
    for chosen in (["mtop_div", "mtop_div"], ["novel_words", mine, "mtop_div"]):
        with pytest.raises(ValueError, match="'mtop_div' is given 2 times"):
            resolve("tiny", chosen)
    with pytest.raises(ValueError, match="detectors is empty"):
        resolve("tiny", [])
    for name in ("start", "README.md"):
        with pytest.raises(
            ValueError, match="name of detector 'mtop_div' is one of RE"
        ):
            detectors.mtop_div(name=name)
    with pytest.raises(ValueError, match="detectors is 'novel_words'; give a list of"):
        resolve("tiny", "novel_words")
    with pytest.raises(ValueError, match="token_threshold is 1.5; give one from 0 to"):
        jaxhal.score(tiny_lm(), [GOOD], ["token_entropy"], token_threshold=1.5)


def test_a_score_that_is_no_number_is_an_error():
    lm = tiny_lm()
    nothing = jax.tree.map(lambda leaf: leaf * np.nan, lm.params)
    bad = dataclasses.replace(lm, params=nothing)
    every = [make() for make in detectors.CATALOGUE.values()]
    read = {name: one for each in every for name, one in each.reducers.items()}
    found = jaxhal.extract(bad, [GOOD], read, progress=False)
    for _, features in found.batches():
        for name in read:
            leaves = map(np.asarray, jax.tree.leaves(features[name]))
            assert all(np.isnan(one).any() for one in leaves if one.dtype.kind == "f")
    for name in ("token_entropy", "predictive_probability", "mtop_div", "sink_share"):
        (found,) = jaxhal.score(bad, [GOOD], [name], progress=False)
        assert f"{name} is nan; every number must be finite" in (found.error or "")
        assert found.scores == {} and found.verdict is None and found.tokens == []


def test_other_options_are_other_settings(tmp_path):
    """What was stopped is gone on with by the same detectors alone."""

    def settings(spec):
        return settings_of(tiny_lm(), [untrained(detectors.build(spec))], 8)

    for one, other in (
        ({"selfcheck_nli": {"how": "mean"}}, {"selfcheck_nli": {"how": "max"}}),
        ({"eigenscore": {"alpha": 1e-3}}, {"eigenscore": {"alpha": 1.0}}),
    ):
        assert settings(one) == settings(one) != settings(other)
    # Nor by a classifier or encoder that has been written anew.
    weights = tmp_path / "model.safetensors"
    for spec in (
        {"token_classifier": {"source": str(tmp_path)}},
        {"nli_context": {"entailment": f"nli:{tmp_path}"}},
        {"selfcheck_bertscore": {"encoder": str(tmp_path)}},
    ):
        weights.write_bytes(b"one")
        before = settings(spec)
        assert before == settings(spec)
        weights.write_bytes(b"three")
        assert before != settings(spec)


def test_conflicting_readers_are_refused():
    one = detectors.mtop_div()
    other = one._replace(
        name="mine",
        features=(("mtop_div", jaxhal.MTopDiv(normalize=False)),),
    )
    with pytest.raises(ValueError, match="'mine' looks at 'mtop_div'"):
        detectors.features_of([one, other])


def test_catalogue_names_are_functions():
    for name, make in detectors.CATALOGUE.items():
        assert make().name == name
        assert make() is make()  # so that a jitted score compiles once
        assert getattr(detectors, name)() == make()


def test_a_detector_with_settings_of_its_own(smollm2):
    own = detectors.selfcheck_ngram(draw={"n": 2, "max_new_tokens": 6}, name="own")
    (report,) = jaxhal.score(smollm2, [GOOD], [own, "response_length"], progress=False)
    assert set(report.scores) == {"own", "response_length"}
    with pytest.raises(ValueError, match="'lookback_lens' must be fitted to labelled"):
        jaxhal.score(smollm2, [GOOD], [detectors.lookback_lens()])
