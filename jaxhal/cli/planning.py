"""``jaxhal plan``."""

import math
import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from jaxhal.cli.console import detectors, tell, usage

if TYPE_CHECKING:
    from jaxhal.bench.bounds import Bound
    from jaxhal.bench.plan import Plan
    from jaxhal.models.config import Config
    from jaxhal.models.gguf import GGUFSource

# Of what a model's pass gives: attention and logits.
_DEFAULT = ("toha", "lookback_lens", "token_entropy")


def plan(
    source: Annotated[
        str,
        typer.Argument(help="A config.json, a folder with one, a GGUF file or a name."),
    ],
    topology: Annotated[
        str,
        typer.Option(
            help="Devices to compile for: TPUs such as v5e:1x1, v5e:2x4 or v5p:2x2x2, "
            "or the GPUs of a host such as h100, h200:8 or a100:4."
        ),
    ],
    task: Annotated[
        str, typer.Option(help="read answers, or generate responses to prompts.")
    ] = "read",
    batch: Annotated[
        int, typer.Option(min=1, help="Answers read or written together.")
    ] = 4,
    tokens: Annotated[
        int, typer.Option(min=2, help="Of a prompt and its response together.")
    ] = 2048,
    response: Annotated[int, typer.Option(min=1, help="Those of the response.")] = 256,
    detector: Annotated[
        list[str] | None, detectors(f"{', '.join(_DEFAULT)}; none to generate")
    ] = None,
    dtype: Annotated[
        str, typer.Option(help="Of the model's parameters: bfloat16 or float32.")
    ] = "bfloat16",
    weights: Annotated[
        str,
        typer.Option(
            help="dequantised are numbers of that type; matrices in blocks of few "
            "bits are stored, as a GGUF file has them, or int8 or int4 of another."
        ),
    ] = "dequantised",
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
    """Says what reading or writing answers would take of devices that are not here.

    It compiles for them: memory and collectives are those of the real program, the time
    is what the devices need at their best, by their data sheet.  What detectors read is
    counted: logits, and relevance there and back.  Exits 1 when it does not fit.
    """
    # Nothing runs, so nothing is asked of a device, which may be somebody else's.
    os.environ.setdefault("JAX_PLATFORMS", "cpu")
    from jaxhal.bench import plan as plans
    from jaxhal.detectors import get
    from jaxhal.models.lm import check_dtype
    from jaxhal.models.mesh import sides
    from jaxhal.models.placement import packings_of

    with usage():
        check_dtype(dtype)
        reducers: dict[str, Any] = {}
        for one in get(detector or (_DEFAULT if task == "read" else ())):
            reducers |= one.reducers
        config, file = _config(source)
        (packed,) = packings_of(weights, source, file is not None)
        found = plans.plan(
            config,
            topology,
            plans.Shape(batch, tokens, response),
            reducers,
            task=task,
            mesh=None if mesh is None else sides(mesh),
            dtype=dtype,
            packed=packed,
            file=file,
        )
    tell(_rows(found, price), *_advice(found))
    if not found.fits:
        raise typer.Exit(1)


def _config(source: str) -> "tuple[Config, GGUFSource | None]":
    """The configuration, and the file if it is one's; no weights are read."""
    from jaxhal.models import registry
    from jaxhal.models.families import from_huggingface, read_config
    from jaxhal.models.gguf import GGUFSource
    from jaxhal.models.gguf_config import config_from_gguf
    from jaxhal.models.settings import Settings, read_json

    path = Path(source)
    if path.suffix == ".json":
        return from_huggingface(Settings(read_json(path), source), source), None
    path = registry.locate(source)
    if path.is_dir():
        return read_config(path), None
    file = GGUFSource(path)
    return config_from_gguf(file), file


def _rows(found: "Plan", price: float | None) -> list[dict[str, str]]:
    devices, (answers, tokens, response) = math.prod(found.mesh.values()), found.shape
    writes = found.step is not None
    what = {
        "devices": f"{devices} x {found.kind}",
        "mesh": ",".join(f"{axis}={count}" for axis, count in found.mesh.items()),
        "answers": f"{answers} of {tokens:,} tokens, {response:,} of the response",
        "weights a device": _bytes(found.weights),
    }
    if not found.refused:
        called = [f"{n} {kind}" for kind, n in found.collectives.items()]
        kept = "cache and features" if writes else "features"
        what |= {
            "temporaries a device": _bytes(found.temporaries),
            f"{kept} a device": _bytes(found.outputs),
            "memory of a device": f"{_bytes(found.memory)}, "
            f"{found.needed / found.memory:.0%} used",
            "collectives, a layer's once": ", ".join(called) or "none",
        }
        if not writes:
            what |= {
                "calls of fused attention, a layer's once": f"{found.kernels}",
                "arrays of heads x tokens x tokens": f"{found.squares}",
            }
    flops, read = found.an_answer
    what["products an answer"] = f"{flops / 1e12:,.3g} TFLOP"
    what["memory read an answer"] = _bytes(read)
    if found.step is None:
        what["seconds, at least"] = _time(found.first)
    else:
        pace = answers / found.step.seconds
        what["seconds to the first token, at least"] = _time(found.first)
        what["seconds a token of each, at least"] = _time(found.step)
        what["tokens a second, at most"] = f"{pace:,.0f}"
    what["answers a second, at most"] = f"{found.pace:,.3g}"
    if price is not None:
        cost = price * devices / 3600 / found.pace * 1e6
        what["dollars a million answers, at least"] = f"{cost:,.0f}"
    return [{"what": name, "value": value} for name, value in what.items()]


def _time(bound: "Bound") -> str:
    return f"{bound.seconds:.3g}, bound by {bound.by}"


def _advice(found: "Plan") -> list[str]:
    if found.fits:
        return []
    said = [f"does not fit: {found.refused}"] if found.refused else ["does not fit"]
    if found.weights > found.memory / 2:
        fewer = "take more devices, or weights of fewer bits"
        return [*said, f"{fewer}, as they fill half of one's memory"]
    return [*said, "take fewer or shorter answers together, or more devices"]


def _bytes(size: int | float) -> str:
    if size < 1 << 30:
        return f"{size / 2**20:,.3g} MiB"
    return f"{size / 2**30:,.2f} GiB"
