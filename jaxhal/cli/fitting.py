"""``jaxhal fit`` and ``jaxhal rate``: detectors for a reader, and how often it errs."""

import dataclasses
from pathlib import Path
from typing import Annotated, Any

import typer

from jaxhal.cli.console import brief, detectors, tell, usage
from jaxhal.cli.scoring import DEFAULT, BatchSize, Dtype, Model, OnMesh, Weights
from jaxhal.io.checks import one_of
from jaxhal.io.showing import shown

# Read in one pass, and fitted to answers with or without annotated spans.
_DEFAULT = ("lookback_lens", "linear_probe", "toha_supervised", "toha")
_FOLDS = 5


def fit(
    output: Annotated[
        Path, typer.Option("--output", "-o", help="Folder for what is fitted.")
    ],
    data: Annotated[
        str | None,
        typer.Argument(
            help="Labelled answers: a .jsonl or .parquet file, or a data set by name."
        ),
    ] = None,
    preset: Annotated[
        str | None,
        typer.Option(
            help="Answers, split and detectors by name, instead of DATA: ragtruth."
        ),
    ] = None,
    model: Model = DEFAULT,
    dtype: Dtype = "float32",
    weights: Weights = None,
    mesh: OnMesh = None,
    detector: Annotated[list[str] | None, detectors(", ".join(_DEFAULT))] = None,
    folds: Annotated[
        int | None,
        typer.Option(min=2, help="Of cross-validation.", show_default=str(_FOLDS)),
    ] = None,
    seed: Annotated[
        int, typer.Option(min=0, max=2**32 - 1, help="Of folds and networks.")
    ] = 0,
    batch_size: BatchSize = 8,
    force: Annotated[
        bool, typer.Option("--force", help="Replace detectors saved there before.")
    ] = False,
) -> None:
    """Fits detectors to labelled answers as a model reads them.

    A row is {"id", "response", "source", "label": 0 or 1 or "labels": [{"start",
    "end"}], and either "prompt" or "context" + "question"}.  Each detector, and each
    control, judges one fold of the sources after the other, fitted to the others; the
    table says what that found, and a line below which detector will decide verdicts, if
    any.  What is saved was fitted to all answers, and `jaxhal detect --detector FOLDER`
    uses it.

    With --preset ragtruth the detectors are those that come along for smollm2-135m,
    fitted to RAGTruth's training part of QA answers by Llama-2-7b and 70b as the model
    reads them; the table is of its test part.  The answers are in the data root, else
    they are downloaded.
    """
    import jaxhal
    from jaxhal.datasets import load_dataset
    from jaxhal.detectors import build
    from jaxhal.scoring.collection import beside_controls
    from jaxhal.scoring.folders import check_folder
    from jaxhal.scoring.inputs import readable
    from jaxhal.scoring.verdicts import described

    names = detector or list(_DEFAULT)
    options: Any = {"seed": seed, "batch_size": batch_size}
    with usage(*["experiments"] if preset else []):
        check_folder(output, force)  # before hours go into it
        if preset is None:
            if data is None:
                raise ValueError("nothing to fit to; give DATA or --preset ragtruth")
            beside_controls(names)
            examples = load_dataset(data)
            lm = jaxhal.load(model, dtype=dtype, weights=weights, mesh=mesh)
            if not detector:
                names = [one.name for one in readable(lm, map(build, names))]
            options |= {"data": Path(data).stem, "folds": folds or _FOLDS}
            ready = jaxhal.fit(lm, examples, names, **options)
        else:
            from jaxhal import experiments

            one_of(experiments.PRESETS, preset=preset)
            if data or detector or folds or weights:
                raise ValueError(
                    f"--preset {preset} has answers, detectors and a split of its own; "
                    "leave it out, or DATA, --detector, --folds and --weights"
                )
            config = experiments.load_config(preset)
            options |= {"model": model, "dtype": dtype, "mesh": mesh or ""}
            ready = experiments.fit(dataclasses.replace(config, **options))
        ready.save_pretrained(output, force=force)
    said = described([*ready], ready.about["model"])
    tell([brief(row) for row in ready.rows], said, f"written to {output}")


def rate(
    source: Annotated[str, typer.Argument(help="JSON Lines of answers, - for stdin.")],
    model: Model = DEFAULT,
    dtype: Dtype = "float32",
    weights: Weights = None,
    mesh: OnMesh = None,
    detector: Annotated[
        list[str] | None,
        typer.Option(
            "--detector", "-d", help="A detector, or a folder that jaxhal fit wrote."
        ),
    ] = None,
    batch_size: BatchSize = 8,
) -> None:
    """Says how many of some answers are hallucinated, where few or none are labelled.

    That is what the deciding detector says of them, corrected by how it errs on
    labelled answers, with a 95 % interval for both samples.  Those are the answers that
    came with it, of which another share may be hallucinated (scaled probability
    average; Bella et al., 2010).

    If five rows or more of each class have a label, and others none, these rows correct
    it instead (prediction-powered inference; Angelopoulos et al., 2023).  They have to
    be a random part of all rows, and not what the detector was fitted to.
    """
    import jaxhal
    from jaxhal.datasets import examples
    from jaxhal.datasets.jsonl import read_rows
    from jaxhal.models.registry import known_as
    from jaxhal.scoring.detection import placed, resolve

    with usage():
        reader = known_as(model)
        names = placed(reader, detector) if detector else None
        resolve(reader, names)  # a wrong name should cost no download
        if not (rows := examples(read_rows(source))):
            raise ValueError(f"{shown(source)} holds no rows; give answers")
        lm = jaxhal.load(model, dtype=dtype, weights=weights, mesh=mesh)
        found = jaxhal.rate(lm, rows, names, batch_size=batch_size)
    names = ("rate", "low", "high", "answers", "labelled", "called", "by")
    how = "scaled probability average, by the labelled answers that came with it"
    if found.labelled:
        how = f"prediction-powered inference, by {found.labelled} labelled rows"
    tell([{n: getattr(found, n) for n in names}], f"{found.by}: {found.basis}", how)
