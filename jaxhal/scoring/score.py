"""From answers to reports: encode, read once, let every detector score."""

import dataclasses
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

import jax
import numpy as np

from jaxhal import detectors as catalogue
from jaxhal import lrp
from jaxhal.capture.forward import read
from jaxhal.detectors import Detector, Recast
from jaxhal.detectors.bulk import Bulk, measured
from jaxhal.io.progress import progress_bar
from jaxhal.models.batching import (
    Encoded,
    Planned,
    check_length,
    collate,
    plan,
    rows_together,
)
from jaxhal.models.lm import LM
from jaxhal.reading.keys import column_name
from jaxhal.reading.units import has_text
from jaxhal.reading.views import token_features, viewed
from jaxhal.reporting.attribution import trace
from jaxhal.reporting.report import Report
from jaxhal.scoring.fit import Fitted, untrained
from jaxhal.scoring.judge import empty, judge, report
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
        of :data:`jaxhal.scoring.judge.PREFERRED`.
      relevance: also trace what each response token rests on, by a name of
        :data:`jaxhal.lrp.RULE_SETS` or a rule set of one's own, for the page of
        :func:`jaxhal.reporting.report.write_html`; it takes a pass back for every token.

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
    if batch_size < 1:
        raise ValueError(f"batch_size is {batch_size}; it must be at least 1")
    flow = None if relevance is None else lrp.resolve(relevance)
    chosen = resolve(lm.name, detectors)
    named = [one.detector for one in chosen]
    along = token_features(lm, catalogue.views(named))
    computed = {text for detector in named for text in detector.text}
    tokenizer = lm.require_tokenizer()
    rows: list[Encoded] = []
    others: list[dict[Recast, Encoded]] = []
    numbers: list[dict[str, np.ndarray]] = []
    bad: dict[int, Report] = {}
    kept: list[int] = []
    for number, example in enumerate(examples):
        try:
            row = tokenizer.encode_example(example)
            seen = {
                of: tokenizer.encode_example(viewed(of, example, names))
                for of, names in along.items()
            }
            for one in (row, *seen.values()):
                check_length(one, lm.config.context_length)
            texts = {n: np.asarray(made(example), np.float32) for n, made in computed}
        except ValueError as error:
            bad[number] = empty(lm.name, example, named, str(error))
            continue
        rows.append(row)
        others.append(seen)
        numbers.append(texts)
        kept.append(number)
    if missing := [pair for pair in bad.items() if pair[0] not in known]:
        yield missing
    size = rows_together(max(1, len(rows)), batch_size)
    planned = plan(rows, size)
    todo = [one for one in planned if not all(kept[i] in known for i in one.rows)]
    bulk = Bulk(lm, [examples[n] for n in kept], None, batch_size, progress)
    together = measured(named, bulk) if todo else {}
    total = sum(len(group.rows) for group in todo)
    with progress_bar(total, "scoring", "answer", progress) as bar:
        for group in todo:
            features = _read(lm, named, rows, others, along, group, size)
            for name, _ in computed:
                values = np.stack([numbers[i][name] for i in group.rows])
                features[name] = _filled(values, size)
            for name, found in together.items():
                features[name] = jax.tree.map(
                    lambda leaf, rows=group.rows: _filled(leaf[rows], size), found
                )
            judged = judge(chosen, features)
            done = []
            for at, i in enumerate(group.rows):
                example = examples[kept[i]]
                if kept[i] in known:
                    continue
                if i in bulk.errors:
                    found = empty(lm.name, example, named, bulk.errors[i])
                else:
                    found = report(
                        chosen, lm.name, example, rows[i], judged, at, threshold
                    )
                    if flow is not None:
                        found = _traced(lm, found, example, rows[i], flow, group)
                done.append((kept[i], found))
            bar.update(len(group.rows))
            yield done


def _filled(values: np.ndarray, rows: int) -> np.ndarray:
    """With rows of zeros behind, which only fill a batch."""
    pad = [(0, rows - len(values)), *[(0, 0)] * (values.ndim - 1)]
    return np.pad(values, pad)


def _traced(
    lm: LM,
    found: Report,
    example: Example,
    row: Encoded,
    rules: lrp.RuleSet,
    group: Planned,
) -> Report:
    """The report with what its tokens rest on, or with the error of the pass back."""
    try:
        sources = trace(lm, example, row, rules, *group[1:])
    except ValueError as error:
        return empty(lm.name, example, [], str(error))
    return dataclasses.replace(found, relevance=sources)


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
        later = [n for n, one in ready.items() if not one.detector.views]
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
                    f"{model!r} first; pass what jaxhal.scoring.fit.fit, jaxhal.scoring.save."
                    "load or jaxhal.experiments.run returned instead of its name"
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


def _read(
    lm: LM,
    chosen: Sequence[Detector],
    rows: Sequence[Encoded],
    others: Sequence[Mapping[Recast, Encoded]],
    along: Mapping[Recast, Sequence[str]],
    group: Planned,
    size: int,
) -> dict[str, Any]:
    """Features of one batch, of the answers and of other views of them."""
    pad_id, response = lm.require_tokenizer().pad_id, group.response_length
    some = [rows[i] for i in group.rows]
    batch = collate(some, pad_id, group.prompt_length, response, size)
    marked = np.zeros(batch.response_mask.shape, bool)
    features = {
        "valid": batch.response_mask,
        "text": has_text(batch.offsets),
        "marked": marked,
    }
    reducers = catalogue.reads(chosen)
    if reducers:
        features |= read(lm, batch, reducers)
    for of, reducers in catalogue.views(chosen).items():
        some = [others[i][of] for i in group.rows]
        columns = response if along[of] else None
        batch = collate(some, pad_id, response_length=columns, batch_size=size)
        # Under names of their own, so that views which differ in these alone compile
        # once.
        seen = read(lm, batch, {column_name(r): r for r in reducers.values()})
        features |= {name: seen[column_name(r)] for name, r in reducers.items()}
    return features
