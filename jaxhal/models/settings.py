"""A checkpoint's settings, read with care: whoever wrote the file may have erred."""

import json
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any, NoReturn

from jaxhal.io.showing import shown

# No model is near these; what is over them would take the memory before it is refused.
LAYERS, WIDTH, VOCABULARY, LENGTH = 1 << 12, 1 << 20, 1 << 24, 1 << 30


def read_json(path: Path) -> Any:
    """What a JSON file of a model folder says; an error where there is none."""
    if not path.is_file():
        raise FileNotFoundError(
            f"{path} does not exist; a model folder holds config.json, the tokenizer "
            "files and *.safetensors"
        )
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (RecursionError, ValueError) as error:
        raise ValueError(
            f"{path} is not valid JSON: {error}; download it again"
        ) from error


class Settings(dict[str, Any]):
    """The keys of one JSON object, or of a GGUF file, that have a value.

    Every method raises a ValueError that names the file, the key, its value and what
    to give instead.
    """

    def __init__(self, raw: Any, where: str):
        if not isinstance(raw, Mapping):
            raise ValueError(f"{where} is {shown(raw)}; give a JSON object")
        super().__init__({key: raw[key] for key in raw if raw[key] is not None})
        self.where = where
        self.spelled: dict[str, str] = {}
        off = frozenset(key for key in raw if raw[key] is None)
        self.off = off | getattr(raw, "off", frozenset())

    def over(self, values: Mapping[str, Any]) -> "Settings":
        """With these values instead of its own."""
        made = Settings({**self, **values}, self.where)
        made.spelled, made.off = self.spelled, self.off - made.keys()
        return made

    def filled(self, values: Mapping[str, Any]) -> "Settings":
        """With these values where it says nothing, not even null."""
        missing = {key: values[key] for key in values if key not in self.off}
        return self.over({**missing, **self})

    def named(self, names: Mapping[str, str]) -> "Settings":
        """Under other names, its own -> those to go by; errors keep its own.

        What has one of those names already means something else, and is left out.
        """
        given = {ours: self[key] for key, ours in names.items() if key in self}
        rest = {key: self[key] for key in self if key not in names.values()}
        made = Settings({**rest, **given}, self.where)
        made.spelled = {ours: key for key, ours in names.items()}
        made.off = frozenset(names.get(key, key) for key in self.off)
        return made

    def refuse(self, key: str, remedy: str) -> NoReturn:
        """Raises the error of one key."""
        name = self.spelled.get(key, key)
        found = f"{name} is {shown(self[key])}" if key in self else f"lacks {name}"
        raise ValueError(f"{self.where}: {found}; {remedy}")

    def whole(
        self, key: str, default: int | None = None, least: int = 1, most: int = WIDTH
    ) -> int:
        value = self.get(key, default)
        if type(value) is not int or not least <= value <= most:
            self.refuse(key, f"give a whole number from {least} to {most}")
        return value

    def wholes(
        self, key: str, count: int, least: int = 0, most: int = WIDTH
    ) -> list[int]:
        """A list of ``count`` whole numbers."""
        values = self.get(key)
        if not isinstance(values, list) or len(values) != count:
            self.refuse(key, f"give a list of {count}")
        for value in values:
            if type(value) is not int or not least <= value <= most:
                self.refuse(key, f"give whole numbers from {least} to {most} in it")
        return values

    def numbers(self, key: str) -> list[float]:
        """A list of numbers above 0."""
        values = self.get(key)
        if not isinstance(values, list) or not values:
            self.refuse(key, "give a list of numbers")
        for value in values:
            if type(value) not in (int, float) or not 0 < value < 1e30:
                self.refuse(key, "give numbers above 0 in it")
        return [*map(float, values)]

    def number(
        self,
        key: str,
        default: float | None = None,
        above: float = 0.0,
        least: float | None = None,
    ) -> float:
        """One above a number, or at least another."""
        value = self.get(key, default)
        known = type(value) in (int, float) and value < 1e30
        if not known or (value <= above if least is None else value < least):
            how = f"above {above:g}" if least is None else f"at least {least:g}"
            self.refuse(key, f"give a number {how}")
        return float(value)

    def flag(self, key: str, default: bool = False) -> bool:
        value = self.get(key, default)
        if type(value) is not bool:
            self.refuse(key, "give true or false")
        return value

    def one_of(self, key: str, default: str | None, known: Collection[str]) -> str:
        value = self.get(key, default)
        if not isinstance(value, str) or value not in known:
            self.refuse(key, f"known: {', '.join(known)}")
        return value

    def each(self, key: str, known: Collection[str], count: int) -> list[str]:
        """A list of ``count`` of the known names."""
        values = self.get(key)
        if not isinstance(values, list) or len(values) != count:
            self.refuse(key, f"give a list of {count}")
        for value in values:
            if not isinstance(value, str) or value not in known:
                self.refuse(key, f"known in it: {', '.join(known)}")
        return values

    def only(self, computed: Mapping[str, Any]) -> None:
        """Raises on the first setting that has another value than the one computed."""
        for key, value in computed.items():
            if self.get(key, value) != value:
                self.refuse(key, f"only {key}={value!r} is computed")

    def inside(self, key: str) -> "Settings":
        """A nested object, empty when there is none."""
        found = self.get(key, {})
        if isinstance(found, Settings):  # which names its own keys
            return found
        return Settings(found, f"{self.where}: {key}")

    def layer_count(self) -> int:
        return self.whole("num_hidden_layers", most=LAYERS)

    def head_dim(self) -> int:
        """Channels of a head; where it says nothing, a head's share of the width."""
        heads = self.whole("num_attention_heads")
        return self.whole("head_dim", self.whole("hidden_size") // heads)

    def context_length(self, default: int | None = None) -> int:
        return self.whole("max_position_embeddings", default, most=LENGTH)
