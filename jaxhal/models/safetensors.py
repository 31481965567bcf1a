"""Weights of a folder, as Hugging Face keeps them."""

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from jaxhal.models.settings import Settings, read_json

# Wrappers under which checkpoints keep the same decoder.
_WRAPPERS = (
    ("model.language_model.", "model."),
    ("language_model.model.", "model."),
    ("language_model.lm_head.", "lm_head."),
)


def _unwrapped(name: str) -> str:
    for wrapper, plain in _WRAPPERS:
        if name.startswith(wrapper):
            name = plain + name.removeprefix(wrapper)
    return name


class SafetensorsSource:
    """The ``*.safetensors`` of a folder, sharded or not."""

    def __init__(
        self,
        folder: Path,
        bare_prefix: str = "",
        rename: Callable[[str], str] = _unwrapped,
    ):
        """``rename`` gives stored names as the key table has them.

        ``bare_prefix`` is put before those that lack it (headless checkpoints).
        """
        self.where = str(folder)
        self._files: dict[str, tuple[Any, str]] = {}
        self.size = 0
        for path in self._paths(Path(folder)):
            handle = _open(path)
            for stored in handle.keys():
                self.size += math.prod(handle.get_slice(stored).get_shape())
                name = rename(stored)
                if not name.startswith((bare_prefix, "lm_head.")):
                    name = bare_prefix + name
                self._files[name] = (handle, stored)

    @staticmethod
    def _paths(folder: Path) -> list[Path]:
        index = folder / "model.safetensors.index.json"
        if index.is_file():
            shards = Settings(read_json(index), str(index)).inside("weight_map")
            paths = [_shard(folder, shards, name) for name in shards]
            paths = sorted(set(paths))
            missing = [path.name for path in paths if not path.is_file()]
            if missing:
                raise FileNotFoundError(
                    f"{folder} lacks {len(missing)} of {len(paths)} weight shards: "
                    f"{', '.join(missing[:3])}; download the checkpoint again"
                )
            return paths
        paths = sorted(folder.glob("*.safetensors"))
        if not paths:
            raise FileNotFoundError(
                f"{folder} holds no *.safetensors; convert other weight formats with "
                "transformers' save_pretrained(safe_serialization=True)"
            )
        return paths

    def names(self) -> set[str]:
        return set(self._files)

    def get(self, name: str) -> np.ndarray:
        handle, stored = self._files[name]
        return handle.get_tensor(stored)

    def half(self, name: str, which: int) -> np.ndarray:
        """The first or second half of a tensor, along its last but one axis."""
        shape = self.shape(name)
        if len(shape) < 2 or shape[-2] % 2:
            raise ValueError(
                f"{self.where}: {name} has shape {list(shape)}, which has no halves; "
                "download it again"
            )
        rows = shape[-2] // 2
        along = slice(which * rows, (which + 1) * rows)
        return self.part(name, (*(slice(None),) * (len(shape) - 2), along))

    def part(self, name: str, index: tuple[slice, ...]) -> np.ndarray:
        """A part of a tensor; no more than that is read."""
        handle, stored = self._files[name]
        return handle.get_slice(stored)[index]

    def shape(self, name: str) -> tuple[int, ...]:
        handle, stored = self._files[name]
        return tuple(handle.get_slice(stored).get_shape())


def _shard(folder: Path, shards: Settings, name: str) -> Path:
    """The file that an index names for a tensor; none but those of the folder."""
    shard = shards[name]
    if not isinstance(shard, str) or shard != Path(shard).name or "\0" in shard:
        shards.refuse(name, f"give the name of a file in {folder}")
    # A snapshot of the hub is made of links to the files beside it.
    hub = folder.parent.name == "snapshots"
    home = (folder.parent.parent / "blobs" if hub else folder).resolve()
    path = folder / shard
    if path.is_symlink() and home not in path.resolve().parents:
        shards.refuse(name, f"it is a link out of {folder}; put the file itself there")
    return path


def _open(path: Path) -> Any:
    from safetensors import SafetensorError, safe_open

    try:
        return safe_open(path, framework="np")
    except (SafetensorError, OSError) as error:
        raise ValueError(
            f"{path} is not a whole safetensors file ({error}); download it again"
        ) from error
