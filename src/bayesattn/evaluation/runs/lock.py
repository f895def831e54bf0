"""One run per folder: a lock that the operating system releases when the process ends, however it ends."""

import os
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from bayesattn.files import RunError

try:
    import fcntl
except ModuleNotFoundError:  # Windows
    fcntl = None

LOCK_FILE = "run.lock"


@contextmanager
def hold_run_folder(folder: Path) -> Iterator[None]:
    """Lock a folder, created if missing, against other runs. Of a run's processes only the first calls this.

    The file that a crash leaves behind locks nothing. Windows and some network file systems have no such lock: there a
    warning says so.

    Raises:
        RunError: Another run holds the folder.
    """
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / LOCK_FILE
    handle = _lock(path)
    if handle is None:
        yield
        return
    try:
        os.ftruncate(handle, 0)
        os.write(handle, f"{os.getpid()}\n".encode())
        yield
    finally:
        # before the lock is released: after that, the file may belong to the next run
        path.unlink(missing_ok=True)
        os.close(handle)


def _lock(path: Path) -> int | None:
    """Return an open file that this process has locked; None, with a warning, where there are no locks."""
    while True:
        if fcntl is None:
            _warn(path.parent, "Windows")
            return None
        handle = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            owner = os.read(handle, 20).decode(errors="replace").strip() or "unknown"
            os.close(handle)
            raise RunError(
                f"{path.parent} is in use by another run (process {owner}). Wait until it ends, or choose another folder"
            ) from None
        except OSError as error:
            os.close(handle)
            path.unlink(missing_ok=True)
            _warn(path.parent, str(error))
            return None
        try:
            if os.path.samestat(os.fstat(handle), os.stat(path)):
                return handle
        except FileNotFoundError:
            pass
        # its last owner removed the file in between: a lock on it would have no effect
        os.close(handle)


def _warn(folder: Path, reason: str) -> None:
    warnings.warn(f"{folder} cannot be locked ({reason}): nothing keeps a second run out of it", UserWarning, stacklevel=5)
