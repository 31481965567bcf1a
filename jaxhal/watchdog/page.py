"""What an evaluation leaves in its folder."""

import json
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from jaxhal import plotting
from jaxhal.detectors import Detector
from jaxhal.io.files import lines_of, replacing
from jaxhal.plotting.series import ablations as ablated_figure
from jaxhal.plotting.series import entropy_trend
from jaxhal.reporting import results
from jaxhal.reporting.markdown import escaped, picture
from jaxhal.reporting.summary import verdict
from jaxhal.watchdog.config import Watch, guard_of
from jaxhal.watchdog.domain import Known

#: Shares of hallucinations after which the bound is looked at, and their table.
GAMMAS = (0.35, 0.4, 0.45, 0.5, 0.55, 0.6, 0.65)
GAMMA = "share of hallucinations (gamma)"


def write(
    config: Watch,
    all_of: Sequence[Watch],
    tables: Mapping[str, Sequence[Mapping[str, Any]]],
    ablations: Mapping[str, Sequence[Mapping[str, Any]]],
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
    paragraphs = [
        f"# {escaped(config.name)}",
        f"Agent: {escaped(config.agent.model)}, {escaped(_source(config))}. "
        f"Explored by {summary['queries']} queries, "
        f"{summary['hallucinated']} hallucinated (gamma {summary['gamma']:.2f}), "
        f"stopped by {escaped(summary['stopped'])}; {summary['unsure']} unsure, "
        f"{summary['failed']} failed; {summary['points']} points; {policy}. "
        f"Seed {config.seed}.",
        f"Held out: {len(known.labels)} questions, {hallucinated} answered wrongly "
        f"({hallucinated / len(known.labels):.0%}) by the paper's rule: the mean of "
        "unigram F1 and ROUGE-L with the reference is under 0.5"
        f"{', and no reference stands in the answer' if config.contained else ''}. "
        f"{known.left_out} more got no answer, or too few others, and are left out.",
        f"Guard: preset {escaped(config.preset)}, similarity {guard.similarity}.",
        results.short_markdown(tables["short"]),
        escaped(verdict(named)),
        "Thresholds and calibration come from the other half of the questions; the "
        "intervals resample questions of equal words, answers or sources together. "
        f"{len(data.errors)} answers could not be read by the baselines and count for "
        "no method.",
        "## More of each method",
        results.markdown(rows, several=True),
        "Here F1 and what follows it are means of the two halves.",
        "## The guard's own flags",
        results.interval_markdown(tables["guards"]),
        "## Other uses of the exploration",
        *_changes(tables["changes"]),
    ]
    lines = [line for one in paragraphs for line in (one, "")]
    lines += _ablations(ablations, config.plan.starts)
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
        "ablations": ablated_figure(ablations),
    }
    lines += [*map(picture, figures), ""]
    for name, figure in figures.items():
        with replacing(folder / f"{name}.png", binary=True) as file:
            figure.savefig(file, format="png", dpi=150)
    with replacing(folder / "evaluation.md") as file:
        file.write("\n".join(lines))
    whole = {"prevalence": float(known.labels.mean()), **tables}
    whole |= {"ablations": dict(ablations)}
    with replacing(folder / "evaluation.json") as file:
        json.dump(whole, file, indent=1)


def _changes(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    if not rows:
        return ["No explored query was answered wrongly, so there is none to go by."]
    return [
        results.interval_markdown(rows),
        "Scores of the same queries by the same exploration, taken otherwise: AUROC, "
        "and how far it is above that of the watchdog and of the cosine with the "
        "nearest point (paired differences). Wrong among queries is the share of wrong "
        "answers among the nearest queries explored, weighted by their cosines. The "
        "regression is fitted to the exploration alone, and left out where all its "
        "answers are right or all are wrong.",
    ]


def _source(config: Watch) -> str:
    """What the agent answers from."""
    if not (many := config.agent.passages):
        return f"asked questions of {config.questions} by themselves"
    nearest = "nearest passage" if many == 1 else f"{many} nearest passages"
    return f"answering from the {nearest} of {config.questions}"


def _ablations(
    changes: Mapping[str, Sequence[Mapping[str, Any]]], least: int
) -> list[str]:
    """Tables of the ablations, what there is to say below each."""
    shares = ", ".join(map(str, GAMMAS))
    lines = []
    for setting, rows in changes.items():
        table = results.interval_markdown(rows)
        lines += [f"## Over {escaped(setting)}", "", table, ""]
        if setting == GAMMA:
            reached = (
                f"Of the shares {shares} those in the table were reached, each after "
                f"at least {least} queries; those reached after as many queries have "
                "one bound."
            )
            lines += [reached, ""]
    if GAMMA not in changes:
        lines += [f"## Over {GAMMA}", "", f"None of {shares} was reached.", ""]
    return lines
