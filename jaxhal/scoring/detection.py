"""From answers to reports: encode, read once, let every detector score."""

import dataclasses
from collections.abc import Collection, Iterator, Sequence
from typing import Any

from jaxhal import detectors as catalogue
from jaxhal import lrp
from jaxhal.detectors import Detector
from jaxhal.features.base import OfRewrite
from jaxhal.models.batching import Encoded
from jaxhal.models.lm import LM
from jaxhal.reading.extract import extract
from jaxhal.reporting.attribution import trace
from jaxhal.reporting.report import Report
from jaxhal.scoring.fitting import Fitted, untrained
from jaxhal.scoring.judging import empty, judge, report
from jaxhal.scoring.shipped import shipped
from jaxhal.types import Example


def detect(
    lm: LM,
    *,
    response: str,
    context: str | None = None,
    question: str | None = None,
    prompt: str | None = None,
    templated: bool = False,
    detectors: Sequence[str | Detector | Fitted] | None = None,
    relevance: str | lrp.RuleSet | None = None,
) -> Report:
    """Judges one answer: scores, coloured tokens and suspicious spans.

    Args:
      lm: the reader, from :func:`jaxhal.load`.
      response: the answer.
      context, question: what it should rest on and what was asked.
      prompt: instead of these two, the whole prompt.
      templated: the prompt is finished, as :class:`~jaxhal.types.Example` has it.
      detectors, relevance: as :func:`score` takes them.

    Raises:
      ValueError: when the answer or prompt is empty, too long for the model, an
        endpoint has no reply of use, a detector is unknown or named twice, or rules are
        unknown.
    """
    example = Example(
        response,
        prompt=prompt,
        context=context,
        question=question,
        id="answer",
        templated=templated,
    )
    (found,) = score(lm, [example], detectors, batch_size=1, relevance=relevance)
    if found.error is not None:
        raise ValueError(found.error)
    return found


def score(
    lm: LM,
    examples: Sequence[Example],
    detectors: Sequence[str | Detector | Fitted] | None = None,
    *,
    batch_size: int = 8,
    progress: bool | None = None,
    threshold: float | None = None,
    relevance: str | lrp.RuleSet | None = None,
) -> list[Report]:
    """Scores many answers, a bucket of similar lengths at a time.

    Args:
      lm: the reader.
      examples: the answers.
      detectors: catalogue names, detectors that need no training with settings of
        one's own, such as ``eigenscore(draw={"n": 5})``, or detectors that were fitted;
        by default all that need no second pass and no training, or that the package
        ships fitted for the reader: :data:`jaxhal.scoring.shipped.MODELS`.
      batch_size: answers read together.
      progress: show a progress bar; ``None`` shows it on a terminal.
      threshold: token score from which on a token belongs to a span; by default that
        of :data:`jaxhal.scoring.judging.PREFERRED`.
      relevance: also trace what each response token rests on, by a name of
        :data:`jaxhal.lrp.RULE_SETS` or a rule set of one's own, for the page of
        :func:`jaxhal.reporting.page.write_html`; it takes a pass back for every
        token.

    Returns:
      One report per example, in order.  An example that cannot be read (too long, not
      encodable), or that an endpoint has no reply of use for, comes back with its
      ``error`` and costs no other example.

    Raises:
      ValueError: on an unknown detector, one that must be fitted first, no detector or
        two of one name, a batch size below 1, or unknown rules.
    """
    found = score_batches(
        lm,
        examples,
        detectors,
        batch_size=batch_size,
        progress=progress,
        threshold=threshold,
        relevance=relevance,
    )
    reports = {number: report for batch in found for number, report in batch}
    return [reports[number] for number in range(len(examples))]


def score_batches(
    lm: LM,
    examples: Sequence[Example],
    detectors: Sequence[str | Detector | Fitted] | None = None,
    *,
    batch_size: int = 8,
    progress: bool | None = None,
    threshold: float | None = None,
    relevance: str | lrp.RuleSet | None = None,
    known: Collection[int] = (),
) -> Iterator[list[tuple[int, Report]]]:
    """The reports of :func:`score` as they are done, those read together at a time.

    Args:
      known: numbers of examples whose reports are there already.  What was read
        together is read together still, so the others come out bit for bit as they
        would with these; batches of nothing but known examples are passed over.

    Yields:
      Pairs of an example's number and its report, known ones left out.

    Raises:
      ValueError: as :func:`score`, at the first one.
    """
    flow = None if relevance is None else lrp.resolve(relevance)
    chosen = resolve(lm.name, detectors)
    named = [one.detector for one in chosen]
    options: Any = {"batch_size": batch_size, "progress": progress}
    found = extract(lm, examples, catalogue.features_of(named), **options)
    if bad := [pair for pair in found.errors.items() if pair[0] not in known]:
        yield [(n, empty(lm.name, examples[n], named, why)) for n, why in bad]
    wanted = {at for at, number in enumerate(found.kept) if number not in known}
    for places, features in found.batches(wanted):
        judged, done = judge(chosen, features), []
        for at, place in enumerate(places):
            if place not in wanted:
                continue
            number, row = found.kept[place], found.rows[place]
            if (why := found.measured[1].get(place)) is not None:
                one = empty(lm.name, examples[number], named, why)
            else:
                how = chosen, lm.name, examples[number], row, judged, at, threshold
                one = report(*how)
                if flow is not None:
                    one = _traced(lm, one, examples[number], row, flow)
            done.append((number, one))
        yield done


def _traced(
    lm: LM, found: Report, example: Example, row: Encoded, rules: lrp.RuleSet
) -> Report:
    """The report with what its tokens rest on, or with the error of the pass back."""
    try:
        sources = trace(lm, example, row, rules)
    except ValueError as error:
        return empty(lm.name, example, [], str(error))
    return dataclasses.replace(found, relevance=sources)


def _one_pass(detector: Detector) -> bool:
    return not any(isinstance(one, OfRewrite) for _, one in detector.features)


def resolve(
    model: str, detectors: Sequence[str | Detector | Fitted] | None
) -> list[Fitted]:
    """The detectors asked for, with the parameters that the package ships.

    Args:
      model: name of the reader.
      detectors: as :func:`score` takes them.

    Raises:
      ValueError: on an unknown detector, one that must be fitted first, no detector, or
        two of one name.
    """
    ready = shipped(model)
    if detectors is None:
        later = [n for n, one in ready.items() if _one_pass(one.detector)]
        detectors = list(dict.fromkeys([*catalogue.AT_ONCE, *later]))
    chosen = []
    for one in detectors:
        if isinstance(one, Fitted):
            chosen.append(one)
        elif isinstance(one, str) and one in ready:
            chosen.append(ready[one])
        else:
            (detector,) = catalogue.get([one]) if isinstance(one, str) else (one,)
            if detector.fit is not None:
                raise ValueError(
                    f"detector {detector.name!r} must be fitted to labelled answers of "
                    f"{model!r} first; pass what jaxhal.scoring.fit, "
                    "jaxhal.scoring.load or jaxhal.experiments.run returned "
                    "instead of its name"
                )
            chosen.append(untrained(detector))
    names = [one.detector.name for one in chosen]
    if not names:
        raise ValueError("detectors is empty; name at least one, or leave it out")
    for name in names:
        if names.count(name) > 1:
            raise ValueError(
                f"detector {name!r} is given {names.count(name)} times, and scores go "
                "by name; give it once, or one of them another 'name'"
            )
    return chosen
