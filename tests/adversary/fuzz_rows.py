"""Random and hostile rows through ``jaxhal detect``, on a tiny model.

python tests/adversary/fuzz_rows.py --rows 100000 --seed 0
"""

import argparse
import collections
import json
import random
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from detect_bench import Bench
from hostile_rows import line


def campaign(
    bench: Bench, rows: int, seed: int, part: int = 1000, alone: int = 2
) -> Iterator[collections.Counter[str]]:
    """Counts of what came out of every part of so many rows, all of it checked."""
    for at, first in enumerate(range(0, rows, part)):
        rng = random.Random(f"{seed} {at}")
        lines = [line(rng) for _ in range(min(part, rows - first))]
        counts, output = bench.check(lines, page=at % 10 == 0, piped=at % 10 == 5)
        found = [json.loads(row) for row in output.split(b"\n")[:-1]]
        good = [n for n, row in enumerate(found) if row["error"] is None]
        for n in rng.sample(good, min(alone, len(good))):
            bench.check_alone(lines, output, n)
            counts["compared alone"] += 1
        counts["lines"] = len(lines)
        counts["pages"] = int(at % 10 == 0)
        yield counts


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, default=100_000)
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    begun, counts = time.monotonic(), collections.Counter()
    with tempfile.TemporaryDirectory() as folder:
        for found in campaign(Bench(Path(folder)), given.rows, given.seed):
            counts += found
            print(".", end="", file=sys.stderr, flush=True)
    said = ", ".join(f"{count} {what}" for what, count in sorted(counts.items()))
    print(f"\n{said}, in {time.monotonic() - begun:.0f} s; every row as it should be")


if __name__ == "__main__":
    main()
