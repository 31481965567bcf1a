"""``python -m jaxhal``, and where the ``jaxhal`` command begins."""

import gc
import os

from jaxhal.cli.stopping import orderly


def main() -> None:
    """The entry point: it can be stopped before anything heavy is imported."""
    gc.set_threshold(100_000, 20, 100)  # imports make many objects and little garbage
    # XLA says of every program it kept that no machine lists some of its features; what
    # fails is an exception anyway.
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
    with orderly():
        from jaxhal.cli.app import main as run

        run()


if __name__ == "__main__":
    main()
