"""A run as text for people: Markdown, and the same as HTML."""

import base64
from collections.abc import Mapping, Sequence
from typing import Any

from jaxhal.detectors import Detector
from jaxhal.devices import device_name
from jaxhal.experiments import relevance, results, sentences
from jaxhal.experiments.config import UNITS, Config
from jaxhal.experiments.protocols import PUBLISHED_SEEDS
from jaxhal.experiments.results import Judged
from jaxhal.inputs import Inputs
from jaxhal.summary import verdict

_READING = (
    'The column "vs best control" is the paired difference in AUROC, with its '
    "95 % interval. Thresholds and calibration come from the training part."
)
_ONE_FIT = "One fit judged all parts, which are pooled by its scores."
_POOLED = (
    "Scores of different fits are not comparable: fitted methods are pooled over the "
    "parts by calibrated probability, which says nothing (AUROC about 0.5) for a score "
    "that ranked the training part the wrong way round. The AUROC of folds is that of "
    "the score itself. Methods that are not fitted are pooled by score."
)
_TOKENS = (
    "Tokens and characters of annotated spans in the first test part. Each method "
    "marks tokens from the score on that gives the best F1 over the training part's. "
    "Intervals resample sources 200 times."
)
_TIMED = (
    "Milliseconds are those of a method alone, everything computed anew and nothing "
    "shared with others, programs compiled before, on"
)


def markdown(
    config: Config,
    data: Mapping[str, Inputs],
    methods: Sequence[Detector],
    judged: Sequence[Judged],
    rows: Sequence[Mapping[str, Any]],
    tokens: Sequence[Mapping[str, Any]],
    inside: Sequence[Mapping[str, Any]],
    differences: Sequence[Mapping[str, Any]],
    figures: Sequence[str],
) -> str:
    """The results of a run, figures named beside it."""
    text = _head(config, data)
    if len(data) > 1:
        text += ["", *_transfer(judged, rows)]
    else:
        counts = ", ".join(str(len(part.frame)) for part in judged)
        judging = f"Judged in each test part: {counts} {UNITS[config.unit]}."
        text += ["", judging, ""]
        named = [{**row, "detector": row["method"]} for row in rows]
        text += [results.markdown(rows, len(judged) > 1), "", verdict(named), ""]
    text += [_READING, ""]
    if len(judged) > 1 and len(data) == 1:
        text += [_ONE_FIT if len({part.fit for part in judged}) == 1 else _POOLED, ""]
    if config.timed:
        text += [f"{_TIMED} {device_name()}.", ""]
    if tokens:
        text += ["## Tokens", "", results.interval_markdown(tokens), "", _TOKENS, ""]
    if inside:
        text += ["## Sentences and answers", "", sentences.markdown(inside), ""]
    if differences:
        text += ["## Relevance", "", relevance.markdown(differences), ""]
    text += results.methods_markdown(methods)
    if config.notes:
        text += ["## Notes", "", *[f"- {note}" for note in config.notes], ""]
    text += [*[f"![{name}]({name}.png)" for name in figures], ""]
    return "\n".join(text)


def _head(config: Config, data: Mapping[str, Inputs]) -> list[str]:
    text = [f"# {config.name}", ""]
    text += [f"Reader: {config.model} ({config.dtype}). Protocol: {config.protocol}."]
    if config.unit != "response":
        text += [
            f"Each answer is cut into parts; one {config.unit} is judged at a time."
        ]
    text += [f"Seed {config.seed}; {_split_seed(config)}."]
    text += ["Higher scores mean more likely hallucinated.", ""]
    for label, one in data.items():
        labels = one.labels
        sources = len(set(one.groups.tolist()))
        text.append(
            f"- {label}: {len(labels)} {UNITS[config.unit]}, {sources} sources, "
            f"{int(labels.sum())} hallucinated; {len(one.errors)} answers could not be "
            "read"
        )
        text += [f"  - row {n}: {why}" for n, why in one.errors.items()]
    return text


def _split_seed(config: Config) -> str:
    if config.protocol == "official":
        return "the split is the data's own"
    if config.protocol in PUBLISHED_SEEDS:
        return f"seed of the split {PUBLISHED_SEEDS[config.protocol]}, as published"
    return f"seed of the split {config.seed}"


def _transfer(judged: Sequence[Judged], rows: Sequence[Mapping[str, Any]]) -> list[str]:
    text = []
    for name, matrix in results.matrices(rows).items():
        head = ["", *map(str, matrix.columns)]
        lines = [head, ["---"] * len(head)]
        for label, values in matrix.iterrows():
            lines.append([str(label), *(f"{value:.3f}" for value in values)])
        text += [f"## {name}: AUROC, trained on rows, tested on columns", ""]
        text += [f"| {' | '.join(cells)} |" for cells in lines] + [""]
    for part in judged:
        pair = part.train, part.test
        some = [row for row in rows if (row["train"], row["test"]) == pair]
        named = [{**row, "detector": row["method"]} for row in some]
        text += [f"## Trained on {part.train}, tested on {part.test}", ""]
        if part.left_out:
            text += [
                f"Left out of the test part, because their source was trained on: "
                f"{part.left_out} of {part.left_out + len(part.frame)}.",
                "",
            ]
        text += [results.markdown(some, several=False), "", verdict(named), ""]
    return text


def html(text: str, pictures: Mapping[str, bytes], answers: int) -> str:
    """The Markdown as HTML that holds its figures.

    Args:
      text: of :func:`markdown`.
      pictures: PNG by name.
      answers: how many are shown below.
    """
    from markdown_it import MarkdownIt

    if answers:
        text += (
            f"\n## Answers\n\nBelow are {answers} answers of the first test part, with "
            "the scores, probabilities and thresholds of detectors that were fitted "
            "without them.\n"
        )
    _, _, text = text.partition("\n")  # the page has the heading
    body = MarkdownIt("commonmark").enable("table").render(text)
    for name, png in pictures.items():
        data = base64.b64encode(png).decode()
        body = body.replace(f'src="{name}.png"', f'src="data:image/png;base64,{data}"')
    return body
