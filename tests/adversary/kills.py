"""Stops commands at random moments and says what came of it.

python tests/adversary/kills.py --stops 100 --seed 0 --command detect
"""

import argparse
import collections
import signal
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from stops import COMMANDS, campaign


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--stops", type=int, default=100)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--command", choices=COMMANDS, action="append")
    given = parser.parse_args()
    # A shell ignores Ctrl-C for what it runs in the background, and so do children.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    for name in given.command or COMMANDS:
        begun, counts = time.monotonic(), collections.Counter()
        with tempfile.TemporaryDirectory() as folder:
            command = COMMANDS[name]()
            for number, found in campaign(
                command, Path(folder), given.stops, given.seed
            ):
                what = f"exit {found.code}" if found.stopped else "was done before"
                counts[f"{signal.Signals(number).name}: {what}"] += 1
                print(".", end="", file=sys.stderr, flush=True)
        said = ", ".join(f"{count} x {what}" for what, count in sorted(counts.items()))
        print(f"\n{name}: {given.stops} stops in {time.monotonic() - begun:.0f} s")
        print(f"  {said}; nothing lost, every result the same", flush=True)


if __name__ == "__main__":
    main()
