"""Weights of a folder, as Hugging Face keeps them."""

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Float32, UInt8

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


# Of a byte of MXFP4 the numbers of its lower and of its higher four bits.
_FP4 = np.array([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0], np.float32)
_FP4 = np.concatenate([_FP4, -_FP4])
_PAIRS = np.stack([np.tile(_FP4, 16), np.repeat(_FP4, 16)], axis=-1)
_BLOCK = 32
_INDEX = "model.safetensors.index.json"
_NUMBERS = ("F64", "F32", "F16", "BF16")


def from_mxfp4(
    blocks: UInt8[np.ndarray, "*lead blocks bytes"],
    scales: UInt8[np.ndarray, "*lead blocks"],
) -> Float32[np.ndarray, "*lead columns"]:
    """Numbers of four bits, times a power of two for each block.

    OCP Microscaling Formats (MX) 1.0, 2023, section 5.3.
    """
    numbers = _PAIRS[blocks].reshape(*scales.shape, _BLOCK)
    with np.errstate(over="ignore", invalid="ignore"):
        numbers *= np.ldexp(np.float32(1), scales.astype(np.int32) - 127)[..., None]
    return numbers.reshape(*scales.shape[:-1], -1)


class SafetensorsSource:
    """The ``*.safetensors`` of a folder, sharded or not.

    ``NAME_blocks`` and ``NAME_scales`` of MXFP4 are one tensor of numbers, ``NAME``
    ``[experts, in, out]``.
    """

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
        indexed = (Path(folder) / _INDEX).is_file()
        for path in self._paths(Path(folder)):
            handle = _open(path)
            for stored in handle.keys():
                self.size += math.prod(handle.get_slice(stored).get_shape())
                name = rename(stored)
                if not name.startswith((bare_prefix, "lm_head.")):
                    name = bare_prefix + name
                if not indexed and name in self._files:
                    raise ValueError(
                        f"{folder}: {path.name} holds {name}, and so does another "
                        "file; keep one of them, as model.safetensors"
                    )
                self._files[name] = (handle, stored)
        names = self._files.keys()
        each = {name.removesuffix("_blocks") for name in names}
        self._mxfp4 = {x for x in each if {f"{x}_blocks", f"{x}_scales"} <= names}
        for name in self._mxfp4:
            self.size += math.prod(self.shape(f"{name}_blocks"))  # two in a byte

    @staticmethod
    def _paths(folder: Path) -> list[Path]:
        index = folder / _INDEX
        if index.is_file():
            shards = Settings(read_json(index), str(index)).inside("weight_map")
            paths = sorted({_shard(folder, shards, name) for name in shards})
            missing = [path.name for path in paths if not path.is_file()]
            if missing:
                raise FileNotFoundError(
                    f"{folder} lacks {len(missing)} of {len(paths)} weight shards: "
                    f"{', '.join(missing[:3])}; download the checkpoint again"
                )
            return paths
        # What lies beside it, such as Mistral's own form, is not the model's.
        if (whole := folder / "model.safetensors").is_file():
            return [whole]
        paths = sorted(folder.glob("*.safetensors"))
        if not paths:
            raise FileNotFoundError(
                f"{folder} holds no *.safetensors; convert other weight formats with "
                "transformers' save_pretrained(safe_serialization=True)"
            )
        return paths

    def names(self) -> set[str]:
        parts = {f"{name}_{x}" for name in self._mxfp4 for x in ("blocks", "scales")}
        return (set(self._files) - parts) | self._mxfp4

    def get(self, name: str) -> np.ndarray:
        if name in self._mxfp4:
            return self.part(name, (slice(None),) * 3)
        handle, stored = self._held(name)
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
        """A part of a tensor; no more than that is read, of MXFP4 whole blocks."""
        if name in self._mxfp4:
            experts, rows, columns = index
            start, stop, _ = rows.indices(self.shape(name)[1])
            held = experts, columns, slice(start // _BLOCK, -(-stop // _BLOCK))
            blocks = self.part(f"{name}_blocks", (*held, slice(None)))
            numbers = from_mxfp4(blocks, self.part(f"{name}_scales", held))
            first = start % _BLOCK
            return numbers.swapaxes(1, 2)[:, first : first + stop - start]
        handle, stored = self._held(name)
        return handle.get_slice(stored)[index]

    def _held(self, name: str) -> tuple[Any, str]:
        """The file of a tensor of numbers, or of parts of MXFP4, and its name there."""
        handle, stored = self._files[name]
        kind = handle.get_slice(stored).get_dtype()
        part = name.rpartition("_")[0] in self._mxfp4
        if kind not in (*_NUMBERS, "U8" if part else ""):
            raise ValueError(
                f"{self.where}: {stored} is stored as {kind}; give the checkpoint in "
                f"16 or 32 bits, with weights='int8' or 'int4' if it is too large"
            )
        return handle, stored

    def shape(self, name: str) -> tuple[int, ...]:
        if name in self._mxfp4:
            blocks, scales = (self.shape(f"{name}_{x}") for x in ("blocks", "scales"))
            if len(scales) != 3 or blocks != (*scales, _BLOCK // 2):
                raise ValueError(
                    f"{self.where}: {name} has blocks {list(blocks)} and scales "
                    f"{list(scales)}, which do not go together; download it again"
                )
            experts, columns, count = scales
            return experts, count * _BLOCK, columns
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
