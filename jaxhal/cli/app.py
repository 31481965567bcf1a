"""The ``jaxhal`` command.  Heavy imports wait until a command needs them."""

import inspect
import os
import sys
import warnings
from typing import Annotated

import typer

from jaxhal.cli import (
    experiments,
    exported,
    fitting,
    listing,
    planning,
    scoring,
    serving,
)
from jaxhal.cli.console import open_streams, usage
from jaxhal.cli.stopping import orderly
from jaxhal.cli.watchdog import app as watchdog
from jaxhal.llm import hosts
from jaxhal.models import registry

app = typer.Typer(
    add_completion=False,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
app.add_typer(watchdog, name="watchdog")
for command in (
    scoring.demo,
    scoring.detect,
    serving.serve,
    exported.score,
    fitting.fit,
    fitting.rate,
    listing.list_,
    listing.data,
    experiments.run,
    experiments.tune,
    experiments.sweep,
    experiments.generate,
    experiments.guide,
    experiments.bench,
    planning.plan,
):
    app.command(command.__name__.rstrip("_"))(command)
for registered in (*app.registered_commands, *watchdog.registered_commands):
    # A terminal breaks lines where it ends, and not where the source does as well.
    told = inspect.getdoc(registered.callback) or ""
    registered.help = "\n\n".join(" ".join(one.split()) for one in told.split("\n\n"))


def main() -> None:
    """Runs a command; it exits 0, 1 when a row failed, 2 on bad usage or a file that
    cannot be read or written, 130 on Ctrl-C and 143 on SIGTERM."""
    with orderly():
        open_streams()
        warnings.showwarning = _warn
        try:
            app(prog_name="jaxhal")
        except OSError as error:  # of what is printed
            typer.echo(f"jaxhal: {error}", err=True)
            os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # for what is left of it
            sys.exit(2)


def _warn(message: Warning | str, *where: object) -> None:
    """In a line, without the place in the package that it comes from."""
    typer.echo(f"jaxhal: {message}", err=True)


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
        # What one command compiled, the next one finds; jax reads this when it is
        # imported.
        compiled = str(registry.cache_dir() / "compiled")
        os.environ.setdefault("JAX_COMPILATION_CACHE_DIR", compiled)
        # Many small programs take as long as a large one.
        os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0")
        for name in allowed or ():
            hosts.place_of(name)
            os.environ[hosts.VARIABLE] = f"{os.environ.get(hosts.VARIABLE, '')},{name}"
