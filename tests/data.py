"""Where the shared data sets are, if they are there at all."""

import os
from pathlib import Path


def shared_data() -> Path | None:
    """Return the folder named by BAYESATTN_DATA, else `../shared/data` beside the repository, else None."""
    named = os.environ.get("BAYESATTN_DATA")
    beside = Path(__file__).resolve().parents[2] / "shared" / "data"
    folder = Path(named) if named else beside
    return folder if folder.is_dir() else None
