"""The paper's two translation tables again: BLEU and cost of every variant, with what our data sets and draws add."""

import dataclasses
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

from bayesattn.recipes import _tables
from bayesattn.recipes._guards import Diverged
from bayesattn.recipes._train import progress
from bayesattn.recipes.translation import bleu
from bayesattn.recipes.translation.cost import measure_costs
from bayesattn.recipes.translation.data import OUT_OF_DOMAIN, load_out_of_domain, load_splits, split_hash
from bayesattn.recipes.translation.measure import measure_quality, measure_uncertainty, tf32_products
from bayesattn.recipes.translation.text import Pairs
from bayesattn.recipes.translation.train import TranslationConfig, load_config, load_run, train_on
from bayesattn.report.aggregate import over_runs
from bayesattn.runs import read_run, write_bytes, write_json

DATASETS = ("multi30k", "tatoeba")
VARIANTS = ("soft", "nokl", "lf", "lc", "wf", "wc", "hard", "gaussian", "mc-dropout", "enum", "sample", "dirichlet")
# IWSLT14 German–English, tokenised and lower-cased: BLEU (Sec. 4.4), seconds a step and millions of parameters (App. D);
# soft attention's cost and the lognormal variant are in comments of the paper's source only
PAPER_BLEU = {"soft": 32.77, "dirichlet": 30.05, "enum": 33.68, "sample": 33.30, "wc": 33.81, "lc": 33.63}
PAPER_COST = {"soft": (0.075, 42), "enum": (0.12, 64), "sample": (0.15, 64), "wc": (0.10, 42)}
NUM_SAMPLES = 20


def reproduce(
    datasets: Sequence[str] | None,
    variants: Sequence[str] | None,
    *,
    num_seeds: int,
    data: Path | None,
    out: Path,
    console: Console,
    settings: Sequence[str] = (),
) -> Path:
    """Train and measure what is missing in `out`, write the tables as Markdown, CSV and JSON, and print them.

    Args:
        datasets: Of `DATASETS`; None for all.
        variants: Config names without the data set; None for all. Differences are to `soft`, which is always run.
        num_seeds: Runs per variant, with seeds 0, 1, …
        data: Folder of the data sets.
        out: Folder of the runs and tables.
        console: Where to print.
        settings: `name=value` on top of every config.
    """
    datasets = _chosen("datasets", datasets, (*DATASETS, "iwslt14"), DATASETS)
    variants = _chosen("variants", variants, VARIANTS, VARIANTS)
    variants = variants if "soft" in variants else ["soft", *variants]
    bleu.corpus_bleu(["a"], ["a"])  # before hours of training: is sacrebleu there?
    loaded = {dataset: load_splits(dataset, data) for dataset in datasets}
    foreign = load_out_of_domain(data) if data is not None else None
    parts, cells = [], {}
    with progress(console) as display:
        task = display.add_task("", total=len(datasets) * len(variants) * num_seeds)
        for dataset in datasets:
            for variant in variants:
                for seed in range(num_seeds):
                    display.update(task, description=f"{dataset}-{variant}, seed {seed}")
                    config = load_config(f"{dataset}-{variant}", [*settings, f"seed={seed}"])
                    name = f"{dataset}-{variant}-{seed}"
                    cells[dataset, variant, seed] = run_cell(name, config, loaded[dataset], foreign, out)
                    display.advance(task)
    for dataset in datasets:
        found = {v: {seed: cells[dataset, v, seed] for seed in range(num_seeds)} for v in variants}
        _tables.write_csv(out / f"{dataset}.csv", csv_rows(dataset, found))
        parts.append(render(dataset, found, loaded[dataset], split_hash(loaded[dataset])))
    parts.append(cost_table(datasets[0], variants, out, settings))
    text = "\n".join(parts)
    write_bytes(out / "translation.md", text.encode())
    console.print(text, highlight=False, markup=False, soft_wrap=True)
    return out / "translation.md"


def _chosen(name: str, wanted: Sequence[str] | None, allowed: Sequence[str], default: Sequence[str]) -> list[str]:
    for value in wanted or ():
        if value not in allowed:
            raise ValueError(f"{name} has {value!r}; allowed: {', '.join(allowed)}")
    return list(default) if wanted is None else list(dict.fromkeys(wanted))


def run_cell(
    name: str, config: TranslationConfig, splits: dict[str, Pairs], foreign: Pairs | None, out: Path
) -> dict[str, Any]:
    """Return the measures of one run; trained, and measured, only where `out` does not have them.

    A run that diverges is a result too: its measures are `diverged`, the message alone.
    """
    path, folder = out / "cells" / f"{name}.json", out / "runs" / name
    identity = {"config": dataclasses.asdict(config), "split_hash": split_hash(splits)}
    measures = _tables.read_cell(path, identity)
    if measures is None:
        try:
            # an interrupted run goes on, a finished one is measured, one with other settings is refused
            log = train_on(config, splits, folder, resume=True)
        except Diverged as error:
            measures = {"diverged": str(error).partition(";")[0]}
        else:
            measures = measure_run(folder, config, splits, foreign)
            measures["validation_perplexity"] = min(row["validation_perplexity"] for row in log.rows)
        _tables.write_cell(path, identity, measures)
    return measures


def measure_run(
    folder: Path, config: TranslationConfig, splits: dict[str, Pairs], foreign: Pairs | None
) -> dict[str, Any]:
    """Return everything the tables say of a finished run; the translations of the main test are kept, for its p-value."""
    _, vocabulary, model = load_run(folder)
    model.to("cuda" if torch.cuda.is_available() else "cpu")
    tests = {split: pairs for split, pairs in splits.items() if split.startswith("test")}
    main = next(iter(tests))
    kinds: dict[str, bleu.Kind] = dict.fromkeys(tests, "tokenised" if config.dataset == "iwslt14" else "cased")
    if foreign is not None and config.dataset != "iwslt14":
        tests[OUT_OF_DOMAIN], kinds[OUT_OF_DOMAIN] = foreign, "lowercase"
    run = read_run(folder)
    seconds, quality = {"train": run["train_seconds"]}, {}
    with tf32_products():
        for split, pairs in tests.items():
            started = time.monotonic()
            quality[split] = measure_quality(model, vocabulary, pairs, kind=kinds[split])
            seconds[split] = round(time.monotonic() - started, 3)
        started, outputs = time.monotonic(), quality[main]["outputs"]
        uncertainty = measure_uncertainty(model, vocabulary, tests[main], outputs, num_samples=NUM_SAMPLES)
        seconds["uncertainty"] = round(time.monotonic() - started, 3)
    return {
        "tests": {s: {k: v for k, v in found.items() if s == main or k != "outputs"} for s, found in quality.items()},
        "uncertainty": uncertainty,
        "parameters": run["num_parameters"],
        "seconds": seconds,
    }


Cells = dict[str, dict[int, dict[str, Any]]]


def csv_rows(dataset: str, cells: Cells) -> list[dict[str, Any]]:
    """Return one row for every variant, seed and test set."""
    return [
        {
            "dataset": dataset,
            "variant": variant,
            "seed": seed,
            "test": test,
            **{name: values[name] for name in ("bleu", "chrf", "perplexity", "token_accuracy", "token_ece")},
            "bleu_signature": values["bleu_signature"],
            "validation_perplexity": cell["validation_perplexity"],
            "train_seconds": cell["seconds"]["train"],
            "test_seconds": cell["seconds"][test],
        }
        for variant, by_seed in cells.items()
        for seed, cell in by_seed.items()
        for test, values in cell["tests"].items()
    ]


def render(dataset: str, cells: Cells, splits: dict[str, Pairs], digest: str) -> str:
    """Return the Markdown of one data set: quality beside the paper's BLEU, and the worth of the uncertainty."""
    tests = list(next(iter(cells["soft"].values()))["tests"])
    main = tests[0]
    signature = cells["soft"][0]["tests"][main]["bleu_signature"]
    rows = [_quality_row(variant, by_seed, cells["soft"], main, splits[main]) for variant, by_seed in cells.items()]
    header = ["attention", f"BLEU, {main}", "− soft", "p (bootstrap)", "perplexity", "token ECE", "paper, IWSLT14"]
    others = [
        [v, *(_tables.show(over_runs([cell["tests"][t]["bleu"] for cell in by_seed.values()])) for t in tests[1:])]
        for v, by_seed in cells.items()
    ]
    lines = [
        f"## {dataset}: {len(cells['soft'])} seeds, split {digest[:16]}\n\n",
        _tables.markdown(header, rows),
        f"\n{signature}. The p-value is of seed 0's translations, paired bootstrap of 1,000 resamples.\n\n",
    ]
    if tests[1:]:
        lines += [_tables.markdown(["BLEU", *tests[1:]], others), "\n"]
    lines += [_tables.markdown(_UNCERTAINTY_HEADER, _uncertainty_rows(cells)), "\n"]
    return "".join(lines)


def _quality_row(variant: str, by_seed: dict[int, Any], soft: dict[int, Any], main: str, pairs: Pairs) -> list[str]:
    def each(cells: dict[int, Any], name: str) -> dict[int, float]:
        return {seed: cell["tests"][main][name] for seed, cell in cells.items()}

    difference = _tables.paired(each(by_seed, "bleu"), each(soft, "bleu")).difference
    p_value = None
    if variant != "soft":
        baseline, ours = (cells[0]["tests"][main]["outputs"] for cells in (soft, by_seed))
        p_value = bleu.bootstrap_p_value(baseline, ours, pairs.targets)
    return [
        variant,
        _tables.show(over_runs(list(each(by_seed, "bleu").values()))),
        "–" if variant == "soft" else _tables.show(difference),
        _tables.show_p(p_value),
        _tables.show(over_runs(list(each(by_seed, "perplexity").values()))),
        _tables.show(over_runs(list(each(by_seed, "token_ece").values())), digits=3),
        f"{PAPER_BLEU[variant]:.2f}" if variant in PAPER_BLEU else "–",
    ]


_UNCERTAINTY_HEADER = ["attention, draws, signal", "Spearman chrF", "Spearman BLEU", "BLEU, all", "BLEU, 20 % withheld"]


def _uncertainty_rows(cells: Cells) -> list[list[str]]:
    rows = []
    for variant, by_seed in cells.items():
        for signal in next(iter(by_seed.values()))["uncertainty"]:
            found = [cell["uncertainty"][signal] for cell in by_seed.values()]
            numbers = [[f["spearman_chrf"], f["spearman_bleu"], f["rejection"][0], f["rejection"][2]] for f in found]
            shown = [_tables.show(over_runs(list(column))) for column in zip(*numbers, strict=True)]
            rows.append([f"{variant}, {signal}", *shown])
    return rows


def cost_table(dataset: str, variants: Sequence[str], out: Path, settings: Sequence[str]) -> str:
    """Return the Markdown of what a training step costs, all variants on one batch of 4,096 tokens in one run."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    configs = [(variant, load_config(f"{dataset}-{variant}", settings)) for variant in variants]
    size = configs[0][1].vocabulary_size
    num_sentences = max(1, configs[0][1].batch_tokens // 16)
    measured, parameters = measure_costs(
        configs, num_sentences=num_sentences, length=16, vocabulary_size=size, device=device
    )
    rows = []
    for row in measured:
        paper = PAPER_COST.get(row.provider)
        rows.append(
            [
                row.provider,
                f"{row.median_ms / 1e3:.4f}",
                f"{row.ratio:.2f}",
                f"{parameters[row.provider] / 1e6:.1f}",
                f"{row.peak_mib:.0f}",
                "–" if paper is None else f"{paper[0]:.3f}",
                "–" if paper is None else f"{paper[0] / PAPER_COST['soft'][0]:.2f}",
                "–" if paper is None else str(paper[1]),
            ]
        )
    write_json(out / "cost.json", {"rows": [dataclasses.asdict(row) for row in measured], "parameters": parameters})
    header = ["attention", "s a step", "/ soft", "parameters (M)", "peak MiB", "paper: s a step", "/ soft", "parameters (M)"]
    title = f"## Cost of a training step, {num_sentences} pairs of 16 tokens, {measured[0].device}\n\n"
    return title + _tables.markdown(header, rows)
