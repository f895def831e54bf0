"""Feed broken files to everything that reads a config, a run folder, a checkpoint or data, and count the outcomes.

    python benchmarks/soak/fuzz.py --inputs 100000

An input is accepted, or refused by a ValueError or OSError (which the command line turns into one line) of bounded length.
Anything else is a defect: another exception, or more than ten seconds. Each kind is shown once, with its input. Any defect
ends the run with an error.
"""

import argparse
import json
import random
import signal
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import torch
from data_files import DataTargets

import bayesattn_recipes as recipes
from bayesattn import files
from bayesattn.evaluation import runs
from bayesattn_recipes.common import folders, state
from bayesattn_recipes.common import runs as _runs
from bayesattn_recipes.common.config import build_config, override, read_config
from bayesattn_recipes.digits.config import DigitsConfig
from bayesattn_recipes.digits.train import CONFIGS, TRAINING

SECONDS = 10
LONGEST_MESSAGE = 5000
TOKENS = (
    "&a", "*a", "<<: *a", "!!python/object/apply:os.system [ls]", "!!binary AA==", "!!set {a, b}", "!!timestamp 2020-13-45",
    "[" * 300, "{" * 50, "- " * 200, "? ", "|", ">", "%YAML 9.9", "---", "...", "\0", "\x1b[31m", "\u202e", "ü" * 50, "💥",
    "1e999", "-.inf", ".nan", "0x" + "f" * 40, "9" * 400, "1_000", "0o777", "190:20:30", "2020-02-30", "yes", "null", "~",
    '"\\ud800"', "'", '"', ":", "\t", "\r", "attention", "training", "kl_schedule", "epochs", "../../etc/passwd", "=",
)  # fmt: skip
VALUES = (
    None,
    True,
    -1,
    0,
    1,
    2**70,
    0.5,
    float("nan"),
    float("inf"),
    "",
    "x" * 3000,
    [],
    [1, [2]],
    {},
    {"a": {"b": 1}},
    "soft",
)


def mutate(content: bytes, draw: random.Random) -> bytes:
    """Return the bytes with a few of them changed, removed, doubled or moved, and foreign ones put in."""
    for _ in range(draw.randint(1, 6)):
        at, length = draw.randrange(len(content) + 1), draw.choice((1, 1, 2, 8, 40))
        kind = draw.randrange(6)
        if kind == 0:
            content = content[:at] + bytes(draw.randrange(256) for _ in range(length)) + content[at + length :]
        elif kind == 1:
            content = content[:at] + content[at + length :]
        elif kind == 2:
            content = content[:at] + content[at : at + length] + content[at:]
        elif kind == 3:
            content = content[:at] + draw.choice(TOKENS).encode("utf-8", "replace") + content[at:]
        elif kind == 4:
            content = content[:at]
        elif at < len(content):
            content = content[:at] + bytes([content[at] ^ (1 << draw.randrange(8))]) + content[at + 1 :]
    return content


def random_values(draw: random.Random, depth: int = 0):
    """Return nested values with names of real settings among the keys."""
    names = ("attention", "training", "seed", "width", "epochs", "kl_schedule", "variant", "kind", "x", 3, None)
    if depth > 3 or draw.random() < 0.4:
        return draw.choice(VALUES)
    return {draw.choice(names): random_values(draw, depth + 1) for _ in range(draw.randint(0, 4))}


class Targets:
    """The loaders to feed, each a function that makes one input and reads it."""

    def __init__(self, folder: Path, draw: random.Random) -> None:
        self.folder, self.draw = folder, draw
        configs = recipes.DIGITS.config_folder
        self.configs = [path.read_bytes() for path in sorted(configs.glob("*.yaml"))]
        run = folder / "run"
        runs.write_run(run, recipe="digits", variant="BAM-WC", config={"seed": 0, "training": {"epochs": 2}}, seed=0)
        samples = torch.rand(2, 3, 4)
        splits = {"test": runs.SplitPredictions({"attention": samples}, torch.zeros(3, dtype=torch.int64))}
        runs.write_predictions(run, runs.Predictions(splits, list("abcd"), ["attention"], 0, (1, 2)))
        folders.write_log(run, [{"epoch": 0, "loss": 0.5}])
        state.write_state(run / "state.safetensors", state.flatten({"a": [1, 2.5, (None, torch.ones(3))], 4: "x"}))
        self.files = {name: (run / name).read_bytes() for name in ("run.json", "log.jsonl", "state.safetensors")}
        self.files["predictions.safetensors"] = (run / "predictions.safetensors").read_bytes()
        self.run = run
        self.all: dict[str, Callable[[], object]] = {
            "config file": self.config_file,
            "config values": lambda: build_config(DigitsConfig, {"x": 0, **_as_mapping(random_values(draw))}),
            "known config values": self.known_values,
            "setting": lambda: override({"attention": {"k": 1}}, [_text(draw)]),
            "run.json": lambda: self.file("run.json", lambda: TRAINING.load_run_config(run)),
            "log.jsonl": lambda: self.file("log.jsonl", lambda: _runs.read_log(run)),
            "state": lambda: self.file("state.safetensors", lambda: state.read_state(run / "state.safetensors")),
            "predictions' metadata": self.predictions_metadata,
            "predictions": lambda: self.file("predictions.safetensors", lambda: runs.read_predictions(run)),
            **DataTargets(folder, draw, mutate).all,
        }

    def config_file(self) -> object:
        path = self.folder / "config.yaml"
        path.write_bytes(mutate(self.draw.choice(self.configs), self.draw))
        return read_config(DigitsConfig, str(path), CONFIGS)

    def known_values(self) -> object:
        parts = {
            "attention": ("variant", "weibull_k", "kl_reduction"),
            "training": ("epochs", "noise", "kl_schedule", "patience"),
        }
        values: dict = {name: self.draw.choice(VALUES) for name in ("seed", "width", "dropout") if self.draw.random() < 0.3}
        for part, names in parts.items():
            values[part] = {name: self.draw.choice(VALUES) for name in names if self.draw.random() < 0.5}
        return build_config(DigitsConfig, values)

    def predictions_metadata(self) -> object:
        draw = self.draw
        meta = {"schema": runs.PREDICTIONS_SCHEMA, "splits": ["test"], "class_names": list("abcd"), "methods": ["attention"]}
        meta |= {"seed": 0, "key_grid": [1, 2]}
        for name in draw.sample(sorted(meta), draw.randint(0, 3)):
            meta[name] = draw.choice((*VALUES, ["test", 1], ["attention", "mean"], "ab", {"test": 1}, [None], [[1]]))
        shapes = ((2, 3, 4), (3,), (), (0, 3, 4), (2, 0, 4), (1, 1, 1, 1), (3, 2))
        parts = ("samples/attention", "labels", "inputs", "attention/mean", "x", "")
        tensors = {f"0/{draw.choice(parts)}": torch.ones(draw.choice(shapes)) for _ in range(draw.randint(0, 4))}
        if draw.random() < 0.7:
            tensors["0/samples/attention"] = torch.ones(2, 3, 4)
        files.write_tensors(self.run / "predictions.safetensors", tensors, {"bayesattn": json.dumps(meta)})
        return runs.read_predictions(self.run)

    def file(self, name: str, read: Callable[[], object]) -> object:
        (self.run / name).write_bytes(mutate(self.files[name], self.draw))
        return read()


def _as_mapping(value: object) -> dict:
    return value if isinstance(value, dict) else {}


def _text(draw: random.Random) -> str:
    return mutate(b"attention.k=[1, {a: 2}]", draw).decode("utf-8", "replace")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--inputs", type=int, default=100_000)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    ends, slowest, began = Counter(), 0.0, time.monotonic()
    defects: dict[str, str] = {}
    with tempfile.TemporaryDirectory() as folder:
        targets = Targets(Path(folder), random.Random(arguments.seed))
        names = list(targets.all)
        for number in range(arguments.inputs):
            name = names[number % len(names)]
            signal.alarm(SECONDS)
            start = time.monotonic()
            try:
                targets.all[name]()
                end, length = "accepted", 0
            except (ValueError, OSError) as error:
                end, length = "refused", len(str(error))
            except Exception as error:
                end, length = "defect", 0
                place = traceback.extract_tb(error.__traceback__)[-1]
                kind = f"{name}: {type(error).__name__} in {Path(place.filename).name}, line {place.lineno}"
                defects.setdefault(kind, f"input {number} of seed {arguments.seed}: {str(error)[:200]}")
            finally:
                signal.alarm(0)
            ends[f"{name}: {end}"] += 1
            assert length < LONGEST_MESSAGE, f"{name}, input {number}: a message of {length} characters"
            slowest = max(slowest, time.monotonic() - start)
    facts = {"inputs": arguments.inputs, "seed": arguments.seed, "ends": dict(sorted(ends.items()))}
    print(json.dumps({**facts, "slowest_seconds": round(slowest, 3), "seconds": round(time.monotonic() - began, 1)}))
    if defects:
        raise SystemExit("\n".join(f"{kind}, {text}" for kind, text in defects.items()))


if __name__ == "__main__":
    main()
