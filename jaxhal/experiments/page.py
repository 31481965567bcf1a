"""A run as text for people: Markdown, and the same as HTML."""

import base64
from collections.abc import Mapping, Sequence
from typing import Any

from jaxhal.experiments import results
from jaxhal.experiments.config import Config
from jaxhal.experiments.results import Judged
from jaxhal.inputs import Inputs
from jaxhal.summary import verdict

_READING = (
    "The last column is the paired difference in AUROC to the best control, with its "
    "95 % interval. Thresholds and calibration come from the training part."
)
_POOLED = (
    "Parts are pooled by calibrated probability, which is constant (AUROC 0.5) for a "
    "score that ranked the training part the wrong way round; the AUROC of folds is "
    "that of the score itself."
)
_TOKENS = (
    "Tokens and characters of annotated spans in the first test part. Each method "
    "marks tokens from the score on that gives the best F1 over the training part's."
)


def markdown(
    config: Config,
    data: Mapping[str, Inputs],
    judged: Sequence[Judged],
    rows: Sequence[Mapping[str, Any]],
    tokens: Sequence[Mapping[str, Any]],
    figures: Sequence[str],
) -> str:
    """The results of a run, figures named beside it."""
    text = _head(config, data)
    if len(data) > 1:
        text += ["", *_transfer(rows)]
    else:
        counts = ", ".join(str(len(part.frame)) for part in judged)
        text += ["", f"Judged in each test part: {counts}.", ""]
        named = [{**row, "detector": row["method"]} for row in rows]
        text += [results.markdown(rows, len(judged) > 1), "", verdict(named), ""]
    text += [_READING, ""]
    if len(judged) > 1 and len(data) == 1:
        text += [_POOLED, ""]
    if tokens:
        text += ["## Tokens", "", results.token_markdown(tokens), "", _TOKENS, ""]
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
    text += [f"Seed {config.seed}. Higher scores mean more likely hallucinated.", ""]
    for label, one in data.items():
        labels = one.labels
        sources = len(set(one.groups.tolist()))
        text.append(
            f"- {label}: {len(labels)} answers to {sources} sources, "
            f"{int(labels.sum())} hallucinated; {len(one.errors)} could not be read"
        )
        text += [f"  - row {n}: {why}" for n, why in one.errors.items()]
    return text


def _transfer(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    text = []
    for name, matrix in results.matrices(rows).items():
        head = ["", *map(str, matrix.columns)]
        lines = [head, ["---"] * len(head)]
        for label, values in matrix.iterrows():
            lines.append([str(label), *(f"{value:.3f}" for value in values)])
        text += [f"## {name}: AUROC, trained on rows, tested on columns", ""]
        text += [f"| {' | '.join(cells)} |" for cells in lines] + [""]
    for train, test in dict.fromkeys((row["train"], row["test"]) for row in rows):
        some = [row for row in rows if (row["train"], row["test"]) == (train, test)]
        named = [{**row, "detector": row["method"]} for row in some]
        text += [f"## Trained on {train}, tested on {test}", ""]
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
            "the scores, probabilities and thresholds of detectors that had not seen "
            "their sources.\n"
        )
    _, _, text = text.partition("\n")  # the page has the heading
    body = MarkdownIt("commonmark").enable("table").render(text)
    for name, png in pictures.items():
        data = base64.b64encode(png).decode()
        body = body.replace(f'src="{name}.png"', f'src="data:image/png;base64,{data}"')
    return body
