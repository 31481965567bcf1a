"""Models on the Hugging Face hub: folders, and GGUF files by quantisation or by path.

``owner/name`` is a repository, ``owner/name:Q4_K_M`` its GGUF file of that kind, and
``owner/name/file.gguf`` one of its files.  With ``$JAXHAL_OFFLINE`` or
``$HF_HUB_OFFLINE`` only the hub's cache is asked.
"""

import contextlib
import fnmatch
import os
import re
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from jaxhal.io.progress import taking

#: Of a model, the files that the hub is asked for.
WANTED = ("*.json", "*.safetensors", "*.model", "*.jinja", "merges.txt", "vocab.txt")
# Other forms of the same weights, as GPT-OSS and Mistral have them.
_UNWANTED = ("*/*.safetensors", "consolidated*.safetensors")

#: Of an owner, a repository or a folder in it.
NAME = r"[A-Za-z0-9][\w.-]*"
_REFERENCE = re.compile(rf"({NAME}/{NAME})(?::({NAME})|/([\w./-]+\.gguf))?")
_PART = re.compile(r"-(\d{5})-of-(\d{5})\.gguf$")
# The kind in a file's name, which stands at its end.
_KIND = re.compile(
    r"(?:^|[-._/])((?:UD-)?(?:I?Q\d\w*|TQ\d\w*|MXFP4\w*|B?F16|F32))"
    r"(?:-\d{5}-of-\d{5})?\.gguf$",
    re.IGNORECASE,
)


class Reference(NamedTuple):
    """A repository, and of its GGUF files the one of a kind, or of a path."""

    repo: str
    kind: str
    file: str

    @property
    def gguf(self) -> bool:
        """Whether it is a file, not the whole repository."""
        return bool(self.kind or self.file)


def reference(name: str) -> Reference | None:
    """What a name means on the hub; None where it cannot be there.

    >>> reference("bartowski/Qwen3-8B-GGUF:Q4_K_M")
    Reference(repo='bartowski/Qwen3-8B-GGUF', kind='Q4_K_M', file='')
    >>> reference("./models/mine") is None
    True
    """
    found = _REFERENCE.fullmatch(name)
    return found and Reference(*(part or "" for part in found.groups()))


def parts(name: str) -> list[str]:
    """All files of a GGUF file by the name of its first, which may be the only one.

    Raises ValueError on the name of a later one.

    >>> parts("q8-00001-of-00002.gguf")
    ['q8-00001-of-00002.gguf', 'q8-00002-of-00002.gguf']
    """
    found = _PART.search(name)
    if found is None:
        return [name]
    number, count = map(int, found.groups())
    begin = name[: found.start()]
    every = [f"{begin}-{at:05}-of-{count:05}.gguf" for at in range(1, count + 1)]
    if number != 1:
        raise ValueError(f"{name} is part {number} of {count}; give {every[0]}")
    return every


def folder(repo: str, wanted: Sequence[str], unwanted: Sequence[str] = ()) -> Path:
    """What the hub keeps by a name, in its cache, of files by patterns.

    Raises ValueError where it cannot be had.
    """
    from huggingface_hub import snapshot_download, utils

    with _asking(repo), taking(f"{repo} from the Hugging Face hub or its cache", utils):
        found = snapshot_download(
            repo,
            allow_patterns=[*wanted],
            ignore_patterns=[*unwanted],
            local_files_only=offline(),
        )
        return Path(found)


def model(repo: str, wanted: Sequence[str] = WANTED) -> Path:
    """The folder of a model; ValueError also where it holds GGUF files alone."""
    found = folder(repo, wanted, _UNWANTED)
    if not (found / "config.json").is_file() and (kinds := by_kind(_files(repo))):
        choice = ", ".join(f"'{repo}:{kind}'" for kind in sorted(kinds))
        raise ValueError(f"{repo!r} has no config.json but GGUF files; give {choice}")
    return found


def gguf(where: Reference) -> Path:
    """A GGUF file, the first of its parts; all of them are taken.

    Raises ValueError where it cannot be had, or several are meant.
    """
    name = where.file or _of_kind(where, _files(where.repo))
    every = parts(name)
    path = folder(where.repo, [*map(_literally, every)]) / name
    missing = [part for part in every if not (path.parent / Path(part).name).is_file()]
    if missing:
        raise ValueError(f"{where.repo!r} has no {missing[0]} on the Hugging Face hub")
    return path


def _literally(name: str) -> str:
    return re.sub(r"([*?[])", r"[\1]", name)


def offline() -> bool:
    """Whether only the hub's cache may be asked."""
    from huggingface_hub import constants

    return bool(os.environ.get("JAXHAL_OFFLINE")) or constants.HF_HUB_OFFLINE


def _files(repo: str) -> list[str]:
    """The names of all GGUF files, or of those in the cache."""
    if offline():
        found = folder(repo, ["*.gguf"])
        names = [path.relative_to(found).as_posix() for path in found.rglob("*.gguf")]
    else:
        from huggingface_hub import list_repo_files

        with _asking(repo):
            names = list_repo_files(repo)
    return sorted(fnmatch.filter(names, "*.gguf"))


def kind_of(name: str) -> str:
    """The kind of a GGUF file by its name, or none: it may be of images.

    >>> kind_of("q8/tiny-q8_0-00001-of-00002.gguf")
    'Q8_0'
    """
    found = _KIND.search(name)
    images = "mmproj" in Path(name).name.lower()  # for a larger model
    return found[1].upper() if found and not images else ""


def by_kind(names: Iterable[str]) -> dict[str, list[str]]:
    """GGUF files by kind, of each that comes in parts the first.

    >>> by_kind(["a-Q8_0-00001-of-00002.gguf", "a-Q8_0-00002-of-00002.gguf"])
    {'Q8_0': ['a-Q8_0-00001-of-00002.gguf']}
    """
    found: dict[str, list[str]] = {}
    for name in names:
        part = _PART.search(name)
        if (kind := kind_of(name)) and (part is None or int(part[1]) == 1):
            found.setdefault(kind, []).append(name)
    return found


def _of_kind(where: Reference, names: Sequence[str]) -> str:
    """The file of a kind, or the first of its parts."""
    kinds = by_kind(names)
    found = kinds.get(where.kind.upper(), [])
    if len(found) == 1:
        return found[0]
    if found:
        choice = ", ".join(f"'{where.repo}/{name}'" for name in found)
        raise ValueError(
            f"{where.repo!r} has {len(found)} files of {where.kind}; give {choice}"
        )
    known = ", ".join(sorted(kinds)) or "no GGUF file"
    raise ValueError(f"{where.repo!r} has no GGUF file of {where.kind}; it has {known}")


def failures() -> tuple[type[Exception], ...]:
    """Of the hub's client, where it has no answer, and of what carries it."""
    from huggingface_hub.errors import HfHubHTTPError

    # Its base is that of one of two libraries.
    (carrier,) = (one for one in HfHubHTTPError.__mro__ if one.__name__ == "HTTPError")
    return HfHubHTTPError, carrier, OSError


@contextlib.contextmanager
def _asking(repo: str) -> Iterator[None]:
    """Errors of the hub's client as ValueErrors that say what to do."""
    from huggingface_hub.errors import (
        GatedRepoError,
        LocalEntryNotFoundError,
        RepositoryNotFoundError,
    )

    begin = f"could not get {repo!r} from the Hugging Face hub"
    try:
        yield
    except GatedRepoError as error:
        raise ValueError(
            f"{begin}: it is gated; accept its terms at https://huggingface.co/{repo} "
            "and log in with 'hf auth login'"
        ) from error
    except RepositoryNotFoundError as error:
        raise ValueError(
            f"{begin}: there is none of that name, or it is private; check the name, "
            "or log in with 'hf auth login'"
        ) from error
    except LocalEntryNotFoundError as error:
        why = "and only its cache may be asked; unset JAXHAL_OFFLINE and HF_HUB_OFFLINE"
        why = why if offline() else f"({error}); check the connection"
        raise ValueError(f"{begin} {why}, or give a local folder") from error
    except failures() as error:
        raise ValueError(
            f"{begin} ({error}); check the name, log in for gated models, or give a "
            "local folder"
        ) from error
