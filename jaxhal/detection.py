"""From answers to reports: encode, read once, let every detector score."""

import functools
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from tqdm import tqdm

from jaxhal import detectors as catalogue
from jaxhal.capture import read
from jaxhal.detectors import Detector
from jaxhal.fitting import Fitted
from jaxhal.inputs import closed_book
from jaxhal.models.batching import Encoded, Planned, check_length, collate, plan
from jaxhal.models.lm import LM
from jaxhal.report import Report, Span, Token
from jaxhal.types import Example

# The detector that colours tokens and finds spans when it is among those asked for.
PREFERRED = "predictive_probability"


def detect(
    lm: LM,
    *,
    response: str,
    context: str | None = None,
    question: str | None = None,
    prompt: str | None = None,
    detectors: Sequence[str | Fitted] | None = None,
) -> Report:
    """Judges one answer: scores, coloured tokens and suspicious spans.

    Args:
      lm: the reader, from :func:`jaxhal.load`.
      response: the answer.
      context, question: what it should rest on and what was asked.
      prompt: instead of these two, the whole prompt.
      detectors: as :func:`score` takes them.

    Raises:
      ValueError: when the answer or prompt is empty, too long for the model, or a
        detector is unknown.
    """
    example = Example(
        response, prompt=prompt, context=context, question=question, id="answer"
    )
    report = score(lm, [example], detectors, batch_size=1)[0]
    if report.error is not None:
        raise ValueError(report.error)
    return report


def score(
    lm: LM,
    examples: Sequence[Example],
    detectors: Sequence[str | Fitted] | None = None,
    *,
    batch_size: int = 8,
    progress: bool | None = None,
    threshold: float = 0.99,
) -> list[Report]:
    """Scores many answers, a bucket of similar lengths at a time.

    Args:
      lm: the reader.
      examples: the answers.
      detectors: catalogue names, or detectors that were fitted; by default all that
        need neither training nor a second pass.
      batch_size: answers read together.
      progress: show a progress bar; ``None`` shows it on a terminal.
      threshold: token score from which on a token belongs to a span; for the default
        detector 0.99 means that the reader gave the token less than 1 % probability.

    Returns:
      One report per example, in order.  An example that cannot be read (too long, not
      encodable) comes back with its ``error`` and costs no other example.

    Raises:
      ValueError: on an unknown detector, one that must be fitted first, or a batch
        size below 1.
    """
    if batch_size < 1:
        raise ValueError(f"batch_size is {batch_size}; it must be at least 1")
    chosen, params = _chosen(detectors)
    needs_question = bool(catalogue.reads(chosen, closed_book=True))
    tokenizer = lm.require_tokenizer()
    rows: list[Encoded] = []
    closed: list[Encoded] = []
    reports: dict[int, Report] = {}
    kept: list[int] = []
    for number, example in enumerate(examples):
        try:
            row = tokenizer.encode_example(example)
            check_length(row, lm.config.context_length)
            if needs_question:
                closed.append(tokenizer.encode_example(closed_book(example)))
        except ValueError as error:
            reports[number] = _report(lm, example, chosen, error=str(error))
            continue
        rows.append(row)
        kept.append(number)
    bar = tqdm(
        total=len(rows),
        desc="scoring",
        unit="answer",
        disable=None if progress is None else not progress,
    )
    with bar:
        for group in plan(rows, batch_size):
            features = _read(lm, chosen, rows, closed, group, batch_size)
            texts = [examples[kept[i]] for i in group.rows]
            for name, function in {t for d in chosen for t in d.text}:
                values = np.stack([np.asarray(function(e), np.float32) for e in texts])
                pad = [(0, batch_size - len(values)), *[(0, 0)] * (values.ndim - 1)]
                features[name] = np.pad(values, pad)
            scored = _score(tuple(chosen), params, features)
            scores, tokens, heads = jax.device_get(scored)
            for at, i in enumerate(group.rows):
                number = kept[i]
                reports[number] = _fill(
                    _report(lm, examples[number], chosen),
                    rows[i],
                    {d.name: float(scores[d.name][at]) for d in chosen},
                    {d.name: tokens[d.name][at] for d in chosen if d.tokens},
                    {name: value[:, at] for name, value in heads.items()},
                    threshold,
                )
            bar.update(len(group.rows))
    return [reports[number] for number in range(len(examples))]


def _chosen(
    detectors: Sequence[str | Fitted] | None,
) -> tuple[list[Detector], tuple[Any, ...]]:
    """The detectors asked for and their parameters."""
    if detectors is None:
        found = catalogue.get()
        return found, ((),) * len(found)
    chosen, params = [], []
    for one in detectors:
        if isinstance(one, Fitted):
            chosen.append(one.detector)
            params.append(one.params)
            continue
        (detector,) = catalogue.get([one])
        if detector.fit is not None:
            raise ValueError(
                f"detector {one!r} must be fitted to labelled answers first; pass what "
                "jaxhal.fitting.fit or jaxhal.experiments.run returned instead of its "
                "name"
            )
        chosen.append(detector)
        params.append(())
    return chosen, tuple(params)


def _read(
    lm: LM,
    chosen: Sequence[Detector],
    rows: Sequence[Encoded],
    closed: Sequence[Encoded],
    group: Planned,
    size: int,
) -> dict[str, Any]:
    """Features of one batch, after the whole prompt and after the question alone."""
    pad_id, response = lm.require_tokenizer().pad_id, group.response_length
    some = [rows[i] for i in group.rows]
    batch = collate(some, pad_id, group.prompt_length, response, size)
    marked = np.zeros(batch.response_mask.shape, bool)
    features = {"valid": batch.response_mask, "marked": marked}
    reducers = catalogue.reads(chosen)
    if reducers:
        features |= read(lm, batch, reducers)
    reducers = catalogue.reads(chosen, closed_book=True)
    if reducers:
        some = [closed[i] for i in group.rows]
        alone = collate(some, pad_id, response_length=response, batch_size=size)
        features |= read(lm, alone, reducers)
    return features


@functools.partial(jax.jit, static_argnums=0)
def _score(
    chosen: tuple[Detector, ...], params: tuple[Any, ...], features: dict[str, Any]
) -> tuple:
    pairs = list(zip(chosen, params, strict=True))
    scores = {d.name: d.score(p, features) for d, p in pairs}
    tokens = {d.name: d.tokens(p, features) for d, p in pairs if d.tokens is not None}
    heads = {}
    for name, reducer in catalogue.reads(chosen).items():
        if reducer.reads == "probs":
            value = features[name]
            rowwise = value.ndim == 4
            heads[name] = catalogue.response_mean(value, features) if rowwise else value
    return scores, tokens, heads


def _report(
    lm: LM, example: Example, chosen: Sequence[Detector], error: str | None = None
) -> Report:
    with_tokens = [d.name for d in chosen if d.tokens is not None]
    preferred = PREFERRED if PREFERRED in with_tokens else (with_tokens or [""])[0]
    return Report(
        id=example.id,
        model=lm.name,
        response=example.response,
        scores={},
        tokens=[],
        spans=[],
        heads={},
        detector=preferred,
        context=example.context,
        question=example.question,
        prompt=example.prompt,
        label=example.label,
        labels=example.labels,
        error=error,
    )


def _fill(
    report: Report,
    row: Encoded,
    scores: dict[str, float],
    tokens: dict[str, Any],
    heads: dict[str, Any],
    threshold: float,
) -> Report:
    listed = []
    for at, (start, end) in enumerate(row.offsets.tolist()):
        if start < end:  # the end-of-sequence token has no text
            values = {name: float(value[at]) for name, value in tokens.items()}
            listed.append(Token(report.response[start:end], start, end, values))
    fields = {"scores": scores, "tokens": listed, "heads": heads}
    spans = find_spans(report.response, listed, report.detector, threshold)
    return Report(**{**vars(report), **fields, "spans": spans})


def find_spans(
    response: str, tokens: Sequence[Token], detector: str, threshold: float
) -> list[Span]:
    """Runs of tokens whose score reaches the threshold, without outer white space.

    The confidence of a span is the mean score of its tokens.
    """
    spans: list[Span] = []
    run: list[Token] = []
    for token in [*tokens, None]:
        if token is not None and token.scores.get(detector, 0.0) >= threshold:
            run.append(token)
            continue
        if run:
            start, end = run[0].start, run[-1].end
            text = response[start:end]
            start += len(text) - len(text.lstrip())
            end -= len(text) - len(text.rstrip())
            confidence = float(np.mean([t.scores[detector] for t in run]))
            if start < end:
                spans.append(Span(start, end, response[start:end], confidence))
            run = []
    return spans
