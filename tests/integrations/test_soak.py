"""The long tests in short: a run that is really killed, and a few broken files for every reader."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow
SOAK = Path(__file__).parents[2] / "benchmarks" / "soak"


def last_line(script, *arguments):
    ended = subprocess.run([sys.executable, SOAK / script, *arguments], capture_output=True, text=True, timeout=300)
    assert ended.returncode == 0, ended.stderr[-3000:]
    return json.loads(ended.stdout.splitlines()[-1])


def test_killed_runs_go_on_exactly():
    counted = last_line("kills.py", "--recipes", "digits", "--kills", "3")
    assert (counted["any_moment"], counted["in_training"], counted["in_a_write"]) == (1, 1, 1)
    assert counted["exact"] == counted["runs"] >= 1


def test_broken_files_are_read_or_refused():
    counted = last_line("fuzz.py", "--inputs", "1400", "--seed", "7")
    readers = {name.rsplit(":", 1)[0] for name in counted["ends"]}
    assert len(readers) == 28
    assert not [name for name in counted["ends"] if name.endswith("defect")]
