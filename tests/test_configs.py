"""The configurations that come with the package."""

import re
from pathlib import Path

import pytest

from jaxhal.experiments import PRESETS, load_config
from jaxhal.experiments.guiding import Guiding
from jaxhal.experiments.making import Making
from jaxhal.experiments.running import detectors_of
from jaxhal.io.configuration import structured
from jaxhal.watchdog.config import load_watch

CONFIGS = sorted((Path(__file__).parent.parent / "configs").glob("*.yaml"))
CONFIGS += PRESETS.values()
FIELDS = ("Paper", "Command", "Minutes", "Expect", "Paper's")
OTHERS = {"generate": Making, "guide": Guiding}


def test_there_are_configurations():
    assert len(CONFIGS) >= 9


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_a_configuration_loads_and_says_what_to_expect(path):
    text = path.read_text("utf-8")
    header = text[: text.index("\nname: ")]
    assert all(line.startswith("#") for line in header.split("\n"))
    found = dict(re.findall(r"^# ([\w']+): +((?:.|\n#  )+)", header, re.MULTILINE))
    assert tuple(found) == FIELDS
    called = path.stem if path.stem in PRESETS else f"configs/{path.name}"
    known = r"jaxhal ((?:watchdog )?\w+) "
    command = re.search(rf"{known}{called}\b", found["Command"])
    assert command, found["Command"]
    if command[1] == "watchdog explore":
        assert load_watch(path).name == path.stem
    elif command[1] in OTHERS:
        assert structured(OTHERS[command[1]], path, []).name == path.stem
    else:
        assert command[1] in ("run", "sweep", "tune")
        config = load_config(path)
        assert config.name == path.stem
        assert detectors_of(config)
    assert re.search(r"\d", found["Minutes"])
    assert re.search(
        r"\d\.\d{3}" if command[1] != "generate" else r"\d", found["Expect"]
    )
    assert "no run" not in found["Expect"]
