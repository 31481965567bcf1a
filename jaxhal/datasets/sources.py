"""Files of published data sets: where they lie, and rows of which none may be bad."""

import difflib
import hashlib
import os
import types
from collections.abc import Collection, Iterable, Mapping
from pathlib import Path
from typing import Any

from jaxhal.datasets.fields import kind
from jaxhal.datasets.jsonl import numbered_lines, parse
from jaxhal.io.extras import brought_by
from jaxhal.io.progress import taking
from jaxhal.io.showing import quoted

_BESIDE = Path("../shared/data")


def data_root(root: str | os.PathLike | None = None) -> Path:
    """The folder that holds a folder for each data set.

    It is ``root``, or else the environment variable ``JAXHAL_DATA``, or else
    ``../shared/data`` seen from the current folder.  Raises FileNotFoundError, naming
    what was tried, when there is no such folder.
    """
    given = root if root is not None else os.environ.get("JAXHAL_DATA")
    path = Path(given) if given else _BESIDE
    if path.is_dir():
        return path
    if root is not None:
        tried = f"{path}, given as root, is no folder"
    elif given:
        tried = f"{path}, from JAXHAL_DATA, is no folder"
    else:
        tried = f"JAXHAL_DATA is not set, and {path.resolve()} is no folder"
    raise FileNotFoundError(
        f"{tried}; set JAXHAL_DATA, or root=, to the folder that holds the data sets"
    )


def require(root: str | os.PathLike | None, relative: str) -> Path:
    """A file or folder under :func:`data_root`; FileNotFoundError if it is missing."""
    path = data_root(root) / relative
    if not path.exists():
        raise FileNotFoundError(
            f"{path}: no such file; put the data set there, or name another folder "
            "by JAXHAL_DATA or root="
        )
    return path


def downloaded(folder: str, files: Mapping[str, str]) -> list[Path]:
    """Files below an address, each checked against its hash as git makes it.

    ``datasets`` keeps them in its cache, where they are found without a network.
    Raises FileNotFoundError where one cannot be had, ValueError where it is another.
    """
    import datasets

    with brought_by("experiments"):
        import aiohttp

    settings = datasets.DownloadConfig(use_etag=False)
    manager, found = datasets.DownloadManager(download_config=settings), []
    for name, known in files.items():
        try:
            with taking(f"{folder}/{name}, or from a cache", datasets):
                path = Path(str(manager.download(f"{folder}/{name}")))
        except (OSError, aiohttp.ClientError) as error:
            # Of some, all that is said is the address.
            bare = str(error) == f"{folder}/{name}"
            why = type(error).__name__ if bare else error
            raise FileNotFoundError(
                f"{folder}/{name} could not be downloaded ({why}); put the data set "
                "into a folder, and set JAXHAL_DATA, or root=, to the one around that"
            ) from error
        data = path.read_bytes()
        if hashlib.sha1(b"blob %d\0" % len(data) + data).hexdigest() != known:
            raise ValueError(
                f"{path} is not what {folder}/{name} was, whose git hash is {known}; "
                "delete it, so that it is downloaded anew"
            )
        found.append(path)
    return found


def records(
    path: Path, texts: Iterable[str], **others: type | types.UnionType
) -> list[dict[str, Any]]:
    """The rows of a JSON Lines file, with their fields that are texts and others.

    Raises ValueError with file and line when a row lacks one.
    """
    fields, rows = {**dict.fromkeys(texts, str), **others}, []
    for line, raw in numbered_lines(path):
        try:
            row = parse(raw)
            check(row, fields)
        except ValueError as error:
            raise ValueError(f"{path}, line {line}: {error}") from None
        rows.append(row)
    return rows


def check(row: Any, fields: Mapping[str, type | types.UnionType]) -> None:
    """Raises ValueError unless ``row`` is an object with ``fields`` of these types.

    >>> check({"id": "a"}, {"id": str, "label": int})
    Traceback (most recent call last):
    ValueError: 'label' is null; this data set has int there
    """
    if not isinstance(row, Mapping):
        raise ValueError(f"expected an object, got {kind(row)}")
    for name, wanted in fields.items():
        if not isinstance(row.get(name), wanted):
            raise ValueError(
                f"{name!r} is {kind(row.get(name))}; this data set has "
                f"{getattr(wanted, '__name__', wanted)} there"
            )


def by_name(rows: Iterable[dict[str, Any]], field: str) -> dict[str, dict[str, Any]]:
    """Rows by a field, in their order; ValueError when two share it."""
    found: dict[str, dict[str, Any]] = {}
    for row in rows:
        if row[field] in found:
            raise ValueError(
                f"{field} {quoted(row[field])} comes twice; keep one of them"
            )
        found[row[field]] = row
    return found


def chosen(
    what: str, wanted: str | Collection[str] | None, present: Iterable[str]
) -> set[str]:
    """The values to keep of those present: one, several, or all when ``None``.

    Raises ValueError on a value that is not present and lists those that are.

    >>> sorted(chosen("split", None, ["train", "test", "train"]))
    ['test', 'train']
    """
    known = set(present)
    if wanted is None:
        return known
    keep = {wanted} if isinstance(wanted, str) else set(wanted)
    for name in sorted(keep - known):
        near = difflib.get_close_matches(name, known, n=1)
        hint = f"did you mean {near[0]!r}? " if near else ""
        raise ValueError(
            f"unknown {what} {quoted(name)}; {hint}there are: "
            f"{', '.join(sorted(known))}"
        )
    return keep
