"""``jaxhal demo`` and ``jaxhal detect``: answers and verdicts on them."""

import functools
import os
import tempfile
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from jaxhal.cli.console import (
    as_table,
    check_place,
    finish,
    on_screen,
    pair_of,
    terminal,
    usage,
)
from jaxhal.cli.verdicts import check_results, counted, deliver

if TYPE_CHECKING:
    from rich.console import Console

    from jaxhal.reporting.report import Report

DEFAULT = "smollm2-135m"
_SURE = 0.9  # of a promise
Model = Annotated[
    str,
    typer.Option(
        "--model",
        "-m",
        help="Registry name, folder with config.json and safetensors, .gguf file, or "
        "Hugging Face hub id.",
    ),
]
Dtype = Annotated[
    str,
    typer.Option(
        help="Of the model's parameters: float32, or bfloat16 in half the memory."
    ),
]
Weights = Annotated[
    str | None,
    typer.Option(
        help="stored keeps a GGUF file's blocks, dequantised makes numbers of them; "
        "int8 and int4 round a folder's matrices.",
        show_default="by what fits into memory",
    ),
]
OnMesh = Annotated[
    str | None,
    typer.Option(
        "--mesh",
        help="Devices to spread the model over, such as data=2,model=4.",
        show_default="all that there are",
    ),
]
BatchSize = Annotated[int, typer.Option(min=1, help="Answers read together.")]
Input = Annotated[
    str,
    typer.Option("--input", "-i", help="JSON Lines of answers to judge, - for stdin."),
]
Output = Annotated[
    str | None,
    typer.Option(
        "--output",
        "-o",
        help="JSON Lines of verdicts, - for stdout.",
        show_default="a table on a terminal, else -",
    ),
]
Detectors = Annotated[
    list[str] | None,
    typer.Option(
        "--detector",
        "-d",
        help="A detector by name, or a folder or hub id (owner/name, or that and a "
        "folder) of what jaxhal fit wrote or a released probe; repeat for more.",
    ),
]
Promise = Annotated[
    str | None,
    typer.Option(
        "--threshold",
        metavar="KIND=SHARE",
        help="A promise for the verdicts to keep: recall=0.9, false_alarms=0.05 or "
        "precision=0.7; or for the spans: highlighted=0.05.",
    ),
]
Confidence = Annotated[
    float | None,
    typer.Option(help="How sure to be of that promise.", show_default=str(_SURE)),
]
Every = Annotated[
    bool,
    typer.Option("--all", help="Rows of what every detector says, and no table."),
]
Page = Annotated[
    Path | None, typer.Option("--html", help="Write a page to read as well.")
]
Adapt = Annotated[
    bool,
    typer.Option(
        "--adapt",
        help="Correct probabilities for the base rate of these rows, 20 or more; the "
        "first verdict comes after the last row.",
    ),
]
Force = Annotated[
    bool, typer.Option("--force", help="Start over, whatever is done already.")
]


def demo(
    out: Annotated[Path, typer.Option(help="Folder for the results.")] = Path(
        "jaxhal-demo"
    ),
    model: Model = DEFAULT,
    dtype: Dtype = "float32",
    weights: Weights = None,
    mesh: OnMesh = None,
    detector: Detectors = None,
    limit: Annotated[
        int | None, typer.Option(min=1, help="Only the first N answers.")
    ] = None,
) -> None:
    """Judges the bundled answers, then the hard pairs, with a small real model."""
    import jaxhal
    from jaxhal.datasets import bundled, bundled_answers
    from jaxhal.datasets.jsonl import write_rows
    from jaxhal.io.files import replacing
    from jaxhal.models.registry import known_as
    from jaxhal.reporting.page import write_html
    from jaxhal.reporting.summary import (
        against_controls,
        compared,
        markdown,
        short,
        verdict,
    )
    from jaxhal.scoring.detection import placed, resolve, resolve_for
    from jaxhal.scoring.verdicts import described

    with usage():
        names = placed(known_as(model), detector) if detector else None
        resolve(known_as(model), names)  # a wrong one should cost no download
        _check_demo(out)
        out.mkdir(parents=True, exist_ok=True)
        lm = jaxhal.load(model, dtype=dtype, weights=weights, mesh=mesh)
        chosen = resolve_for(lm, names)
    answers = bundled_answers()[:limit]
    examples = [*answers, *bundled()][:limit]
    start = time.perf_counter()
    with usage():
        reports = jaxhal.score(lm, examples, chosen)
    pace = (time.perf_counter() - start) / len(reports) * 1000
    first, pairs = reports[: len(answers)], reports[len(answers) :]
    parts = {
        name: (some, compared(some))
        for name, some in (("Answers", first), ("Hard pairs", pairs))
    }
    rows, beside = (short(judged) for _, judged in parts.values())
    said = [
        f"{_counted(first)}, as chat models write them.",
        f"The reader, {model}, is a small surrogate: the answers were written by hand, "
        "not by it.",
        verdict(rows),
    ]
    if pairs:
        said.append(f"Then {_counted(pairs)}, short and hard to tell apart.")
    if beside:
        said.append(against_controls(beside))
        rows = _with_pairs(rows, beside)
    said.append(
        f"All detectors together took {pace:.0f} ms per answer, compilation included."
    )
    note = " ".join(said)
    with usage(), tempfile.TemporaryDirectory(prefix=".demo", dir=out) as scratch:
        made = Path(scratch)
        written = (report.to_dict(every=True) for report in reports)
        write_rows(made / "scores.jsonl", written)
        write_html(made / "report.html", reports, "jaxhal demo", rows, note)
        with replacing(made / "results.md") as file:
            file.write(markdown("demo", f"{lm.name} ({dtype})", parts))
        for name in _DEMO:  # none without the others
            os.replace(made / name, out / name)

    console = terminal(stderr=True)
    if rows:
        terminal().print(as_table(rows))
    console.print(note, style="dim")
    console.print(f"\n{described(chosen, lm)}")
    console.print(counted([report.verdict for report in reports]))
    _show(console, reports[:3])
    for name in _DEMO:
        console.print(f"wrote {out / name}", soft_wrap=True)
    finish(console, [report.error for report in reports])


# What a demo writes.
_DEMO = "scores.jsonl", "results.md", "report.html"


def _check_demo(out: Path) -> None:
    """Refuses a folder in which something else than a demo wrote one of its files."""
    if out.exists() and not out.is_dir():
        raise NotADirectoryError(f"{out} is a file; give a folder")
    there = [name for name in _DEMO if (out / name).exists()]
    if there and len(there) < len(_DEMO):
        raise FileExistsError(
            f"{out} holds {there[0]!r} and not the rest of a demo; give another folder"
        )


def detect(
    source: Input,
    model: Model = DEFAULT,
    dtype: Dtype = "float32",
    weights: Weights = None,
    mesh: OnMesh = None,
    output: Output = None,
    detector: Detectors = None,
    promise: Promise = None,
    confidence: Confidence = None,
    every: Every = False,
    page: Page = None,
    relevance: Annotated[
        str | None,
        typer.Option(
            metavar="RULES",
            help="Show in the page what each span and token rests on, by these rules "
            "of relevance propagation, such as attnlrp; a pass back for every token.",
        ),
    ] = None,
    adapt: Adapt = False,
    batch_size: BatchSize = 8,
    force: Force = False,
) -> None:
    """Says of the answers of a JSON Lines file which are hallucinated, and where.

    A row is {"id", "response", and either "prompt" or "context" + "question"}, or
    {"id", "messages"}, a chat that ends with the answer; a result is {"id", "verdict",
    "probability", "by", "spans", "error"}, in the order of the input.  The verdict,
    hallucinated, unsure or supported, is that of one detector, the best on answers held
    out of those that beat the controls there (an ensemble has to be better by one
    standard error); with none there is no verdict.  A bad row gets its error and the
    command exits 1, otherwise 0.

    Until all is done the results wait in OUTPUT.partial; the same command goes on there
    after a stop.  Up to 1,024 rows are read before the first result, 256 where results
    go to standard output.
    """
    import jaxhal
    from jaxhal import lrp
    from jaxhal.datasets.jsonl import read_rows
    from jaxhal.io.extras import need
    from jaxhal.models.registry import known_as
    from jaxhal.scoring.detection import placed, resolve, resolve_for
    from jaxhal.scoring.results import adapted, results, settings_of
    from jaxhal.scoring.verdicts import check_adaptable, described

    as_rows = every or output is not None or not on_screen()
    with usage():
        read = files_of(model, "--model")
        read |= files_of_detectors(detector or ())
        check_results(source, read, output, page)
        if adapt and relevance is not None:
            raise ValueError(
                f"--relevance {relevance} is of spans, and --adapt finds these after "
                "all rows are read; give one of the two"
            )
        # What is wrong with a name or a promise should cost no download.
        threshold, sure = promised(promise, confidence)
        reader = known_as(model)
        names = placed(reader, detector) if detector else None
        known = resolve(reader, names, threshold, sure)
        if adapt:
            check_adaptable(known)
        if relevance is not None:
            lrp.resolve(relevance)
            need("sentences")
            if page is None:
                raise ValueError(
                    f"--relevance {relevance} is shown in the page; give --html as well"
                )
        rows = read_rows(source)
        for path in (output, page):
            check_place(path)
        lm = jaxhal.load(model, dtype=dtype, weights=weights, mesh=mesh)
        # A folder may be called like a model.
        chosen = resolve_for(lm, names, threshold, sure)
    options: dict[str, Any] = {
        "batch_size": batch_size,
        "relevance": relevance,
        "reports": page is not None or not as_rows or adapt,
        "every": every,
    }
    said: dict[str, Any] = {"threshold": threshold, "confidence": sure}
    made = functools.partial(results, lm, rows, chosen, **options)
    deliver(
        (lambda **how: adapted(made(**how), chosen, every)) if adapt else made,
        functools.partial(settings_of, lm, chosen, **said, **options),
        described(chosen, lm),
        command="detect",
        source=source,
        output=output,
        page=page,
        as_rows=as_rows,
        force=force,
        whole=adapt,
    )


def promised(
    text: str | None, confidence: float | None
) -> tuple[dict[str, float] | None, float]:
    """A promise of the command line, and how sure to be of it.

    >>> promised("recall=0.9", None)
    ({'recall': 0.9}, 0.9)
    """
    if text is None:
        if confidence is not None:
            raise ValueError(
                f"--confidence {confidence:g} is that of a promise; give --threshold "
                "as well, such as --threshold recall=0.9"
            )
        return None, _SURE
    kind, share = pair_of(text)
    try:
        return {kind: float(share)}, _SURE if confidence is None else confidence
    except ValueError:
        raise ValueError(
            f"threshold {text!r} has no number; write {kind}=0.9"
        ) from None


def files_of(place: str, option: str) -> dict[str, Path]:
    """What is read of a file or a folder on this machine, by what it is called.

    >>> files_of("smollm2-135m", "--model")
    {}
    """
    path = Path(place)
    files = sorted(path.iterdir()) if path.is_dir() else [path]
    return {f"{option} {file}": file for file in files if file.is_file()}


def files_of_detectors(places: Iterable[str]) -> dict[str, Path]:
    """What is read of folders of detectors, as :func:`files_of` has it."""
    from jaxhal.scoring.released import WANTED
    from jaxhal.scoring.saving import FILES

    wanted = [*WANTED, *(f"*/{name}" for name in FILES)]
    folders = [Path(place) for place in places if Path(place).is_dir()]
    files = [file for one in folders for name in wanted for file in one.glob(name)]
    return {f"--detector {file}": file for file in files}


def _counted(reports: Sequence["Report"]) -> str:
    """Of how many texts answers are, and which share of them is hallucinated."""
    from jaxhal.reporting.summary import source

    texts = len({source(report) for report in reports})
    share = 100 * sum(report.label == 1 for report in reports) / len(reports)
    return f"{len(reports)} answers to {texts} texts, {share:.0f} % hallucinated"


def _with_pairs(
    rows: Iterable[Mapping[str, Any]], pairs: Iterable[Mapping[str, Any]]
) -> list[dict[str, Any]]:
    """The rows of a summary with what each detector reaches on the hard pairs.

    >>> pairs = [{"detector": "toha", "AUROC": 0.5, "95 % interval": "0.40–0.60"}]
    >>> _with_pairs([{"detector": "toha", "AUROC": 0.7}], pairs)
    [{'detector': 'toha', 'AUROC': 0.7, 'on hard pairs': '0.50 (0.40–0.60)'}]
    >>> few = [{"detector": "toha", "AUROC": 0.5, "95 % interval": ""}]
    >>> _with_pairs([{"detector": "toha"}], few)[0]["on hard pairs"]
    '0.50'
    """
    reached = {}
    for row in pairs:
        interval = f" ({row['95 % interval']})" if row["95 % interval"] else ""
        reached[row["detector"]] = f"{row['AUROC']:.2f}{interval}"
    return [dict(row) | {"on hard pairs": reached[row["detector"]]} for row in rows]


def _show(console: "Console", reports: Iterable["Report"]) -> None:
    for report in reports:
        label = "hallucinated" if report.label else "grounded"
        console.print(f"\n{report.id} ({label})", style="bold")
        console.print(report)
    console.print(
        "\nbackground: token score from 0.5, deeper from 0.75; underlined: annotated; "
        "bold: predicted\n",
        style="dim",
    )
