"""Detectors at work: score, fit, save, stream, guide."""
