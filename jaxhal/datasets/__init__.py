"""Data sets of labelled answers."""

from jaxhal.datasets.bundled import bundled as bundled
