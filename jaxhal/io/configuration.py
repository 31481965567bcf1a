"""Configurations: dataclasses read from YAML, every key checked, and their folders."""

import contextlib
import dataclasses
import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, get_origin

from yaml import YAMLError

from jaxhal.io.extras import brought_by
from jaxhal.io.files import replacing
from jaxhal.io.showing import shown

with brought_by("experiments"):
    from omegaconf import MISSING as MISSING
    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException


def structured(
    schema: type,
    source: str | os.PathLike | Mapping[str, Any] | Any,
    overrides: Iterable[str] = (),
) -> Any:
    """A dataclass from a YAML file, a mapping or an instance, every key checked.

    Overrides are dotted ``key=value`` pairs, values as in YAML.  Raises ValueError on
    what is not YAML, an unknown key, a value of the wrong kind, or a missing one.
    """
    if isinstance(source, (str, os.PathLike)):
        path = Path(source)
        if not path.is_file():
            raise FileNotFoundError(f"{path}: no such file; give a .yaml configuration")
        with _explained(str(path)):
            found = OmegaConf.load(path)
        if OmegaConf.is_list(found):
            raise ValueError(f"{path} is a list; a configuration is a mapping of keys")
    elif isinstance(source, schema):
        found = OmegaConf.structured(source)
    else:
        found = OmegaConf.create(dict(source))
    try:
        try:
            merged = OmegaConf.merge(OmegaConf.structured(schema), found)
        except TypeError as error:  # that is all it says of a mapping for a list
            items: Any = found.items()
            fields = dataclasses.fields(schema)
            lists = {one.name for one in fields if get_origin(one.type) is list}
            given = [str(key) for key, value in items if OmegaConf.is_dict(value)]
            keys = [key for key in given if key in lists] or given
            raise ValueError(
                f"configuration: {' or '.join(keys)} is a mapping and has to be a list"
            ) from error
        _check_plain(merged, "the configuration")  # before anything is looked up in it
        for pair in overrides:
            key, equals, value = pair.partition("=")
            if not equals:
                raise ValueError(f"override {pair!r} is not of the form key=value")
            if key.startswith("tuning.") and "tuning" in merged:
                if merged.tuning is None:
                    OmegaConf.update(merged, "tuning", {})
            outer = key.partition(".")[0]
            block: Any = OmegaConf.select(merged, outer, throw_on_missing=False)
            if OmegaConf.is_config(block):
                OmegaConf.set_readonly(block, False)  # what is frozen comes of it
            if OmegaConf.select(merged, key, throw_on_missing=False) is None:
                _check_key(merged, key)
            with _explained(pair):
                parsed: Any = OmegaConf.create(f"x: {value}")
            _check_plain(parsed, pair)
            OmegaConf.update(merged, key, parsed["x"])
            _check_plain(merged, "the configuration")
        return OmegaConf.to_object(merged)
    except OmegaConfBaseException as error:
        said, key = str(error).splitlines()[0], error.full_key
        where = f"{key}: " if key and key not in said else ""
        raise ValueError(f"configuration: {where}{said}") from error


def to_yaml(config: Any) -> str:
    """The configuration with every default written out."""
    return OmegaConf.to_yaml(OmegaConf.structured(config))


@contextlib.contextmanager
def _explained(where: str) -> Iterator[None]:
    """Says what is not YAML."""
    try:
        yield
    except UnicodeDecodeError as error:
        raise ValueError(f"{where} is not UTF-8; save it as UTF-8") from error
    except YAMLError as error:
        problem = " ".join(str(error).split())
        raise ValueError(
            f"{where!r} is not YAML, close its brackets and quote its colons: {problem}"
        ) from error


def _check_plain(config: Any, where: str) -> None:
    """Refuses what asks for anything but another key of the configuration.

    What a configuration holds is written to run folders and pages, so values of the
    environment, which may be secret, do not get in.
    """

    def walk(value: Any, key: str) -> None:
        if isinstance(value, dict):
            for name, inner in value.items():
                walk(inner, f"{key}.{name}" if key else str(name))
        elif isinstance(value, list):
            for at, inner in enumerate(value):
                walk(inner, f"{key}.{at}")
        elif isinstance(value, str):
            rest, count = value, 1
            while count:  # from the innermost out
                rest, count = re.subn(r"\$\{[\w.\[\]]+\}", "", rest)
            if "${" in rest:
                raise ValueError(
                    f"{where}: {key} is {shown(value)!r}; only other keys can stand in "
                    "${...}: the environment and other resolvers are not read, for "
                    "what they give would be written to results and pages; write the "
                    "value itself"
                )

    walk(OmegaConf.to_container(config, resolve=False), "")


def _check_key(merged: Any, key: str) -> None:
    """An override may name what has no value yet, but not what does not exist."""
    parent, _, last = key.rpartition(".")
    holder = OmegaConf.select(merged, parent) if parent else merged
    if holder is None:
        _check_key(merged, parent)
    elif OmegaConf.is_list(holder):
        raise ValueError(
            f"unknown key {key!r}; {parent!r} has {len(holder)}, counted from 0"
        )
    elif not OmegaConf.is_dict(holder):
        raise ValueError(f"unknown key {key!r}; {parent!r} is one value, {holder!r}")
    elif last not in holder.keys() and OmegaConf.get_type(holder) is not dict:
        raise ValueError(f"unknown key {key!r}; it takes {', '.join(holder.keys())}")


def claim(
    folder: Path,
    config: Any,
    counts: Callable[[Any], Any] = lambda one: one,
    beside: Sequence[str] = (),
) -> None:
    """Makes sure that what the folder holds was made the same way.

    Raises FileExistsError when it holds what none of its kind made, ValueError where
    the configuration kept there differs, naming how.

    Args:
      folder: made, with config.yaml in it, if it is not there.
      config: a dataclass; a field that it had not then counts as left out.
      counts: what of it has to be the same; where the folder is never is.
      beside: files that may be there before config.yaml is.
    """
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "config.yaml"
    if not path.is_file():
        names = sorted(entry.name for entry in folder.iterdir())
        if strange := [n for n in names if n not in beside and not n.startswith(".")]:
            raise FileExistsError(
                f"{folder} holds what was not made here, such as {strange[0]!r}; give "
                "another 'name' or 'out'"
            )
        write_config(folder, config)
        return
    kept = dataclasses.replace(structured(type(config), path, []), out=config.out)
    kept, asked = counts(kept), counts(config)
    names = [field.name for field in dataclasses.fields(config)]
    other = [name for name in names if getattr(kept, name) != getattr(asked, name)]
    if other:
        raise ValueError(
            f"{folder} holds what another configuration made, with another "
            f"{', '.join(other)}; give this one another 'name', or delete the folder"
        )


def write_config(folder: Path, config: Any) -> None:
    with replacing(folder / "config.yaml") as file:
        file.write(to_yaml(config))
