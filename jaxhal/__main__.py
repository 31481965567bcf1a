"""``python -m jaxhal``, and where the ``jaxhal`` command begins."""

import gc

from jaxhal.cli.stopping import orderly


def main() -> None:
    """The entry point: it can be stopped before anything heavy is imported."""
    gc.set_threshold(100_000, 20, 100)  # imports make many objects and little garbage
    with orderly():
        from jaxhal.cli.app import main as run

        run()


if __name__ == "__main__":
    main()
