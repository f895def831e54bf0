"""Train for ten thousand steps with checkpoints and watch the memory of the process: it has to stay flat.

    python benchmarks/soak/leak.py --steps 10000

Prints the resident memory after the first fifth and at the end; more than 8 MiB between them is a failure.
"""

import argparse
import json
import os
import tempfile
import time
from pathlib import Path

from bayesattn_recipes.digits.train import load_config, train_run

ALLOWED_MIB = 8.0
SETTINGS = ("train_size=40", "training.batch_size=10", "width=8", "num_heads=2", "training.noise=keyed")


def resident_mib() -> float:
    """Return the resident memory of this process."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") / 2**20


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=10_000)
    arguments = parser.parse_args()
    epochs = arguments.steps // 4
    config = load_config("wc", [*SETTINGS, f"training.epochs={epochs}", "training.checkpoint_steps=100"])
    seen, began = [], time.monotonic()

    def look(done: int, total: int) -> None:
        if done % max(total // 100, 1) == 0:
            seen.append(resident_mib())

    with tempfile.TemporaryDirectory() as folder:
        train_run(config, Path(folder) / "run", look)
    settled = seen[len(seen) // 5]
    facts = {"steps": 4 * epochs, "first_mib": round(seen[0], 1), "after_a_fifth_mib": round(settled, 1)}
    facts |= {"last_mib": round(seen[-1], 1), "largest_mib": round(max(seen), 1)}
    print(json.dumps({**facts, "seconds": round(time.monotonic() - began, 1)}))
    growth = seen[-1] - settled
    assert growth < ALLOWED_MIB, f"the memory grew by {growth:.1f} MiB between the first fifth and the end"


if __name__ == "__main__":
    main()
