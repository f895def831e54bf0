"""The log of a run as TensorBoard events; the package tensorboard is imported only if they are requested."""

from pathlib import Path
from typing import Any

from bayesattn_recipes.common.folders import TENSORBOARD_FOLDER


class TensorBoardLog:
    """Writes every number of every row against the optimizer step.

    Args:
        run: The run folder; the events go to `tensorboard` in it.

    Raises:
        ValueError: The package is not installed.
    """

    def __init__(self, run: Path) -> None:
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError:
            raise ValueError("tensorboard is not installed. Install it with: pip install tensorboard") from None
        self._open = SummaryWriter
        self._folder = run / TENSORBOARD_FOLDER
        self._writer: Any = None

    def add(self, row: dict[str, Any]) -> None:
        """Write one row; the first one hides what an interrupted run had written from this step on."""
        if self._writer is None:
            self._writer = self._open(str(self._folder), purge_step=row["step"])
        for name, value in row.items():
            if isinstance(value, int | float) and name not in ("epoch", "step"):
                self._writer.add_scalar(name, value, row["step"])
        self._writer.flush()

    def close(self) -> None:
        """Finish the file."""
        if self._writer is not None:
            self._writer.close()
