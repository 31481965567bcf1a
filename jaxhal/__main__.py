"""``python -m jaxhal``, and where the ``jaxhal`` command begins."""

from jaxhal.cli.stopping import orderly


def main() -> None:
    """The entry point: it can be stopped before anything heavy is imported."""
    with orderly():
        from jaxhal.cli.app import main as run

        run()


if __name__ == "__main__":
    main()
