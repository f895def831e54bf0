"""The paper's captioning table beside the results: every variant with several seeds on every available data set.

A finished run is kept as its captions. They are scored when the table is made, so a GPU without Java can train and another
machine can score.
"""

import dataclasses
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, get_args

import torch

from bayesattn.cli.registry import Request
from bayesattn.evaluation.aggregate import over_runs
from bayesattn.evaluation.runs import read_run
from bayesattn.files import write_bytes
from bayesattn_recipes.captioning import tuned
from bayesattn_recipes.captioning.data import CaptionData, DatasetName, load_data
from bayesattn_recipes.captioning.scoring import MEASURES, score, tools
from bayesattn_recipes.captioning.train import (
    CONFIGS,
    CaptioningConfig,
    caption_split,
    kept_row,
    load_config,
    load_run,
    search_options,
    train_run,
)
from bayesattn_recipes.common.cells import read_cell, write_cell
from bayesattn_recipes.common.reproduce import at_hand, collect
from bayesattn_recipes.common.tables import (
    Cells,
    Column,
    choose,
    difference_table,
    markdown,
    mean_table,
    print_tables,
    write_csv,
)

# config suffix: its name in the tables
VARIANTS = {
    "soft": "soft",
    "hard": "hard (REINFORCE)",
    "gaussian": "Gaussian context",
    "nokl": "BAM-NOKL",
    "lf": "BAM-LF",
    "lc": "BAM-LC",
    "wf": "BAM-WF",
    "wc": "BAM-WC",
    "sampled-kl": "BAM-WC, KL at a draw",
    "gaussian-weights": "Gaussian weights",
    "uniform": "uniform",
    "exact": "exact marginal",
}
BASELINE = "soft"
# Table 3 of the paper, COCO, greedy search, in the order of MEASURES
PAPER = {
    "soft": (32.2, 43.6, 58.3, 74.9, 104.0, 54.7, 26.1),
    "hard": (26.5, 37.2, 51.9, 69.8, 84.4, 50.7, 23.3),
    "lc": (32.7, 44.0, 58.7, 75.1, 105.0, 54.8, 26.3),
    "wc": (32.8, 44.1, 58.8, 75.3, 104.5, 54.9, 26.2),
}
COLUMNS = (*(Column(name, name) for name in MEASURES), Column("NLL", "validation_nll", digits=3))
COMPARED = (Column("BLEU-4", "BLEU-4"), Column("CIDEr", "CIDEr"))
FACTS = ("validation_nll", "num_parameters", "train_seconds", "distinct_captions", "tokenizer")


def reproduce(request: Request, *, search: bool = False) -> Path:
    """Train and measure what is missing, and write `captioning.md` and `captioning.csv`; return the path of the `.md` file.

    Args:
        request: `names` are of data sets, by default those available; `variants` are keys of `VARIANTS`.
        search: Compare kinds of attention, each with the same number of settings (`tuned.py`); on shapes unless named.
            Only this takes several `jobs`.
    """
    if search:
        return tuned.compare(request)
    if request.jobs > 1:
        raise ValueError("jobs is for --search; these runs use the whole machine. Leave it out")
    known: tuple[DatasetName, ...] = get_args(DatasetName)
    data, out, pages, rows = request.data, request.out, [], []
    for dataset in choose("datasets", request.names, known, at_hand(known, data)):
        available = [v for v in VARIANTS if (CONFIGS / f"{dataset}-{v}.yaml").exists()]
        chosen = choose("variants", request.variants, available)
        found = load_data(dataset, None if dataset == "shapes" else data)
        work = CaptioningRuns({variant: load_config(f"{dataset}-{variant}", request.settings) for variant in chosen}, found)
        cells = collect(request, dataset, chosen, work)
        with request.console.status("scoring captions"):
            scored = score_cells(cells, found, out / "scores", dataset)
        for decoding, table in scored.items():
            pages.append(_page(f"{dataset}, {decoding}", table))
            rows += [
                {"dataset": dataset, "search": decoding, "variant": VARIANTS[variant], "seed": seed, **_numbers(cell)}
                for variant, seeds in table.items()
                for seed, cell in seeds.items()
            ]
    text = "\n".join([*pages, _paper_page()])
    print_tables(request.console, text)
    write_csv(out / "captioning.csv", rows)
    write_bytes(out / "captioning.md", text.encode())
    return out / "captioning.md"


@dataclasses.dataclass(frozen=True)
class CaptioningRuns:
    """The runs of one data set: its configs by variant, and its images."""

    configs: dict[str, CaptioningConfig]
    data: CaptionData

    def identity(self, variant: str, seed: int) -> dict[str, Any]:
        """Return the config of a run."""
        return dataclasses.asdict(dataclasses.replace(self.configs[variant], seed=seed))

    def run(self, variant: str, seed: int, folder: Path, on_progress: Callable[[int, int], Any]) -> dict[str, Any]:
        """Train one run and describe the test images, by its own search and by the paper's greedy one."""
        config = dataclasses.replace(self.configs[variant], seed=seed)
        log = train_run(config, folder, on_progress, data=self.data, resume=True)
        _, model = load_run(folder)
        model = model.to("cuda" if torch.cuda.is_available() else "cpu")
        options = search_options(config)
        searches = {"greedy search": {**options, "num_beams": 1}}
        if config.num_beams > 1:
            searches[f"{config.num_beams} beams"] = options
        split, facts, kept = self.data.splits["test"], read_run(folder), kept_row(config, log)
        return {
            "captions": {name: caption_split(model, self.data, split, **found) for name, found in searches.items()},
            "validation_nll": kept["validation_nll"],
            "validation_bleu": kept["validation_bleu"],
            "num_parameters": facts["num_parameters"],
            "train_seconds": facts["train_seconds"],
        }


def score_cells(cells: Cells, data: CaptionData, folder: Path, dataset: str) -> dict[str, Cells]:
    """Return the scores of all captions, by search; scores from the same tools are read from the folder."""
    references = data.splits["test"].captions
    found: dict[str, dict[str, dict[int, dict[str, Any]]]] = {}
    for variant, by_seed in cells.items():
        for seed, cell in by_seed.items():
            for search, captions in cell["captions"].items():
                path = folder / f"{dataset}-{variant}-{seed}-{search.replace(' ', '-')}-{tools()}.json"
                scores = read_cell(path, {"captions": captions})
                if scores is None:
                    # as JSON stores it
                    scores = json.loads(json.dumps(dataclasses.asdict(score(captions, references))))
                    write_cell(path, {"captions": captions}, scores)
                facts = {name: cell[name] for name in FACTS if name in cell}
                facts |= {"distinct_captions": len(set(captions)), "tokenizer": scores["tokenizer"]}
                values = {**scores["values"], "skipped": scores["skipped"], **facts}
                found.setdefault(search, {}).setdefault(variant, {})[seed] = values
    return dict(found)


def _numbers(cell: Mapping[str, Any]) -> dict[str, Any]:
    return {name: cell.get(name, "") for name in (*MEASURES, *FACTS)}


def _page(title: str, cells: Cells) -> str:
    """Return the tables of one data set and search: measures, then differences to the baseline."""
    first = next(iter(next(iter(cells.values())).values()))
    lines = [f"## {title}, ours\n", f"Mean over seeds ± half a 95 % t-interval; {first['tokenizer']} tokenizer.\n"]
    lines += [f"{name}: {reason}.\n" for name, reason in first["skipped"].items()]
    more = {
        "parameters": lambda variant: f"{next(iter(cells[variant].values()))['num_parameters']:,}",
        "seconds": lambda variant: f"{over_runs([run['train_seconds'] for run in cells[variant].values()]).value:.0f}",
    }
    lines.append(mean_table(cells, COLUMNS, label=VARIANTS.__getitem__, more=more))
    differences = difference_table(cells, COMPARED, label=VARIANTS.__getitem__, baseline=BASELINE)
    if differences:
        lines += ["\nDifference to soft, seed by seed, and p-value of a paired t-test:\n", differences]
    return "\n".join(lines)


def _paper_page() -> str:
    rows = [[VARIANTS[variant], *(f"{value:.1f}" for value in values)] for variant, values in PAPER.items()]
    table = markdown(["attention", *MEASURES], rows)
    return f"## COCO, the paper's\n\nBottom-up features, greedy search; WC ± 0.1 in every column.\n\n{table}"
