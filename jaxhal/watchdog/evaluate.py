"""Does the watchdog flag the right queries, beside baselines and controls?"""

import asyncio
import dataclasses
import functools
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
from jaxtyping import Int

from jaxhal import plotting
from jaxhal.datasets import Question
from jaxhal.detectors import Detector, Info, build
from jaxhal.evaluation.metrics import evaluate as metrics_of
from jaxhal.evaluation.splits import grouped_kfold
from jaxhal.features.base import OfText
from jaxhal.io.files import alone, lines_of, replacing
from jaxhal.io.progress import progress_bar
from jaxhal.llm.entailment import Entailment, Remembered
from jaxhal.llm.judges import OverlapRule
from jaxhal.models.encoders.encoding import embed, kept_encoder
from jaxhal.models.lm import kept_lm as model
from jaxhal.models.registry import private_cache
from jaxhal.plotting.exploration import ablations, entropy_trend
from jaxhal.reading.keys import digest
from jaxhal.reading.store import Store
from jaxhal.reporting import results
from jaxhal.reporting.markdown import escaped, picture
from jaxhal.reporting.summary import verdict
from jaxhal.scoring.inputs import collect
from jaxhal.scoring.splits import fit_part, frame_of
from jaxhal.types import Example
from jaxhal.watchdog.agents import Agent, Reply
from jaxhal.watchdog.bounds import BoundaryStore, ExactStore, Point
from jaxhal.watchdog.config import (
    Watch,
    check_unchanged,
    guard_of,
    plan_of,
    questions_of,
    related,
    store_of,
    told,
    watchdog_of,
)
from jaxhal.watchdog.guarding import Check, Watchdog
from jaxhal.watchdog.journal import Journal, answered, enough

# Baselines by their catalogue names; those that sample look at the agent's own answers.
_SAMPLED = ("selfcheck_nli", "selfcheck_ngram", "semantic_entropy_discrete")
_BASELINES = ("predictive_probability", "icl_prompt", *_SAMPLED)
_INFERRING = ("selfcheck_nli", "semantic_entropy_discrete")
_EPSILONS = (0.6, 0.65, 0.7, 0.75, 0.8, 0.85, 0.9)
_GAMMAS = (0.35, 0.4, 0.45, 0.5, 0.55, 0.6, 0.65)
_GAMMA = "share of hallucinations (gamma)"
# Of the queries explored, after which the bound is looked at.
_PARTS = (0.125, 0.25, 0.5, 0.75, 1.0)


class Evaluated(NamedTuple):
    """What came of an evaluation.

    Attributes:
      folder: holds evaluation.md, evaluation.json and figures.
      rows: a row per method, as :func:`jaxhal.reporting.results.table` has it.
    """

    folder: Path
    rows: list[dict[str, Any]]


class Recorded:
    """An agent whose every reply is kept, so that nothing is asked twice.

    Args:
      agent: who answers.
      journal: where replies are kept.
    """

    def __init__(self, agent: Agent, journal: Journal):
        self.agent, self.journal = agent, journal

    @property
    def name(self) -> str:
        return self.agent.name

    async def respond(
        self, queries: Sequence[str], n: int = 1, temperature: float = 1.0
    ) -> list[list[Reply]]:
        """See :class:`jaxhal.watchdog.Agent`."""

        async def one(query: str) -> list[Reply]:
            async def ask() -> list[dict[str, Any]]:
                (replies,) = await self.agent.respond([query], n, temperature)
                return [dataclasses.asdict(reply) for reply in replies]

            key = f"{n} at {temperature} {digest(query)}"
            replies = await self.journal.once(key, ask, answered)
            return [Reply(**reply) for reply in replies]

        return await asyncio.gather(*map(one, queries))


class Known(NamedTuple):
    """Held-out queries, what the agent said, and whether it made it up.

    Attributes:
      questions: with their references.
      replies: of the agent.
      samples: other answers of it, of which some may have failed.
      labels: 1 hallucinated, by the references.
      left_out: questions without an answer, or with too few others of use.
    """

    questions: list[Question]
    replies: list[Reply]
    samples: list[list[Reply]]
    labels: Int[np.ndarray, " queries"]
    left_out: int


def evaluate(
    config: Watch,
    beside: Sequence[Watch] = (),
    *,
    progress: bool | None = None,
) -> Evaluated:
    """Judges a watchdog on held-out questions, by references.

    Answers are kept as they come, so an evaluation that was killed asks nothing twice.
    Thresholds of all methods but the guard's own come from the other half of the
    questions.

    Args:
      config: of the watchdog, whose bound was explored.
      beside: of others, for the same agent and questions, whose bounds are compared.
      progress: show progress bars; ``None`` shows them on a terminal.

    Raises:
      FileNotFoundError: when one of them was not explored to its end, or does not say
        with what questions.
      ValueError: when a bound is empty, the questions have changed since it was
        explored, the answers are all hallucinated or all not, or none of them can be
        judged.
      RuntimeError: when the agent takes no query at all, or another process evaluates
        in the folder.

    References:
      Liu et al., Towards Mitigation of Hallucination for LLM-empowered Agents, 2025,
      section 4.
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
        known = _known(config, dog)
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
        other = watchdog_with(dog, one)
        if not len(other.store):
            raise ValueError(
                f"the bound in {one.folder} holds no point; explore it first"
            )
        checks[one.name] = asyncio.run(other.checks(queries))
    detectors = _methods(config, checks, known, dog.entailment)
    rows, short, data = _judged(config, known, detectors, progress)
    guards = _guards(checks, known)
    changes = _ablations(config, dog, queries, known.labels)
    tables = {"rows": rows, "short": short, "guards": guards}
    _write(config, [config, *beside], tables, changes, detectors, known, data)
    return Evaluated(config.folder, rows)


def watchdog_with(dog: Watchdog, config: Watch) -> Watchdog:
    """The same agent behind the bound of another exploration."""
    return _with(dog, store_of(config))


def _with(dog: Watchdog, store: BoundaryStore, **settings: Any) -> Watchdog:
    return Watchdog(
        dog.agent,
        store,
        guard=dataclasses.replace(dog.settings, **settings),
        encoder=dog.encoder,
        samples=dog.samples,
        temperature=dog.temperature,
        answer_temperature=dog.answer_temperature,
        entailment=dog.entailment,
    )


def _known(config: Watch, dog: Watchdog) -> Known:
    """Asks the held-out questions; what gets no answer is left out."""
    _, questions = questions_of(config)
    queries = [one.text for one in questions]

    async def ask() -> tuple[list[list[Reply]], list[list[Reply]]]:
        return await asyncio.gather(
            dog.agent.respond(queries, 1, dog.answer_temperature),
            dog.agent.respond(queries, dog.samples, dog.temperature),
        )

    answers, samples = asyncio.run(ask())
    rule, kept = OverlapRule(config.contained), []
    # All methods look at equally many; a question with few would cost all others.
    least = enough(dog.samples)
    for question, (reply,), some in zip(questions, answers, samples, strict=True):
        good = [one for one in some if one.error is None]
        if reply.error is None and len(good) >= least:
            kept.append((question, reply, good, rule(question, reply.text).label))
    labels = np.array([label for *_, label in kept], int)
    if len(set(labels.tolist())) < 2:
        raise ValueError(
            f"of {len(questions)} held-out questions {len(kept)} were answered, "
            f"{int(labels.sum())} of them wrongly; that leaves nothing to tell apart"
        )
    return Known(
        [one for one, *_ in kept],
        [reply for _, reply, *_ in kept],
        [some for _, _, some, _ in kept],
        labels,
        len(questions) - len(kept),
    )


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
    for name in _BASELINES:
        fewest = min(map(len, known.samples))
        options: dict[str, Any] = {}
        if name in _SAMPLED:
            options["draw"] = {"given": True, "n": fewest}
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
    config: Watch,
    known: Known,
    detectors: Sequence[Detector],
    progress: bool | None,
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
            known_by = jax.random.fold_in(key, half)
            fitted = fit_part(detectors, data, train, known_by, bar=bar)
            frame = results.Judged(
                config.name, config.name, half, half, 0, frame_of(data, test, fitted)
            )
            judged.append(frame)
    rows = results.table(judged, detectors)
    named = {one.name: one for one in detectors}
    ordered = [named[row["method"]] for row in rows]
    return rows, results.in_short(judged, ordered), data


def _guards(
    checks: Mapping[str, Sequence[Check]], known: Known
) -> list[dict[str, Any]]:
    """How well the guard's own flags fit, nothing being fitted."""
    decided = {
        name: ([one.flagged for one in some], [one.near for one in some])
        for name, some in checks.items()
    }
    labels = known.labels
    # What any guard has to beat where most answers are wrong.
    every = [True] * len(labels)
    decided["(flagging every query)"] = every, [False] * len(labels)
    groups = related(known.questions).tolist()
    rows = []
    for name, (flagged, near) in decided.items():
        flags = np.array(flagged, float)
        found = metrics_of(flags, labels, 0.5)
        rows.append(
            {
                "watchdog": name,
                "flagged": sum(flagged),
                "near the bound": sum(near),
                **results.estimates(results.DECIDED, flags, labels, groups),
                **{name: found[name] for name in ("precision", "recall")},
            }
        )
    return rows


def _ablations(
    config: Watch, dog: Watchdog, queries: Sequence[str], labels: np.ndarray
) -> dict[str, list[dict[str, Any]]]:
    """The watchdog over epsilon and, by beginnings of the exploration, over gamma."""
    asked = lines_of(config.folder / "queries.jsonl")

    @functools.cache
    def after(count: int) -> dict[str, Any]:
        store = _beginning(dog.encoder, asked[:count])
        found = _fit(_with(dog, store), queries, labels)
        return {"points": len(store), **found}

    epsilon = []
    for value in _EPSILONS:
        other = _with(dog, dog.store, similarity=value)
        epsilon.append({"value": value, **_fit(other, queries, labels)})
    least, gamma = plan_of(config).starts, []
    for value in _GAMMAS:
        count = _reached(asked, value, least)
        if count is not None:
            gamma.append({"value": value, "queries": count, **after(count)})
    # Where one share is reached as soon as another, how far it came says more.
    hits = [at for at, row in enumerate(asked, 1) if row["label"] == 1]
    counts = {max(hits[0], round(part * len(asked))) for part in _PARTS if hits}
    queried = [{"value": count, **after(count)} for count in sorted(counts)]
    tables = {
        "similarity (epsilon)": epsilon,
        _GAMMA: gamma,
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
    vectors = embed(
        kept_encoder(encoder), [row["query"] for row in hits], progress=False
    )
    found = ExactStore(vectors.shape[1])
    points = [
        Point(digest(row["query"]), row["query"], row["answer"], entropy=row["entropy"])
        for row in hits
    ]
    found.add(points, vectors)
    return found


def _write(
    config: Watch,
    all_of: Sequence[Watch],
    tables: Mapping[str, Sequence[Mapping[str, Any]]],
    changes: Mapping[str, Sequence[Mapping[str, Any]]],
    methods: Sequence[Detector],
    known: Known,
    data: Any,
) -> None:
    """evaluation.md, evaluation.json and figures."""
    folder, guard, rows = config.folder, guard_of(config), tables["rows"]
    hallucinated = int(known.labels.sum())
    summary = json.loads((folder / "summary.json").read_text("utf-8"))
    named = [{**row, "detector": row["method"]} for row in rows]
    policy = "no policy was trained"
    if summary["losses"]:
        policy = (
            f"{summary['steps']} steps trained its policy, which chose "
            f"{summary['by the policy']} of the queries"
        )
    lines = [
        f"# {escaped(config.name)}",
        "",
        f"Agent: {escaped(config.agent.model)}, {escaped(_source(config))}. "
        f"Explored by {summary['queries']} queries, "
        f"{summary['hallucinated']} hallucinated (gamma {summary['gamma']:.2f}), "
        f"stopped by {escaped(summary['stopped'])}; {summary['unsure']} unsure, "
        f"{summary['failed']} failed; {summary['points']} points; {policy}. "
        f"Seed {config.seed}.",
        "",
        f"Held out: {len(known.labels)} questions, {hallucinated} answered wrongly "
        f"({hallucinated / len(known.labels):.0%}) by the paper's rule: the mean of "
        "unigram F1 and ROUGE-L with the reference is under 0.5"
        f"{', and no reference stands in the answer' if config.contained else ''}. "
        f"{known.left_out} more got no answer, or too few others, and are left out.",
        "",
        f"Guard: preset {escaped(config.preset)}, similarity {guard.similarity}.",
        "",
        results.short_markdown(tables["short"]),
        "",
        escaped(verdict(named)),
        "",
        "Thresholds and calibration come from the other half of the questions; the "
        "intervals resample questions of equal words, answers or sources together. "
        f"{len(data.errors)} answers could not be read by the baselines and count for "
        "no method.",
        "",
        "## More of each method",
        "",
        results.markdown(rows, several=True),
        "",
        "Here F1 and what follows it are means of the two halves.",
        "",
        "## The guard's own flags",
        "",
        results.interval_markdown(tables["guards"]),
        "",
    ]
    lines += _over(changes, plan_of(config).starts)
    lines += results.methods_markdown(methods)
    trend = {
        one.name: [
            np.nan if row["entropy"] is None else row["entropy"]
            for row in lines_of(one.folder / "queries.jsonl")
        ]
        for one in all_of
    }
    areas = {r["method"]: (r["AUROC"], r["low"], r["high"]) for r in rows}
    controls = [row["method"] for row in rows if row["control"]]
    figures = {
        "auroc": plotting.auroc_intervals(areas, controls),
        "entropy": entropy_trend(trend),
        "ablations": ablations(changes),
    }
    lines += [*map(picture, figures), ""]
    for name, figure in figures.items():
        with replacing(folder / f"{name}.png", binary=True) as file:
            figure.savefig(file, format="png", dpi=150)
    with replacing(folder / "evaluation.md") as file:
        file.write("\n".join(lines))
    whole = {
        "prevalence": float(known.labels.mean()),
        **tables,
        "ablations": dict(changes),
    }
    with replacing(folder / "evaluation.json") as file:
        json.dump(whole, file, indent=1)


def _over(changes: Mapping[str, Sequence[Mapping[str, Any]]], least: int) -> list[str]:
    """Tables of the ablations, what there is to say below each."""
    shares = ", ".join(map(str, _GAMMAS))
    lines = []
    for setting, rows in changes.items():
        table = results.interval_markdown(rows)
        lines += [f"## Over {escaped(setting)}", "", table, ""]
        if setting == _GAMMA:
            lines += [
                f"Of the shares {shares} those in the table were reached, each after "
                f"at least {least} queries; those reached after as many queries have "
                "one bound.",
                "",
            ]
    if _GAMMA not in changes:
        lines += [f"## Over {_GAMMA}", "", f"None of {shares} was reached.", ""]
    return lines


def _source(config: Watch) -> str:
    """What the agent answers from."""
    match config.agent.passages:
        case 0:
            return f"asked questions of {config.questions} by themselves"
        case 1:
            return f"answering from the nearest passage of {config.questions}"
        case many:
            return f"answering from the {many} nearest passages of {config.questions}"
