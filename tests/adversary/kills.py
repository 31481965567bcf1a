"""Stops commands at random moments and says what came of it.

python tests/adversary/kills.py --stops 100 --seed 0 --command detect
"""

import argparse
import collections
import functools
import signal
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))


def main() -> None:
    import conftest  # noqa: F401  (a compiler in a hurry, and Ctrl-C that is heard)
    import stopped_server
    from stopped import COMMANDS
    from stops import campaign

    campaigns = {
        name: functools.partial(campaign, make) for name, make in COMMANDS.items()
    }
    campaigns["serve"] = stopped_server.campaign

    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--stops", type=int, default=100)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--command", choices=campaigns, action="append")
    given = parser.parse_args()
    for name in given.command or campaigns:
        begun, counts = time.monotonic(), collections.Counter()
        with tempfile.TemporaryDirectory() as folder:
            stops = campaigns[name](Path(folder) / name, given.stops, given.seed)
            for number, found in stops:
                what = f"exit {found.code}" if found.stopped else "was done before"
                counts[f"{signal.Signals(number).name}: {what}"] += 1
                print(".", end="", file=sys.stderr, flush=True)
        said = ", ".join(f"{count} x {what}" for what, count in sorted(counts.items()))
        print(f"\n{name}: {given.stops} stops in {time.monotonic() - begun:.0f} s")
        print(f"  {said}; nothing lost, every result the same", flush=True)


if __name__ == "__main__":
    main()
