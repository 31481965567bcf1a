"""Is guided decoding worth its cost?  Guided, plainly sampled and greedy responses."""

import dataclasses
import json
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np

from jaxhal.datasets import Question
from jaxhal.evaluation.intervals import mean_interval
from jaxhal.experiments.writing import (
    Writing,
    check_writing,
    journal,
    keys_of,
    prompt_of,
    questions_of,
    source_of,
)
from jaxhal.features.controls import novel_word_share, response_length
from jaxhal.generation import GREEDY, Sampling, generate
from jaxhal.io.configuration import claim, structured
from jaxhal.io.extras import need
from jaxhal.io.files import alone, replacing
from jaxhal.llm.judges import references
from jaxhal.models.lm import LM
from jaxhal.models.lm import kept_lm as model
from jaxhal.plotting.comparisons import guided_pairs
from jaxhal.reading.keys import digest, fingerprint
from jaxhal.reporting.markdown import Markdown, escaped, table
from jaxhal.reporting.page import write_html
from jaxhal.reporting.report import Report
from jaxhal.scoring.detection import resolve, score
from jaxhal.scoring.fitting import Fitted
from jaxhal.scoring.guided import guide
from jaxhal.scoring.saving import load as load_fitted
from jaxhal.texts import contains, rouge_l, unigram_f1
from jaxhal.types import Example

WAYS = ("guided", "sampled", "greedy")
CUT = "share cut off by the limit of tokens"


@dataclasses.dataclass
class Guiding(Writing):
    """A comparison of ways to write; beside the fields of :class:`Writing`:

    Attributes:
      detector: what guides; one that comes fitted for the model, or the folder of one
        that was saved.
      candidates: to choose from.
      chunk: tokens of each.
    """

    detector: str = "lookback_probe"
    candidates: int = 8
    chunk: int = 8
    temperature: float = 0.9
    top_p: float | None = 0.95
    batch_size: int = 4


class Compared(NamedTuple):
    """What came of a comparison, in a folder and by measure.

    A row has the mean of every way to write, with a 95 % interval over questions, and
    the mean differences.
    """

    folder: Path
    rows: list[dict[str, Any]]


def compare(
    source: str | os.PathLike | Mapping[str, Any] | Guiding,
    overrides: Iterable[str] = (),
    *,
    progress: bool | None = None,
) -> Compared:
    """Writes each response in three ways and compares them.

    Responses are kept as they come: a run that was killed writes nothing twice.

    Raises:
      ValueError: on a wrong configuration, a folder that holds what another one made,
        or when a way leaves no response with text.
      OSError: when the folder cannot be written.
      RuntimeError: when another process writes to it.

    References:
      Chuang et al., Lookback Lens, EMNLP 2024, section 3.
    """
    need("experiments")
    config = structured(Guiding, source, overrides)
    check_writing(config)
    folder = Path(config.out) / config.name
    questions = questions_of(config)
    lm = model(config.model, config.dtype, config.mesh)
    guiding = _detector(config, lm)
    # What is written together changes nothing.
    claim(folder, config, lambda one: dataclasses.replace(one, batch_size=1))
    with alone(folder):
        written = _written(lm, config, guiding, questions, folder, progress)
    whole = [q for q in questions if all(written[q.id][way] for way in WAYS)]
    if not whole:
        raise ValueError(
            f"none of {len(questions)} questions has a response with text in every "
            "way; allow more new tokens"
        )
    reports = {}
    for way in WAYS:
        examples = [_example(config, q, written[q.id][way], way) for q in whole]
        reports[way] = score(lm, examples, [guiding], progress=progress)
    # A response that cannot be read costs its question only.
    errors = [
        [one.error for one in trio] for trio in zip(*reports.values(), strict=True)
    ]
    fine = [at for at, trio in enumerate(errors) if not any(trio)]
    if not fine:
        first = next(why for trio in errors for why in trio if why)
        raise ValueError(f"none of {len(whole)} questions can be judged: {first}")
    whole = [whole[at] for at in fine]
    reports = {way: [some[at] for at in fine] for way, some in reports.items()}
    measured = {
        way: _measures(config, whole, some)
        | {CUT: np.array([float(way in written[q.id]["cut"]) for q in whole])}
        for way, some in reports.items()
    }
    rows = _table(measured, [source_of(one) for one in whole])
    _write(config, folder, rows, measured, reports, len(questions) - len(whole))
    return Compared(folder, rows)


def _detector(config: Guiding, lm: LM) -> Fitted:
    if Path(config.detector).is_dir():
        return load_fitted(config.detector)
    (found,) = resolve(lm.name, [config.detector])
    return found


def _written(
    lm: LM,
    config: Guiding,
    detector: Fitted,
    questions: Sequence[Question],
    folder: Path,
    progress: bool | None,
) -> dict[str, dict[str, Any]]:
    """Responses by question and way, and the ways that the limit ``"cut"`` off."""
    prompts = {one.id: prompt_of(config, one) for one in questions}
    every = [_example(config, one, "-", "") for one in questions]
    bases = jax.random.split(jax.random.key(config.seed), 2)
    keys = [keys_of(base, len(questions)) for base in bases]
    sampling = Sampling(temperature=config.temperature, top_p=config.top_p)
    options: dict[str, Any] = {
        "max_new_tokens": config.max_new_tokens,
        "batch_size": config.batch_size,
        "progress": False,
    }

    def write(part: list[int]) -> list[dict[str, Any]]:
        some = [every[at] for at in part]
        guided = guide(
            lm,
            some,
            detector,
            candidates=config.candidates,
            chunk=config.chunk,
            sampling=sampling,
            key=keys[0][np.array(part)],
            **options,
        )
        key = keys[1][np.array(part)]
        found = {
            "guided": [[one.response] for one in guided],
            "sampled": generate(lm, some, sampling=sampling, key=key, **options),
            "greedy": generate(lm, some, sampling=GREEDY, **options),
        }
        rows: list[dict[str, Any]] = [{"cut": []} for _ in part]
        for way, responses in found.items():
            for row, (one,) in zip(rows, responses, strict=True):
                row[way] = one.text.strip()
                row["cut"] += [way] if one.stopped == "length" else []
        return rows

    failed = {**dict.fromkeys(WAYS, ""), "cut": []}
    path = folder / "responses.jsonl"
    learnt = [np.asarray(leaf) for leaf in jax.tree.leaves(detector.params)]
    by = digest(b"|".join(leaf.tobytes() for leaf in learnt) + fingerprint(lm).encode())
    return journal(path, lm, config, by, prompts, write, failed, progress)


def _example(config: Guiding, question: Question, text: str, way: str) -> Example:
    prompt = prompt_of(config, question)
    shown = question.context is not None and question.context in prompt
    context = question.context if shown else None
    return Example(
        text, prompt=prompt, context=context, id=f"{question.id} {way}".strip()
    )


def _measures(
    config: Guiding, questions: Sequence[Question], reports: Sequence[Report]
) -> dict[str, np.ndarray]:
    """A number of each response, by what it is."""
    (name,) = {name for one in reports for name in one.scores}
    examples = [Example(r.response, prompt=r.prompt) for r in reports]

    def nearest(measure: Callable[[str, str], float]) -> np.ndarray:
        return np.array(
            [
                max(float(measure(r.response, each)) for each in references(q))
                for q, r in zip(questions, reports, strict=True)
            ]
        )

    return {
        f"{name} (lower is better)": np.array([one.scores[name] for one in reports]),
        "ROUGE-L with the reference": nearest(rouge_l),
        "unigram F1 with the reference": nearest(unigram_f1),
        "share with a whole reference": nearest(partial(contains, words=True)),
        "share of novel words": np.array([novel_word_share(e) for e in examples]),
        "words": np.array([float(response_length(e)) for e in examples]),
    }


def _table(
    measured: Mapping[str, Mapping[str, np.ndarray]], sources: Sequence[str]
) -> list[dict[str, Any]]:
    """Means with 95 % intervals over sources, and paired differences to guided."""
    rows = []
    for name in measured["guided"]:
        values = {way: measured[way][name] for way in WAYS}
        for way in WAYS[1:]:
            values[f"guided - {way}"] = values["guided"] - values[way]
        row: dict[str, Any] = {"measure": name}
        ends = mean_interval(np.stack([*values.values()], 1), sources)
        for (what, some), low, high in zip(values.items(), *ends, strict=True):
            row |= {what: float(some.mean())}
            row |= {f"{what} low": float(low), f"{what} high": float(high)}
        rows.append(row)
    return rows


def _write(
    config: Guiding,
    folder: Path,
    rows: Sequence[Mapping[str, Any]],
    measured: Mapping[str, Mapping[str, np.ndarray]],
    reports: Mapping[str, Sequence[Report]],
    dropped: int,
) -> None:
    count = len(reports["greedy"])
    note = (
        f"{count} questions of {config.questions}; {config.model} writes, "
        f"{config.detector} chooses between {config.candidates} candidates of "
        f"{config.chunk} tokens. Means and, in brackets, 95 % intervals over their "
        f"sources; differences are paired. {dropped} questions were left out, whose "
        "prompt left no room or whose response in one of the ways had no text or could "
        "not be read. What chooses also measures: that its score falls shows that "
        "guiding works, not that the text is better."
    )
    columns = [*WAYS, *(f"guided - {way}" for way in WAYS[1:])]
    shown = [
        {"measure": row["measure"]} | {name: _cell(row, name) for name in columns}
        for row in rows
    ]
    cells = table(["measure", *columns], [list(row.values()) for row in shown])
    with replacing(folder / "results.md") as file:
        file.write(f"# {escaped(config.name)}\n\n{escaped(note)}\n\n{cells}\n")
    first = rows[0]["measure"]
    figure = guided_pairs(
        {way: measured[way][first] for way in WAYS},
        {way: measured[way]["ROUGE-L with the reference"] for way in WAYS},
        config.detector,
    )
    with replacing(folder / "guided.png", binary=True) as file:
        figure.savefig(file, format="png")
    page = [one for trio in zip(*reports.values(), strict=True) for one in trio]
    write_html(folder / "report.html", page[:90], config.name, shown, note)
    # The last one: where it is, all the others are.
    with replacing(folder / "results.json") as file:
        json.dump(
            {"count": count, "dropped": dropped, "rows": list(rows)}, file, indent=1
        )


def _cell(row: Mapping[str, Any], name: str) -> Markdown:
    low, high = row[f"{name} low"], row[f"{name} high"]
    return Markdown(f"{row[name]:.3f} [{low:.3f}, {high:.3f}]")
