"""Files that show damage: JSON that holds its own checksum, and sums of whole files."""

import hashlib
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from jaxhal.io.files import replacing

# The key that a sealed object holds its checksum under.
SEAL = "checksum"


def sha256(path: str | os.PathLike) -> str:
    """The SHA-256 of a file, in hexadecimal digits."""
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def write(path: str | os.PathLike, content: Mapping[str, Any]) -> None:
    """Writes an object as JSON, with a checksum of what it says."""
    with replacing(path) as file:
        json.dump({**content, SEAL: _seal(content)}, file, indent=1)


def read(path: str | os.PathLike) -> dict[str, Any]:
    """What :func:`write` wrote; ValueError when it says anything else."""
    name = Path(path).name
    try:
        content = json.loads(Path(path).read_text("utf-8"))
    except (RecursionError, ValueError) as error:
        raise ValueError(f"{name} is not JSON ({error})") from error
    if not isinstance(content, dict) or SEAL not in content:
        raise ValueError(f"{name} has no {SEAL!r}; an earlier version may have made it")
    if content.pop(SEAL) != _seal(content):
        raise ValueError(f"{name} does not have the {SEAL!r} that it names")
    return content


def _seal(content: Mapping[str, Any]) -> str:
    # By way of JSON twice: what is read has lists and texts where tuples and keys were.
    plain = json.loads(json.dumps(content))
    return hashlib.sha256(json.dumps(plain, sort_keys=True).encode()).hexdigest()
