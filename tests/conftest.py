"""Fixtures that several test files share."""

import os
from pathlib import Path

import pytest

from jaxhal.models import registry


@pytest.fixture(scope="session")
def smollm2_gguf() -> Path:
    """The real small model; skipped only where JAXHAL_OFFLINE forbids the download."""
    try:
        return registry.fetch("smollm2-135m")
    except RuntimeError as error:
        if os.environ.get("JAXHAL_OFFLINE"):
            pytest.skip(str(error))
        raise


@pytest.fixture(scope="session")
def smollm2(smollm2_gguf: Path):
    """The real small model, loaded by its registry name."""
    import jaxhal

    return jaxhal.load("smollm2-135m")
