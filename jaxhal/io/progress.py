"""Progress bars of long work, all alike."""

from tqdm import tqdm as Bar


def progress_bar(
    total: int, desc: str, unit: str, progress: bool | None, initial: int = 0
) -> Bar:
    """A bar on standard error; ``progress=None`` shows it on a terminal."""
    disable = None if progress is None else not progress
    return Bar(total=total, desc=desc, unit=unit, initial=initial, disable=disable)
