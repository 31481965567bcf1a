"""What runs for hours by hand, each for a moment."""

import subprocess
import sys
from pathlib import Path

import pytest
import thorough


@thorough.mark
@pytest.mark.parametrize(
    "command",
    [
        "fuzz_rows.py --rows 60",
        "kills.py --stops 1 --command detect",
        "fuzz.py requests --count 50",
        "fuzz.py stalls --count 1",
    ],
)
def test_a_campaign_runs(command):
    script, *options = command.split()
    done = subprocess.run(
        [sys.executable, Path(__file__).parent / script, *options],
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0 and done.stdout.strip(), done.stderr[-3000:]
