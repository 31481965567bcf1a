"""Does the watchdog flag the right queries, beside baselines and controls?"""

import asyncio
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np

from jaxhal.detectors import Detector, Info, build
from jaxhal.evaluation.metrics import evaluate as metrics_of
from jaxhal.evaluation.splits import grouped_kfold
from jaxhal.features.base import OfText
from jaxhal.io.files import alone
from jaxhal.io.progress import progress_bar
from jaxhal.llm.entailment import Entailment, Remembered
from jaxhal.models.lm import kept_lm as model
from jaxhal.models.registry import private_cache
from jaxhal.reading.store import Store
from jaxhal.reporting import results
from jaxhal.scoring.inputs import collect, fit_part, frame_of
from jaxhal.types import Example
from jaxhal.watchdog import page
from jaxhal.watchdog.ablations import ablated
from jaxhal.watchdog.building import store_of, told, watchdog_of
from jaxhal.watchdog.config import Watch
from jaxhal.watchdog.domain import Known, check_unchanged, known_of, related
from jaxhal.watchdog.guarding import Check, Watchdog
from jaxhal.watchdog.journal import Journal, Recorded

# Baselines by their catalogue names; those that sample look at the agent's own answers.
_SAMPLED = ("selfcheck_nli", "selfcheck_ngram", "semantic_entropy_discrete")
_BASELINES = ("predictive_probability", "icl_prompt", *_SAMPLED)
_INFERRING = ("selfcheck_nli", "semantic_entropy_discrete")


class Evaluated(NamedTuple):
    """What came of an evaluation: its folder, and a row for each method."""

    folder: Path
    rows: list[dict[str, Any]]


def evaluate(
    config: Watch, beside: Sequence[Watch] = (), *, progress: bool | None = None
) -> Evaluated:
    """Judges a watchdog on held-out questions (Liu et al., 2025, section 4).

    Answers are kept as they come, so an evaluation that was killed asks nothing twice.
    Thresholds of all methods but the guard's own come from the other half of the
    questions.

    Args:
      config: of the watchdog, whose bound was explored.
      beside: of others, for the same agent and questions, whose bounds are compared.

    Raises:
      FileNotFoundError: when one of them was not explored to its end.
      ValueError: when there is nothing to tell apart.
    """
    for one in (config, *beside):
        if not (one.folder / "summary.json").is_file():
            raise FileNotFoundError(
                f"{one.folder} holds no exploration that came to its end; explore first"
            )
    dog = watchdog_of(config, progress)
    for one in (config, *beside):
        check_unchanged(one)
    # Baselines and ablations ask the same of the same answers.
    dog.entailment = Remembered(dog.entailment)
    with alone(config.folder):
        dog.agent = Recorded(dog.agent, Journal(config.folder / "evaluation.jsonl"))
        known = known_of(config, dog)
        return _evaluated(config, beside, dog, known, progress)


def _evaluated(
    config: Watch,
    beside: Sequence[Watch],
    dog: Watchdog,
    known: Known,
    progress: bool | None,
) -> Evaluated:
    queries = [one.text for one in known.questions]
    checks: dict[str, list[Check]] = {}
    for one in (config, *beside):
        other = dog.behind(store_of(one))
        if not len(other.store):
            raise ValueError(
                f"the bound in {one.folder} holds no point; explore it first"
            )
        checks[one.name] = asyncio.run(other.checks(queries))
    detectors = _methods(config, checks, known, dog.entailment)
    rows, short, data = _judged(config, known, detectors, progress)
    guards = _guards(checks, known)
    changes = ablated(config, dog, queries, known.labels)
    tables = {"rows": rows, "short": short, "guards": guards}
    page.write(config, [config, *beside], tables, changes, detectors, known, data)
    return Evaluated(config.folder, rows)


def _methods(
    config: Watch,
    checks: Mapping[str, Sequence[Check]],
    known: Known,
    entailment: Entailment,
) -> list[Detector]:
    """The watchdog as a method, its baselines, and controls."""
    methods = [
        _given(name, "score of the watchdog", {c.query: c.score for c in some})
        for name, some in checks.items()
    ]
    first = checks[config.name]
    near = {c.query: c.hits[0].similarity for c in first}
    words = {c.query: float(len(c.query.split())) for c in first}
    methods += [
        _given("nearest_similarity", "cosine with the nearest point", near, True),
        _given("query_length", "number of words of the query", words, True),
    ]
    given = {"draw": {"given": True, "n": min(map(len, known.samples))}}
    for name in _BASELINES:
        options: dict[str, Any] = {**given} if name in _SAMPLED else {}
        if name in _INFERRING:
            options["entailment"] = entailment
        methods.append(build({name: options}))
    controls = ("response_length", "novel_words", "novel_word_share")
    return methods + [build(name) for name in controls]


def _given(
    name: str, summary: str, scores: Mapping[str, float], control: bool = False
) -> Detector:
    """A detector of numbers that are known, by the question."""

    def of(example: Example) -> float:
        return scores[str(example.question)]

    unit = "see the watchdog" if not control else "words or cosine"
    return Detector(
        Info(name, summary, unit, "Liu et al., 2025 (HalMit)", control),
        features=((name, OfText(of)),),
        inputs=lambda features: features[name],
    )


def _judged(
    config: Watch, known: Known, detectors: Sequence[Detector], progress: bool | None
) -> tuple[list[dict[str, Any]], list[dict[str, Any]], Any]:
    """The table over two halves of the questions, that in short, and what was read."""
    fewest = min(map(len, known.samples))
    every = zip(*known[:4], related(known.questions), strict=True)
    examples = [
        Example(
            reply.text,
            prompt=told(config, question.text, reply.context),
            context=reply.context or None,
            question=question.text,
            id=question.id or str(number),
            label=int(label),
            source=str(group),
            samples=tuple(one.text for one in some[:fewest]),
        )
        for number, (question, reply, some, label, group) in enumerate(every)
    ]
    reader = config.agent.model if not config.agent.endpoint else config.reader
    lm = model(reader, config.agent.dtype)
    store = Store(private_cache("features"))
    data = collect(lm, examples, detectors, store, progress=progress)
    key, judged = jax.random.key(config.seed), []
    halves = grouped_kfold(data.labels, data.groups.tolist(), 2, config.seed)
    with progress_bar(2 * len(detectors), "fitting", "fit", progress) as bar:
        for half, (train, test) in enumerate(halves):
            of_half = jax.random.fold_in(key, half)
            fitted = fit_part(detectors, data, train, of_half, bar=bar)
            frame, names = frame_of(data, test, fitted), (config.name, config.name)
            judged.append(results.Judged(*names, half, half, 0, frame))
    rows = results.table(judged, detectors)
    named = {one.name: one for one in detectors}
    ordered = [named[row["method"]] for row in rows]
    return rows, results.in_short(judged, ordered), data


def _guards(
    checks: Mapping[str, Sequence[Check]], known: Known
) -> list[dict[str, Any]]:
    """How well the guard's own flags fit, nothing being fitted."""
    labels, groups = known.labels, related(known.questions).tolist()

    def row(name: str, flagged: Sequence[bool], near: int) -> dict[str, Any]:
        flags = np.array(flagged, float)
        found = metrics_of(flags, labels, 0.5)
        return {
            "watchdog": name,
            "flagged": sum(flagged),
            "near the bound": near,
            **results.estimates(results.DECIDED, flags, labels, groups),
            **{name: found[name] for name in ("precision", "recall")},
        }

    rows = [
        row(name, [one.flagged for one in some], sum(one.near for one in some))
        for name, some in checks.items()
    ]
    # What any guard has to beat where most answers are wrong.
    return [*rows, row("(flagging every query)", [True] * len(labels), 0)]
