"""A run as text for people: Markdown, and the same as HTML."""

import base64
import html as escaping
from collections.abc import Mapping, Sequence
from typing import Any

from jaxhal.experiments import finetuning, promises, relevance
from jaxhal.experiments.answers import (
    kind_markdown,
    kind_table,
    sentence_markdown,
    sentence_table,
)
from jaxhal.experiments.config import UNITS, Experiment
from jaxhal.experiments.running import PUBLISHED_SEEDS, Result
from jaxhal.experiments.tokens import token_table
from jaxhal.models.devices import device_name
from jaxhal.models.registry import known_as
from jaxhal.reporting import results
from jaxhal.reporting.markdown import escaped, rendered, table
from jaxhal.reporting.summary import verdict

Rows = Sequence[Mapping[str, Any]]

_READING = (
    'The column "vs best control" is the paired difference in AUROC, with its '
    "95 % interval. Thresholds and calibration come from the training part. ECE "
    "adapted is that of probabilities corrected for the base rate of the test part, "
    "which is found without its labels where it is clearly another (Saerens et al., "
    "2002); by chance is what these would show if they were right, on as many answers."
)
_ONE_FIT = "One fit judged all parts, which are pooled by its scores."
_POOLED = (
    "Scores of different fits are not comparable: fitted methods are pooled over the "
    "parts by calibrated probability, which says nothing (AUROC about 0.5) for a score "
    "that ranked the training part the wrong way round. The AUROC of folds is that of "
    "the score itself. Methods that are not fitted are pooled by score."
)
_APART = (
    "Several fits judge the same grounded answers beside other hallucinated ones, and "
    "their scores are not comparable: AUROC is over the pairs that one fit judged."
)
_TOKENS = (
    "Of the first test part: tokens beside annotated spans, and the characters of the "
    "spans that a report shows where that method decides, whole words, none in an "
    "answer that it calls supported; all counted over all answers together. Each "
    "method marks tokens from the score on that gives the best F1 over the training "
    "part's tokens. Intervals resample sources 200 times."
)
_SELECTIVE = (
    "Answers kept from the lowest score on, of all test parts together. PRR: how much "
    "is gained of what rejecting by the truth would gain, 0 by chance, 1 at best; "
    "AURC: the share of hallucinated answers among those kept, mean over all shares "
    "kept; coverage at 90 %: the largest share of answers kept of which 90 % are "
    "grounded. Intervals resample sources 200 times."
)
_TIMED = (
    "Milliseconds are those of a method alone, everything computed anew and nothing "
    "shared with others, programs compiled before, on"
)


def tables(found: Result) -> dict[str, list[dict[str, Any]]]:
    """What is said beside the rows of the methods, by what it is said of."""
    unit = found.config.unit
    tokens = [
        {"data": label, **row}
        for label, one in (found.data if unit == "response" else {}).items()
        for row in token_table(one, found.fitted[label], *found.splits[label][0])
    ]
    kept = [
        {"data": label, **row}
        for label in found.data
        for row in results.selective(
            [part for part in found.judged if part.train == part.test == label],
            found.methods,
        )
    ]
    return {
        "selective": kept,
        "kinds": kind_table(found) if unit == "response" else [],
        "tokens": tokens,
        "sentences": sentence_table(found) if unit == "sentence" else [],
        "relevance": relevance.table(found.data) if unit == "response" else [],
        "promises": promises.rows(found) if found.config.promises else [],
    }


def markdown(found: Result, tables: Mapping[str, Rows]) -> str:
    """The results of a run, without figures."""
    config, judged = found.config, found.judged
    text = _head(found)
    if len(found.data) > 1:
        text += ["", *_transfer(found)]
    else:
        counts = ", ".join(str(len(part.frame)) for part in judged)
        judging = f"Judged in each test part: {counts} {UNITS[config.unit]}."
        text += ["", judging, "", *_judged(found.rows, len(judged) > 1)]
    text += [_READING, ""]
    if len(judged) > 1 and len(found.data) == 1:
        one_fit = len({part.fit for part in judged}) == 1
        pooled = _APART if judged[0].apart else _POOLED
        text += [_ONE_FIT if one_fit else pooled, ""]
    if config.timed:
        text += [f"{_TIMED} {device_name()}.", ""]
    if rows := tables["selective"]:
        text += ["## Selective", "", results.short_markdown(rows), "", _SELECTIVE, ""]
    if rows := tables["kinds"]:
        text += ["## Kinds", "", kind_markdown(rows, found.rows), ""]
    if rows := tables["tokens"]:
        text += ["## Tokens", "", results.short_markdown(rows), "", _TOKENS, ""]
    if rows := tables["sentences"]:
        text += ["## Sentences and answers", "", sentence_markdown(rows), ""]
    if rows := tables["relevance"]:
        text += ["## Relevance", "", relevance.markdown(rows), ""]
    if rows := tables["promises"]:
        text += ["## Promises", "", promises.markdown(rows), ""]
    text += results.methods_markdown(found.methods)
    notes = [*config.notes, *(finetuning.note(*one) for one in found.tuned.items())]
    if notes:
        text += ["## Notes", "", *[f"- {escaped(note)}" for note in notes], ""]
    return "\n".join(text)


def _judged(rows: Rows, several: bool) -> list[str]:
    """A table and what it comes to."""
    named = [{**row, "detector": row["method"]} for row in rows]
    return [results.markdown(rows, several), "", escaped(verdict(named)), ""]


def _head(found: Result) -> list[str]:
    config = found.config
    reader = escaped(
        f"{known_as(config.model)} ({config.dtype}). Protocol: {config.protocol}."
    )
    text = [f"# {escaped(config.name)}", "", f"Reader: {reader}"]
    if config.unit != "response":
        text += [
            f"Each answer is cut into parts; one {config.unit} is judged at a time."
        ]
    text += [f"Seed {config.seed}; {_split_seed(config)}."]
    text += ["Higher scores mean more likely hallucinated.", ""]
    for data, (label, one) in zip(config.data, found.data.items(), strict=True):
        labels = one.labels
        sources = len(set(one.groups.tolist()))
        text.append(
            f"- {escaped(label)}: {len(labels)} {UNITS[config.unit]}, {sources} "
            f"sources, {int(labels.sum())} hallucinated; {len(one.errors)} answers "
            "could not be read" + "; refusals are left out" * (not data.refusals)
        )
        text += [f"  - row {n}: {escaped(why)}" for n, why in one.errors.items()]
    return text


def _split_seed(config: Experiment) -> str:
    if config.protocol == "official":
        return "the split is the data's own"
    if config.protocol in PUBLISHED_SEEDS:
        return f"seed of the split {PUBLISHED_SEEDS[config.protocol]}, as published"
    return f"seed of the split {config.seed}"


def _transfer(found: Result) -> list[str]:
    text = []
    for name, matrix in results.matrices(found.rows).items():
        lines = [
            [str(label), *(f"{value:.3f}" for value in values)]
            for label, values in matrix.iterrows()
        ]
        text += [f"## {escaped(name)}: AUROC, trained on rows, tested on columns", ""]
        text += [table(["", *map(str, matrix.columns)], lines), ""]
    for part in found.judged:
        pair = part.train, part.test
        rows = [row for row in found.rows if (row["train"], row["test"]) == pair]
        train, test = map(escaped, pair)
        text += [f"## Trained on {train}, tested on {test}", ""]
        if part.left_out:
            text += [
                f"Left out of the test part, because their source was trained on: "
                f"{part.left_out} of {part.left_out + len(part.frame)}.",
                "",
            ]
        text += _judged(rows, several=False)
    return text


def html(text: str, pictures: Mapping[str, bytes], answers: int) -> str:
    """The Markdown as HTML that holds its figures, PNG by name."""
    _, _, text = text.partition("\n")  # the page has the heading
    body = rendered(text)
    for name, png in pictures.items():
        data = base64.b64encode(png).decode()
        alt = escaping.escape(name)
        body += f'<p><img src="data:image/png;base64,{data}" alt="{alt}"></p>\n'
    if answers:
        body += (
            f"<h2>Answers</h2>\n<p>Below are {answers} answers of the first test part, "
            "with the scores, probabilities and thresholds of detectors that were "
            "fitted without them.</p>\n"
        )
    return body
