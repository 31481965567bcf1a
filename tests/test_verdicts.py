"""One detector decides: the best of those known to be worth it, and as they say."""

import copy
import dataclasses
import json

import numpy as np
import pytest

import jaxhal
from jaxhal import evaluation
from jaxhal.datasets import examples
from jaxhal.datasets.jsonl import read_rows
from jaxhal.detectors import build
from jaxhal.evaluation import CalibrationSet, Isotonic, Measured, Platt, guarantee
from jaxhal.evaluation.guarantees import NoThreshold
from jaxhal.io import progress
from jaxhal.models.lm import LM
from jaxhal.models.tokenizer import Tokenizer
from jaxhal.scoring.fitting import Fitted, untrained
from jaxhal.scoring.verdicts import (
    check_adaptable,
    decider,
    promising,
    undecided,
    verdict,
)
from jaxhal.types import Example
from tiny_lm import tiny_lm

LOGISTIC = Platt(1.0, 0.0)


def fitted(name="novel_words", auroc=0.8, beats="yes", threshold=0.5, by=LOGISTIC):
    """A method that is no control, whatever it is called."""
    detector = build(name)._replace(control=False)
    measured = None if auroc is None else Measured("crates", 40, 10, auroc)
    return Fitted(detector, (), by, threshold, beats=beats, measured=measured)


def named(one):
    return one and one.detector.name


def test_the_best_of_those_that_may_decides():
    low, high = fitted("novel_words", 0.7), fitted("response_length", 0.9)
    assert (
        named(decider([low, high])) == named(decider([high, low])) == "response_length"
    )
    assert named(decider([low, untrained(build("mtop_div"))])) == "novel_words"
    assert decider([untrained(build("mtop_div"))]) is None
    for worthless in (
        fitted("response_length", 0.99, beats="no"),
        fitted("response_length", 0.99, beats="within noise"),
        fitted("response_length", 0.99, beats=None),
        fitted("response_length", None),
        fitted("response_length", 0.99, by=Platt(0.0, 3.0)),
        fitted("response_length", 0.99, by=Isotonic((0.0, 1.0), (0.6, 0.6))),
        dataclasses.replace(high, detector=build("response_length")),  # a control
    ):
        assert decider([worthless]) is None
        assert named(decider([worthless, low])) == "novel_words"


def test_a_single_method_comes_before_an_ensemble_within_one_standard_error():
    """An interval of 0.1 around 0.85 has a standard error of 0.0255."""
    at = Measured("crates", 40, 10, 0.85, 0.8, 0.9)
    assert at.standard_error == pytest.approx(0.0255, abs=1e-4)
    assert at._replace(low=None, high=None).standard_error == 0
    both = fitted("novel_words")
    members = tuple(build(name) for name in ("mtop_div", "token_entropy"))
    both = dataclasses.replace(
        both, detector=both.detector._replace(members=members), measured=at
    )
    for auroc, best in ((0.83, "response_length"), (0.82, "novel_words")):
        one = fitted("response_length", auroc)
        assert named(decider([one, both])) == named(decider([both, one])) == best
    known = dataclasses.replace(both, measured=at._replace(low=None, high=None))
    assert named(decider([fitted("response_length", 0.849), known])) == "novel_words"


@pytest.mark.parametrize("threshold", [-1.0, 0.0, 1.0])
def test_no_verdict_contradicts_its_probability(threshold):
    one = fitted(threshold=threshold)
    for score in np.linspace(-2, 2, 33):
        said, probability = verdict(one, score)
        assert probability == pytest.approx(1 / (1 + np.exp(-score)))
        reached, likely = score >= threshold, score >= 0  # p >= 0.5
        want = {(True, True): "hallucinated", (False, False): "supported"}
        assert said == want.get((reached, likely), "unsure")
        assert bool(one.flags([score])[0]) == (said == "hallucinated")


@pytest.mark.parametrize("score", [float("nan"), float("inf"), -float("inf")])
def test_no_verdict_of_a_score_that_is_not_finite(lm, score):
    with pytest.raises(ValueError, match=f"score of 'novel_words' is {score}; nothing"):
        verdict(fitted(), score)
    broken = fitted()
    inputs = broken.detector.inputs
    detector = broken.detector._replace(
        inputs=lambda features: inputs(features) * score
    )
    example = Example("It holds pears.", prompt="What is in it?", id="a")
    one = dataclasses.replace(broken, detector=detector)
    (found,) = jaxhal.score(lm, [example], [one], progress=False)
    assert "novel_words" in str(found.error) and found.verdict is None


def test_what_was_fitted_to_parts_of_answers_flags_nothing():
    for unit, said in (("response", None), ("sentence", "each sentence of answers")):
        one = dataclasses.replace(fitted(), unit=unit)
        assert (decider([one]) is None) == (said is not None)
        assert bool(one.flags([9.0])[0]) == (said is None)
        assert said is None or said in undecided([one], "tiny")


def test_no_verdict_says_why():
    assert undecided([untrained(build("mtop_div"))], "tiny") == (
        "no verdict: none of the detectors in use was fitted to labelled answers read "
        "by 'tiny'; fit one, or read with qwen2.5-coder-0.5b, qwen2.5-coder-1.5b, "
        "smollm2-135m"
    )
    control = Fitted(build("tfidf"), (), LOGISTIC, 0.5)
    assert "none of the detectors in use was fitted" in undecided([control], "tiny")
    some = [fitted("response_length", beats="no"), fitted(beats=None), control]
    assert undecided(some, "tiny") == (
        "no verdict: no detector in use may decide (response_length: it does not beat "
        "the best control; novel_words: nobody measured it beside the controls on "
        "answers held out)"
    )


@pytest.fixture(scope="module")
def lm():
    return tiny_lm()


def judged(lm, *chosen, response="It holds pears, 2021.", **options):
    example = Example(response, context="A crate.", question="What is in it?", id="a")
    (report,) = jaxhal.score(lm, [example], chosen, progress=False, **options)
    assert report.error is None, report.error
    return report


def test_a_report_has_the_verdict_of_one(lm):
    """Four words: a score of 4 for the one, and of 4 new ones for the other."""
    best = fitted("response_length", 0.9, threshold=3.0)
    other = fitted("novel_words", 0.8, threshold=99.0)
    found = judged(lm, other, best, "predictive_probability")
    assert (found.verdict, found.by) == ("hallucinated", "response_length")
    assert found.probability == found.probabilities["response_length"] > 0.95
    assert found.basis == best.measured and found.undecided is None
    assert found.flagged == ["response_length"]
    for threshold, want in ((99.0, "unsure"), (4.0, "hallucinated")):
        one = dataclasses.replace(best, threshold=threshold)
        assert judged(lm, other, one).verdict == want
    rare = dataclasses.replace(best, calibration=Platt(1.0, -10.0))
    assert judged(lm, rare).verdict == "unsure" and judged(lm, rare).flagged == []
    assert judged(lm, dataclasses.replace(rare, threshold=5.0)).verdict == "supported"


def test_without_a_decider_there_is_no_verdict(lm):
    found = judged(lm, "mtop_div", "predictive_probability")
    assert found.verdict is found.probability is found.by is found.basis is None
    assert found.undecided and found.undecided.startswith("no verdict: none of the")
    why = undecided([untrained(build("mtop_div"))], "smollm2-135m")
    assert why.endswith("add one that ships for it, such as token_probe, or name none")
    assert found.spans == [] and found.detector == "predictive_probability"
    marked = judged(lm, "predictive_probability", token_threshold=0.0)
    assert [span.text for span in marked.spans] == [marked.response]


def test_spans_are_the_deciders_and_of_unsupported_answers(lm):
    """Any score of a token is above the least threshold, and every score a loss."""
    for threshold, by, want in (
        (0.0, LOGISTIC, "hallucinated"),
        (99.0, LOGISTIC, "unsure"),
        (99.0, Platt(1.0, -99.0), "supported"),
    ):
        one = fitted("predictive_probability", threshold=threshold, by=by)
        found = judged(lm, one, "token_entropy", token_threshold=0.0)
        assert found.verdict == want and found.detector == "predictive_probability"
        assert bool(found.spans) == (want != "supported")
    # The best scores no tokens: the next best that does marks them.
    best = fitted("response_length", 0.95, threshold=0.0)
    other = fitted("token_entropy", 0.6, threshold=99.0)
    found = judged(lm, best, "predictive_probability", other)
    assert (found.by, found.detector) == ("response_length", "token_entropy")
    worthless = fitted("token_entropy", 0.6, beats="no")
    found = judged(lm, best, worthless)
    assert (found.verdict, found.spans) == ("hallucinated", [])


def test_a_name_of_its_own_changes_no_span(lm):
    """Thresholds of token scores belong to what a detector is, not to its name."""
    found = {}
    for name in ("predictive_probability", "mine"):
        plain = fitted("predictive_probability", threshold=0.0)
        kind = build({"predictive_probability": {"name": name}})
        one = dataclasses.replace(plain, detector=kind)
        found[name] = judged(lm, one, "token_entropy")
        assert found[name].detector == name
        both = judged(lm, "token_entropy", untrained(kind))
        assert both.detector == name
    first, other = found.values()
    assert [s[:3] for s in first.spans] == [s[:3] for s in other.spans]
    assert first.verdict == other.verdict == "hallucinated"


def test_a_conversation_of_several_turns_gets_a_verdict(lm):
    words = copy.deepcopy(lm.tokenizer.hf)
    words.chat_template = (
        "{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}"
    )
    chatty = LM(lm.params, lm.graphdef, lm.config, Tokenizer(words), "chatty")
    said = [
        "A crate of pears.",
        "What is it?",
        "A crate.",
        "And in it?",
        "Pears, 2021.",
    ]
    roles = ["system", "user", "assistant", "user", "assistant"]
    chat = [{"role": a, "content": b} for a, b in zip(roles, said, strict=True)]
    rows = [{"id": "a", "messages": chat}, {"id": "b", "messages": chat[-2:]}]
    given = examples(read_rows([json.dumps(row).encode() for row in rows]))
    some = [fitted("novel_words", threshold=1.0), "mtop_div"]
    whole, last = jaxhal.score(chatty, given, some, progress=False)
    assert whole.response == last.response == said[-1]
    # Pears are in a turn that the other row lacks.
    assert (whole.scores["novel_words"], last.scores["novel_words"]) == (1.0, 2.0)
    assert whole.verdict == last.verdict == "hallucinated"
    assert whole.scores["mtop_div"] != last.scores["mtop_div"]


def test_what_cannot_be_read_has_no_verdict(lm):
    example = Example("word " * 9000, prompt="Write a lot.", id="long")
    one = fitted("predictive_probability")
    (found,) = jaxhal.score(lm, [example], [one], progress=False)
    assert found.error and found.verdict is found.by is found.undecided is None


# --- promises -----------------------------------------------------------------------


def drawn(rng, count, sources=None):
    """Scores and labels of some answers, two to a source unless told otherwise."""
    labels = rng.integers(0, 2, count)
    scores = np.float32(rng.normal(size=count) + 2.5 * labels)
    return CalibrationSet(scores, labels, np.arange(count) // (sources or 1))


def promised(known, promise, confidence=0.9, **options):
    one = dataclasses.replace(fitted(**options), calibrated_on=known)
    (found,) = promising([one], "tiny", promise, confidence)
    return found


def test_the_threshold_is_that_of_the_guarantee():
    known = drawn(np.random.default_rng(0), 400, sources=2)
    groups = known.sources.tolist()
    for promise in ({"precision": 0.8}, {"recall": 0.8}, {"false_alarms": 0.1}):
        found = promised(known, promise, 0.8)
        want = guarantee(known.scores, known.labels, promise, groups, confidence=0.8)
        assert found.promise == want and found.threshold == want.threshold
        assert want.sources == 200
    average = promised(known, {"recall": 0.9}, None)
    assert str(average.promise) == "recall at least 90% on average (200 sources)"


def wrong(kind, said, labels):
    """Of the answers that a promise is about, the share that went wrong."""
    if kind == "precision":
        return 1 - np.mean([*labels[said == "hallucinated"]] or [1])
    if kind == "recall":  # not all are called hallucinated, but none is let through
        return np.mean(said[labels == 1] == "supported")
    return np.mean(said[labels == 0] == "hallucinated")


@pytest.mark.parametrize("slope", [0.3, 3.0])
@pytest.mark.parametrize(
    "promise", [{"precision": 0.8}, {"recall": 0.9}, {"false_alarms": 0.1}], ids=str
)
def test_verdicts_keep_the_promise_as_often_as_stated(promise, slope):
    """Whatever the probabilities, which may hold too many or too few for likely.

    Broken 20 times of 100 at most; 32 or more would come up once in 300.
    """
    rng, broken, made = np.random.default_rng(1), 0, 0
    ((kind, level),) = promise.items()
    allowed = level if kind == "false_alarms" else 1 - level
    new = drawn(rng, 20_000)
    for _ in range(100):
        by = Platt(slope, rng.normal())
        try:
            one = promised(drawn(rng, 300), promise, 0.8, by=by)
        except NoThreshold:
            continue
        made += 1
        reached, likely = one.reaches(new.scores), one.probabilities(new.scores) >= 0.5
        said = np.array(["supported", "unsure", "hallucinated"])[1 * reached + likely]
        assert said[0] == verdict(one, float(new.scores[0]))[0]
        broken += wrong(kind, said, new.labels) > allowed
    assert broken < 32 and made > 80


def test_a_precision_of_few_is_not_promised():
    """Of what the threshold flags, three alone are likelier hallucinated than not.

    What is true of the others says nothing of them.
    """
    scores = np.float32([*np.zeros(200), *np.ones(97), 60, 60, 60])
    known = CalibrationSet(scores, np.int32(scores == 1), np.arange(300))
    assert promised(known, {"precision": 0.8}, by=Platt(1.0, -0.5)).threshold == 0.5
    with pytest.raises(NoThreshold, match="gives 3 of 300 answers a probability of a"):
        promised(known, {"precision": 0.8}, by=Platt(0.1, -1.0))


def test_promises_that_cannot_be_made():
    bare = fitted("response_length", 0.9)
    with pytest.raises(ValueError, match="saved without the answers that it was calib"):
        promising([bare, fitted()], "tiny", {"recall": 0.9}, 0.9)
    with pytest.raises(ValueError, match=r"{'recall': 0.9}: no verdict: none of the"):
        promising([untrained(build("mtop_div"))], "tiny", {"recall": 0.9}, 0.9)
    known = drawn(np.random.default_rng(0), 30)
    with pytest.raises(
        ValueError, match="no known threshold keeps precision 0.99 on 30"
    ):
        promised(known, {"precision": 0.99})
    for wrong in ({"f1": 0.9}, {}, {"recall": 0.9, "precision": 0.9}):
        with pytest.raises(ValueError, match="give one of precision, recall, false"):
            promised(known, wrong)
    with pytest.raises(ValueError, match="recall is 90.0; promise a share"):
        promised(known, {"recall": 90.0})


def test_promises_that_another_base_rate_breaks():
    best = dataclasses.replace(
        fitted("response_length", 0.9),
        calibrated_on=drawn(np.random.default_rng(0), 400),
    )
    for kind in ("recall", "false_alarms"):
        check_adaptable(promising([best], "tiny", {kind: 0.7}, 0.9))
    kept = promising([best], "tiny", {"precision": 0.6}, 0.9)
    with pytest.raises(ValueError, match="a threshold for precision is chosen at the"):
        check_adaptable(kept)


def test_a_report_says_what_is_promised(lm):
    known = drawn(np.random.default_rng(0), 400)
    best = dataclasses.replace(
        fitted("response_length", 0.9, threshold=99.0), calibrated_on=known
    )
    asked = {"threshold": {"recall": 0.9}, "confidence": 0.8}
    found = judged(lm, best, fitted("novel_words", 0.7), **asked)
    assert found.promise == "recall at least 90% with 80% confidence (400 sources)"
    assert found.verdict == "hallucinated" and found.by == "response_length"
    assert judged(lm, best).promise is None and judged(lm, best).verdict == "unsure"
    text = {"context": "A crate.", "question": "What?", "response": "Pears, 2021."}
    alone = jaxhal.detect(lm, **text, detectors=[best], **asked)
    assert alone.promise == found.promise and found.promise in str(alone.to_dict(True))


def marking(shares, **options):
    """A detector that marks tokens, with what it highlights in so many sources."""
    known = {"highlights": np.float32(shares), "calibrated_on": None}
    return dataclasses.replace(fitted("predictive_probability", **options), **known)


def test_spans_keep_a_promise_of_their_own(lm):
    """By the threshold of tokens; the verdict's stays."""
    shares = np.linspace(0, 0.8, 201) * np.linspace(0.8, 1.2, 300)[:, None]
    one, promise = marking(shares, threshold=0.0), {"highlighted": 0.2}
    other = fitted("response_length", 0.7)
    (sure, same) = promising([one, other], "tiny", promise, 0.8)
    want = evaluation.guaranteed_highlights(one.highlights, 0.2, confidence=0.8)
    assert sure.promise == want and sure.threshold == one.threshold and same is other
    assert 0.7 < want.threshold < 0.9
    said = "highlighted at most 20% with 80% confidence (300 sources)"
    asked = {"threshold": promise, "confidence": 0.8}
    found = judged(lm, one, **asked)
    assert found.promise == said and found.verdict == "hallucinated"
    assert found.spans == judged(lm, one, token_threshold=want.threshold).spans != []
    careful = marking(np.tile(np.arange(201) > 0, (300, 1)), threshold=0.0)
    assert judged(lm, careful, **asked).spans == [] != judged(lm, careful).spans
    # Where all is highlighted from the first score below 1 on, that is not.
    with pytest.raises(
        ValueError, match="no known threshold keeps the share of highlighted"
    ):
        promising([marking(np.ones((50, 201)))], "tiny", promise, 0.9)
    for how, message in (
        ({"token_threshold": 0.5}, "token_threshold=0.5 is of the scores that a thre"),
        ({"adapt": True}, "which adapt .--adapt. corrects; give one of the two"),
    ):
        with pytest.raises(ValueError, match=message):
            judged(lm, one, **asked, **how)


def test_no_promise_of_spans_without_what_is_known_of_them():
    promise = {"highlighted": 0.1}
    first = fitted("response_length", 0.9)
    with pytest.raises(ValueError, match="'response_length' decides and scores no to"):
        promising([first, marking(np.zeros((50, 201)))], "tiny", promise, 0.9)
    with pytest.raises(ValueError, match="without what it highlights .*jaxhal fit"):
        promising([fitted("predictive_probability")], "tiny", promise, 0.9)
    with pytest.raises(ValueError, match="highlighted is 5.0; promise a share ab"):
        promising([first], "tiny", {"highlighted": 5.0}, 0.9)


# --- another base rate ----------------------------------------------------------------

# Of four new words, mostly of none.
SEVERAL = [
    Example(
        "A fig, nut, plum, kiwi." if n % 6 == 0 else "A b.",
        context="A b.",
        source=str(n),
    )
    for n in range(30)
]
MANY = np.arange(2000)
HALF = CalibrationSet(np.zeros(len(MANY), np.float32), MANY % 2, MANY)


def shifting(name, auroc, intercept, known=HALF):
    one = fitted(name, auroc, threshold=-1.0, by=Platt(0.5, intercept))
    return dataclasses.replace(one, calibrated_on=known)


def test_probabilities_follow_the_base_rate_of_the_answers(lm, capsys):
    progress.note.cache_clear()
    chosen = [
        shifting("predictive_probability", 0.6, -1.0),
        shifting("novel_words", 0.9, -1.9),
        shifting("response_length", 0.8, 1.0),
        "mtop_div",
    ]
    long = Example("word " * 9000, context="A b.", id="long")
    given, how = [*SEVERAL, long], {"progress": False, "token_threshold": 0.0}
    *before, unread = jaxhal.score(lm, given, chosen, **how)
    assert capsys.readouterr().err == ""
    *after, still = jaxhal.score(lm, given, chosen, adapt=True, **how)
    said = capsys.readouterr().err
    assert still.error == unread.error is not None and still.verdict is None
    rates = {}
    for one in chosen[:3]:
        name = one.detector.name
        given = [report.probabilities[name] for report in before]
        kept = one.calibrated_on
        seen = one.calibration(kept.scores), kept.sources.tolist()
        of = dict(zip(("known", "known_groups"), seen, strict=True))
        want, rates[name] = evaluation.adapted(given, 0.5, **of)
        got = [report.probabilities[name] for report in after]
        np.testing.assert_array_equal(got, want)
    rate = rates["novel_words"]
    assert rate < 0.4 < 0.5 < rates["response_length"]
    assert f"by novel_words: {100 * rate:.0f} %, not the 50 % of its calib" in said
    rare = dataclasses.replace(chosen[1], rate=rate)
    for old, new in zip(before, after, strict=True):
        assert (new.scores, new.tokens, new.by) == (old.scores, old.tokens, old.by)
        want = verdict(rare, new.scores["novel_words"])
        assert (new.verdict, new.probability) == want
        assert all(new.probabilities[name] >= 0.5 for name in new.flagged)
        assert ("novel_words" in new.flagged) == (new.verdict == "hallucinated")
    assert {report.verdict for report in before} == {"hallucinated", "unsure"}
    assert {report.verdict for report in after} == {"unsure"}


def test_verdicts_by_another_base_rate_decide_on_spans(lm):
    one = dataclasses.replace(shifting("novel_words", 0.9, -1.9), threshold=99.0)
    chosen = [one, shifting("predictive_probability", 0.6, -1.0)]
    before, after = (
        jaxhal.score(lm, SEVERAL, chosen, token_threshold=0.0, adapt=adapt)
        for adapt in (False, True)
    )
    assert before[0].verdict == "unsure" and before[0].spans
    assert after[0].verdict == "supported" and not after[0].spans


def test_probabilities_stay_where_no_other_base_rate_is_clear(lm, capsys):
    progress.note.cache_clear()
    known = CalibrationSet(np.zeros(6, np.float32), np.arange(6) // 5, np.arange(6))
    one = shifting("novel_words", 0.9, -2.3, known)
    before, after = (
        jaxhal.score(lm, SEVERAL, [one], progress=False, adapt=adapt)
        for adapt in (False, True)
    )
    assert [row.to_dict(True) for row in before] == [row.to_dict(True) for row in after]
    assert "not clearly another than the 17 % of its" in capsys.readouterr().err


def test_what_has_no_base_rate_is_an_error(lm):
    how = {"progress": False, "adapt": True}
    with pytest.raises(ValueError, match="19 of them could be read; give 20 or more"):
        jaxhal.score(lm, SEVERAL[:19], [shifting("novel_words", 0.9, 0.0)], **how)
    with pytest.raises(
        ValueError, match="so their base rate is not known; fit it anew"
    ):
        jaxhal.score(lm, SEVERAL, [fitted()], **how)
    with pytest.raises(ValueError, match="'attnlrp' is of spans.*give one of the two"):
        jaxhal.score(lm, SEVERAL, ["mtop_div"], relevance="attnlrp", **how)
