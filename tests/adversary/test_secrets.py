"""Configurations: what the environment holds does not get into files and pages."""

import pytest
from omegaconf import OmegaConf

from jaxhal.experiments.config import Experiment, load_config
from jaxhal.experiments.making import make
from jaxhal.io.configuration import structured, to_yaml
from jaxhal.watchdog.config import load_watch

SECRET = "sk-a-secret-that-nobody-shows"
BASE = {"name": "a", "data": [{"name": "bundled"}], "detectors": ["toha"]}

ASKING = [
    "${oc.env:JAXHAL_SECRET}",
    "${oc.env:NOT_SET,${oc.env:JAXHAL_SECRET}}",
    "x ${oc.decode:${oc.env:JAXHAL_SECRET}} y",
    "${oc.create:{a: ${oc.env:JAXHAL_SECRET}}}",
    "${somebodys.own:1}",
    "${oc.dict.values:data}",
    "${${name}:JAXHAL_SECRET}",
    "${oc.${part}:JAXHAL_SECRET}",
]


@pytest.fixture(autouse=True)
def secret(monkeypatch):
    monkeypatch.setenv("JAXHAL_SECRET", SECRET)


@pytest.mark.parametrize("asking", ASKING)
def test_the_environment_is_not_read(asking, tmp_path):
    path = tmp_path / "config.yaml"
    path.write_text(OmegaConf.to_yaml(BASE | {"notes": [asking]}))
    for ask in (
        lambda: load_config(BASE | {"notes": [asking]}),
        lambda: load_config(path),
        lambda: load_config(BASE, [f"notes=['{asking}']"]),
        lambda: load_config(BASE, [f"model={asking}"]),
        lambda: load_config(BASE | {"seed": asking}, ["seed=1"]),
        lambda: load_config(BASE | {"name": asking}, ["name.x=1"]),
        lambda: load_config(BASE, [f"name={asking}", "name.x=1"]),
        lambda: load_config(BASE | {"notes": [asking]}, ["notes.0.b=1"]),
        lambda: load_config(
            BASE | {"data": [{"name": "x", "options": {"a": {"b": asking}}}]}
        ),
        lambda: load_watch({"name": "w", "questions": "coqa", "domain": asking}),
        lambda: make({"name": asking, "questions": "coqa"}),
    ):
        with pytest.raises(ValueError) as caught:
            ask()
        assert SECRET not in str(caught.value)


def test_the_error_names_the_key_and_the_remedy():
    with pytest.raises(
        ValueError, match=r"notes\.0 is '\$\{oc\.env:HOME\}'.*write the value itself"
    ):
        load_config(BASE | {"notes": ["${oc.env:HOME}"]})


def test_keys_of_the_configuration_may_stand_in_others():
    config = load_config(BASE | {"notes": ["of ${name} by ${data.0.name}, ${seed}: x"]})
    assert config.notes == ["of a by bundled, 0: x"]


def test_what_looks_like_an_interpolation_is_not_resolved_later(tmp_path):
    """Text that came whole through one reading is refused, not read, by the next."""
    config = structured(Experiment, BASE)
    config.notes = ["${oc.env:JAXHAL_SECRET}"]
    path = tmp_path / "config.yaml"
    path.write_text(to_yaml(config))
    assert SECRET not in path.read_text()
    with pytest.raises(ValueError, match="notes.0"):
        load_config(path)
