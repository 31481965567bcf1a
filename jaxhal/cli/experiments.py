"""``jaxhal run``, ``tune``, ``sweep``, ``generate``, ``guide`` and ``bench``."""

from pathlib import Path
from typing import Annotated

import typer

from jaxhal.cli.console import (
    Configuration,
    Setting,
    brief,
    check_place,
    pair_of,
    tell,
    usage,
)
from jaxhal.cli.scoring import OnMesh
from jaxhal.io.files import check_apart, replacing

Force = Annotated[
    bool,
    typer.Option(
        "--force", help="Replace what another configuration made under this name."
    ),
]


def _with_mesh(settings: list[str] | None, mesh: str | None) -> list[str]:
    return [*(settings or ()), *([] if mesh is None else [f"mesh={mesh}"])]


def run(
    config: Configuration,
    settings: Setting = None,
    force: Force = False,
    distributed: Annotated[
        bool,
        typer.Option(
            "--distributed",
            help="Share the work with the other processes of a SLURM, GKE, TPU or MPI "
            "job, or of $JAX_COORDINATOR_ADDRESS, $JAX_NUM_PROCESSES, $JAX_PROCESS_ID.",
        ),
    ] = False,
    mesh: OnMesh = None,
) -> None:
    """Runs one experiment and writes its directory.

    It reads the answers (or finds them in the feature store), fits every detector to
    the training part, judges the test part, and writes config.yaml, scores.parquet,
    results.json, results.md, report.html, figures and the fitted detectors.  The
    directory takes its name when it is whole; until then what was there stays.

    Beside files there is the configuration `ragtruth`, which makes the detectors that
    come along.

    With --distributed every process is started with the same command.  All need the
    same feature store; each reads its part of the answers on its own devices, process 0
    does the rest.  One that was killed goes on when it is started again; after process
    0 was, start all of them.
    """
    with usage("experiments"):
        from jaxhal import experiments

        function = experiments.run_distributed if distributed else experiments.run
        result = function(config, _with_mesh(settings, mesh), force=force)
    if isinstance(result, experiments.Share):
        done = ", ".join(f"{count:,} {what}" for what, count in result.done.items())
        where = f"process {result.process} of {result.processes}"
        tell([], f"{where}: {done or 'nothing was left to read'}")
        return
    tell([brief(row) for row in result.rows], f"written to {result.folder}")


def tune(
    config: Configuration,
    settings: Setting = None,
    force: Force = False,
    mesh: OnMesh = None,
) -> None:
    """Runs one experiment with the reader itself fine-tuned as one more method.

    Its settings are those of the configuration's `tuning` block, such as
    tuning.method=full or tuning.rank=4; without one they are the defaults.  A run that
    was stopped goes on where it was when it is started again.
    """
    run(config, ["tuning={}", *(settings or ())], force, mesh=mesh)


def sweep(
    config: Configuration,
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
    with usage("experiments"):
        from jaxhal import experiments

        check_apart({"the configuration": config}, {"--output": output})
        check_place(output)
        pairs = [pair_of(setting) for setting in settings]
        given = [key for key, _ in pairs]
        for key in given:
            if given.count(key) > 1:
                raise ValueError(
                    f"{key} is given {given.count(key)} times; give it once, as "
                    f"{key}=V1,V2"
                )
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
    rows = table.to_dict("records")
    tell([{**{key: row[key] for key in grid}, **brief(row)} for row in rows])


def generate(
    config: Configuration,
    settings: Setting = None,
    mesh: OnMesh = None,
) -> None:
    """Makes a labelled data set: a reader answers questions, a judge labels them.

    The folder gets dataset.jsonl, which `jaxhal run` and `jaxhal detect` read, and
    answers.jsonl, every answer with its verdict.  A run that was stopped goes on where
    it was; the command exits 1 when an answer could not be judged.
    """
    with usage("experiments"):
        from jaxhal.experiments.making import make

        made = make(config, _with_mesh(settings, mesh))
    counts = ", ".join(f"{n} {kind}" for kind, n in made.counts.items())
    tell([], counts, f"written to {made.folder}")
    if made.counts.get("errors"):
        raise typer.Exit(1)


def guide(
    config: Configuration,
    settings: Setting = None,
    mesh: OnMesh = None,
) -> None:
    """Writes responses guided by a detector, plainly sampled and greedily.

    The folder gets results.md with the detector's score, overlap with the references,
    whole references, novel words and length of each way, report.html and a figure.  A
    run that was stopped goes on where it was.
    """
    with usage("experiments"):
        from jaxhal.experiments.guiding import WAYS, compare

        compared = compare(config, _with_mesh(settings, mesh))
    rows = [{key: row[key] for key in ("measure", *WAYS)} for row in compared.rows]
    tell(rows, f"written to {compared.folder}")


def bench(
    names: Annotated[
        list[str] | None,
        typer.Argument(help="By default the first eleven of those named above."),
    ] = None,
    json: Annotated[
        Path | None, typer.Option("--json", help="Write the rows to this file.")
    ] = None,
    against: Annotated[
        Path | None, typer.Option(help="For versions: a checkout of an earlier one.")
    ] = None,
) -> None:
    """Measures speed as ratios to what stands beside it in the same run.

    There are read, extract, probes, fit, relevance, generate, nli, encoders, serve,
    start and watchdog; mixture compares a layer's experts with ragged_dot; soak asks a
    server 20,000 times; stored takes 4-bit files of 0.5 and 1.5 billion parameters from
    the hub; accelerator needs one, and measures a model of 8 billion parameters on it;
    compiled needs none, and compiles models of 8 to 70 billion for several; versions
    compares with an earlier version's checkout.
    """
    from jaxhal import bench as benches

    with usage():
        check_place(json)
        benches.run(names or [], json, against)
