"""Hallucination detection for language models as pure, jit-compiled JAX transforms."""

import lazy_loader

__version__ = "0.1.0"

# Imported at first use, as the stub names them, so that `jaxhal --help` needs no JAX.
__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
