"""``jaxhal serve``: verdicts over HTTP, and answers judged while they are written."""

import logging
import os
from pathlib import Path
from typing import Annotated

import typer

from jaxhal.cli.console import secret, terminal, usage
from jaxhal.cli.scoring import (
    DEFAULT,
    Confidence,
    Detectors,
    Dtype,
    OnMesh,
    Promise,
    Weights,
    promised,
)
from jaxhal.serve import LARGEST


def serve(
    model: Annotated[
        list[str] | None,
        typer.Option(
            "--model",
            "-m",
            help="A reader, as for detect; repeat for more.",
            show_default=DEFAULT,
        ),
    ] = None,
    dtype: Dtype = "float32",
    weights: Weights = None,
    mesh: OnMesh = None,
    detector: Detectors = None,
    promise: Promise = None,
    confidence: Confidence = None,
    upstream: Annotated[
        str | None,
        typer.Option(
            metavar="URL",
            help="Have another engine write, that speaks as OpenAI does there, such as "
            "http://localhost:8001/v1; its answers are judged here.",
        ),
    ] = None,
    watchdog: Annotated[
        Path | None,
        typer.Option(
            metavar="CONFIG",
            help="Have the agent of a watchdog's configuration answer conversations, "
            "guarded by its bound, as jaxhal watchdog serve does.",
        ),
    ] = None,
    block: Annotated[
        bool, typer.Option("--block", help="Hold back answers to flagged queries.")
    ] = False,
    teacher: Annotated[
        str | None,
        typer.Option(
            envvar="JAXHAL_TEACHER",
            help="What one who gives feedback to the watchdog has to show; by default "
            "the token.",
        ),
    ] = None,
    host: Annotated[str, typer.Option(help="Where to listen.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535)] = 8000,
    slots: Annotated[int, typer.Option(min=1, help="Answers written at once.")] = 16,
    max_tokens: Annotated[
        int, typer.Option(min=1, help="Of an answer, where a request does not say.")
    ] = 256,
    token: Annotated[
        str | None,
        typer.Option(envvar="JAXHAL_TOKEN", help="What a client has to show."),
    ] = None,
    largest: Annotated[int, typer.Option(min=1, help="Bytes of a request.")] = LARGEST,
    drain: Annotated[
        int, typer.Option(min=0, help="Seconds that open answers get at the end.")
    ] = 120,
) -> None:
    """Serves verdicts on answers, and answers with verdicts while they are written.

    POST /v1/verdict says of an answer whether it is hallucinated, and where; POST
    /v1/chat/completions and /v1/completions speak as OpenAI's do, with the reader as
    the model.  A page to try both is at /, what may be asked in /openapi.json.
    """
    console = terminal(stderr=True)
    with usage("serve", *[] if watchdog is None else ["watchdog"]):
        import jaxhal
        from jaxhal.cli.watchdog import service_of
        from jaxhal.scoring.detection import placed, resolve_for
        from jaxhal.serve.app import Reader, Server
        from jaxhal.serve.running import bound, run, url_of
        from jaxhal.serve.upstream import Upstream

        if watchdog is not None and upstream is not None:
            raise ValueError("--watchdog and --upstream both answer; give one of them")
        # In the environment a teacher's token may stand for other servers.
        teaches = teacher not in (None, os.environ.get("JAXHAL_TEACHER"))
        if watchdog is None and (block or teaches):
            raise ValueError("--block and --teacher are a watchdog's; give --watchdog")
        token = secret(token, "JAXHAL_TOKEN")
        threshold, sure = promised(promise, confidence)
        bound(host, port).close()  # what is taken already should cost no loading
        readers = {}
        for source in model or [DEFAULT]:
            lm = jaxhal.load(source, dtype=dtype, weights=weights, mesh=mesh)
            if lm.name in readers:
                raise ValueError(f"--model {source} is given twice; give it once")
            names = placed(lm.name, detector) if detector else None
            chosen = resolve_for(lm, names, threshold, sure)
            readers[lm.name] = Reader.of(lm, chosen, slots)
        judge = next(iter(readers.values())).judge
        engine = None if upstream is None else Upstream(upstream, judge)
        options = {"max_tokens": max_tokens, "token": token, "largest": largest}
        dog = None
        if watchdog is not None:
            teacher = secret(teacher, "JAXHAL_TEACHER")
            shown = {"token": token, "teacher": teacher, "largest": largest}
            dog = service_of(watchdog, (), block, **shown)
        server = Server(readers, upstream=engine, watchdog=dog, **options)
        at = bound(host, port)
    if host not in ("127.0.0.1", "::1", "localhost") and token is None:
        console.print(f"anyone who reaches {host} can ask: give --token", style="bold")
    for reader in readers.values():
        about = reader.about
        console.print(f"{about.name}: {about.because}", soft_wrap=True)
        if about.rides is None and upstream is None and watchdog is None:
            console.print(
                f"{about.name}: answers are written without a verdict: no detector "
                "that may decide judges while a token is written",
                soft_wrap=True,
            )
    console.print(url_of(host, at))
    logging.basicConfig(format="%(message)s")
    logging.getLogger("jaxhal.serve").setLevel(logging.INFO)
    try:
        run(server.app(host), at, drain)
    finally:
        for reader in readers.values():
            reader.close()
