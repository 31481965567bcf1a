"""What a proxy counts and times, for Prometheus."""

import math
from typing import Any

import prometheus_client

from jaxhal.watchdog.bounds import BoundaryStore
from jaxhal.watchdog.guarding import Guarded

_BOUNDARIES = (0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1, 3, 10, 30, 100)


class Metrics:
    """Counters and times of one proxy, and the points of its store."""

    def __init__(self, store: BoundaryStore):
        self._store = store
        self.registry = prometheus_client.CollectorRegistry()

        def counter(name: str, what: str, *labels: str) -> Any:
            made = prometheus_client.Counter
            return made(f"watchdog_{name}", what, labels, registry=self.registry)

        def timer(name: str, what: str) -> Any:
            return prometheus_client.Histogram(
                f"watchdog_{name}_seconds",
                what,
                buckets=_BOUNDARIES,
                registry=self.registry,
            )

        self.requests = counter(
            "requests", "Requests by path and status.", "path", "status"
        )
        self._checks = counter("checks", "Queries by what became of them.", "verdict")
        self.failures = counter("failures", "Queries that the agent gave no answer to.")
        self.feedback = counter("feedback", "Feedback by what it says.", "hallucinated")
        self._lookup = timer("lookup", "Time that the bound was looked through.")
        self.seconds = timer("answer", "Time from a request to its whole answer.")
        prometheus_client.Gauge(
            "watchdog_points", "Points of the bound.", registry=self.registry
        ).set_function(self._points)

    def count(self, found: Guarded) -> None:
        """Takes in what became of a query."""
        check = found.check
        kind = "near" if check.near else "unsure" if check.flagged else "clean"
        self._checks.labels("unknown" if check.error else kind).inc()
        self._lookup.observe(check.seconds)
        if found.reply.error is not None:
            self.failures.inc()

    def _points(self) -> float:
        try:
            return float(len(self._store))
        except RuntimeError:
            return math.nan  # the store does not answer, which /health says
