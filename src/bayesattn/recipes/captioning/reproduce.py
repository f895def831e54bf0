"""The paper's captioning table beside ours: every variant with several seeds on every data set at hand."""

import dataclasses
from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any, get_args

import torch
from rich.console import Console

from bayesattn.bench.harness import measure
from bayesattn.objective import elbo
from bayesattn.recipes._tables import markdown, paired, read_cell, show, show_p, write_cell, write_csv
from bayesattn.recipes._train import progress, seed_everything
from bayesattn.recipes.captioning.data import CaptionData, DatasetName, load_data
from bayesattn.recipes.captioning.scoring import MEASURES, score
from bayesattn.recipes.captioning.train import (
    CaptioningConfig,
    CaptioningExperiment,
    caption_split,
    load_config,
    load_run,
    search_options,
    train_run,
)
from bayesattn.recording import record_kl
from bayesattn.report.aggregate import over_runs
from bayesattn.runs import read_run, write_bytes

# config suffix: what the tables call it
VARIANTS = {
    "soft": "soft",
    "hard": "hard (REINFORCE)",
    "gaussian": "Gaussian context",
    "nokl": "BAM-NOKL",
    "lf": "BAM-LF",
    "lc": "BAM-LC",
    "wf": "BAM-WF",
    "wc": "BAM-WC",
}
BASELINE = "soft"
# Table 3 of the paper, COCO, greedy search, in the order of MEASURES
PAPER = {
    "soft": (32.2, 43.6, 58.3, 74.9, 104.0, 54.7, 26.1),
    "hard": (26.5, 37.2, 51.9, 69.8, 84.4, 50.7, 23.3),
    "lc": (32.7, 44.0, 58.7, 75.1, 105.0, 54.8, 26.3),
    "wc": (32.8, 44.1, 58.8, 75.3, 104.5, 54.9, 26.2),
}
COMPARED = ("BLEU-4", "CIDEr")


def reproduce(
    names: Sequence[str] | None,
    variants: Sequence[str] | None,
    *,
    num_seeds: int,
    data: Path | None,
    out: Path,
    console: Console,
) -> Path:
    """Train and measure what has not been, and write `captioning.md` and `captioning.csv`; returns the path of the former.

    Args:
        names: Data sets; None takes those at hand.
        variants: Keys of `VARIANTS`; None takes all.
        num_seeds: Runs per variant.
        data: The folder of the data sets.
        out: Folder for the runs and the tables; finished runs in it are not repeated.
        console: Where to print.
    """
    datasets = _chosen_datasets(names, data)
    chosen = list(VARIANTS) if variants is None else list(dict.fromkeys(variants))
    for variant in chosen:
        if variant not in VARIANTS:
            raise ValueError(f"variant is {variant!r}; allowed: {', '.join(VARIANTS)}")
    pages, rows = [], []
    for dataset in datasets:
        found = load_data(dataset, None if dataset == "shapes" else data)
        configs = {variant: load_config(f"{dataset}-{variant}") for variant in chosen}
        cells: dict[str, dict[int, dict[str, Any]]] = {variant: {} for variant in chosen}
        with progress(console) as display:
            task = display.add_task(dataset, total=len(chosen) * num_seeds)
            # seed by seed: an interrupted experiment has complete pairs
            for seed in range(num_seeds):
                for variant, config in configs.items():
                    done = display.tasks[0].completed
                    cells[variant][seed] = _cell(
                        dataclasses.replace(config, seed=seed),
                        found,
                        out / dataset / f"{variant}-{seed}",
                        lambda step, steps, done=done, task=task: display.update(task, completed=done + step / steps),
                    )
                    display.update(task, completed=done + 1)
        with console.status("timing steps"):
            times = {variant: step_milliseconds(config, found) for variant, config in configs.items()}
        page = _page(dataset, cells, times, num_seeds)
        console.print(page, markup=False, highlight=False, soft_wrap=True)
        pages.append(page)
        rows += [
            {"dataset": dataset, "variant": VARIANTS[variant], "seed": seed, **_numbers(cell), "step_ms": times[variant]}
            for variant, seeds in cells.items()
            for seed, cell in seeds.items()
        ]
    write_csv(out / "captioning.csv", rows)
    table = out / "captioning.md"
    write_bytes(table, "\n".join([*pages, _paper_page()]).encode())
    return table


def _chosen_datasets(names: Sequence[str] | None, data: Path | None) -> list[DatasetName]:
    known: tuple[DatasetName, ...] = get_args(DatasetName)
    if names is None:
        return [name for name in known if name == "shapes" or (data is not None and (data / name).is_dir())]
    for name in names:
        if name not in known:
            raise ValueError(f"dataset is {name!r}; allowed: {', '.join(known)}")
    return [name for name in known if name in names]


def _cell(config: CaptioningConfig, data: CaptionData, folder: Path, on_progress: Any) -> dict[str, Any]:
    """Train one run and score its captions of the test images, unless that was done before."""
    identity = dataclasses.asdict(config)
    known = read_cell(folder / "cell.json", identity)
    if known is not None:
        return known
    log = train_run(config, folder, on_progress, data=data, resume=True)
    _, model = load_run(folder)
    split = data.splits["test"]
    captions = caption_split(model.to(_device()), data, split, **search_options(config))
    scores = score(captions, split.captions)
    run = read_run(folder)
    measures = {
        **scores.values,
        "skipped": scores.skipped,
        "tokenizer": scores.tokenizer,
        "distinct_captions": len(set(captions)),
        "validation_nll": log.rows[-1]["validation_nll"],
        "num_parameters": run["num_parameters"],
        "train_seconds": run["train_seconds"],
    }
    write_bytes(folder / "captions.txt", "".join(f"{name}\t{text}\n" for name, text in zip(split.names, captions)).encode())
    write_cell(folder / "cell.json", identity, measures)
    return measures


def step_milliseconds(config: CaptioningConfig, data: CaptionData) -> float:
    """Return the median time of a training step on the first batch: forward, backward, optimiser; nothing is read."""
    seed_everything(config.seed)
    experiment = CaptioningExperiment(config, data)
    device = _device()
    model = experiment.model.to(device).train()
    indices = experiment.batches(config.training, torch.Generator().manual_seed(0))[0]
    batch = {name: value.to(device) for name, value in experiment.collate(indices).items()}
    labels = experiment.num_labels(batch)
    is_bf16 = config.training.precision == "bf16"

    def step() -> None:
        with torch.autocast(device.type, torch.bfloat16) if is_bf16 else nullcontext(), record_kl() as scope:
            nll = experiment.nll(model, batch)
        kl = scope.total() if len(scope) else nll.new_zeros(())
        elbo(nll / labels, kl, labels_per_example=labels / len(indices)).loss.backward()
        experiment.optimizer.step()
        experiment.optimizer.zero_grad()

    return measure(step, device=device.type, budget_ms=1000.0)[0]


def _device() -> torch.device:
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def _numbers(cell: dict[str, Any]) -> dict[str, Any]:
    return {
        name: cell.get(name, "") for name in (*MEASURES, "validation_nll", "num_parameters", "train_seconds", "tokenizer")
    }


def _page(dataset: str, cells: dict[str, dict[int, dict[str, Any]]], times: dict[str, float], num_seeds: int) -> str:
    """Return the tables of one data set: measures, then differences to the baseline."""
    first = next(iter(next(iter(cells.values())).values()))
    seeds = "1 seed" if num_seeds == 1 else f"{num_seeds} seeds, ± half a 95 % t-interval"
    lines = [f"## {dataset}, ours\n", f"{seeds}; {first['tokenizer']} tokenizer.\n"]
    lines += [f"{name}: {reason}.\n" for name, reason in first["skipped"].items()]
    header = ["attention", *MEASURES, "NLL", "parameters", "step, ms", "step / soft"]
    rows = []
    for variant, runs in cells.items():
        measured = [_summary(runs, name) for name in MEASURES]
        ratio = f"{times[variant] / times[BASELINE]:.2f}" if BASELINE in times else "–"
        nll = show(over_runs([run["validation_nll"] for run in runs.values()]), digits=3)
        size = f"{next(iter(runs.values()))['num_parameters']:,}"
        rows.append([VARIANTS[variant], *measured, nll, size, f"{times[variant]:.1f}", ratio])
    lines.append(markdown(header, rows))
    if BASELINE in cells and len(cells) > 1:
        lines += ["\nDifference to soft, seed by seed, and p-value of a paired t-test:\n", _differences(cells)]
    return "\n".join(lines)


def _summary(runs: dict[int, dict[str, Any]], name: str) -> str:
    values = [run[name] for run in runs.values() if name in run]
    return show(over_runs(values)) if values else "–"


def _differences(cells: dict[str, dict[int, dict[str, Any]]]) -> str:
    rows = []
    for variant, runs in cells.items():
        if variant == BASELINE:
            continue
        row = [VARIANTS[variant]]
        for name in COMPARED:
            if any(name not in run for run in (*runs.values(), *cells[BASELINE].values())):
                row += ["–", "–"]
                continue
            found = paired(*({seed: run[name] for seed, run in part.items()} for part in (runs, cells[BASELINE])))
            row += [show(found.difference), show_p(found.p_value)]
        rows.append(row)
    return markdown(["attention", *(part for name in COMPARED for part in (name, "p"))], rows)


def _paper_page() -> str:
    rows = [[VARIANTS[variant], *(f"{value:.1f}" for value in values)] for variant, values in PAPER.items()]
    table = markdown(["attention", *MEASURES], rows)
    return f"## COCO, the paper's\n\nBottom-up features, greedy search; WC ± 0.1 in every column.\n\n{table}"
