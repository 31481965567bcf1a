"""From answers to reports: encode, read once, let every detector score."""

import dataclasses
import functools
import os
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
from jaxtyping import Array

from jaxhal import detectors as catalogue
from jaxhal import lrp
from jaxhal.detectors import Detector
from jaxhal.features.base import OfRewrite, Reducer
from jaxhal.io.extras import need
from jaxhal.models.batching import Encoded
from jaxhal.models.config import ATTENTION
from jaxhal.models.lm import LM
from jaxhal.reading.extract import Extraction, extract
from jaxhal.reporting.attribution import trace
from jaxhal.reporting.report import Report, Token
from jaxhal.scoring import verdicts
from jaxhal.scoring.collection import Asked, FittedDetectors
from jaxhal.scoring.fitting import Fitted, untrained
from jaxhal.scoring.folders import is_place, located
from jaxhal.scoring.inputs import check_rows, readable
from jaxhal.scoring.released import is_released_probe, released_probe
from jaxhal.scoring.shipped import NAMES, readers, shipped
from jaxhal.scoring.tokens import token_scores
from jaxhal.types import Example


def detect(
    lm: LM,
    *,
    response: str,
    context: str | None = None,
    question: str | None = None,
    prompt: str | None = None,
    templated: bool = False,
    detectors: Iterable[Asked] | None = None,
    threshold: Mapping[str, float] | None = None,
    confidence: float | None = 0.9,
    relevance: str | lrp.RuleSet | None = None,
) -> Report:
    """Judges one answer: scores, coloured tokens and suspicious spans.

    Raises ValueError where :func:`score` gives the answer an error.

    Args:
      lm: the reader, from :func:`jaxhal.load`.
      context, question: what it should rest on and what was asked.
      prompt: instead of these two, the whole prompt.
      templated: the prompt is finished, as :class:`~jaxhal.types.Example` has it.
      detectors, threshold, confidence, relevance: as :func:`score` takes them.
    """
    text: Any = {"prompt": prompt, "context": context, "question": question}
    example = Example(response, id="answer", templated=templated, **text)
    how: Any = {"threshold": threshold, "confidence": confidence}
    (found,) = score(lm, [example], detectors, batch_size=1, relevance=relevance, **how)
    if found.error is not None:
        raise ValueError(found.error)
    return found


def score(
    lm: LM,
    examples: Iterable[Example],
    detectors: Iterable[Asked] | None = None,
    *,
    batch_size: int = 8,
    progress: bool | None = None,
    threshold: Mapping[str, float] | None = None,
    confidence: float | None = 0.9,
    token_threshold: float | None = None,
    relevance: str | lrp.RuleSet | None = None,
    adapt: bool = False,
) -> list[Report]:
    """Scores many answers, a bucket of similar lengths at a time, in their order.

    An example that cannot be read (too long, not encodable), or that an endpoint has no
    reply of use for, comes back with its ``error`` and costs no other example.  Raises
    ValueError on an unknown detector, one that must be fitted first or was fitted to
    what another reader read, two of one name, unknown rules, or a promise that cannot
    be kept.

    Args:
      detectors: catalogue names, detectors that need no training with settings of
        one's own, such as ``eigenscore(draw={"n": 5})``, or detectors that were fitted;
        by default all that need no second pass and no training, or that the package
        ships fitted for the reader: :data:`jaxhal.scoring.shipped.MODELS`.
      batch_size: answers read together, on each device along ``data`` of a mesh.
      progress: ``None`` shows a progress bar on a terminal.
      threshold: a promise that the deciding detector's threshold is to keep on answers
        like those it was calibrated on: ``{"precision": 0.9}`` of those called
        hallucinated, ``{"false_alarms": 0.05}`` of grounded ones called so, or
        ``{"recall": 0.9}``, the share of hallucinated ones not called supported; by
        default the threshold it was fitted with.  ``{"highlighted": 0.05}`` chooses the
        token score from which on spans are marked instead: of an answer's supported
        characters, at most that share lies in spans, in the mean over answers.
      confidence: of the promise, as :func:`jaxhal.evaluation.guarantee` has it.
      token_threshold: token score from which on a token belongs to a span, whatever
        the detector that scores tokens is worth; by default that of
        :data:`jaxhal.scoring.verdicts.PREFERRED`, and no span of a detector that may
        not flag.
      relevance: also trace what each response token and each span rests on, by a name
        of :data:`jaxhal.lrp.RULE_SETS` or a rule set of one's own, for the page of
        :func:`jaxhal.reporting.page.write_html`; a pass back for every token.  Needs
        the extra ``sentences``.
      adapt: correct probabilities, and what follows from them, for the base rate of
        these answers, as :func:`jaxhal.scoring.verdicts.adapted` does: where they are
        clearly hallucinated more or less often than those of the calibration.  Takes
        20 answers or more, and no ``relevance``.
    """
    if adapt and relevance is not None:
        raise ValueError(
            f"relevance={relevance!r} is of spans, and adapt=True finds these after "
            "all answers are read; give one of the two"
        )
    chosen = resolve_for(lm, detectors, threshold, confidence)
    if adapt:
        verdicts.check_adaptable(chosen)
    found = score_batches(
        lm,
        examples,
        chosen,
        batch_size=batch_size,
        progress=progress,
        token_threshold=token_threshold,
        relevance=relevance,
    )
    reports = in_order(found)
    return verdicts.adapted(reports, chosen, token_threshold) if adapt else reports


def score_batches(
    lm: LM,
    examples: Iterable[Example],
    detectors: Iterable[Asked] | None = None,
    *,
    batch_size: int = 8,
    progress: bool | None = None,
    threshold: Mapping[str, float] | None = None,
    confidence: float | None = 0.9,
    token_threshold: float | None = None,
    relevance: str | lrp.RuleSet | None = None,
    known: Collection[int] = (),
    reading: Callable[..., Extraction] = extract,
) -> Iterator[list[tuple[int, Report]]]:
    """The reports of :func:`score` with their numbers, those read together at a time.

    Args:
      reading: what makes features of examples, called as
        :func:`~jaxhal.reading.extract.extract` is.
      known: numbers of examples whose reports are there already.  What was read
        together is read together still, so the others come out bit for bit as they
        would with these; batches of nothing but known examples are passed over.
    """
    examples, flow = list(examples), None  # a pandas Series has other numbers
    if relevance is not None:
        flow = lrp.resolve(relevance)
        need("sentences")
    chosen = resolve_for(lm, detectors, threshold, confidence)
    if token_threshold is not None and not 0 <= token_threshold <= 1:
        raise ValueError(f"token_threshold is {token_threshold}; give one from 0 to 1")
    if token_threshold is not None and verdicts.of_spans(chosen):
        raise ValueError(
            f"token_threshold={token_threshold} is of the scores that a threshold for "
            "highlighted characters is chosen of; give one of the two"
        )
    features = catalogue.features_of(one.detector for one in chosen)
    options: Any = {"batch_size": batch_size, "progress": progress}
    found = reading(lm, examples, features, **options)
    if bad := [pair for pair in found.errors.items() if pair[0] not in known]:
        yield [(n, empty(lm.name, examples[n], chosen, why)) for n, why in bad]
    wanted = {at for at, number in enumerate(found.kept) if number not in known}
    for places, features in found.batches(wanted):
        judged, done = judge(chosen, features), []
        for at, place in enumerate(places):
            if place not in wanted:
                continue
            number, row = found.kept[place], found.rows[place]
            example = examples[number]
            if (why := found.measured[1].get(place)) is not None:
                one = empty(lm.name, example, chosen, why)
            else:
                one = report(chosen, lm, example, row, judged, at, token_threshold)
                if flow is not None:
                    try:
                        rests, spans = trace(lm, example, row, flow, one.places)
                        one = dataclasses.replace(one.resting(spans), relevance=rests)
                    except ValueError as error:
                        one = empty(lm.name, example, [], str(error))
            done.append((number, one.checked()))
        yield done


def in_order(batches: Iterable[list[tuple[int, Report]]]) -> list[Report]:
    """All that :func:`score_batches` gives, in the order of the examples."""
    by_number = dict(pair for batch in batches for pair in batch)
    return [by_number[number] for number in sorted(by_number)]


def resolve(
    model: str,
    detectors: Iterable[Asked] | None,
    threshold: Mapping[str, float] | None = None,
    confidence: float | None = 0.9,
    lm: LM | None = None,
) -> list[Fitted]:
    """The detectors asked for, with parameters shipped for that reader.

    The one that decides has a threshold that keeps a promise, where one is asked for.
    Errors name the reader nearest to ``lm`` that has what has to be fitted.
    """
    ready = shipped(model)
    if isinstance(detectors, str | Detector | Fitted):
        raise ValueError(f"detectors is {detectors!r:.80}; give a list of them")
    if detectors is None:
        later = [
            name
            for name, one in ready.items()
            if not any(isinstance(f, OfRewrite) for _, f in one.detector.features)
        ]
        detectors = list(dict.fromkeys([*catalogue.AT_ONCE, *later]))
    chosen = []
    for one in placed(model, detectors):
        if isinstance(one, Fitted):
            chosen.append(one)
        elif isinstance(one, str) and one in ready:
            chosen.append(ready[one])
        else:
            (detector,) = catalogue.get([one]) if isinstance(one, str) else (one,)
            has = readers(lm) if detector.name in NAMES else ""
            chosen.append(untrained(detector, model=model, readers=has))
    chosen = _once(chosen)
    names = [one.detector.name for one in chosen]
    if not names:
        raise ValueError("detectors is empty; name at least one, or leave it out")
    for name in names:
        if names.count(name) > 1:
            raise ValueError(
                f"detector {name!r} is given {names.count(name)} times, and scores go "
                "by name; give it once, or one of them another 'name'"
            )
    if threshold is None:
        return chosen
    return verdicts.promising(chosen, model, threshold, confidence)


def _once(chosen: Sequence[Fitted]) -> list[Fitted]:
    """The same without controls that are there before: every fit has them beside it."""
    kept: list[Fitted] = []
    for one in chosen:
        before = {each.detector.name for each in kept}
        if not (one.detector.control and one.detector.name in before):
            kept.append(one)
    return kept


def placed(model: str, detectors: Iterable[Asked]) -> list[str | Detector | Fitted]:
    """The same, those of folders and of the hub loaded; other names stay names.

    Raises ValueError where a folder is named that is not there, or on what is no
    detector.
    """
    named = {*shipped(model), *catalogue.CATALOGUE}
    found: list[str | Detector | Fitted] = []
    for one in detectors:
        if isinstance(one, FittedDetectors):
            found += one
            continue
        one = os.fspath(one) if isinstance(one, os.PathLike) else one
        if not isinstance(one, str | Detector | Fitted):
            raise ValueError(f"{one!r:.80} is no detector; give a name, or a folder")
        if not isinstance(one, str) or one in named:
            found.append(one)
        elif not is_place(one):
            if "/" in one and ":" not in one:
                raise ValueError(f"{one}: no such folder; give one of fitted detectors")
            found.append(one)
        elif is_released_probe(folder := located(one)):
            found.append(released_probe(folder))
        else:
            found += FittedDetectors.from_pretrained(folder)
    return found


def resolve_for(
    lm: LM,
    detectors: Iterable[Asked] | None,
    threshold: Mapping[str, float] | None = None,
    confidence: float | None = 0.9,
) -> list[Fitted]:
    """:func:`resolve` for a reader at hand; ValueError where one was fitted to what
    another reader read, or reads attention that it has none of.  By default those that
    it has something for.
    """
    if detectors is None:
        known = {one.detector: one for one in resolve(lm.name, None)}
        detectors = [known[one] for one in readable(lm, known)]
    chosen = resolve(lm.name, detectors, threshold, confidence, lm)
    check_rows(lm, (one.detector for one in chosen))
    for one in chosen:
        one.check_reader(lm)
    return chosen


# What a report has from its example.
GIVEN = ("id", "response", "context", "question", "prompt", "turns", "source")
GIVEN += ("label", "labels")


@functools.partial(jax.jit, static_argnums=0)
def response_scores(
    detectors: tuple[Detector, ...], params: tuple[Any, ...], features: dict[str, Any]
) -> dict[str, Array]:
    """Detector -> ``Float[batch]``."""
    pairs = zip(detectors, params, strict=True)
    return {d.name: d.score(p, features) for d, p in pairs}


@functools.partial(jax.jit, static_argnums=0)
def head_maps(
    detectors: tuple[Detector, ...], features: dict[str, Any]
) -> dict[str, Array]:
    """Feature -> ``Float[layer batch heads]``, for what is one number a head."""
    maps = {}
    for name, feature in catalogue.features_of(detectors).items():
        if isinstance(feature, Reducer) and feature.axes[:2] == ("layer", "heads"):
            if feature.axes[2:] == ("response",):
                maps[name] = catalogue.response_mean(features[name], features)
            elif not feature.axes[2:]:
                maps[name] = features[name]
    return maps


class BatchScores(NamedTuple):
    """What detectors say of a batch, as NumPy arrays."""

    scores: dict[str, np.ndarray]
    tokens: dict[str, np.ndarray]
    heads: dict[str, np.ndarray]


def judge(
    chosen: Sequence[Fitted],
    features: dict[str, Any],
    scores: dict[str, np.ndarray] | None = None,
) -> BatchScores:
    """Lets every detector judge a batch, whose ``scores`` may be known."""
    params = tuple(one.params for one in chosen)
    detectors = tuple(one.detector for one in chosen)
    known = response_scores(detectors, params, features) if scores is None else scores
    tokens = token_scores(detectors, params, features)
    maps = head_maps(detectors, features)
    return BatchScores(*jax.device_get((known, tokens, maps)))


def report(
    chosen: Sequence[Fitted],
    lm: LM,
    example: Example,
    row: Encoded,
    judged: BatchScores,
    at: int,
    token_threshold: float | None = None,
) -> Report:
    """The report of one answer, in row ``at`` of a batch that was judged."""
    names = [one.detector.name for one in chosen]
    with_tokens = [name for name in names if name in judged.tokens]
    listed = []
    for number, (start, end) in enumerate(row.offsets.tolist()):
        if start < end:  # the end-of-sequence token has no text
            values = {n: float(judged.tokens[n][at, number]) for n in with_tokens}
            listed.append(Token(example.response[start:end], start, end, values))
    found = dataclasses.replace(
        empty(lm.name, example, chosen),
        scores={name: float(judged.scores[name][at]) for name in names},
        tokens=listed,
        heads={name: value[:, at] for name, value in judged.heads.items()},
        layers=list(lm.config.layers_with(*ATTENTION)),
    )
    return verdicts.decided(found, chosen, token_threshold)


def empty(
    model: str, example: Example, chosen: Sequence[Fitted], error: str | None = None
) -> Report:
    """A report without a verdict."""
    best = [one.detector.name for one in verdicts.ranked(chosen)]
    usual = [*verdicts.PREFERRED]

    def place(of: Detector) -> tuple[int, int]:
        kind = usual.index(of.kind) if of.kind in usual else len(usual)
        return best.index(of.name) if of.name in best else len(best), kind

    colours = [one.detector for one in chosen if one.detector.tokens is not None]
    given: Any = {name: getattr(example, name) for name in GIVEN}
    nothing: Any = {"scores": {}, "tokens": [], "spans": [], "heads": {}}
    helpers = {d.detector.name: d.detector.by for d in chosen if d.detector.by}
    how: Any = {"error": error, "helpers": helpers}
    how["detector"] = min(colours, key=place).name if colours else ""
    return Report(model=model, **given, **nothing, **how)
