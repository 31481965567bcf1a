"""Folders of fitted detectors, here or on the Hugging Face hub."""

import os
import re
from pathlib import Path

from jaxhal.io.files import check_replaceable
from jaxhal.models import hub
from jaxhal.scoring import released
from jaxhal.scoring.saving import FILES

# Of a repository on the hub, or a folder in it, the files that are asked for.
_WANTED = ("*/card.json", "*/params.safetensors", *released.WANTED)
_HUB = re.compile(rf"({hub.NAME}/{hub.NAME})((?:/{hub.NAME})*)")


def is_place(name: str) -> bool:
    """Whether detectors can be there: a folder, or an id of the Hugging Face hub, which
    may go on to a folder in that repository.

    >>> is_place("owner/name/folder"), is_place("token_classifier:owner/name")
    (True, False)
    """
    beside = "/" in name and released.probes(Path(name).parent)
    return bool(_HUB.fullmatch(name) or Path(name).is_dir() or beside)


def located(name: str) -> Path:
    """The folder of that place, which may hold a released probe instead.

    Raises ValueError where it cannot be had from the hub, or holds neither, and says
    which folders beside or in it hold a probe.
    """
    if (folder := Path(name)).is_dir():
        root, begin = folder, name
    elif released.probes(folder.parent):
        root, begin = folder.parent, os.path.dirname(name) or "."
    elif (found := _HUB.fullmatch(name)) is not None:
        begin, inside = found[1], found[2].strip("/")
        wanted = [f"{inside}/{one}" if inside else one for one in _WANTED]
        root = hub.folder(begin, [*wanted, f"*/{released.CONFIG}"])
        folder = root / inside
    else:
        raise ValueError(f"{name!r} is no folder and no hub id ('owner/name')")
    if released.is_released_probe(folder) or saved(folder):
        return folder
    has = ", ".join(f"{begin}/{one}" for one in released.probes(root))
    raise ValueError(
        f"{name} holds no detectors, which are folders with card.json, and no released "
        f"probe with its {released.CONFIG}; give {has or 'what jaxhal fit wrote'}"
    )


def check_folder(folder: Path, force: bool) -> None:
    """FileExistsError where it holds something that may not be replaced, OSError where
    nothing can be made."""
    if folder.parent.is_dir():
        check_replaceable(folder)
    else:
        raise FileNotFoundError(f"{folder.parent}: no such folder; make it first")
    if not folder.exists() or (folder.is_dir() and not any(folder.iterdir())):
        return
    ours = folder.is_dir() and bool(saved(folder))
    if not ours:
        raise FileExistsError(f"{folder} holds no detectors; give a new folder")
    if not force:
        raise FileExistsError(
            f"{folder} holds detectors already; give a new folder, or replace them "
            "with --force (force=True)"
        )


def saved(folder: Path) -> list[Path]:
    """Folders of detectors; ValueError where one has lost its card."""
    card, params = FILES
    found = sorted(one.parent for one in folder.glob(f"*/{card}"))
    bare = {one.parent for one in folder.glob(f"*/{params}")} - {*found}
    if found and bare:
        raise ValueError(
            f"{min(bare)} has no {card}, so it is damaged; copy the whole folder "
            "again, or delete it"
        )
    return found


def own(folder: Path) -> list[str]:
    """Of a folder of detectors, the names that are replaced with them."""
    return ["README.md", *(one.name for one in saved(folder))]
