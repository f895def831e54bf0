"""The paper's captioning table beside ours: every variant with several seeds on every data set at hand.

A finished run is kept as its captions. They are scored when the table is made, so a GPU without Java can train and another
machine can score.
"""

import dataclasses
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, get_args

import torch
from rich.console import Console

from bayesattn.evaluation.aggregate import over_runs
from bayesattn.evaluation.runs import read_run, write_bytes
from bayesattn_recipes.captioning.data import CaptionData, DatasetName, load_data
from bayesattn_recipes.captioning.scoring import MEASURES, score, tools
from bayesattn_recipes.captioning.train import (
    CaptioningConfig,
    caption_split,
    load_config,
    load_run,
    search_options,
    train_run,
)
from bayesattn_recipes.common.tables import (
    choose,
    markdown,
    paired,
    print_tables,
    read_cell,
    show,
    show_p,
    write_cell,
    write_csv,
)
from bayesattn_recipes.vision.cells import Cells, at_hand, collect, deadline_after

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
FACTS = ("validation_nll", "num_parameters", "train_seconds", "distinct_captions", "tokenizer")


def reproduce(
    names: Sequence[str] | None,
    variants: Sequence[str] | None,
    *,
    num_seeds: int,
    data: Path | None,
    out: Path,
    console: Console,
    minutes: float | None = None,
    settings: Sequence[str] = (),
) -> Path:
    """Train and measure what has not been, and write `captioning.md` and `captioning.csv`; returns the path of the former.

    Args:
        names: Data sets; None takes those at hand.
        variants: Keys of `VARIANTS`; None takes all.
        num_seeds: Runs per variant.
        data: The folder of the data sets.
        out: Folder for the runs and the tables; finished runs in it are not repeated.
        console: Where to print.
        minutes: No run begins later than this; the tables are of what is finished, and the same call goes on later.
        settings: `name=value` on top of every config.
    """
    known: tuple[DatasetName, ...] = get_args(DatasetName)
    chosen = choose("variants", variants, list(VARIANTS))
    deadline, pages, rows = deadline_after(minutes), [], []
    for dataset in choose("datasets", names, known, at_hand(known, data)):
        found = load_data(dataset, None if dataset == "shapes" else data)
        configs = {variant: load_config(f"{dataset}-{variant}", settings) for variant in chosen}

        def read(variant: str, seed: int, configs: Any = configs) -> dict[str, Any] | None:
            config = dataclasses.replace(configs[variant], seed=seed)
            return read_cell(cell_folder(out, variant, config) / "cell.json", dataclasses.asdict(config))

        def run(variant: str, seed: int, on_progress: Any, configs: Any = configs, found: Any = found) -> dict[str, Any]:
            config = dataclasses.replace(configs[variant], seed=seed)
            return run_cell(config, found, cell_folder(out, variant, config), on_progress)

        cells = collect(dataset, chosen, num_seeds, read=read, run=run, deadline=deadline, console=console)
        with console.status("scoring captions"):
            scored = score_cells(cells, found, out / dataset)
        for search, table in scored.items():
            pages.append(_page(f"{dataset}, {search}", table))
            rows += [
                {"dataset": dataset, "search": search, "variant": VARIANTS[variant], "seed": seed, **_numbers(cell)}
                for variant, seeds in table.items()
                for seed, cell in seeds.items()
            ]
    text = "\n".join([*pages, _paper_page()])
    print_tables(console, text)
    write_csv(out / "captioning.csv", rows)
    write_bytes(out / "captioning.md", text.encode())
    return out / "captioning.md"


def cell_folder(out: Path, variant: str, config: CaptioningConfig) -> Path:
    """Return the run folder of a cell, which also holds its captions."""
    return out / config.dataset / f"{variant}-{config.seed}"


def run_cell(
    config: CaptioningConfig,
    data: CaptionData,
    folder: Path,
    on_progress: Callable[[int, int], Any] = lambda done, total: None,
) -> dict[str, Any]:
    """Train one run and let it describe the test images, by its own search and by the paper's greedy one."""
    log = train_run(config, folder, on_progress, data=data, resume=True)
    _, model = load_run(folder)
    model = model.to("cuda" if torch.cuda.is_available() else "cpu")
    options = search_options(config)
    searches = {"greedy search": {**options, "num_beams": 1}}
    if config.num_beams > 1:
        searches[f"{config.num_beams} beams"] = options
    split, facts = data.splits["test"], read_run(folder)
    kept = [row for row in log.rows if row["is_best"]][-1] if config.training.keep != "last" else log.rows[-1]
    measures = {
        "captions": {name: caption_split(model, data, split, **found) for name, found in searches.items()},
        "validation_nll": kept["validation_nll"],
        "validation_bleu": kept["validation_bleu"],
        "num_parameters": facts["num_parameters"],
        "train_seconds": facts["train_seconds"],
    }
    write_cell(folder / "cell.json", dataclasses.asdict(config), measures)
    return measures


def score_cells(cells: Cells, data: CaptionData, folder: Path) -> dict[str, Cells]:
    """Return the scores of all captions, by search; what the same tools scored before is read."""
    references = data.splits["test"].captions
    found: dict[str, Cells] = {}
    for variant, by_seed in cells.items():
        for seed, cell in by_seed.items():
            for search, captions in cell["captions"].items():
                path = folder / f"{variant}-{seed}" / f"scores-{search.replace(' ', '-')}-{tools()}.json"
                scores = read_cell(path, {"captions": captions})
                if scores is None:
                    # as JSON gives it back
                    scores = json.loads(json.dumps(dataclasses.asdict(score(captions, references))))
                    write_cell(path, {"captions": captions}, scores)
                facts = {name: cell[name] for name in FACTS if name in cell}
                facts |= {"distinct_captions": len(set(captions)), "tokenizer": scores["tokenizer"]}
                values = {**scores["values"], "skipped": scores["skipped"], **facts}
                found.setdefault(search, {}).setdefault(variant, {})[seed] = values
    return found


def _numbers(cell: dict[str, Any]) -> dict[str, Any]:
    return {name: cell.get(name, "") for name in (*MEASURES, *FACTS)}


def _page(title: str, cells: Cells) -> str:
    """Return the tables of one data set and search: measures, then differences to the baseline."""
    first = next(iter(next(iter(cells.values())).values()))
    lines = [f"## {title}, ours\n", f"Mean over seeds ± half a 95 % t-interval; {first['tokenizer']} tokenizer.\n"]
    lines += [f"{name}: {reason}.\n" for name, reason in first["skipped"].items()]
    header = ["attention", "seeds", *MEASURES, "NLL", "parameters", "seconds"]
    rows = []
    for variant, runs in cells.items():
        measured = [_summary(runs, name) for name in MEASURES]
        nll = show(over_runs([run["validation_nll"] for run in runs.values()]), digits=3)
        size = f"{next(iter(runs.values()))['num_parameters']:,}"
        seconds = over_runs([run["train_seconds"] for run in runs.values()]).value
        rows.append([VARIANTS[variant], str(len(runs)), *measured, nll, size, f"{seconds:.0f}"])
    lines.append(markdown(header, rows))
    if BASELINE in cells and len(cells) > 1:
        lines += ["\nDifference to soft, seed by seed, and p-value of a paired t-test:\n", _differences(cells)]
    return "\n".join(lines)


def _summary(runs: dict[int, dict[str, Any]], name: str) -> str:
    values = [run[name] for run in runs.values() if name in run]
    return show(over_runs(values)) if values else "–"


def _differences(cells: Cells) -> str:
    rows = []
    for variant, runs in cells.items():
        if variant == BASELINE:
            continue
        row = [VARIANTS[variant]]
        for name in COMPARED:
            if any(name not in run for run in (*runs.values(), *cells[BASELINE].values())):
                row += ["–", "–"]
                continue
            seeds = sorted(runs.keys() & cells[BASELINE].keys())
            found = paired(*({seed: part[seed][name] for seed in seeds} for part in (runs, cells[BASELINE])))
            row += [show(found.difference), show_p(found.p_value)]
        rows.append(row)
    return markdown(["attention", *(part for name in COMPARED for part in (name, "p"))], rows)


def _paper_page() -> str:
    rows = [[VARIANTS[variant], *(f"{value:.1f}" for value in values)] for variant, values in PAPER.items()]
    table = markdown(["attention", *MEASURES], rows)
    return f"## COCO, the paper's\n\nBottom-up features, greedy search; WC ± 0.1 in every column.\n\n{table}"
