"""Tensors of a small file that torch wrote, without torch and without its code."""

import collections
import math
import os
import pickle
import zipfile
import zlib
from collections.abc import Sequence
from typing import Any

import ml_dtypes
import numpy as np

_STORAGES = {
    "FloatStorage": np.float32,
    "DoubleStorage": np.float64,
    "HalfStorage": np.float16,
    "BFloat16Storage": ml_dtypes.bfloat16,
}
# Bytes of a member at most: what is read here are heads of a classifier.
_LARGEST = 1 << 26


def read(path: str | os.PathLike) -> dict[str, np.ndarray]:
    """The tensors of a state dict, by name, as ``torch.save`` wrote them.

    A pickle names what it is made of; all but tensors and dictionaries is refused
    before anything of it is called.

    Raises:
      ValueError: on another file, another content, or more than 64 MiB of it.
      OSError: when it cannot be read.
    """
    try:
        with zipfile.ZipFile(path) as archive:
            (about,) = (n for n in archive.namelist() if n.endswith("/data.pkl"))
            with archive.open(_small(archive, about)) as file:
                found = _Tensors(file, archive, about.removesuffix("data.pkl")).load()
    # What zipfile says of an archive, and pickle of what it cannot make sense of.
    except (
        *(zipfile.BadZipFile, zlib.error, pickle.UnpicklingError, EOFError),
        *(AttributeError, LookupError, RuntimeError, TypeError, ValueError),
    ) as error:
        raise ValueError(
            f"{path} is no state dict that torch wrote: {error}"
        ) from error
    good = isinstance(found, dict) and all(
        isinstance(name, str) and isinstance(value, np.ndarray)
        for name, value in found.items()
    )
    if not good:
        raise ValueError(f"{path} holds something else than tensors by name")
    return dict(found)


def _small(archive: zipfile.ZipFile, name: str) -> zipfile.ZipInfo:
    about = archive.getinfo(name)
    if about.file_size > _LARGEST:
        raise pickle.UnpicklingError(f"{name} has {about.file_size} bytes")
    return about


class _Tensors(pickle.Unpickler):
    """Takes dictionaries and tensors, and nothing else, from a pickle."""

    def __init__(self, file: Any, archive: zipfile.ZipFile, root: str):
        super().__init__(file)
        self._archive, self._root = archive, root

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) == ("collections", "OrderedDict"):
            return collections.OrderedDict
        if (module, name) == ("torch._utils", "_rebuild_tensor_v2"):
            return _tensor
        if module == "torch" and name in _STORAGES:
            return _STORAGES[name]
        raise pickle.UnpicklingError(f"it holds {module}.{name}, which is no tensor")

    def persistent_load(self, pid: Any) -> np.ndarray:
        _, kind, key, *_ = pid
        data = self._archive.read(_small(self._archive, f"{self._root}data/{key}"))
        return np.frombuffer(data, kind)


def _tensor(
    storage: np.ndarray,
    offset: int,
    size: Sequence[int],
    stride: Sequence[int],
    *_: Any,
) -> np.ndarray:
    steps = [math.prod(size[axis + 1 :]) for axis in range(len(size))]
    if steps != [*stride]:
        raise pickle.UnpicklingError(f"a tensor of {[*size]} has strides {[*stride]}")
    return storage[offset : offset + math.prod(size)].reshape(size)
