"""GGUF files: their metadata and their tensors."""

from collections.abc import Callable
from pathlib import Path

import numpy as np

from jaxhal.io.progress import note
from jaxhal.io.showing import shown
from jaxhal.models import blocks, hub
from jaxhal.models.quantized import Packed
from jaxhal.models.settings import Settings

_NUMBERS = ("F32", "F16", "BF16")


class GGUFSource:
    """Metadata and dequantised tensors of one GGUF file, or of all its parts."""

    def __init__(self, path: Path):
        import gguf

        class Reader(gguf.GGUFReader):
            # It takes a slice for each token; of a memmap those are slow.
            data = property(
                lambda self: self._plain,
                lambda self, found: setattr(self, "_plain", np.asarray(found)),
            )

        self.where = str(path)
        self._tensors = {}
        for number, name in enumerate(hub.parts(path.name)):
            part = path.with_name(name)
            if not part.is_file():
                raise FileNotFoundError(f"{part} does not exist")
            try:
                reader = Reader(part)
            except (ValueError, IndexError, OSError, UnicodeDecodeError) as error:
                raise ValueError(
                    f"{part} is not a whole GGUF file ({error}); download it again"
                ) from error
            if not number:
                self.reader = reader
            size = part.stat().st_size
            for tensor in reader.tensors:
                end = tensor.data_offset + tensor.n_bytes
                if end > size:
                    raise ValueError(
                        f"{part} is cut short: {tensor.name} ends at byte {end} of "
                        f"{size}; download it again"
                    )
                self._tensors[tensor.name] = tensor
        guess = {n.split(".nextn.")[0] for n in self._tensors if ".nextn." in n}
        for layer in sorted(guess):  # of none that is computed
            for name in [n for n in self._tensors if n.startswith(f"{layer}.")]:
                del self._tensors[name]
            note(f"{path}: not loaded, as it guesses further tokens: {layer}")
        self.size = sum(int(tensor.n_elements) for tensor in self._tensors.values())
        self.bytes = sum(int(tensor.n_bytes) for tensor in self._tensors.values())

    def names(self) -> set[str]:
        """Of its tensors, but for layers that guess further tokens."""
        return set(self._tensors)

    def get(self, name: str) -> np.ndarray:
        import gguf

        tensor = self._tensors[name]
        try:
            return gguf.quants.dequantize(tensor.data, tensor.tensor_type)
        except NotImplementedError as error:
            raise ValueError(
                f"{self.where}: {name} is stored as {tensor.tensor_type.name}, which "
                "the gguf package cannot dequantise; use another quantisation"
            ) from error

    @property
    def stays(self) -> bool:
        """Whether all that it holds can be kept as it is."""
        kinds = {tensor.tensor_type.name for tensor in self._tensors.values()}
        return kinds <= {*_NUMBERS, *blocks.FORMATS}

    def kind(self, name: str) -> str:
        """The format of a tensor's blocks, ``""`` of numbers.

        Raises:
          ValueError: on a tensor that is missing, or that cannot stay in its format.
        """
        if name not in self._tensors:
            raise ValueError(f"{self.where} has no tensor {name}; download it again")
        kind = self._tensors[name].tensor_type.name
        if kind in _NUMBERS:
            return ""
        if kind not in blocks.FORMATS:
            raise ValueError(
                f"{self.where}: {name} is stored as {kind}, which cannot stay so; load "
                f"it with weights='dequantised', or use a file of "
                f"{', '.join(blocks.FORMATS)}"
            )
        return kind

    def packed(
        self, name: str, turn: Callable[[np.ndarray], np.ndarray], kind: str
    ) -> Packed:
        """A matrix as it is stored, in blocks of its format.

        ``turn`` puts rows, of bytes here, in the order of the parameter.
        """
        return blocks.pack(kind, turn(self._tensors[name].data))

    def settings(self, prefix: str) -> Settings:
        """The metadata whose keys begin so, without that beginning."""
        found = {}
        for key, field in self.reader.fields.items():
            if key.startswith(prefix):
                try:
                    found[key.removeprefix(prefix)] = field.contents()
                except (ValueError, IndexError) as error:
                    raise ValueError(
                        f"{self.where}: {shown(key)} cannot be read ({error}); "
                        "download it again"
                    ) from error
        return Settings(found, f"{self.where}: {prefix}*")

    def rows(self, name: str) -> int:
        """The length of a stored matrix."""
        shape = self._tensors[name].shape if name in self._tensors else ()
        if len(shape) != 2:
            raise ValueError(
                f"{self.where} has no matrix {name}; convert the checkpoint again"
            )
        return int(shape[1])
