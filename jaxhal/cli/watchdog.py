"""``jaxhal watchdog``: explore, evaluate, check and serve."""

import asyncio
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from jaxhal.cli.console import Configuration, Setting, secret, tell, terminal, usage
from jaxhal.serve import LARGEST

if TYPE_CHECKING:
    from jaxhal.serve.proxy import Service
    from jaxhal.watchdog.config import Watch
    from jaxhal.watchdog.guarding import Watchdog

app = typer.Typer(no_args_is_help=True, help="Guards an agent by its bound.")


@app.command()
def explore(config: Configuration, settings: Setting = None) -> None:
    """Explores where an agent begins to hallucinate.

    The folder gets the bound, journal.jsonl with all that was said, queries.jsonl,
    summary.json, and review.jsonl: give a row there a "label" of 0 or 1 and explore
    again.  An exploration that was stopped goes on where it was.
    """
    with usage("watchdog"):
        from jaxhal.watchdog.building import explorer_of
        from jaxhal.watchdog.config import load_watch

        loaded = load_watch(config, settings or ())
        plan = loaded.plan
        found = explorer_of(loaded).run()
    said = []
    if plan.how == "reinforced" and found.policy is None:
        said.append(
            f"no policy was trained: of {plan.steps} queries changed in every way that "
            f"one learns from (plan.steps), there were {found.counts['steps']}"
        )
    if unsure := found.counts["unsure"]:
        path = loaded.folder / "review.jsonl"
        said.append(f"{unsure} answers wait for a person in {path}")
    row = {**found.counts, "stopped by": found.stopped}
    tell([row], *said, f"written to {loaded.folder}")


@app.command()
def evaluate(
    config: Configuration,
    settings: Setting = None,
    beside: Annotated[
        list[str] | None,
        typer.Option(help="Name of another exploration to compare; repeat for more."),
    ] = None,
) -> None:
    """Judges the watchdog on held-out questions, beside baselines and controls.

    The exploration's folder gets evaluation.md, evaluation.json and figures.  An
    evaluation that was stopped goes on where it was.
    """
    with usage("watchdog"):
        from jaxhal.watchdog.config import beside as explored_beside
        from jaxhal.watchdog.config import load_watch
        from jaxhal.watchdog.evaluate import evaluate as judge

        loaded = load_watch(config, settings or ())
        others = [explored_beside(loaded, name) for name in beside or ()]
        found = judge(loaded, others)
    keys = ("method", "AUROC", "low", "high", "F1", "accuracy", "control")
    rows = [{key: row[key] for key in keys} for row in found]
    tell(rows, f"written to {loaded.folder}")


@app.command()
def check(
    config: Configuration,
    query: Annotated[
        list[str] | None,
        typer.Option("--query", "-q", help="What is asked; repeat for more."),
    ] = None,
    source: Annotated[
        Path | None, typer.Option("--input", "-i", help="A text file, a query a line.")
    ] = None,
    setting: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="KEY=VALUE", help="Dotted key and YAML value."),
    ] = None,
) -> None:
    """Says of queries whether the agent may hallucinate, a JSON object a line."""
    with usage("watchdog"):
        from jaxhal.datasets.jsonl import numbered_lines, write_rows
        from jaxhal.watchdog.config import load_watch
        from jaxhal.watchdog.guarding import verdict

        loaded = load_watch(config, setting or ())
        queries = [*(query or [])]
        if source is not None:
            lines = (raw.decode("utf-8").strip() for _, raw in numbered_lines(source))
            queries += [line for line in lines if line]
        if not queries:
            raise ValueError("there is nothing to check; give --query or --input")
        dog = _explored(loaded, config)
        checks = asyncio.run(dog.checks(queries))
    rows: list[dict[str, Any]] = [
        {"query": one.query, **verdict(one, False)} for one in checks
    ]
    for row in rows:
        del row["mode"], row["blocked"]
    write_rows("-", rows)
    if any(one.error is not None for one in checks):
        raise typer.Exit(1)


@app.command()
def serve(
    config: Configuration,
    settings: Setting = None,
    host: Annotated[str, typer.Option(help="Address to listen at.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535)] = 8080,
    block: Annotated[
        bool, typer.Option("--block", help="Hold answers to flagged queries back.")
    ] = False,
    token: Annotated[
        str | None,
        typer.Option(envvar="JAXHAL_TOKEN", help="What a client has to show."),
    ] = None,
    teacher: Annotated[
        str | None,
        typer.Option(
            envvar="JAXHAL_TEACHER",
            help="What one who gives feedback has to show; by default the token.",
        ),
    ] = None,
    largest: Annotated[int, typer.Option(min=1, help="Bytes of a request.")] = LARGEST,
) -> None:
    """Stands in front of the agent and speaks as OpenAI's chat completions do."""
    with usage("watchdog"):
        from jaxhal.serve.running import bound, run, url_of

        token = secret(token, "JAXHAL_TOKEN")
        teacher = secret(teacher, "JAXHAL_TEACHER")
        bound(host, port).close()  # what is taken already should cost no loading
        shown = {"token": token, "teacher": teacher, "largest": largest}
        service = service_of(config, settings or (), block, **shown)
        at = bound(host, port)
    dog = service.watchdog
    console = terminal(stderr=True)
    if host not in ("127.0.0.1", "::1", "localhost") and token is None:
        console.print(f"anyone who reaches {host} can ask: give --token", style="bold")
    if not len(dog.store):
        console.print("the bound is empty: no query will be near it", style="bold")
    console.print(
        f"{dog.agent.name} behind {len(dog.store)} points at {url_of(host, at)}/v1"
    )
    run(service.app(host), at)


def service_of(
    config: str | Path, settings: Sequence[str], block: bool, **options: Any
) -> "Service":
    """The proxy of a configuration; ValueError where it would block nothing."""
    from jaxhal.serve.proxy import Service
    from jaxhal.watchdog.building import watchdog_of
    from jaxhal.watchdog.config import load_watch

    loaded = load_watch(config, settings)
    dog = _explored(loaded, config) if block else watchdog_of(loaded)
    return Service(dog, block=block, **options)


def _explored(loaded: "Watch", config: str | Path) -> "Watchdog":
    """The watchdog; ValueError where its bound holds no point, and before any model is
    loaded where the bound's file is not there."""
    from jaxhal.watchdog.building import watchdog_of

    beside = {"exact": "points.jsonl", "milvus": "bound.db"}.get(loaded.store, "")
    dog = (
        watchdog_of(loaded) if (loaded.folder / beside).exists() or not beside else None
    )
    if dog is None or not len(dog.store):
        raise ValueError(
            f"the bound in {loaded.folder} holds no point; run jaxhal watchdog explore "
            f"{config} first"
        )
    return dog
