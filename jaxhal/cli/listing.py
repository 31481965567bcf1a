"""``jaxhal list`` and ``jaxhal data``: what there is, and what is in it."""

import enum
import inspect
import sys
from collections.abc import Collection, Iterable, Mapping
from typing import Annotated, Any, get_args, get_origin

import typer

from jaxhal.cli.console import (
    as_table,
    finish,
    on_screen,
    pair_of,
    terminal,
    usage,
)
from jaxhal.io.checks import one_of


class Kind(enum.StrEnum):
    """What ``jaxhal list`` can list."""

    models = "models"
    families = "families"
    detectors = "detectors"
    datasets = "datasets"


def list_(
    kind: Annotated[Kind, typer.Argument(help="What to list.")],
    search: Annotated[
        str | None,
        typer.Option(
            metavar="WORDS",
            help="Models of the Hugging Face hub that are called like that, and the "
            "largest form of each that this machine's memory has room for.",
        ),
    ] = None,
    json: Annotated[bool, typer.Option("--json", help="Print JSON Lines.")] = False,
) -> None:
    """Lists what can be named on the command line.

    On a terminal detectors have a name and what they are; with --json, and where the
    lines go elsewhere, also a unit, a reference, and whether they are trained, come
    fitted or are controls.
    """
    from jaxhal.datasets.jsonl import write_rows

    if search is not None:
        if kind != Kind.models:
            raise typer.BadParameter(f"--search finds models, not {kind}")
        with usage():
            rows = _found(search)
    else:
        each = {
            Kind.models: _models,
            Kind.families: _families,
            Kind.detectors: _detectors,
            Kind.datasets: _datasets,
        }
        rows = each[kind]()
    if json:
        write_rows("-", rows)
        return
    if not rows:  # of a search
        typer.echo(f"no model of the hub is called {search!r}; try fewer words")
        return
    if kind == Kind.detectors and on_screen():
        rows = [{key: row[key] for key in ("name", "what")} for row in rows]
    terminal().print(as_table(rows))
    if kind == Kind.models and search is None and on_screen():
        typer.echo(
            "others load from a folder, a .gguf file or the hub; which families, and "
            "what was tested of each: jaxhal list families"
        )


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
        taken = (
            inspect.signature(DATASETS[name].loader).parameters
            if name in DATASETS
            else {}
        )
        chosen = _options(options or [], taken)
        bad: list[str | None] = []
        if name in DATASETS or chosen:
            examples = load_dataset(name, **chosen)
        else:
            rows = list(read_file(name))
            bad = [row.error for row in rows]
            examples = [row.example for row in rows if row.example is not None]
            if not rows:
                raise ValueError(f"{name} holds no rows; give at least one")
        parts = card(examples) if examples or not any(bad) else []
    if json:
        write_rows("-", [{"name": name, "splits": parts}])
    elif parts:
        terminal().print(as_table(table(parts)))
    finish(terminal(stderr=True), bad)


def _models() -> list[dict[str, Any]]:
    from jaxhal.models import registry
    from jaxhal.models.families import shown
    from jaxhal.scoring.shipped import MODELS

    tested = shown()
    return [
        {
            "name": one.name,
            "family": one.family,
            "tested": ", ".join(tested[one.family]),
            "size": f"{one.size / 1e6:.0f} MB",
            "fitted detectors": one.name in MODELS,
            "licence": one.licence,
            "what": one.note,
        }
        for one in (registry.ENTRIES[name] for name in registry.names())
    ]


def _families() -> list[dict[str, Any]]:
    from jaxhal.models.families import shown

    return [{"name": name, "tested": ", ".join(of)} for name, of in shown().items()]


def _found(words: str) -> list[dict[str, Any]]:
    """Offers of the hub; what does not load is counted on standard error."""
    from jaxhal.models import offers, placement

    room = placement.room()
    found, others = offers.search(words, room)
    print(f"weights may take {room / 2**30:.1f} GiB here", file=sys.stderr)
    if others:
        of = ", ".join(
            sorted(f"{name or 'unknown'} ({n})" for name, n in others.items())
        )
        print(f"not listed, as they do not load: {of}", file=sys.stderr)
    return [
        {
            "name": one.form.name,
            "options": one.form.options,
            "fits": one.fits,
            "weights": f"{one.form.size / 2**30:.1f} GiB",
            "parameters": f"{one.parameters / 1e9:.2f} B",
            "family": one.family,
            "gated": one.gated,
            "downloads": one.downloads,
        }
        for one in found
    ]


def _detectors() -> list[dict[str, Any]]:
    from jaxhal.detectors import CATALOGUE, ensemble, get
    from jaxhal.scoring.shipped import MODELS, shipped

    made = [make() for make in CATALOGUE.values()]
    made.append(ensemble(get(["linear_probe", "novel_words"])))
    return [
        {
            "name": each.name,
            "what": each.summary,
            "unit": each.unit,
            "trained": each.fit is not None,
            "ships fitted": any(each.name in shipped(model) for model in MODELS),
            "control": each.control,
            "reference": each.reference,
        }
        for each in made
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


def _options(
    pairs: Iterable[str], taken: Mapping[str, inspect.Parameter]
) -> dict[str, Any]:
    """``key=value`` words as a loader takes them; a key given again collects values."""
    kinds = {
        key: [get_origin(kind) or kind for kind in get_args(of) or [of]]
        for key, of in ((key, one.annotation) for key, one in taken.items())
    }
    found: dict[str, list[Any]] = {}
    for pair in pairs:
        key, text = pair_of(pair)
        found.setdefault(key, []).append(_value(key, text, kinds.get(key, ())))
    for key, some in found.items():
        if len(some) == 1 or key not in taken:  # what is not taken is said elsewhere
            continue
        if Collection not in kinds.get(key, ()):
            raise ValueError(f"{key} is given {len(some)} times; give it once")
        if None in some:
            raise ValueError(f"{key} is null and has values; give null, or the values")
    return {key: some[0] if len(some) == 1 else some for key, some in found.items()}


def _value(key: str, text: str, kinds: Collection[Any]) -> Any:
    if text.lower() in ("null", "none") and type(None) in kinds:
        return None
    if int in kinds:
        if not text.isdecimal():
            raise ValueError(f"{key} is {text!r}; give a whole number, 0 or more")
        return int(text)
    if bool in kinds:
        one_of(("true", "false"), **{key: text.lower()})
        return text.lower() == "true"
    return text
