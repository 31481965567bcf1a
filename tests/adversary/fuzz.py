"""Fuzzing by the thousand: ``python tests/adversary/fuzz.py requests``."""

import argparse
import importlib
import sys
from pathlib import Path

if __name__ == "__main__":
    sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parents[1])]
    parser = argparse.ArgumentParser()
    parser.add_argument("what", choices=("requests", "stalls"))
    parser.add_argument("--count", type=int, default=10_000)
    given = parser.parse_args()
    importlib.import_module(f"fuzz_{given.what}").main(given.count)
