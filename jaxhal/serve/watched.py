"""What is counted and noted of requests; never what they hold."""

import json
import logging
import time
from collections.abc import Callable
from typing import Any

import prometheus_client
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

_SECONDS = (0.003, 0.01, 0.03, 0.1, 0.3, 1, 3, 10, 30, 100)
_LOG = logging.getLogger("jaxhal.serve")


class Watched:
    """Counts and times of one server."""

    def __init__(self):
        self._registry = CollectorRegistry()
        here: Any = {"namespace": "jaxhal", "registry": self._registry}
        timed = here | {"unit": "seconds", "buckets": _SECONDS}
        self.requests = Counter(
            "requests", "Requests by path and status.", ["path", "status"], **here
        )
        self.verdicts = Counter(
            "verdicts", "Answers by what is said of them.", ["verdict"], **here
        )
        self.tokens = Counter("tokens", "Tokens that were written.", **here)
        self.first = Histogram("first_token", "Time to the first tokens.", **timed)
        self.times = Histogram("request", "Time of a request.", ["path"], **timed)

    def gauge(self, name: str, text: str, value: Callable[[], float]) -> None:
        """Adds a number that is looked at when it is asked for."""
        one = Gauge(name, text, namespace="jaxhal", registry=self._registry)
        one.set_function(value)

    def latest(self) -> bytes:
        """All of it, as Prometheus reads it."""
        return prometheus_client.generate_latest(self._registry)

    def middleware(self, app: Any) -> Any:
        """An application of which every request is counted, and noted in one line."""

        async def watched(scope: Any, receive: Any, send: Any) -> None:
            if scope["type"] != "http":
                await app(scope, receive, send)
                return
            began, status = time.perf_counter(), 500

            async def noted(message: Any) -> None:
                nonlocal status
                if message["type"] == "http.response.start":
                    status = message["status"]
                await send(message)

            try:
                await app(scope, receive, noted)
            finally:
                seconds = time.perf_counter() - began
                # Of paths that are no route's there is no end.
                path = getattr(scope.get("route"), "path", "other")
                self.requests.labels(path, str(status)).inc()
                self.times.labels(path).observe(seconds)
                about = {"method": scope["method"], "path": path, "status": status}
                _LOG.info(json.dumps(about | {"seconds": round(seconds, 4)}))

        return watched
