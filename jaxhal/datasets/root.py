"""Where the data sets lie that do not come with the package."""

import os
from pathlib import Path

_BESIDE = Path("../shared/data")


def data_root(root: str | os.PathLike | None = None) -> Path:
    """The folder that holds a folder for each data set.

    It is ``root``, or else the environment variable ``JAXHAL_DATA``, or else
    ``../shared/data`` seen from the current folder.

    Raises:
      FileNotFoundError: when there is no such folder; it names what was tried.

    >>> data_root("/").as_posix()
    '/'
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
    """The file or folder ``relative`` under :func:`data_root`.

    Raises:
      FileNotFoundError: when it is not there.

    >>> require("/", ".").as_posix()
    '/'
    """
    path = data_root(root) / relative
    if not path.exists():
        raise FileNotFoundError(
            f"{path}: no such file; put the data set there, or name another folder "
            "by JAXHAL_DATA or root="
        )
    return path
