"""One experiment by several processes: they agree on it, then share its store.

JAX's coordination service knows which process is which, and carries what they say to
each other before anything is loaded.  Then they leave it: none waits for another one or
falls with it, each computes on its own devices, and the locks of the store share out
the work.
"""

import contextlib
import dataclasses
import json
import os
import re
import threading
import uuid
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import jax
from jax._src.distributed import State

from jaxhal import __version__
from jaxhal.experiments.config import Experiment
from jaxhal.io.files import locked
from jaxhal.reading.sharing import Share
from jaxhal.reading.store import Store

# Seconds until all processes are there, and until each has said its part.
_COMING, _SAYING = 300, 60
# Seconds that JAX itself waits before it aborts the process.
_NEVER = 7 * 24 * 3600
_ADDRESS, _COUNT, _NUMBER = (
    "JAX_COORDINATOR_ADDRESS",
    "JAX_NUM_PROCESSES",
    "JAX_PROCESS_ID",
)
# Processes that an error names.
_NAMED = 4


@contextlib.contextmanager
def together(config: Experiment, store: Store) -> Iterator[Share]:
    """Meets the other processes of a job and makes sure that they do the same.

    Until process 0 leaves the block, one that was killed and started again can join.

    Raises:
      ValueError: where no job is found, when processes have other settings, or when
        they do not share the store.
      RuntimeError: when the others do not come.
    """
    state = _connected()
    share = Share(state.process_id, state.num_processes)
    with contextlib.ExitStack() as job:
        if state.service is not None:
            job.callback(state.service.shutdown)
        name = f".{uuid.uuid4().hex}.lock"
        if share.process == 0:
            job.callback((store.root / name).unlink, missing_ok=True)
            job.enter_context(locked(store.root / name))
        settings = _told(state, "settings", [_settings(config), name])
        known, names = zip(*settings, strict=True)
        apart = share.process > 0 and _free(store, names[0])
        everyone = _told(state, "store", str(store.root.resolve()) if apart else None)
        state.client.shutdown()  # waits until everybody has heard everything
        _check_settings(known)
        _check_stores(everyone, store)
        yield share


def _connected() -> Any:
    """The service, found as ``jax.distributed.initialize`` finds it.

    JAX's own state stays that of a single process.
    """
    state = State()
    failed: list[Exception] = []
    address = os.environ.get(_ADDRESS)
    if address is not None and not re.fullmatch(r".+:\d{1,5}", address):
        raise ValueError(f"{_ADDRESS} is {address!r}; give HOST:PORT of process 0")
    count, number = _integer(_COUNT), _integer(_NUMBER)
    jax.config.update("jax_enable_preemption_service", False)  # it would hear SIGTERM

    def connect() -> None:
        try:
            state.initialize(
                num_processes=count,
                process_id=number,
                initialization_timeout=_NEVER,
                shutdown_timeout_seconds=_SAYING,
            )
        except Exception as error:
            failed.append(error)

    # While it waits nothing can be heard, such as Ctrl-C.
    thread = threading.Thread(target=connect, daemon=True)
    thread.start()
    thread.join(_COMING)
    if thread.is_alive():
        raise RuntimeError(
            f"process {state.process_id} waited {_COMING} seconds for the others at "
            f"{state.coordinator_address}; start all of them, also where process 0 "
            "alone has ended: what was read is kept"
        )
    if failed:
        error = failed[0]
        if not isinstance(error, ValueError):
            raise error
        raise ValueError(
            f"no job of several processes is known here: {error} Start all processes "
            "by srun, mpirun, as a job on GKE or on every host of a TPU slice; or give "
            f"each {_ADDRESS}=HOST:PORT of process 0, {_COUNT} and {_NUMBER}"
        ) from error
    return state


def _integer(variable: str) -> int | None:
    text = os.environ.get(variable)
    if text is None:
        return None
    if not re.fullmatch(r"\d{1,9}", text):
        raise ValueError(f"{variable} is {text!r}; give a number")
    return int(text)


def _told(state: Any, topic: str, value: Any) -> list[Any]:
    """What all processes say of a topic, in their order."""
    own, client = f"jaxhal/{topic}/{state.process_id}", state.client
    client.key_value_set(own, json.dumps(value, default=str), allow_overwrite=True)
    return [
        json.loads(
            client.blocking_key_value_get(f"jaxhal/{topic}/{number}", 1000 * _SAYING)
        )
        for number in range(state.num_processes)
    ]


def _settings(config: Experiment) -> dict[str, Any]:
    """What has to be the same, by dotted names; the store may have other paths."""
    found: dict[str, Any] = {"jaxhal": __version__}

    def walk(value: Any, key: str) -> None:
        pairs = enumerate(value) if isinstance(value, list) else None
        pairs = value.items() if isinstance(value, dict) else pairs
        if pairs is None or not value:
            found[key] = value
            return
        for name, inner in pairs:
            walk(inner, f"{key}.{name}" if key else str(name))

    walk(dataclasses.asdict(config), "")
    del found["store"]
    return found


def _free(store: Store, name: str) -> bool:
    """Whether a lock that process 0 holds can be taken here."""
    with locked(store.root / name, wait=False) as free:
        if free:
            (store.root / name).unlink()
    return free


def _check_settings(known: Sequence[Mapping[str, Any]]) -> None:
    """ValueError that names each setting in which processes differ."""
    wrong = []
    for key in dict.fromkeys(key for one in known for key in one):
        having: dict[str, list[int]] = defaultdict(list)
        for number, one in enumerate(known):
            having[json.dumps(one[key]) if key in one else "missing"].append(number)
        if len(having) > 1:
            each = (f"{text} in {_processes(some)}" for text, some in having.items())
            wrong.append(f"{key} is {' and '.join(each)}")
    if wrong:
        raise ValueError(
            f"the processes disagree: {'; '.join(wrong)}; start all of them with the "
            "same configuration"
        )


def _check_stores(others: Sequence[str | None], store: Store) -> None:
    apart = [number for number, path in enumerate(others) if path is not None]
    if apart:
        raise ValueError(
            f"the store {others[apart[0]]} of {_processes(apart)} is not that of "
            "process 0, for it does not see a lock of it; give 'store' a folder of a "
            f"file system with locks that all of them share (here {store.root})"
        )


def _processes(numbers: Sequence[int]) -> str:
    named = ", ".join(map(str, numbers[:_NAMED]))
    more = f" and {len(numbers) - _NAMED} more" if len(numbers) > _NAMED else ""
    return f"process{'es' if len(numbers) > 1 else ''} {named}{more}"
