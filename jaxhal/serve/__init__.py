"""Verdicts over HTTP, and answers that are judged while they are written."""

#: Bytes of a request's body.
LARGEST = 1 << 20
