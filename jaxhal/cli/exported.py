"""``jaxhal score``: verdicts by what an engine exported of its answers."""

import functools
from pathlib import Path
from typing import Annotated, Any

import typer

from jaxhal.cli.console import check_place, on_screen, usage
from jaxhal.cli.scoring import (
    DEFAULT,
    Adapt,
    BatchSize,
    Confidence,
    Detectors,
    Dtype,
    Every,
    Force,
    Input,
    Model,
    Output,
    Page,
    Promise,
    files_of,
    files_of_detectors,
    promised,
)
from jaxhal.cli.verdicts import check_results, deliver


def score(
    source: Input,
    states: Annotated[
        Path | None,
        typer.Option(help="Folder of hidden states, a .safetensors file an answer."),
    ] = None,
    layers: Annotated[
        str | None,
        typer.Option(
            help="Which they are, as vLLM's eagle_aux_hidden_state_layer_ids: 10,20.",
            show_default="all of the model's",
        ),
    ] = None,
    model: Model = DEFAULT,
    dtype: Dtype = "float32",
    output: Output = None,
    detector: Detectors = None,
    promise: Promise = None,
    confidence: Confidence = None,
    every: Every = False,
    page: Page = None,
    adapt: Adapt = False,
    batch_size: BatchSize = 8,
    force: Force = False,
) -> None:
    """Says the same as jaxhal detect, of what the engine that wrote answers exported.

    No layer of the model runs, and of its weights none are loaded that are not needed.
    Rows are those of jaxhal detect.  The hidden states of an answer are the file in
    STATES that its row names in "states", else "id" with .safetensors behind it, as
    vLLM writes it; its log probabilities are "logprobs" of the row, as an
    OpenAI-compatible server gives them with a choice.  An answer of whose tokens
    something else was exported gets an error.  Detectors that look at something else,
    such as attention, are none of these.
    """
    from jaxhal.datasets.jsonl import read_rows
    from jaxhal.models.registry import known_as
    from jaxhal.scoring.detection import placed, resolve
    from jaxhal.scoring.exported import reader_for, reading_of
    from jaxhal.scoring.results import adapted, results, settings_of
    from jaxhal.scoring.verdicts import check_adaptable, described

    as_rows = every or output is not None or not on_screen()
    with usage():
        read = files_of(model, "--model")
        read |= files_of_detectors(detector or ())
        if states is not None:
            read |= files_of(str(states), "--states")
        check_results(source, read, output, page)
        threshold, sure = promised(promise, confidence)
        if detector:  # a wrong one should cost no download
            named = placed(known_as(model), detector)
            resolve(known_as(model), named, threshold, sure)
        rows = read_rows(source)
        for path in (output, page):
            check_place(path)
        numbers = None if layers is None else _numbers(layers)
        said: dict[str, Any] = {"threshold": threshold, "confidence": sure}
        lm, chosen, exported = reader_for(
            model, states, detector or None, layers=numbers, dtype=dtype, **said
        )
        if adapt:
            check_adaptable(chosen)
    options: dict[str, Any] = {
        "batch_size": batch_size,
        "reports": page is not None or not as_rows or adapt,
        "every": every,
    }

    def settings() -> dict[str, Any]:
        of: dict[str, Any] = {"states": states and str(states.resolve())}
        of |= {"files of states": states and _stamp(states), "layers": exported.numbers}
        return settings_of(lm, chosen, **said, **options) | of

    how: Any = {"reading": reading_of(exported), **options}
    made = functools.partial(results, lm, rows, chosen, **how)
    deliver(
        (lambda **more: adapted(made(**more), chosen, every)) if adapt else made,
        settings,
        described(chosen, lm),
        command="score",
        source=source,
        output=output,
        page=page,
        as_rows=as_rows,
        force=force,
        whole=adapt,
    )


def _stamp(folder: Path) -> str:
    """What changes when an engine writes the files of a folder again."""
    from jaxhal.io.files import stamps
    from jaxhal.reading.keys import digest

    return digest(repr(stamps(folder.rglob("*.safetensors"))))


def _numbers(layers: str) -> list[int]:
    """Layers of the command line.

    >>> _numbers("10,20")
    [10, 20]
    """
    try:
        return [int(one) for one in layers.split(",")]
    except ValueError:
        raise ValueError(
            f"--layers {layers!r} are no numbers; write them as 10,20"
        ) from None
