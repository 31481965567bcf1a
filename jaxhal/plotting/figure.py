"""The figure that every plot is drawn on."""

import io

from matplotlib.figure import Figure


class Shown(Figure):
    """One that a notebook shows by its name, whether pyplot was imported or not."""

    def _repr_png_(self) -> bytes:
        stream = io.BytesIO()
        self.savefig(stream, format="png")
        return stream.getvalue()
