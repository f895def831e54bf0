"""The paper's translation table: BLEU of every variant, with further data sets and measures of draws."""

import dataclasses
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from bayesattn.cli.registry import Request
from bayesattn.evaluation.runs import read_run
from bayesattn.files import write_bytes
from bayesattn_recipes.common.figures import write_figure
from bayesattn_recipes.common.guards import Diverged
from bayesattn_recipes.common.reproduce import collect
from bayesattn_recipes.common.tables import choose, print_tables, write_csv
from bayesattn_recipes.translation import bleu
from bayesattn_recipes.translation.config import TranslationConfig
from bayesattn_recipes.translation.data import OUT_OF_DOMAIN, load_out_of_domain, load_splits, split_hash
from bayesattn_recipes.translation.figures import rejection_figure
from bayesattn_recipes.translation.measure import measure_calibration, measure_quality, measure_uncertainty, tf32_products
from bayesattn_recipes.translation.tables import (
    calibration_csv_rows,
    comparison_csv_rows,
    csv_rows,
    render,
    uncertainty_csv_rows,
)
from bayesattn_recipes.translation.text import Pairs
from bayesattn_recipes.translation.train import CONFIGS, load_config, load_run, train_run

DATASETS = ("multi30k", "tatoeba")
VARIANTS = (
    *("soft", "nokl", "lf", "lc", "wf", "wc", "wc-default", "sampled-kl"),
    *("hard", "gumbel", "gaussian", "gaussian-weights", "mc-dropout", "uniform", "exact", "exact-top"),
    *("enum", "sample", "dirichlet"),
)
# variants also tested out of domain and under draws, which takes several times as long as the rest of the measuring
CLOSELY = ("soft", "wc", "mc-dropout")
NUM_SAMPLES = 20


def reproduce(request: Request) -> Path:
    """Train and measure what is missing, write the tables as Markdown and CSV, and print them.

    Args:
        request: `names` are of `DATASETS`, all by default, or `iwslt14`; `variants` are config names without the data set,
            by default all it has. Differences are to `soft`, which is always run.
    """
    data, out = request.data, request.out
    datasets = choose("datasets", request.names, (*DATASETS, "iwslt14"), DATASETS)
    variants = None
    if request.variants is not None:
        variants = list(dict.fromkeys(("soft", *choose("variants", request.variants, VARIANTS))))
    wanted = {
        dataset: variants or [v for v in VARIANTS if (CONFIGS / f"{dataset}-{v}.yaml").exists()] for dataset in datasets
    }
    loaded = {dataset: load_splits(dataset, data) for dataset in datasets}
    foreign = load_out_of_domain(data) if data is not None else None
    parts = []
    for dataset in datasets:
        splits = loaded[dataset]
        work = TranslationRuns(dataset, splits, foreign, request.settings)
        cells = collect(request, dataset, wanted[dataset], work, required="soft")
        comparisons = comparison_csv_rows(dataset, cells, splits)
        files = {
            "": csv_rows(dataset, cells),
            "-uncertainty": uncertainty_csv_rows(dataset, cells),
            "-calibration": calibration_csv_rows(dataset, cells),
            **({"-comparisons": comparisons} if comparisons else {}),
        }
        for ending, rows in files.items():
            write_csv(out / f"{dataset}{ending}.csv", rows)
        write_figure(out / f"{dataset}-rejection.png", rejection_figure(cells, title=dataset))
        parts.append(render(dataset, cells, comparisons, split_hash(splits)))
    text = "\n".join(parts)
    write_bytes(out / "translation.md", text.encode())
    print_tables(request.console, text)
    return out / "translation.md"


@dataclasses.dataclass(frozen=True)
class TranslationRuns:
    """The runs of one data set, and the out-of-domain test set if it is available."""

    dataset: str
    splits: dict[str, Pairs]
    foreign: Pairs | None
    settings: Sequence[str] = ()

    def config(self, variant: str, seed: int) -> TranslationConfig:
        """Return the config of a run."""
        return load_config(f"{self.dataset}-{variant}", [*self.settings, f"seed={seed}"])

    def identity(self, variant: str, seed: int) -> dict[str, Any]:
        """Return the config of a run, and the identity of its sentences."""
        return {"config": dataclasses.asdict(self.config(variant, seed)), "split_hash": split_hash(self.splits)}

    def run(self, variant: str, seed: int, folder: Path, on_progress: Callable[[int, int], Any]) -> dict[str, Any]:
        """Train and measure. A run that diverges is a result too: its only measure is `diverged`, the message."""
        config = self.config(variant, seed)
        try:
            # an interrupted run is continued, a finished one measured, one with other settings refused
            log = train_run(config, folder, on_progress, data=self.splits, resume=True)
        except Diverged as error:
            return {"diverged": str(error).partition(";")[0]}
        measures = measure_run(folder, config, self.splits, self.foreign, closely=variant in CLOSELY)
        measures["validation_perplexity"] = min(row["validation_perplexity"] for row in log.rows)
        return measures


def measure_run(
    folder: Path, config: TranslationConfig, splits: dict[str, Pairs], foreign: Pairs | None, *, closely: bool = True
) -> dict[str, Any]:
    """Return everything the tables show of a finished run; the translations of the main test are kept for its p-value.

    Without `closely`, the out-of-domain test and everything that needs draws are left out; without `foreign`, that test is.
    `not_measured` lists what was left out.
    """
    _, vocabulary, model = load_run(folder)
    model.to("cuda" if torch.cuda.is_available() else "cpu")
    tests = {split: pairs for split, pairs in splits.items() if split.startswith("test")}
    main = next(iter(tests))
    kinds: dict[str, bleu.Kind] = dict.fromkeys(tests, "tokenized" if config.dataset == "iwslt14" else "cased")
    if closely and foreign is not None and config.dataset != "iwslt14":
        tests[OUT_OF_DOMAIN], kinds[OUT_OF_DOMAIN] = foreign, "lowercase"
    run, not_measured = read_run(folder), [] if closely else ["uncertainty", "calibration"]
    if OUT_OF_DOMAIN not in tests and config.dataset != "iwslt14":
        not_measured.insert(0, OUT_OF_DOMAIN)
    seconds, quality = {"train": run["train_seconds"]}, {}
    uncertainty, calibration = {}, {}
    with tf32_products():
        for split, pairs in tests.items():
            started = time.monotonic()
            quality[split] = measure_quality(model, vocabulary, pairs, kind=kinds[split])
            seconds[split] = round(time.monotonic() - started, 3)
        if closely:
            started, outputs = time.monotonic(), quality[main]["outputs"]
            uncertainty = measure_uncertainty(model, vocabulary, tests[main], outputs, num_samples=NUM_SAMPLES)
            calibration = measure_calibration(model, vocabulary, tests[main], num_samples=NUM_SAMPLES)
            seconds["uncertainty"] = round(time.monotonic() - started, 3)
    return {
        "tests": {s: {k: v for k, v in found.items() if s == main or k != "outputs"} for s, found in quality.items()},
        "uncertainty": uncertainty,
        "calibration": calibration,
        "not_measured": not_measured,
        "parameters": run["num_parameters"],
        "seconds": seconds,
    }
