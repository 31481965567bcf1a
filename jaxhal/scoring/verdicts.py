"""Which of the detectors in use decides, and what it says of an answer."""

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any

from jaxhal.evaluation.guarantees import (
    KINDS,
    NoThreshold,
    check_promise,
    guarantee,
    guaranteed_highlights,
    says_enough,
)
from jaxhal.evaluation.held_out import Measured
from jaxhal.io.progress import note
from jaxhal.io.showing import quoted, shown
from jaxhal.models.lm import LM
from jaxhal.reporting.report import Report, Verdict
from jaxhal.reporting.summary import source
from jaxhal.scoring.fitting import Fitted
from jaxhal.scoring.shipped import MODELS, readers
from jaxhal.scoring.spans import find_spans

# Tokens belong to a span from this score on: where a classifier finds it rather made up
# than not, where the F1 of a probe of tokens is best on RAGTruth QA, and where the
# reader gave the token less than 1 % probability.  Where no detector that scores tokens
# may decide, the first of these colours them.  By the kinds of detectors.
PREFERRED = {
    "token_classifier": 0.5,
    "token_probe": 0.25,
    "attentive_probe": 0.22,
    "predictive_probability": 0.99,
}
_OTHERWISE = 0.5

# A promise of these, by the threshold of token scores.
_SPANS = "highlighted"

# Of fewer answers the base rate is seldom clear.
_LEAST = 20

# By how many of threshold and probability hold an answer for hallucinated.
_BY_VOTES: tuple[Verdict, ...] = ("supported", "unsure", "hallucinated")


def ranked(chosen: Sequence[Fitted]) -> list[Fitted]:
    """The detectors that may decide, best first by their AUROC on held-out answers.

    Those are fitted, not silent, and known to beat the controls there.  Among those
    within one standard error of the highest AUROC, single methods come before
    ensembles, whose weights hold for answers like those they were fitted to (the rule
    of one standard error; Breiman et al., Classification and Regression Trees, 1984).
    """
    known = [
        (one, one.measured)
        for one in chosen
        if one.measured is not None and one.beats == "yes" and one.silent is None
    ]
    if not known:
        return []
    _, best = max(known, key=lambda pair: pair[1].auroc)
    limit = best.auroc - best.standard_error

    def order(pair: tuple[Fitted, Measured]) -> tuple[bool, bool, float, str]:
        one, at = pair
        ensemble = bool(one.detector.members)
        return at.auroc < limit, ensemble, -at.auroc, one.detector.name

    return [one for one, _ in sorted(known, key=order)]


def decider(chosen: Sequence[Fitted]) -> Fitted | None:
    """The detector whose verdict counts, ``None`` where none may decide."""
    return next(iter(ranked(chosen)), None)


def verdict(one: Fitted, score: float) -> tuple[Verdict, float]:
    """What a detector says of an answer of that score, and its probability.

    Hallucinated is what reaches the threshold and is more likely so than not, supported
    what does neither.  Of what does one of the two it is unsure.

    So a promise of the threshold holds whatever the probabilities, of answers like
    those it was chosen on: precision (see :func:`promising`) and false alarms for the
    answers called hallucinated, which are those of a threshold no lower; recall for
    those not called supported, which are those of one no higher.
    """
    if not math.isfinite(score):
        name = one.detector.name
        raise ValueError(f"score of {name!r} is {score}; nothing follows from that")
    probability = float(one.probabilities([score])[0])
    votes = int(one.reaches([score])[0]) + (probability >= 0.5)
    return _BY_VOTES[votes], probability


def decided(
    found: Report, chosen: Sequence[Fitted], token_threshold: float | None = None
) -> Report:
    """A report with what follows from its scores: probabilities, flags, verdict, spans.

    Spans are those of the detector that colours the tokens, where it may flag, and none
    where the verdict is that the answer is supported.  With a score that is not finite
    there is an error, and none of it.
    """
    if not all(map(math.isfinite, found.scores.values())):
        return found.checked()
    known = [(d, found.scores[d.detector.name]) for d in chosen if d.calibration]
    probable = {d.detector.name: float(d.probabilities([s])[0]) for d, s in known}
    flagged = [d.detector.name for d, s in known if d.flags([s])[0]]
    made: dict[str, Any] = {"probabilities": probable, "flagged": flagged, "spans": []}
    if (one := decider(chosen)) is None:
        made["undecided"] = undecided(chosen, found.model)
    else:
        name = one.detector.name
        said, probability = verdict(one, found.scores[name])
        made |= {"verdict": said, "probability": probability, "by": name}
        made |= {"promise": one.promise and str(one.promise), "basis": one.measured}
    found = dataclasses.replace(found, **made)
    may = any(d.detector.name == found.detector and d.silent is None for d in chosen)
    if found.verdict == "supported" or not (may or token_threshold is not None):
        return found
    if not any(found.detector in token.scores for token in found.tokens):
        return found
    if token_threshold is None:
        kinds = {d.detector.name: d.detector.kind for d in chosen}
        token_threshold = PREFERRED.get(kinds[found.detector], _OTHERWISE)
        if one is not None and one.promise is not None and of_spans([one]):
            token_threshold = one.promise.threshold
    given = found.response, found.tokens, found.detector
    return dataclasses.replace(found, spans=find_spans(*given, token_threshold))


def adapted(
    reports: Sequence[Report],
    chosen: Sequence[Fitted],
    token_threshold: float | None = None,
) -> list[Report]:
    """The reports by probabilities that are corrected for the answers' own base rate.

    That is found without labels, see :func:`jaxhal.evaluation.adapted`, of every
    detector by its own scores.  Which base rate the deciding one found is noted.

    Raises ValueError on fewer than 20 answers that were read, or as
    :meth:`Fitted.adapted`.
    """
    read = [one for one in reports if one.error is None]
    if len(read) < _LEAST:
        raise ValueError(
            f"adapt finds the base rate of answers, and {len(read)} of them could be "
            f"read; give {_LEAST} or more, or leave adapt out"
        )
    scores = {
        one.detector.name: [report.scores[one.detector.name] for report in read]
        for one in chosen
    }
    sources = [source(report) or number for number, report in enumerate(read)]
    found = [one.adapted(scores[one.detector.name], sources) for one in chosen]
    if (one := decider(found)) is not None and one.calibrated_on is not None:
        prior = f"the {100 * one.calibrated_on.labels.mean():.0f} % of its calibration"
        said = f"not clearly another than {prior}"
        if one.rate is not None:
            said = f"{100 * one.rate:.0f} %, not {prior}"
        note(f"base rate of these answers by {shown(one.detector.name)}: {said}")
    return [
        one if one.error is not None else decided(one, found, token_threshold)
        for one in reports
    ]


def promising(
    chosen: Sequence[Fitted],
    model: str,
    promise: Mapping[str, float],
    confidence: float | None,
) -> list[Fitted]:
    """The same detectors, the deciding one with a threshold that keeps a promise.

    It is chosen on the answers that the detector was calibrated on, that of spans on
    what fits that had not seen them highlight in these.  Raises ValueError where none
    may decide, or that one was saved without those, or gives no spans, or as
    :func:`jaxhal.evaluation.guarantee`; and on a precision where so few answers are
    more likely hallucinated than not that no such threshold was tested.
    """
    kind, level = check_promise(promise, confidence, (*KINDS, _SPANS))
    if (one := decider(chosen)) is None:
        raise ValueError(f"threshold {dict(promise)}: {undecided(chosen, model)}")
    name, vain = (
        one.detector.name,
        f"nothing can be promised by threshold {dict(promise)}",
    )
    if kind == _SPANS:
        if one.detector.tokens is None:
            raise ValueError(
                f"detector {name!r} decides and scores no tokens, so {vain}; use one "
                "that marks spans, such as token_probe, alone, or leave the threshold "
                "out"
            )
        if one.highlights is None:
            raise ValueError(
                f"detector {name!r} was saved without what it highlights in answers "
                f"that it was not fitted to, so {vain}; fit it anew (jaxhal fit) and "
                "use that one, or leave the threshold out"
            )
        kept = guaranteed_highlights(one.highlights, level, confidence=confidence)
        sure = dataclasses.replace(one, promise=kept)
        return [sure if each is one else each for each in chosen]
    if (known := one.calibrated_on) is None:
        raise ValueError(
            f"detector {name!r} was saved without the answers that it was calibrated "
            f"on, so {vain}; fit it anew and use that one, or leave the threshold out"
        )
    scores, labels, sources = known
    kept = guarantee(scores, labels, promise, sources.tolist(), confidence=confidence)
    sure = dataclasses.replace(one, threshold=kept.threshold, promise=kept)
    if kind == "precision" and confidence is not None:
        likely = one.probabilities(scores) >= 0.5
        reach = sure.reaches(scores)
        fewer = (reach & ~likely).any()  # than the threshold promises of
        if fewer and not says_enough(
            reach & likely, sources.tolist(), level, confidence
        ):
            raise NoThreshold(
                f"detector {name!r} gives {likely.sum()} of {len(scores)} answers a "
                f"probability of a half or more, so few that {vain}; promise less, or "
                "recall or false_alarms"
            )
    return [sure if each is one else each for each in chosen]


def of_spans(chosen: Sequence[Fitted]) -> bool:
    """Whether a promise is kept by the threshold of token scores."""
    return any(one.promise is not None and one.promise.kind == _SPANS for one in chosen)


def check_adaptable(chosen: Sequence[Fitted]) -> None:
    """ValueError where another base rate would break a promise.

    Precision falls with it, whatever the threshold.  Spans are shown in answers that
    are not supported, which follows from probabilities.  Recall and false alarms are of
    one class.
    """
    for one in chosen:
        if one.promise is not None and one.promise.kind in ("precision", _SPANS):
            what = "highlighted characters" if of_spans([one]) else one.promise.kind
            raise ValueError(
                f"a threshold for {what} is chosen at the base rate of the "
                "calibration, which adapt (--adapt) corrects; give one of the two"
            )


def described(chosen: Sequence[Fitted], reader: LM | str) -> str:
    """In words, which detector decides and what shows its worth, or why none does."""
    if (one := decider(chosen)) is None:
        return undecided(chosen, reader)
    kept = f"; threshold for {one.promise}" if one.promise is not None else ""
    return f"verdicts by {shown(one.detector.name)}: {one.measured}{kept}"


def undecided(chosen: Sequence[Fitted], reader: LM | str) -> str:
    """In words, why none of the detectors may decide, and which reader has some.

    Of a name alone, the nearest reader is not named.
    """
    lm = None if isinstance(reader, str) else reader
    model = reader if lm is None else lm.name
    fitted = [one for one in chosen if one.threshold is not None]
    methods = [one for one in fitted if not one.detector.control]
    if not methods:
        have = f"fit one, or read with {readers(lm)}"
        if model in MODELS:
            have = "add one that ships for it, such as token_probe, or name none"
        return (
            f"no verdict: none of the detectors in use was fitted to labelled answers "
            f"read by {quoted(model)}; {have}"
        )
    why = "nobody measured it beside the controls on answers held out"
    said = (f"{shown(o.detector.name)}: {o.silent or why}" for o in methods)
    return f"no verdict: no detector in use may decide ({'; '.join(said)})"
