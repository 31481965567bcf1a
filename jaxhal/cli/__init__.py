"""The ``jaxhal`` command."""
