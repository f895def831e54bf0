"""Progress on stderr: lines anywhere, a status in between on a terminal only, nothing where it is not wanted."""

import io
from types import SimpleNamespace

import pytest

from bayesattn.doubt import progress


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def set_clock(monkeypatch, *times: float) -> None:
    clock = iter(times)
    monkeypatch.setattr(progress, "time", SimpleNamespace(monotonic=lambda: next(clock)))


STATUS = "\rjob: batch 1, about 12 s left\x1b[K", "\rjob: batch 2, about 0 s left\x1b[K"


@pytest.mark.parametrize(
    ("stream", "expected"),
    [
        (io.StringIO, "job: first, about 12 s left\njob: last\n"),
        (Terminal, f"{STATUS[0]}\r\x1b[Kjob: first, about 12 s left\n{STATUS[1]}\r\x1b[Kjob: last\n"),
    ],
)
def test_lines_and_status(stream, expected, monkeypatch):
    stream = stream()
    monkeypatch.setattr("sys.stderr", stream)
    set_clock(monkeypatch, 100.0, 103.0, 103.0, 720.0)
    job = progress.Progress("job", 5, quiet=False)
    job.advance(1, "batch 1")
    job.line("first")
    job.advance(4, "batch 2")
    job.line("last")
    assert stream.getvalue() == expected


def test_long_times_are_minutes_and_quiet_is_quiet(monkeypatch):
    stream = Terminal()
    monkeypatch.setattr("sys.stderr", stream)
    set_clock(monkeypatch, 0.0, 60.0)
    job = progress.Progress("job", 7, quiet=False)
    job.advance(1, "x")
    assert "about 6 min left" in stream.getvalue()
    stream.truncate(0)
    job.quiet = True
    job.advance(1, "y")
    job.line("z")
    assert not stream.getvalue()
