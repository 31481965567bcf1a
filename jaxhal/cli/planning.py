"""``jaxhal plan``."""

import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from jaxhal.cli.console import tell, usage

if TYPE_CHECKING:
    from jaxhal.bench.plan import Plan
    from jaxhal.models.config import Config


def plan(
    source: Annotated[
        str,
        typer.Argument(help="A config.json, a folder with one, a GGUF file or a name."),
    ],
    topology: Annotated[
        str, typer.Option(help="TPUs to compile for, such as v5e:2x4 or v5p:2x2x2.")
    ],
    batch: Annotated[int, typer.Option(min=1, help="Answers read together.")] = 4,
    tokens: Annotated[
        int, typer.Option(min=2, help="Of a prompt and its response together.")
    ] = 2048,
    response: Annotated[int, typer.Option(min=1, help="Those of the response.")] = 256,
    detector: Annotated[
        list[str] | None,
        typer.Option(
            "--detector",
            "-d",
            help="A detector by name; repeat for more.",
            show_default="toha, lookback_lens, token_entropy",
        ),
    ] = None,
    dtype: Annotated[
        str, typer.Option(help="Of the model's parameters: bfloat16 or float32.")
    ] = "bfloat16",
    mesh: Annotated[
        str | None,
        typer.Option(
            help="How the devices are arranged, such as data=2,model=4.",
            show_default="the fewest along model that fit",
        ),
    ] = None,
    price: Annotated[
        float | None, typer.Option(min=0, help="Dollars an hour of one device.")
    ] = None,
) -> None:
    """Says what reading answers would take of TPUs that are not here.

    It compiles for them: memory and collectives are those of the real program, the time
    is what the devices need at their best, by their data sheet.  Exits 1 when it does
    not fit.
    """
    # Nothing runs, so nothing is asked of a device, which may be somebody else's.
    os.environ.setdefault("JAX_PLATFORMS", "cpu")
    from jaxhal import detectors
    from jaxhal.bench import plan as plans
    from jaxhal.models.lm import check_dtype
    from jaxhal.models.mesh import sides

    with usage():
        check_dtype(dtype)
        names = detector or ["toha", "lookback_lens", "token_entropy"]
        reducers: dict[str, Any] = {}
        for one in detectors.get(names):
            reducers |= one.reducers
        found = plans.plan(
            _config(source),
            topology,
            plans.Shape(batch, tokens, response),
            reducers,
            mesh=None if mesh is None else sides(mesh),
            dtype=dtype,
        )
    tell(_rows(found, price), *_advice(found))
    if not found.fits:
        raise typer.Exit(1)


def _config(source: str) -> "Config":
    """The configuration alone; no weights are read."""
    from jaxhal.models import registry
    from jaxhal.models.config import from_huggingface, read_config
    from jaxhal.models.gguf import GGUFSource, config_from_gguf
    from jaxhal.models.settings import Settings, read_json

    path = Path(source)
    if path.suffix == ".json":
        return from_huggingface(Settings(read_json(path), source), source)
    path = registry.locate(source)
    return read_config(path) if path.is_dir() else config_from_gguf(GGUFSource(path))


def _rows(found: "Plan", price: float | None) -> list[dict[str, str]]:
    devices = found.mesh["data"] * found.mesh["model"]
    what = {
        "devices": f"{devices} x {found.kind}",
        "mesh": ",".join(f"{axis}={count}" for axis, count in found.mesh.items()),
        "answers": f"{found.shape.answers} of {found.shape.tokens:,} tokens, "
        f"{found.shape.response:,} of the response",
        "weights a device": _bytes(found.weights),
    }
    if not found.refused:
        called = found.collectives.items()
        what |= {
            "temporaries a device": _bytes(found.temporaries),
            "features a device": _bytes(found.features),
            "memory of a device": f"{_bytes(found.memory)}, "
            f"{found.needed / found.memory:.0%} used",
            "collectives, a layer's once": ", ".join(
                f"{n} {kind}" for kind, n in called
            )
            or "none",
        }
    what |= {
        "products": f"{found.flops / 1e12:,.1f} TFLOP",
        "seconds, at least": f"{found.seconds:.3g}, bound by {found.bound}",
        "answers a second, at most": f"{found.pace:,.3g}",
    }
    if price is not None:
        cost = price * devices / 3600 / found.pace * 1e6
        what["dollars a million answers, at least"] = f"{cost:,.0f}"
    return [{"what": name, "value": value} for name, value in what.items()]


def _advice(found: "Plan") -> list[str]:
    if found.fits:
        return []
    said = [f"does not fit: {found.refused}"] if found.refused else ["does not fit"]
    if found.weights > found.memory / 2:
        return [*said, "take more devices, as the weights fill half of one's memory"]
    return [*said, "read fewer or shorter answers together, or take more devices"]


def _bytes(size: int | float) -> str:
    if size < 1 << 30:
        return f"{size / 2**20:,.3g} MiB"
    return f"{size / 2**30:,.2f} GiB"
