"""Kill training runs at random moments with SIGKILL, resume them, and compare with a run that was left in peace.

    python benchmarks/soak/kills.py digits wc --set training.epochs=5 --set train_size=60 --kills 50

A checkpoint is written after every step, and every second kill waits until one is being written. Each run is killed
again and again until it gets through; then its parameters and its log have to equal those of the undisturbed run.
"""

import argparse
import json
import os
import random
import signal
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from bayesattn import recipes

COMPARED = ("checkpoint.safetensors", "log.jsonl", "log.csv")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("recipe")
    parser.add_argument("config")
    parser.add_argument("--set", action="append", default=[], dest="settings", metavar="NAME=VALUE")
    parser.add_argument("--data", type=Path)
    parser.add_argument("--kills", type=int, default=50)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    module = recipes.load(arguments.recipe, "train")
    config = module.load_config(arguments.config, [*arguments.settings, "training.checkpoint_steps=1"])
    draw = random.Random(arguments.seed)

    def start(folder: Path) -> Callable[[], None]:
        return lambda: module.train_run(config, folder, data=arguments.data, resume=True)

    with tempfile.TemporaryDirectory() as work:
        peace = Path(work) / "peace"
        began = time.monotonic()
        assert in_child(start(peace), None) == 0, "the undisturbed run failed"
        seconds = time.monotonic() - began
        expected = {name: (peace / name).read_bytes() for name in COMPARED}
        kills = in_writes = runs = 0
        while kills < arguments.kills:
            folder, killed = Path(work) / f"run-{runs}", 0
            while not (folder / "run.json").exists():
                # the last attempt of each run is left alone, or a long run would be killed for ever
                delay = draw.uniform(0.0, seconds) if kills + killed < arguments.kills else None
                status = in_child(start(folder), delay, folder / "checkpoints" if (kills + killed) % 2 else None)
                if status == 0:
                    break
                assert status == -signal.SIGKILL, f"run {runs} ended with {status}"
                killed += 1
                in_writes += bool(list(folder.rglob(".*.part")))
            found = {name: (folder / name).read_bytes() for name in COMPARED}
            assert found == expected, f"run {runs}, killed {killed} times, differs from the undisturbed run"
            kills, runs = kills + killed, runs + 1
    facts = {"recipe": arguments.recipe, "config": arguments.config, "kills": kills, "kills_in_a_write": in_writes}
    print(json.dumps({**facts, "runs": runs, "exact": runs, "seconds": round(time.monotonic() - began, 1)}))


def in_child(work: Callable[[], object], delay: float | None, watched: Path | None = None) -> int:
    """Run `work` in a child process; kill it after `delay` seconds, or at the first write into `watched` after that.

    Returns its exit code, or minus the signal.
    """
    child = os.fork()
    if child == 0:
        try:
            work()
        except BaseException as error:
            os.write(2, f"{type(error).__name__}: {error}\n".encode())
            os._exit(1)
        os._exit(0)
    deadline = None if delay is None else time.monotonic() + delay
    while True:
        done, status = os.waitpid(child, 0 if deadline is None else os.WNOHANG)
        if done:
            return os.waitstatus_to_exitcode(status)
        is_time = deadline is not None and time.monotonic() >= deadline
        if is_time and (watched is None or any(watched.glob(".*.part"))):
            os.kill(child, signal.SIGKILL)
            deadline = None
        time.sleep(0.0005 if is_time else 0.002)


if __name__ == "__main__":
    main()
