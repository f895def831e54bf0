"""The demo: doubt of ordinary models, then soft and Bayesian attention side by side, same data and budget, several seeds."""

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table

from bayesattn.evaluation.aggregate import Summary, over_runs
from bayesattn.evaluation.report import measure_run
from bayesattn.evaluation.report.names import method_name
from bayesattn.evaluation.runs import PREDICTIONS_FILE, write_predictions
from bayesattn.evaluation.threads import one_thread
from bayesattn.files import write_json
from bayesattn.scalars import check_count
from bayesattn_recipes.common.demo import run_side_by_side
from bayesattn_recipes.digits.config import DigitsConfig
from bayesattn_recipes.digits.data import OUT_OF_DISTRIBUTION, SHIFTS
from bayesattn_recipes.digits.doubt import show_doubt
from bayesattn_recipes.digits.evaluate import available_methods, predict_run
from bayesattn_recipes.digits.train import load_config, train_run

CONFIG_NAMES = ("soft", "wc")
NOISE = (0.5, 1.0)
SHIFTED = (*(f"noise-{strength:g}" for strength in NOISE), *SHIFTS)
# title, prefix of the summary's keys, and (heading, metric) of every column
TABLES = (
    (
        "Clean test images",
        "test ",
        (("accuracy ↑", "accuracy"), ("NLL ↓", "nll"), ("ECE ↓", "ece"), ("PAvPU ↑", "pavpu_05")),
    ),
    (
        f"Shifted test images, mean over {', '.join(SHIFTED)}",
        "shifted ",
        (("accuracy ↑", "accuracy"), ("NLL ↓", "nll"), ("ECE ↓", "ece"), ("PAvPU ↑", "pavpu_05")),
    ),
    (
        "Scrambled images against clean ones, told apart by the uncertainty",
        "ood ",
        (("AUROC entropy ↑", "ood_auroc_entropy"), ("AUROC mutual inf. ↑", "ood_auroc_mutual_information")),
    ),
)


def run_demo(
    out: Path, *, num_seeds: int = 3, num_samples: int = 20, epochs: int | None = None, console: Console
) -> list[Path]:
    """Train, evaluate and print the comparison; return the run folders for the demo's report.

    Args:
        out: Folder for the run folders and the figure of doubt; runs of an earlier demo in it are replaced.
        num_seeds: Runs per variant.
        num_samples: Draws per prediction.
        epochs: Overrides the configs' number of epochs, for a quick look.
        console: Where to print.
    """
    check_count("num_seeds", num_seeds)
    settings = [] if epochs is None else [f"training.epochs={epochs}"]
    configs = [(name, load_config(name, [*settings, f"seed={seed}"])) for name in CONFIG_NAMES for seed in range(num_seeds)]
    work = {
        f"digits: {config.attention.variant}, seed {config.seed}": (config, out / f"{name}-{config.seed}", num_samples)
        for name, config in configs
    }
    folders = [folder for _, folder, _ in work.values()]
    # models with ordinary attention come first, because most people have those; the others go on training meanwhile
    ordinary = dict(zip([*work][:num_seeds], folders, strict=False))
    missing = set(ordinary)

    def show_once_trained(name: str) -> None:
        missing.discard(name)
        # a failed run has written no predictions; its error is raised at the end
        if name in ordinary and not missing and all((folder / PREDICTIONS_FILE).is_file() for folder in ordinary.values()):
            with one_thread():
                show_doubt([*ordinary.values()], out / "figures", num_samples, console)

    run_side_by_side(train_and_predict, work, console, on_end=show_once_trained)
    measured = [measure_run(folder, num_resamples=0) for folder in folders]
    summaries = summarize(measured)
    print_tables(summaries, num_seeds, num_samples, console)
    plain = {row: {key: dataclasses.asdict(cell) for key, cell in cells.items()} for row, cells in summaries.items()}
    write_json(out / "summary.json", plain)
    return folders


def train_and_predict(config: DigitsConfig, folder: Path, num_samples: int) -> None:
    """Train one model and write its predictions."""
    train_run(config, folder, overwrite=True)
    methods = available_methods(config)
    write_predictions(folder, predict_run(folder, num_samples=num_samples, noise=NOISE, methods=methods))


def summarize(measured: Sequence[dict[str, Any]]) -> dict[str, dict[str, Summary]]:
    """Return, per variant and method, every number of the tables over the runs.

    `shifted …` is the mean over the shifted test sets, taken inside each run before the mean over runs.
    """
    places = {"test ": ["test"], "shifted ": list(SHIFTED), "ood ": [OUT_OF_DISTRIBUTION]}
    rows: dict[str, dict[str, list[float]]] = {}
    for run in measured:
        for method, result in run["methods"].items():
            row = rows.setdefault(f"{run['variant']}, {method_name(method)}", {})
            for _, prefix, columns in TABLES:
                for _, metric in columns:
                    found = [result["splits"][split]["metrics"].get(metric) for split in places[prefix]]
                    if None not in found:
                        row.setdefault(prefix + metric, []).append(sum(value["value"] for value in found) / len(found))
    return {name: {key: over_runs(values) for key, values in row.items()} for name, row in rows.items()}


def print_tables(summaries: dict[str, dict[str, Summary]], num_seeds: int, num_samples: int, console: Console) -> None:
    """Print the comparison: clean, shifted and out-of-distribution images."""
    for title, prefix, columns in TABLES:
        table = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False)
        table.add_column("attention, prediction", no_wrap=True)
        for heading, _ in columns:
            table.add_column(heading, justify="right", no_wrap=True)
        for name, row in summaries.items():
            table.add_row(name, *(str(row[prefix + key]) if prefix + key in row else "–" for _, key in columns))
        console.print(title, style="bold", highlight=False)
        console.print(table)
    seeds = "1 seed" if num_seeds == 1 else f"{num_seeds} seeds ± half a 95 % t-interval"
    console.print(
        f"Mean over {seeds}, {num_samples} draws. PAvPU: paired t-test on probabilities, threshold 0.05.", highlight=False
    )
