"""The ``jaxhal`` command.  Heavy imports wait until a command needs them."""

import enum
import os
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from jaxhal.cli.console import as_table, check_place, terminal, usage
from jaxhal.cli.stopping import orderly
from jaxhal.cli.watchdog import app as watchdog
from jaxhal.io.files import check_apart, replacing
from jaxhal.llm import hosts

if TYPE_CHECKING:
    from rich.console import Console

    from jaxhal.reporting.report import Report
    from jaxhal.scoring.partial import Partial

app = typer.Typer(
    add_completion=False,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


app.add_typer(watchdog, name="watchdog")


class Kind(enum.StrEnum):
    """What ``jaxhal list`` can list."""

    models = "models"
    detectors = "detectors"
    datasets = "datasets"


Model = Annotated[
    str,
    typer.Option(
        "--model",
        "-m",
        help="Registry name, folder with config.json and safetensors, .gguf file, or "
        "Hugging Face hub id.",
    ),
]
BatchSize = Annotated[int, typer.Option(min=1, help="Answers read together.")]


def main() -> None:
    """Runs the command of ``sys.argv``.

    It exits 0, 1 when a row failed, 2 on bad usage or where a file cannot be read or
    written, 130 on Ctrl-C and 143 on SIGTERM.
    """
    with orderly():
        app(prog_name="jaxhal")


def _version(wanted: bool) -> bool:
    if wanted:
        import jaxhal

        typer.echo(f"jaxhal {jaxhal.__version__}")
        raise typer.Exit
    return wanted


@app.callback()
def _jaxhal(
    allowed: Annotated[
        list[str] | None,
        typer.Option(
            "--allow-endpoint",
            metavar="HOST",
            help="A server that configurations and saved detectors may ask and, over "
            "https, show your key to; repeat for more. Also $JAXHAL_ENDPOINTS.",
        ),
    ] = None,
    version: Annotated[
        bool,
        typer.Option(
            "--version", callback=_version, is_eager=True, help="Say the version."
        ),
    ] = False,
) -> None:
    """Finds hallucinations in what language models write."""
    with usage():
        for name in allowed or ():
            hosts.place_of(name)
            os.environ[hosts.VARIABLE] = f"{os.environ.get(hosts.VARIABLE, '')},{name}"


@app.command()
def demo(
    out: Annotated[Path, typer.Option(help="Folder for the results.")] = Path(
        "jaxhal-demo"
    ),
    model: Model = "smollm2-135m",
    limit: Annotated[
        int | None, typer.Option(min=1, help="Only the first N answers.")
    ] = None,
) -> None:
    """Scores the bundled examples with a small real model."""
    import jaxhal
    from jaxhal.datasets import bundled
    from jaxhal.datasets.jsonl import write_rows
    from jaxhal.reporting.report import write_html
    from jaxhal.reporting.summary import source, summarize, verdict
    from jaxhal.scoring.results import checked

    with usage():
        out.mkdir(parents=True, exist_ok=True)
        lm = jaxhal.load(model)
    examples = bundled()[:limit]
    start = time.perf_counter()
    reports = [checked(report) for report in jaxhal.score(lm, examples)]
    pace = (time.perf_counter() - start) / len(reports) * 1000
    rows = summarize(reports)
    questions = len({source(report) for report in reports})
    note = (
        f"{len(reports)} answers to {questions} questions. The reader, {model}, is a "
        "small surrogate: the answers were written by hand, not by it. "
        f"{verdict(rows)} All detectors together took {pace:.0f} ms per answer, "
        "compilation included."
    )
    write_rows(out / "scores.jsonl", (report.to_dict() for report in reports))
    write_html(out / "report.html", reports, "jaxhal demo", rows, note)

    console = terminal(stderr=True)
    if rows:
        console.print(as_table(rows))
    console.print(note, style="dim")
    _show(console, reports[:3])
    for name in ("scores.jsonl", "report.html"):
        console.print(f"wrote {out / name}", soft_wrap=True)
    _finish(console, [report.error for report in reports])


@app.command()
def detect(
    model: Model,
    source: Annotated[
        str,
        typer.Option(
            "--input", "-i", help="JSON Lines of answers to judge, - for stdin."
        ),
    ],
    output: Annotated[
        str, typer.Option("--output", "-o", help="JSON Lines of scores, - for stdout.")
    ] = "-",
    detector: Annotated[
        list[str] | None,
        typer.Option("--detector", "-d", help="A detector by name; repeat for more."),
    ] = None,
    page: Annotated[
        Path | None, typer.Option("--html", help="Write a page to read as well.")
    ] = None,
    relevance: Annotated[
        str | None,
        typer.Option(
            metavar="RULES",
            help="Show in the page what each token rests on, by these rules of "
            "relevance propagation, such as attnlrp; a pass back for every token.",
        ),
    ] = None,
    batch_size: BatchSize = 8,
    force: Annotated[
        bool, typer.Option("--force", help="Start over, whatever is done already.")
    ] = False,
) -> None:
    """Scores the answers of a JSON Lines file.

    A row is {"id", "response", and either "prompt" or "context" + "question"}; a
    result is {"id", "scores", "probabilities", "flagged", "spans", "error"}, in the
    order of the input; probabilities are those of fitted detectors, flags of those
    among them that beat the controls.  A bad row gets its error and the command exits
    1.

    Until all is done the results wait in OUTPUT.partial; the same command goes on there
    after a stop.
    """
    import jaxhal
    from jaxhal import lrp
    from jaxhal.datasets.jsonl import read_rows, write_rows
    from jaxhal.io.files import is_file
    from jaxhal.reporting.report import write_html
    from jaxhal.reporting.summary import summarize, verdict
    from jaxhal.scoring.detection import resolve
    from jaxhal.scoring.partial import beside, resuming
    from jaxhal.scoring.results import results, rows_of, settings_of

    names, keeps = detector or None, is_file(output)
    with usage():
        check_apart(
            {"--input": source} | _files_of(model),
            {
                "--output": output,
                "--html": page,
                "what is done so far,": beside(output) if keeps else None,
            },
        )
        resolve(model, names)  # a wrong name should cost no download
        if relevance is not None:
            lrp.resolve(relevance)
            if page is None:
                raise ValueError(
                    f"--relevance {relevance} is shown in the page; give --html as well"
                )
        rows = read_rows(source)
        for path in (output, page):
            check_place(path)
        lm = jaxhal.load(model)
        resolve(lm.name, names)  # a folder may be called like a model
        options: dict[str, Any] = {
            "batch_size": batch_size,
            "relevance": relevance,
            "reports": page is not None,
        }
        kept: list[Report] = []
        errors: list[str | None] = []

        def done(partial: "Partial | None" = None) -> Iterator[Mapping[str, Any]]:
            for row, report in results(lm, rows, names, partial=partial, **options):
                errors.append(row["error"])
                kept.extend([report] if report is not None else [])
                yield row

        def write_page() -> None:
            if page is not None:
                table = summarize(kept)
                note = verdict(table) if table else ""
                title = f"jaxhal detect: {Path(source).name}"
                write_html(page, kept, title, table, note)

        if keeps:
            settings = settings_of(lm, names, **options)
            with resuming(output, settings, force=force) as partial:
                for _ in done(partial):
                    pass
                write_page()
                write_rows(output, rows_of(partial))
        else:
            write_rows(output, done())
            write_page()
    console = terminal(stderr=True)
    place = "standard output" if output == "-" else output
    scored = f"{errors.count(None)} of {len(errors)} answers scored"
    console.print(f"{scored}, written to {place}", soft_wrap=True)
    _finish(console, errors)


@app.command("list")
def list_(kind: Annotated[Kind, typer.Argument(help="What to list.")]) -> None:
    """Lists what can be named on the command line."""
    rows = {
        Kind.models: _models,
        Kind.detectors: _detectors,
        Kind.datasets: _datasets,
    }[kind]()
    terminal().print(as_table(rows))


@app.command()
def data(
    name: Annotated[
        str,
        typer.Argument(help="A name of `jaxhal list datasets`, .jsonl, or .parquet."),
    ],
    options: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[KEY=VALUE]...",
            help="Options of the loader, such as split=test; a key given twice has "
            "both values, null means none.",
        ),
    ] = None,
    json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Counts what is in a data set, and how far it can be judged without a model.

    The controls are response length and words that the prompt does not hold; an AUROC
    far from 0.5 says that the labels follow from these alone.  A bad row of a file is
    named, the others are counted, and the command exits 1.
    """
    from jaxhal.datasets import DATASETS, load_dataset, read_file
    from jaxhal.datasets.card import card, table
    from jaxhal.datasets.jsonl import write_rows

    with usage():
        chosen = _options(options or [])
        bad: list[str | None] = []
        if name in DATASETS or chosen:
            examples = load_dataset(name, **chosen)
        else:
            rows = list(read_file(name))
            bad = [row.error for row in rows]
            examples = [row.example for row in rows if row.example is not None]
        parts = card(examples) if examples or not any(bad) else []
    if json:
        write_rows("-", [{"name": name, "splits": parts}])
    elif parts:
        terminal().print(as_table(table(parts)))
    _finish(terminal(stderr=True), bad)


Setting = Annotated[
    list[str] | None,
    typer.Argument(metavar="[KEY=VALUE]...", help="Dotted keys and YAML values."),
]


Force = Annotated[
    bool,
    typer.Option(
        "--force", help="Replace what another configuration made under this name."
    ),
]


@app.command()
def run(
    config: Annotated[str, typer.Argument(help="A YAML configuration.")],
    settings: Setting = None,
    force: Force = False,
) -> None:
    """Runs one experiment and writes its directory.

    It reads the answers (or finds them in the feature store), fits every detector to
    the training part, judges the test part, and writes config.yaml, scores.parquet,
    results.json, results.md, report.html, figures and the fitted detectors.  The
    directory takes its name when it is whole; until then what was there stays.
    """
    from jaxhal import experiments

    with usage():
        result = experiments.run(config, settings or (), force=force)
    terminal().print(as_table([_brief(row) for row in result.rows]))
    terminal(stderr=True).print(f"written to {result.folder}", soft_wrap=True)


@app.command()
def tune(
    config: Annotated[str, typer.Argument(help="A YAML configuration.")],
    settings: Setting = None,
    force: Force = False,
) -> None:
    """Runs one experiment with the reader itself fine-tuned as one more method.

    Its settings are those of the configuration's `tuning` block, such as
    tuning.method=full or tuning.rank=4; without one they are the defaults.  A run that
    was stopped goes on where it was when it is started again.
    """
    run(config, ["tuning={}", *(settings or ())], force)


@app.command()
def sweep(
    config: Annotated[str, typer.Argument(help="A YAML configuration.")],
    settings: Annotated[
        list[str],
        typer.Argument(
            metavar="KEY=V1,V2...", help="Dotted keys; one with commas is swept."
        ),
    ],
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="Write the table as CSV.")
    ] = None,
    force: Force = False,
) -> None:
    """Runs every combination of settings; the model is loaded and read once."""
    from jaxhal import experiments

    with usage():
        check_apart({"the configuration": config}, {"--output": output})
        check_place(output)
        pairs = [_pair(setting) for setting in settings]
        # A YAML list or mapping is one value, whatever commas it holds.
        grid = {k: v.split(",") for k, v in pairs if "," in v and v[0] not in "[{"}
        for key, values in grid.items():
            if not all(values):
                raise ValueError(
                    f"{key}={','.join(values)} has an empty value; write {key}=V1,V2"
                )
        fixed = [f"{key}={value}" for key, value in pairs if key not in grid]
        table = experiments.sweep(config, grid, fixed, force=force)
    if output is not None:
        with usage(), replacing(output) as file:
            table.to_csv(file, index=False)
    keys = list(grid)
    rows = table.to_dict("records")
    terminal().print(as_table([{**{k: r[k] for k in keys}, **_brief(r)} for r in rows]))


@app.command()
def generate(
    config: Annotated[str, typer.Argument(help="A YAML configuration.")],
    settings: Setting = None,
) -> None:
    """Makes a labelled data set: a reader answers questions, a judge labels them.

    The folder gets dataset.jsonl, which `jaxhal run` and `jaxhal detect` read, and
    answers.jsonl, every answer with its verdict.  A run that was stopped goes on where
    it was; the command exits 1 when an answer could not be judged.
    """
    from jaxhal.experiments.making import make

    with usage():
        made = make(config, settings or ())
    console = terminal(stderr=True)
    console.print(", ".join(f"{n} {kind}" for kind, n in made.counts.items()))
    console.print(f"written to {made.folder}", soft_wrap=True)
    if made.counts.get("errors"):
        raise typer.Exit(1)


@app.command()
def guide(
    config: Annotated[str, typer.Argument(help="A YAML configuration.")],
    settings: Setting = None,
) -> None:
    """Writes responses guided by a detector, plainly sampled and greedily.

    The folder gets results.md with the detector's score, overlap with the references,
    whole references, novel words and length of each way, report.html and a figure.  A
    run that was stopped goes on where it was.
    """
    from jaxhal.experiments.guiding import WAYS, compare

    with usage():
        compared = compare(config, settings or ())
    keys = ("measure", *WAYS)
    terminal().print(as_table([{k: row[k] for k in keys} for row in compared.rows]))
    terminal(stderr=True).print(f"written to {compared.folder}", soft_wrap=True)


@app.command()
def bench(
    names: Annotated[
        list[str] | None, typer.Argument(help="Benchmarks; all by default.")
    ] = None,
    json: Annotated[
        Path | None, typer.Option("--json", help="Write the rows to this file.")
    ] = None,
) -> None:
    """Measures speed as ratios to what stands beside it in the same run.

    There are read, extract, probes, relevance, generate, nli and watchdog.
    """
    from jaxhal import bench as benches

    with usage():
        check_place(json)
        benches.run(names or [], json)


def _brief(row: Mapping[str, Any]) -> dict[str, Any]:
    """The columns of a result that fit a terminal."""
    pair = {key: row[key] for key in ("train", "test") if key in row}
    return {
        **pair,
        "method": row["method"],
        "AUROC": row["AUROC"],
        "95 % interval": f"{row['low']:.2f}–{row['high']:.2f}",
        "F1": row["F1"],
        "accuracy": row["accuracy"],
        "control": row["control"],
        "beats controls": row["beats controls"],
    }


def _files_of(model: str) -> dict[str, Path]:
    """What a model is read from, where that is on this machine, by what it is called.

    >>> _files_of("smollm2-135m")
    {}
    """
    path = Path(model)
    files = sorted(path.iterdir()) if path.is_dir() else [path]
    return {f"--model {file}": file for file in files if file.is_file()}


def _models() -> list[dict[str, Any]]:
    from jaxhal.models import registry

    entries = [registry.entry(name) for name in registry.names()]
    return [
        {
            "name": entry.name,
            "size": f"{entry.size / 1e6:.0f} MB",
            "licence": entry.licence,
            "what": entry.note,
        }
        for entry in entries
    ]


def _detectors() -> list[dict[str, Any]]:
    from jaxhal.detectors import CATALOGUE, get
    from jaxhal.scoring.shipped import MODELS, shipped

    return [
        {
            "name": each.name,
            "what": each.info.summary,
            "unit": each.info.unit,
            "trained": each.fit is not None,
            "fitted for": ", ".join(m for m in MODELS if each.name in shipped(m)),
            "control": each.info.control,
            "reference": each.info.reference,
        }
        for each in get(list(CATALOGUE))
    ]


def _datasets() -> list[dict[str, Any]]:
    from jaxhal.datasets import DATASETS

    return [
        {
            "name": name,
            "what": entry.summary,
            "licence": entry.licence,
            "reference": entry.reference,
        }
        for name, entry in DATASETS.items()
    ]


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


def _options(pairs: Iterable[str]) -> dict[str, Any]:
    """``key=value`` words; a key given again collects its values."""
    words = {"null": None, "none": None, "true": True, "false": False}
    found: dict[str, Any] = {}
    for pair in pairs:
        key, text = _pair(pair)
        value = words.get(text.lower(), text)
        found[key] = [*_several(found[key]), value] if key in found else value
    return found


def _pair(text: str) -> tuple[str, str]:
    key, equals, value = text.partition("=")
    if not key or not equals:
        raise ValueError(f"{text!r} is no option; write key=value")
    return key, value


def _several(value: Any) -> list[Any]:
    return value if isinstance(value, list) else [value]


def _finish(console: "Console", found: Sequence[str | None]) -> None:
    """Says what failed and exits 1 if anything did."""
    errors = [error for error in found if error is not None]
    for error in errors[:10]:
        console.print(f"error: {error}", soft_wrap=True)
    if len(errors) > 10:
        console.print(f"and {len(errors) - 10} more errors")
    if errors:
        raise typer.Exit(1)
