"""The configurations that come with the package."""

import re
from pathlib import Path

import pytest

from jaxhal.experiments import load_config
from jaxhal.experiments.running import detectors_of

CONFIGS = sorted((Path(__file__).parent.parent / "configs").glob("*.yaml"))
FIELDS = ("Paper", "Command", "Minutes", "Expect", "Paper's")


def test_there_are_configurations():
    assert len(CONFIGS) >= 9


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_a_configuration_loads_and_says_what_to_expect(path):
    config = load_config(path)
    assert config.name == path.stem
    assert detectors_of(config)
    text = path.read_text("utf-8")
    header = text[: text.index("\nname: ")]
    assert all(line.startswith("#") for line in header.split("\n"))
    found = dict(re.findall(r"^# ([\w']+): +((?:.|\n#  )+)", header, re.MULTILINE))
    assert tuple(found) == FIELDS
    assert re.search(f"jaxhal (run|sweep|tune) configs/{path.name}", found["Command"])
    assert re.search(r"\d", found["Minutes"])
    assert re.search(r"\d\.\d{3}", found["Expect"])
    assert "no run" not in found["Expect"]
