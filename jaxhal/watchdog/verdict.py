"""What the watchdog says of a query, as those outside are told."""

from typing import Any

from jaxhal.watchdog.guarding import Check

#: Said in place of an answer that is held back.
BLOCKED = (
    "I may not know enough to answer this question without making something up, so I "
    "would rather not."
)


def verdict(check: Check, mode: str, blocked: bool) -> dict[str, Any]:
    """What the watchdog says, as the response has it."""
    return {
        "flagged": check.flagged,
        "blocked": blocked,
        "score": check.score,
        "near": check.near,
        "cosine": check.cosine,
        "entropy": check.entropy,
        "mode": mode,
        "error": check.error,
        "nearest": [
            {"query": hit.point.query, "similarity": hit.similarity}
            for hit in check.hits
        ],
    }


def headers(check: Check, blocked: bool) -> dict[str, str]:
    """The same in short, as headers."""
    return {
        "X-Watchdog-Flagged": str(check.flagged).lower(),
        "X-Watchdog-Blocked": str(blocked).lower(),
        "X-Watchdog-Score": f"{check.score:.4f}",
    }
