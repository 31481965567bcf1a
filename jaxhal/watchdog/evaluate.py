"""Does the watchdog flag the right queries, beside baselines and controls?"""

import asyncio
import functools
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np

from jaxhal.detectors import Detector, build
from jaxhal.evaluation.metrics import evaluate as metrics_of
from jaxhal.evaluation.splits import grouped_kfold
from jaxhal.features.base import OfText
from jaxhal.io.files import alone, lines_of
from jaxhal.io.progress import progress_bar
from jaxhal.llm.entailment import Entailment, Remembered
from jaxhal.models.encoders.encoding import embed, kept_encoder
from jaxhal.models.lm import kept_lm as model
from jaxhal.models.registry import private_cache
from jaxhal.reading.keys import digest
from jaxhal.reading.store import Store
from jaxhal.reporting import results
from jaxhal.scoring.inputs import collect, fit_part, frame_of
from jaxhal.types import Example
from jaxhal.watchdog import changes, page
from jaxhal.watchdog.bounds import ExactStore, Point
from jaxhal.watchdog.building import store_of, told, watchdog_of
from jaxhal.watchdog.config import Watch
from jaxhal.watchdog.domain import Known, check_unchanged, known_of, related
from jaxhal.watchdog.guarding import Check, Watchdog
from jaxhal.watchdog.journal import Journal, Recorded
from jaxhal.watchdog.monitor import known_entropies

# Baselines by their catalogue names, and what they are given: of those that sample the
# agent's own answers.
_BASELINES = {
    "predictive_probability": (),
    "icl_prompt": (),
    "selfcheck_nli": ("draw", "entailment"),
    "selfcheck_ngram": ("draw",),
    "semantic_entropy_discrete": ("draw", "entailment"),
}
_CONTROLS = ("response_length", "novel_words", "novel_word_share")
_EPSILONS = (0.6, 0.65, 0.7, 0.75, 0.8, 0.85, 0.9)
# Of the queries explored, after which the bound is looked at.
_PARTS = (0.125, 0.25, 0.5, 0.75, 1.0)


def evaluate(
    config: Watch, beside: Sequence[Watch] = (), *, progress: bool | None = None
) -> list[dict[str, Any]]:
    """Judges a watchdog on held-out questions; a row for each method.

    As in Liu et al., 2025, section 4.  The exploration's folder gets a page of it all.

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
    all_of = [config, *beside]
    for one in all_of:
        if not (one.folder / "summary.json").is_file():
            raise FileNotFoundError(
                f"{one.folder} holds no exploration that came to its end; explore first"
            )
    dog = watchdog_of(config, progress)
    for one in all_of:
        check_unchanged(one)
    # Baselines and ablations ask the same of the same answers.
    dog.entailment = Remembered(dog.entailment)
    with alone(config.folder):
        dog.agent = Recorded(dog.agent, Journal(config.folder / "evaluation.jsonl"))
        known = known_of(config, dog)
        queries = [one.text for one in known.questions]
        checks: dict[str, list[Check]] = {}
        for one in all_of:
            other = dog.behind(store_of(one))
            if not len(other.store):
                raise ValueError(
                    f"the bound in {one.folder} holds no point; explore it first"
                )
            checks[one.name] = asyncio.run(other.checks(queries))
        methods = _methods(config, checks, known, dog.entailment)
        rows, short, data = _judged(config, known, methods, progress)
        tables = {"rows": rows, "short": short, "guards": _guards(checks, known)}
        tables["changes"] = _changes(config, dog, checks[config.name], known)
        ablations = ablated(config, dog, queries, known.labels)
        page.write(config, all_of, tables, ablations, methods, known, data)
    return rows


def _methods(
    config: Watch,
    checks: Mapping[str, Sequence[Check]],
    known: Known,
    entailment: Entailment,
) -> list[Detector]:
    """The watchdog as a method, its baselines, and controls."""
    first = checks[config.name]
    near = {c.query: c.hits[0].similarity for c in first}
    words = {c.query: float(len(c.query.split())) for c in first}
    draw = {"given": True, "n": min(map(len, known.samples))}
    options = {"draw": draw, "entailment": entailment}
    return [
        *(
            _given(name, "score of the watchdog", {c.query: c.score for c in some})
            for name, some in checks.items()
        ),
        _given("nearest_similarity", "cosine with the nearest point", near, True),
        _given("query_length", "number of words of the query", words, True),
        *(
            build({name: {option: options[option] for option in takes}})
            for name, takes in _BASELINES.items()
        ),
        *map(build, _CONTROLS),
    ]


def _given(
    name: str, summary: str, scores: Mapping[str, float], control: bool = False
) -> Detector:
    """A detector of numbers that are known, by the question."""

    def of(example: Example) -> float:
        return scores[str(example.question)]

    unit = "see the watchdog" if not control else "words or cosine"
    return Detector(
        *(name, summary, unit, "Liu et al., 2025 (HalMit)"),
        features=((name, OfText(of)),),
        inputs=lambda features: features[name],
        control=control,
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
    lm = model(reader, config.agent.dtype, config.agent.mesh)
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


def _changes(
    config: Watch, dog: Watchdog, checks: Sequence[Check], known: Known
) -> list[dict[str, Any]]:
    """Other uses of the exploration beside the watchdog's, and the nearest point."""
    said = [[one.text for one in some] for some in known.samples]
    queries = [one.text for one in known.questions]
    of_each = known_entropies(queries, said, dog.entailment)
    entropies = np.array([entropy for entropy, _ in of_each])
    if errors := [error for _, error in of_each if error]:
        raise RuntimeError(f"{errors[0]}; evaluate again, which asks nothing twice")
    answers = [one.text for one in known.replies]
    asked = changes.Asked(queries, answers, entropies, known.labels == 1, queries)
    bound = changes.judged(lines_of(config.folder / "queries.jsonl"))
    beside = {
        "above the watchdog": np.array([one.score for one in checks]),
        "above the nearest point": np.array([c.hits[0].similarity for c in checks]),
    }
    groups = related(known.questions).tolist()
    return changes.compared(asked, bound, config.encoder, beside, groups)


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


def ablated(
    config: Watch, dog: Watchdog, queries: Sequence[str], labels: np.ndarray
) -> dict[str, list[dict[str, Any]]]:
    """The watchdog over epsilon and, by beginnings of the exploration, over gamma."""
    asked = lines_of(config.folder / "queries.jsonl")

    @functools.cache
    def after(count: int) -> dict[str, Any]:
        store = _beginning(dog.encoder, asked[:count])
        found = _fit(dog.behind(store), queries, labels)
        return {"points": len(store), **found}

    epsilon = []
    for value in _EPSILONS:
        other = dog.behind(dog.store, similarity=value)
        epsilon.append({"value": value, **_fit(other, queries, labels)})
    least, gamma = config.plan.starts, []
    for value in page.GAMMAS:
        count = _reached(asked, value, least)
        if count is not None:
            gamma.append({"value": value, "queries": count, **after(count)})
    # Where one share is reached as soon as another, how far it came says more.
    hits = [at for at, row in enumerate(asked, 1) if row["label"] == 1]
    counts = {max(hits[0], round(part * len(asked))) for part in _PARTS if hits}
    queried = [{"value": count, **after(count)} for count in sorted(counts)]
    tables = {
        "similarity (epsilon)": epsilon,
        page.GAMMA: gamma,
        "queries explored": queried,
    }
    return {name: rows for name, rows in tables.items() if rows}


def _fit(dog: Watchdog, queries: Sequence[str], labels: np.ndarray) -> dict[str, Any]:
    found = asyncio.run(dog.checks(queries))
    flags = np.array([one.flagged for one in found], float)
    scores = [one.score for one in found]
    return {
        "AUROC": metrics_of(scores, labels, 0.5)["auroc"],
        "accuracy": metrics_of(flags, labels, 0.5)["accuracy"],
        "flagged": int(flags.sum()),
    }


def _reached(
    asked: Sequence[Mapping[str, Any]], gamma: float, least: int
) -> int | None:
    """Queries until the round after which the share first was that high, if it was."""
    hits = judged = 0
    after = [*(row["round"] for row in asked[1:]), None]
    for number, (row, later) in enumerate(zip(asked, after, strict=True), 1):
        judged += row["label"] is not None
        hits += row["label"] == 1
        ends = row["round"] != later and number >= least
        if ends and judged and hits / judged >= gamma:
            return number
    return None


def _beginning(encoder: str, asked: Sequence[Mapping[str, Any]]) -> ExactStore:
    """The bound that some queries made."""
    hits = [row for row in asked if row["label"] == 1]
    queries = [row["query"] for row in hits]
    vectors = embed(kept_encoder(encoder), queries, progress=False)
    found = ExactStore(vectors.shape[1])
    points = [
        Point(digest(row["query"]), row["query"], row["answer"], entropy=row["entropy"])
        for row in hits
    ]
    found.add(points, vectors)
    return found
