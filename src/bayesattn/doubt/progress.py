"""Progress of a long computation: lines on stderr with the time left and, on a terminal, a status line."""

import sys
import time


class Progress:
    """Counts units of work.

    Args:
        name: Start of every line.
        work: Total units of work.
        quiet: Print nothing.
    """

    def __init__(self, name: str, work: int, *, quiet: bool) -> None:
        self.name, self.work, self.quiet = name, work, quiet
        self.done = 0
        self._start = time.monotonic()

    def advance(self, units: int, doing: str) -> None:
        """Count work that was done; a terminal shows the current work."""
        self.done += units
        if not self.quiet and sys.stderr.isatty():
            print(f"\r{self.name}: {doing}, {self._time_left()}\x1b[K", end="", file=sys.stderr, flush=True)

    def line(self, text: str) -> None:
        """Print a line, with the time left while there is work left."""
        if self.quiet:
            return
        start = "\r\x1b[K" if sys.stderr.isatty() else ""
        left = f", {self._time_left()}" if 0 < self.done < self.work else ""
        print(f"{start}{self.name}: {text}{left}", file=sys.stderr, flush=True)

    def _time_left(self) -> str:
        seconds = (time.monotonic() - self._start) * max(self.work - self.done, 0) / self.done
        return f"about {seconds:.0f} s left" if seconds < 120.0 else f"about {seconds / 60.0:.0f} min left"
