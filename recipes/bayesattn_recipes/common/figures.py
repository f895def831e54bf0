"""Figures as files."""

import io
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure

from bayesattn.files import write_bytes


def write_figure(path: Path, figure: Figure, **options: Any) -> None:
    """Write a figure in the format that its path ends with, by default PNG; the file appears whole or not at all.

    Args:
        path: The file; its folder is made.
        figure: The figure.
        **options: For `savefig`.
    """
    content = io.BytesIO()
    figure.savefig(content, format=path.suffix.removeprefix(".") or "png", **options)
    write_bytes(path, content.getvalue())
