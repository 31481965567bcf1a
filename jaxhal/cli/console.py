"""What commands say, and how they say what is wrong."""

import contextlib
import io
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from jaxhal.cli.stopping import begun, notes_of
from jaxhal.io.extras import MissingExtra, need
from jaxhal.io.files import check_replaceable, is_file
from jaxhal.io.showing import printable

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

Configuration = Annotated[str, typer.Argument(help="A YAML configuration.")]
Setting = Annotated[
    list[str] | None,
    typer.Argument(metavar="[KEY=VALUE]...", help="Dotted keys and YAML values."),
]


def detectors(default: str) -> Any:
    """The option that takes detectors by name, and what is taken without it."""
    text = "A detector by name; repeat for more."
    return typer.Option("--detector", "-d", help=text, show_default=default)


class _Closed:
    """In place of a standard stream that whoever began this process has closed."""

    closed = True  # so Python does not flush it in the end
    encoding = "utf-8"

    def __init__(self, name: str):
        self._name = name

    def isatty(self) -> bool:
        return False

    def flush(self) -> None:
        pass

    def _fail(self, *_: Any) -> Any:
        raise OSError(f"{self._name} is closed; give it a file or a pipe")

    write = read = readline = __iter__ = _fail
    buffer = property(_fail)


def open_streams() -> None:
    """Sees to it that what a standard stream cannot do is an OSError that says so, and
    that what it cannot spell is written as Python escapes it."""
    for name, said in (("stdin", "standard input"), ("stdout", "standard output")):
        if getattr(sys, name) is None:
            setattr(sys, name, _Closed(said))
    if sys.stderr is None:
        sys.stderr = open(os.devnull, "w")  # nothing can be said
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")


def on_screen(stderr: bool = False) -> bool:
    """Whether people see what is printed, and no program or file gets it."""
    return (sys.stderr if stderr else sys.stdout).isatty()


def terminal(stderr: bool = False) -> "Console":
    """Where lines go: to people or, where it is no terminal, to programs."""
    from rich.console import Console

    shown = on_screen(stderr)
    return Console(
        stderr=stderr,
        width=None if shown else 120 if stderr else 400,  # a line a name, to grep
        markup=False,  # ids and paths may hold square brackets
        highlight=False,
    )


def as_table(rows: Sequence[Mapping[str, Any]]) -> "Table":
    """Rows of equal keys as a table."""
    from rich.table import Table
    from rich.text import Text

    from jaxhal.reporting.page import cell

    made = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    for at, (name, value) in enumerate(rows[0].items()):
        justify = "right" if cell(value)[1] else "left"
        made.add_column(name, justify=justify, no_wrap=at == 0)
    for row in rows:
        cells = (printable(cell(value)[0], keep="") for value in row.values())
        made.add_row(*map(Text, cells))
    return made


def brief(row: Mapping[str, Any]) -> dict[str, Any]:
    """The columns of a result that fit a terminal."""
    pair = {key: row[key] for key in ("train", "test") if key in row}
    between = {"95 % interval": f"{row['low']:.2f}–{row['high']:.2f}"}
    rest = {key: row[key] for key in ("F1", "accuracy", "control", "beats controls")}
    return pair | {"method": row["method"], "AUROC": row["AUROC"]} | between | rest


def tell(rows: Sequence[Mapping[str, Any]], *lines: str) -> None:
    """Rows go to standard output, lines to standard error."""
    if rows:
        terminal().print(as_table(rows))
    for line in lines:
        terminal(stderr=True).print(line, soft_wrap=True)


def check_place(path: str | Path | None) -> None:
    """Finds out that a result cannot be written before hours go into it."""
    if path is None or path == "-":
        return
    if Path(path).is_dir():
        raise IsADirectoryError(f"{path} is a folder; give a file name")
    if not Path(path).resolve().parent.is_dir():
        raise FileNotFoundError(f"{Path(path).parent}: no such folder; make it first")
    if is_file(path):
        check_replaceable(path)


def secret(value: str | None, variable: str) -> str | None:
    """What was given, or stands in the environment; ValueError where that is empty.

    An option takes an empty variable for none, and would leave a server open.
    """
    if value is None and variable in os.environ:
        raise ValueError(f"${variable} is empty; give one, or unset it")
    return value


@contextlib.contextmanager
def usage(*extras: str) -> Iterator[None]:
    """Turns what is wrong with the arguments into one line and exit code 2.

    So it does with ``extras`` of the package that are needed and not installed.
    """
    begun()
    try:
        for extra in extras:
            need(extra)
        yield
    except (ValueError, KeyError, OSError, RuntimeError, MissingExtra) as error:
        # A KeyError shows its message quoted.
        text = error.args[0] if isinstance(error, KeyError) and error.args else error
        line = "; ".join([f"jaxhal: {text}", *notes_of(error)])
        typer.echo(printable(line), err=True)
        raise typer.Exit(2) from error


def pair_of(text: str) -> tuple[str, str]:
    """Key and value of ``key=value``."""
    key, equals, value = text.partition("=")
    if not key or not equals:
        raise ValueError(f"{text!r} is no option; write key=value")
    return key, value


def finish(console: "Console", found: Sequence[str | None]) -> None:
    """Says what failed and exits 1 if anything did."""
    errors = [error for error in found if error is not None]
    for error in errors[:10]:
        console.print(f"error: {printable(error)}", soft_wrap=True)
    if len(errors) > 10:
        console.print(f"and {len(errors) - 10} more errors")
    if errors:
        raise typer.Exit(1)
