"""What only some commands need: which extra of the package brings which module."""

import contextlib
from collections.abc import Iterator, Sequence
from importlib.util import find_spec

_SENTENCES = ("pysbd",)
_PLOTS = ("matplotlib",)
_EXPERIMENTS = (*_PLOTS, *_SENTENCES, "omegaconf", "markdown_it", "aiohttp")
_PROMPT = ("openai",)
_PROXY = ("anyio", "jiter", "prometheus_client", "starlette", "uvicorn")
_SERVE = (*_SENTENCES, "anyio", "fastapi", "httpx2", "prometheus_client", "uvicorn")
_MILVUS = ("pymilvus", "milvus_lite")
#: The modules of each extra, as ``pyproject.toml`` has their distributions.
MODULES = {
    "sentences": _SENTENCES,
    "plots": _PLOTS,
    "experiments": _EXPERIMENTS,
    "prompt": _PROMPT,
    "watchdog": (*_EXPERIMENTS, *_PROMPT, *_MILVUS, *_PROXY),
    "serve": _SERVE,
    "agentscope": ("agentscope",),
}


class MissingExtra(ModuleNotFoundError):
    """Something is not installed that an extra of the package brings."""


def remedy(extra: str) -> str:
    """How an extra is installed.

    >>> remedy("plots")
    'pip install "jaxhal[plots]"'
    """
    return f'pip install "jaxhal[{extra}]"'


def need(extra: str) -> None:
    """Raises :class:`MissingExtra` unless all of an extra is there; imports nothing."""
    if missing := [name for name in MODULES[extra] if find_spec(name) is None]:
        raise _missing(extra, missing)


@contextlib.contextmanager
def brought_by(extra: str) -> Iterator[None]:
    """Lets imports of what an extra brings say so where it is missing."""
    try:
        yield
    except ModuleNotFoundError as error:
        name = (error.name or "").partition(".")[0]
        if name in MODULES[extra] and find_spec(name) is None:
            raise _missing(extra, [name]) from error
        raise


def _missing(extra: str, names: Sequence[str]) -> MissingExtra:
    verb = "are" if len(names) > 1 else "is"
    return MissingExtra(
        f"{', '.join(names)} {verb} not installed; {remedy(extra)}", name=names[0]
    )
