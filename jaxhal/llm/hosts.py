"""Which servers may be asked, and which of them may have the user's keys.

A server that is named in code is the caller's choice.  One that is named in a
configuration, or by a saved detector, is asked if the user has named its host: in
$JAXHAL_ENDPOINTS, by ``jaxhal --allow-endpoint``, or as that of $OPENAI_BASE_URL.  A
configuration needs no leave for a server on this machine, which is given no key then,
nor for ``https://api.openai.com``; a saved detector does.  No key goes out unencrypted.
"""

import contextlib
import contextvars
import ipaddress
import os
import re
from collections.abc import Iterable, Iterator
from typing import NamedTuple

from jaxhal.io.showing import shown

#: Names the hosts, with or without a port, between commas.
VARIABLE = "JAXHAL_ENDPOINTS"

_HOST = r"([a-z0-9._-]+|\[[0-9a-f:.]+\])(?::([0-9]{1,5}))?"
# Without ASCII, a long s is one of these letters.
_FLAGS = re.IGNORECASE | re.ASCII
_PLACE = re.compile(_HOST, _FLAGS)
# Strict, so that nobody reads another host in it.
_ADDRESS = re.compile(rf"(https?)://{_HOST}(?:/[!-\[\]-~]*)?", _FLAGS)
_PORTS = {"http": 80, "https": 443}
# Shorter ones may be words of an error.
_SECRET = 8


class Refused(RuntimeError):
    """A server that the user has not named."""


class Server(NamedTuple):
    """Who is behind an address: ``scheme``, ``host`` in small letters, and ``port``."""

    scheme: str
    host: str
    port: int

    @property
    def is_local(self) -> bool:
        ip = address(self.host)
        return self.host == "localhost" or bool(ip and ip.is_loopback)

    @property
    def is_openai(self) -> bool:
        return self == Server("https", "api.openai.com", 443)

    @property
    def is_safe(self) -> bool:
        """Whether nobody on the way reads what it is sent."""
        return self.scheme == "https" or self.is_local


def address(host: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    """The address that a host is in numbers, if it is one."""
    with contextlib.suppress(ValueError):
        return ipaddress.ip_address(host.strip("[]"))
    return None


def server_of(url: str, what: str = "endpoint") -> Server:
    """The server behind a plain http address, without user and password.

    ``what`` names the address where it is none.
    """
    if not (found := _ADDRESS.fullmatch(url)):
        bare = url.rpartition("@")[2]  # what is before it may be a password
        raise ValueError(
            f"{what} is {shown(bare)!r}; give the base address of a server, such as "
            f"'http://localhost:8000/v1'{', without user and password' * (bare != url)}"
        )
    scheme, host, port = found.groups()
    return Server(scheme.lower(), host.lower(), int(port or _PORTS[scheme.lower()]))


def is_named(server: Server, names: Iterable[str]) -> bool:
    """Whether the user named a server's host, by ``names`` or in the environment."""
    given = (name.strip() for name in os.environ.get(VARIABLE, "").split(","))
    places = [place_of(name) for name in names]
    try:
        places += map(place_of, filter(None, given))
    except ValueError as error:
        raise ValueError(f"${VARIABLE}: {error}") from None
    if base := os.environ.get("OPENAI_BASE_URL"):
        places.append(server_of(base, "$OPENAI_BASE_URL")[1:])
    ports = [port for host, port in places if host == server.host]
    return None in ports or server.port in ports


def place_of(name: str) -> tuple[str, int | None]:
    """Host and port that a name in $JAXHAL_ENDPOINTS stands for."""
    if not (found := _PLACE.fullmatch(name)):
        raise ValueError(
            f"{shown(name)!r} names no host; write such as 'api.example.org' or "
            "'api.example.org:8000'"
        )
    host, port = found.groups()
    return host.lower(), int(port) if port else None


class _Bringer(NamedTuple):
    """What named servers are from, and what is said for them."""

    what: str
    names: tuple[str, ...]
    trusted: bool


_BRINGER = contextvars.ContextVar[_Bringer | None]("bringer", default=None)


@contextlib.contextmanager
def brought(
    what: str, names: Iterable[str] = (), *, trusted: bool = True
) -> Iterator[None]:
    """Servers that :func:`keyed` judges in this block are named by data, not in code.

    ``what`` names them, in words; the caller allows hosts of some ``names``; where the
    user runs it, it is ``trusted`` to name servers on this machine and OpenAI.  Inside
    of another such block it changes nothing.
    """
    if _BRINGER.get() is not None:
        yield
        return
    token = _BRINGER.set(_Bringer(what, tuple(names), trusted))
    try:
        yield
    finally:
        _BRINGER.reset(token)


def keyed(url: str) -> bool:
    """Whether a server may have the user's keys; Refused where it may not be asked."""
    server, bringer = server_of(url), _BRINGER.get()
    if bringer is None:
        return server.is_safe
    named = is_named(server, bringer.names)
    usual = bringer.trusted and server.is_openai
    if not (named or usual or (bringer.trusted and server.is_local)):
        raise Refused(
            f"{bringer.what} would send what it is given to {shown(url)!r}, a server "
            f"that you have not named; if you trust it, add {server.host} to "
            f"${VARIABLE}, or give jaxhal --allow-endpoint {server.host}"
        )
    return server.is_safe and (named or usual)


def key() -> str:
    """The user's key without space around it, empty where there is none.

    Raises RuntimeError on one that no server could be sent.
    """
    key = _key()
    if not (key.isascii() and key.isprintable()):
        raise RuntimeError(
            "$OPENAI_API_KEY holds characters that are no printable ASCII, so it can "
            "be sent to no server; copy the key anew"
        )
    return key


def _key() -> str:
    return os.environ.get("OPENAI_API_KEY", "").strip()


def hidden(text: object) -> str:
    """What an error says, without the user's key, should a server have said it back."""
    key, said = _key(), str(text)
    return said.replace(key, "$OPENAI_API_KEY") if len(key) >= _SECRET else said
