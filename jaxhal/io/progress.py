"""Progress bars of long work, all alike."""

from tqdm import tqdm as Bar


def progress_bar(
    total: int, desc: str, unit: str, progress: bool | None, initial: int = 0
) -> Bar:
    """A bar on standard error.

    Args:
      total: how much there is to do.
      desc: what is being done.
      unit: of what.
      progress: show it; ``None`` shows it on a terminal.
      initial: how much was done before.
    """
    disable = None if progress is None else not progress
    return Bar(total=total, desc=desc, unit=unit, initial=initial, disable=disable)
