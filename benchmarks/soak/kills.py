"""Kill training runs of every recipe at random moments with SIGKILL, resume them, and compare with undisturbed runs.

    python benchmarks/soak/kills.py --data DIR                                    # all recipes, 102 kills
    python benchmarks/soak/kills.py --data DIR --recipes digits,vqa --kills 40    # some of them
    python benchmarks/soak/kills.py --recipes digits --config soft --set width=8  # one of them, with another config

A checkpoint is written after every step. Kills come in turn at any moment after the start (also while packages are imported
and data are read), at any moment after the first step, and while a checkpoint is being written. Each run is killed again
and again until it finishes; then every file in its folder has to equal that of the undisturbed run, except for times.
After every kill the newest checkpoint may lack the last completed step and no other.
"""

import argparse
import json
import mmap
import os
import random
import shutil
import signal
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

import bayesattn_recipes as recipes
from bayesattn_recipes.common.checkpoints import Checkpoints

TIMES = ("finished", "train_seconds")
KINDS = ("any_moment", "in_training", "in_a_write")


@dataclass(frozen=True)
class Small:
    """A configuration of a recipe that trains in seconds, with more than one epoch, all its noise and a best epoch.

    Attributes:
        config: The config it begins with.
        settings: The settings that make it small.
        needs_data: Whether it reads files.
    """

    config: str
    settings: tuple[str, ...]
    needs_data: bool = False


SMALL = {
    "digits": Small("wc", ("training.epochs=5", "train_size=60", "training.keep=validation_nll")),
    "graph": Small("generated-wc", ("training.epochs=25", "num_heads=2")),
    "language": Small(
        "rte",
        ("encoder=tiny", "max_length=32", "train_size=150", "training.steps=12", "training.keep=validation_loss"),
        needs_data=True,
    ),
    "translation": Small(
        "multi30k-wc",
        (
            *("train_size=150", "vocabulary_size=200", "embedding_dim=8", "encoder_dim=8", "decoder_dim=12"),
            *("attention_dim=8", "num_layers=1", "batch_tokens=700", "training.epochs=2"),
        ),
        needs_data=True,
    ),
    "vqa": Small(
        "shapes-wc",
        (
            *("data.train_images=60", "training.epochs=3", "model.width=16", "model.num_heads=2", "model.word_dim=8"),
            *("model.feedforward_dim=16", "model.reduction_dim=8", "model.fused_dim=16", "training.keep=validation_nll"),
        ),
    ),
    "captioning": Small(
        "shapes-wc", ("width=16", "attention_dim=8", "training.epochs=2", "training.batch_size=400", "num_beams=1")
    ),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--recipes", default=",".join(SMALL), help="Separated by commas; all without it.")
    parser.add_argument("--config", help="Of one recipe, in place of its small configuration.")
    parser.add_argument("--set", action="append", default=[], dest="settings", metavar="NAME=VALUE")
    parser.add_argument("--data", type=Path, help="Folder of the data sets.")
    parser.add_argument("--kills", type=int, default=17, help="Of each recipe, at least.")
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    results = []
    for name in arguments.recipes.split(","):
        small = SMALL[name]
        if arguments.config is not None:
            small = Small(arguments.config, (), needs_data=arguments.data is not None)
        results.append(torment(name, small, arguments.settings, arguments.data, arguments.kills, arguments.seed))
        print(json.dumps(results[-1]), flush=True)
    total = {key: sum(result[key] for result in results) for key in ("kills", *KINDS, "runs", "exact", "seconds")}
    print(json.dumps({"recipes": len(results), **total, "seconds": round(total["seconds"], 1)}))


def torment(recipe: str, small: Small, settings: list[str], data: Path | None, num_kills: int, seed: int) -> dict[str, Any]:
    """Kill and resume runs of one recipe until there were `num_kills`; return the counts, or fail."""
    module = recipes.RECIPES[recipe].load("train")
    config = module.load_config(small.config, [*small.settings, *settings, "training.checkpoint_steps=1"])
    draw, began = random.Random(f"{recipe} {seed}"), time.monotonic()
    # the progress of a child, in memory that outlives it
    steps_done = mmap.mmap(-1, 8)

    def start(folder: Path) -> Callable[[], object]:
        def note(done: int, total: int) -> None:
            steps_done[:8] = done.to_bytes(8)

        def work() -> object:
            return module.train_run(config, folder, note, data=data if small.needs_data else None, resume=True)

        return work

    with tempfile.TemporaryDirectory() as place:
        peace = Path(place) / "peace"
        first_step: list[float] = []

        def look() -> bool:
            if not first_step and any(steps_done[:8]):
                first_step.append(time.monotonic() - began)
            return False

        assert in_child(start(peace), look) == 0, f"the undisturbed run of {recipe} failed"
        seconds, expected = time.monotonic() - began, content(peace)
        counted = dict.fromkeys(KINDS, 0)
        runs = 0
        while sum(counted.values()) < num_kills:
            folder = Path(place) / "run"
            while True:
                # stop killing a run once there were enough kills, or a long one would be killed forever
                number = sum(counted.values())
                kind = KINDS[number % len(KINDS)]
                steps_done[:8] = bytes(8)
                is_time = moment(kind, draw, first_step[0], seconds, steps_done, folder)
                status = in_child(start(folder), is_time if number < num_kills else None)
                if status == 0:
                    break
                assert status == -signal.SIGKILL, f"run {runs} of {recipe} ended with {status}"
                counted[kind] += 1
                check_nothing_lost(folder, int.from_bytes(steps_done[:8]))
            found = content(folder)
            different = sorted(name for name in {**found, **expected} if found.get(name) != expected.get(name))
            assert not different, f"run {runs} of {recipe} differs in {different}"
            runs += 1
            shutil.rmtree(folder)
    facts = {
        "recipe": recipe,
        "config": small.config,
        "kills": sum(counted.values()),
        **counted,
        "runs": runs,
        "exact": runs,
    }
    return {**facts, "seconds": round(time.monotonic() - began, 1)}


def moment(
    kind: str, draw: random.Random, first_step: float, seconds: float, steps_done: mmap.mmap, folder: Path
) -> Callable[[], bool]:
    """Return a function that says whether to kill now, to be called repeatedly after a child has started.

    Args:
        kind: One of `KINDS`.
        draw: Chooses the moment.
        first_step: Seconds until the first step of an undisturbed run.
        seconds: Seconds of all of that run.
        steps_done: Steps done by the child.
        folder: Folder of its run.
    """
    began, stale = time.monotonic(), set(folder.rglob(".*.part"))
    if kind == "any_moment":
        deadline = began + draw.uniform(0.0, seconds)
        return lambda: time.monotonic() >= deadline
    # a resumed run has less left to do than a whole one
    delay, since = draw.uniform(0.0, 0.7 * (seconds - first_step)), []

    def is_time() -> bool:
        if not since and any(steps_done[:8]):
            since.append(time.monotonic())
        if not since or time.monotonic() - since[0] < delay:
            return False
        return kind == "in_training" or bool(set(folder.rglob(".*.part")) - stale)

    return is_time


def content(folder: Path) -> dict[str, Any]:
    """Return every file of a finished run, without the times in `run.json`."""
    found: dict[str, Any] = {
        str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()
    }
    facts = json.loads(found.pop("run.json"))
    return {**found, "run.json": {name: value for name, value in facts.items() if name not in TIMES}}


def check_nothing_lost(folder: Path, steps_done: int) -> None:
    """Fail if more than the last step is missing in the newest checkpoint; a finished run has none and has lost nothing."""
    if (folder / "run.json").exists():
        return
    saved = max((int(path.stem.removeprefix("step-")) for path in Checkpoints(folder, {}).paths()), default=0)
    assert saved >= steps_done - 1, f"{steps_done} steps were done, and the newest checkpoint is of step {saved}"


def in_child(work: Callable[[], object], is_time: Callable[[], bool] | None) -> int:
    """Run `work` in a child process, and kill it when it is time; return its exit code, or minus the signal."""
    child = os.fork()
    if child == 0:
        try:
            work()
        except BaseException as error:
            os.write(2, f"{type(error).__name__}: {error}\n".encode())
            os._exit(1)
        os._exit(0)
    while True:
        done, status = os.waitpid(child, os.WNOHANG)
        if done:
            return os.waitstatus_to_exitcode(status)
        if is_time is not None and is_time():
            os.kill(child, signal.SIGKILL)
            is_time = None
        time.sleep(0.0005)


if __name__ == "__main__":
    main()
