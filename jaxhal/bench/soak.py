"""Does a server stay as small as it was, and answer whatever it is sent?

Ten thousand requests of three kinds, 16 at a time, to a server of SmolLM2-135M; then as
many by schemathesis, which makes them up by what the server says of itself.
"""

import asyncio
import random
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator

import httpx2
import psutil

from jaxhal.bench import row
from jaxhal.bench.server import OURS, PATIENCE, started

REQUESTS, FIRST, CLIENTS, NEW = 10_000, 1_000, 16, 4
# Counts of the server, but for those of asking for counts.
_COUNTED = re.compile(
    r'^jaxhal_requests_total{path="(?!/metrics).*status="(\d+)"} (\S+)$', re.MULTILINE
)


def rows() -> Iterator[dict]:
    with started(*OURS, "--max-tokens", str(NEW)) as server:
        process = psutil.Process(server.process)
        asyncio.run(_ask(server.url, range(FIRST)))
        first = process.memory_info().rss
        asyncio.run(_ask(server.url, range(FIRST, FIRST + REQUESTS)))
        last = process.memory_info().rss
        case = f"{REQUESTS:,} requests"
        metric = f"memory after them / after the {FIRST:,} before"
        yield row("soak", case, metric, last / first, 1.05)
        yield row("soak", case, "memory after them, MiB", last / 2**20)
        yield from _fuzzed(server.url)


async def _ask(url: str, numbers: range) -> None:
    """Verdicts, completions and streamed conversations of any length, none refused."""
    turn = asyncio.Semaphore(CLIENTS)

    async def one(client: httpx2.AsyncClient, number: int) -> None:
        rng = random.Random(number)
        text = " ".join(
            rng.choices(("a", "crate", "of", "pears"), k=rng.randint(1, 40))
        )
        said = [{"role": "user", "content": text}]
        path, body = (
            ("verdict", {"context": text, "response": f"{number} pears."}),
            ("completions", {"prompt": text, "max_tokens": rng.randint(1, 2 * NEW)}),
            ("chat/completions", {"messages": said, "stream": True}),
        )[number % 3]
        async with turn:
            answer = await client.post(f"{url}/v1/{path}", json=body)
            answer.raise_for_status()

    async with httpx2.AsyncClient(timeout=PATIENCE) as client:
        await asyncio.gather(*(one(client, number) for number in numbers))


def _fuzzed(url: str) -> Iterator[dict]:
    if (fuzzer := shutil.which("schemathesis")) is None:
        print("nothing is made up: install schemathesis", file=sys.stderr)
        return
    wishes = "--checks=not_a_server_error --continue-on-failure --max-examples=1000"
    before, seed = _counted(url), 0
    found: dict[int, int] = {}
    while (asked := sum(found.values())) < REQUESTS:
        command = [fuzzer, "run", *wishes.split(), f"--seed={seed}"]
        subprocess.run([*command, f"{url}/openapi.json"], stdout=sys.stderr)
        found = {code: n - before.get(code, 0) for code, n in _counted(url).items()}
        if sum(found.values()) == asked:
            raise RuntimeError(f"{fuzzer} asked nothing of {url}")
        seed += 1
    wrong = float(sum(n for status, n in found.items() if status >= 500))
    yield row(
        "soak", f"{asked:,} made up", "answered by a status of 500 or more", wrong, 0.0
    )


def _counted(url: str) -> dict[int, int]:
    """Requests by status, as the server counts them."""
    counts: dict[int, int] = {}
    for status, n in _COUNTED.findall(httpx2.get(f"{url}/metrics").text):
        counts[int(status)] = counts.get(int(status), 0) + int(float(n))
    return counts
