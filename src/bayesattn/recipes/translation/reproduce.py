"""The paper's two translation tables again: BLEU and cost of every variant, with what our data sets and draws add."""

import dataclasses
import itertools
import math
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
from bayesattn.recipes.translation.measure import REJECTED, measure_quality, measure_uncertainty, tf32_products
from bayesattn.recipes.translation.text import Pairs
from bayesattn.recipes.translation.train import CONFIGS, TranslationConfig, load_config, load_run, train_on
from bayesattn.report.aggregate import over_runs
from bayesattn.runs import read_run, write_bytes, write_json

DATASETS = ("multi30k", "tatoeba")
VARIANTS = (
    *("soft", "nokl", "lf", "lc", "wf", "wc", "wc-default", "sampled-kl"),
    *("hard", "gumbel", "gaussian", "gaussian-weights", "mc-dropout", "exact", "enum", "sample", "dirichlet"),
)
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
    minutes: float | None = None,
) -> Path:
    """Train and measure what is missing in `out`, write the tables as Markdown, CSV and JSON, and print them.

    Args:
        datasets: Of `DATASETS`; None for all.
        variants: Config names without the data set; None for all the data set has. Differences are to `soft`, which is
            always run.
        num_seeds: Runs per variant, with seeds 0, 1, …
        data: Folder of the data sets.
        out: Folder of the runs and tables.
        console: Where to print.
        settings: `name=value` on top of every config.
        minutes: Begin no run after this time; the tables are then of the runs that are finished. 0 trains and
            times nothing.
    """
    datasets = _chosen("datasets", datasets, (*DATASETS, "iwslt14"), DATASETS)
    if variants is not None:
        variants = list(dict.fromkeys(("soft", *_chosen("variants", variants, VARIANTS, VARIANTS))))
    bleu.corpus_bleu(["a"], ["a"])  # before hours of training: is sacrebleu there?
    wanted = {
        dataset: variants or [v for v in VARIANTS if (CONFIGS / f"{dataset}-{v}.yaml").exists()] for dataset in datasets
    }
    loaded = {dataset: load_splits(dataset, data) for dataset in datasets}
    foreign = load_out_of_domain(data) if data is not None else None
    ends = math.inf if minutes is None else time.monotonic() + 60.0 * minutes
    parts = []
    with progress(console) as display:
        task = display.add_task("", total=sum(map(len, wanted.values())) * num_seeds)
        for dataset in datasets:
            cells: Cells = {variant: {} for variant in wanted[dataset]}
            # all variants of a seed, then the next seed: what an interrupted experiment leaves can be compared
            for seed, variant in itertools.product(range(num_seeds), cells):
                name = f"{dataset}-{variant}-{seed}"
                display.update(task, description=name)
                config = load_config(f"{dataset}-{variant}", [*settings, f"seed={seed}"])
                if time.monotonic() < ends or (out / "cells" / f"{name}.json").exists():
                    cells[variant][seed] = run_cell(name, config, loaded[dataset], foreign, out)
                display.advance(task)
            if not cells["soft"]:
                raise ValueError(f"minutes is {minutes}, and no run of {dataset}-soft is finished; allowed: more minutes")
            rows = csv_rows(dataset, cells)
            _tables.write_csv(out / f"{dataset}.csv", rows)
            _tables.write_csv(out / f"{dataset}-uncertainty.csv", uncertainty_csv_rows(dataset, cells))
            parts.append(render(dataset, cells, loaded[dataset], split_hash(loaded[dataset])))
    if minutes != 0:
        parts.append(cost_table(datasets[0], wanted[datasets[0]], out, settings))
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


def measure_run(folder: Path, config: TranslationConfig, splits: dict[str, Pairs], foreign: Pairs | None) -> dict[str, Any]:
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


# by variant and seed; the measures of a run, or why it diverged
Cells = dict[str, dict[int, dict[str, Any]]]


def _finished(cells: Cells) -> Cells:
    """Return the runs that did not diverge, without variants that have none."""
    kept = {v: {s: cell for s, cell in by_seed.items() if "diverged" not in cell} for v, by_seed in cells.items()}
    return {variant: by_seed for variant, by_seed in kept.items() if by_seed}


def csv_rows(dataset: str, cells: Cells) -> list[dict[str, Any]]:
    """Return one row for every variant, seed and test set; of a run that diverged, what it said."""
    rows = [
        {
            "dataset": dataset,
            "variant": variant,
            "seed": seed,
            "test": test,
            **{name: values[name] for name in ("bleu", "chrf", "perplexity", "token_accuracy", "token_ece")},
            "bleu_signature": values["bleu_signature"],
            "validation_perplexity": cell["validation_perplexity"],
            "parameters": cell["parameters"],
            "train_seconds": cell["seconds"]["train"],
            "test_seconds": cell["seconds"][test],
            "uncertainty_seconds": cell["seconds"]["uncertainty"],
            "diverged": "",
        }
        for variant, by_seed in _finished(cells).items()
        for seed, cell in by_seed.items()
        for test, values in cell["tests"].items()
    ]
    lost = [
        {**dict.fromkeys(rows[0], ""), "dataset": dataset, "variant": v, "seed": seed, "diverged": cell["diverged"]}
        for v, by_seed in cells.items()
        for seed, cell in by_seed.items()
        if "diverged" in cell
    ]
    return [*rows, *lost]


def uncertainty_csv_rows(dataset: str, cells: Cells) -> list[dict[str, Any]]:
    """Return one row for every variant, seed and signal, with its whole rejection curve."""
    return [
        {
            "dataset": dataset,
            "variant": variant,
            "seed": seed,
            "signal": signal,
            "spearman_chrf": found["spearman_chrf"],
            "spearman_bleu": found["spearman_bleu"],
            **{f"bleu_{share:.0%}_withheld": value for share, value in zip(REJECTED, found["rejection"], strict=True)},
        }
        for variant, by_seed in _finished(cells).items()
        for seed, cell in by_seed.items()
        for signal, found in cell["uncertainty"].items()
    ]


def render(dataset: str, cells: Cells, splits: dict[str, Pairs], digest: str) -> str:
    """Return the Markdown of one data set: quality beside the paper's BLEU, and the worth of the uncertainty."""
    finished = _finished(cells)
    any_soft = next(iter(finished["soft"].values()))
    tests = list(any_soft["tests"])
    main = tests[0]
    rows = [_quality_row(variant, by_seed, finished["soft"], main, splits[main]) for variant, by_seed in finished.items()]
    header = ["attention", "seeds", f"BLEU, {main}", "− soft", "p (bootstrap), each seed", "perplexity", "token ECE"]
    others = [
        [v, *(_tables.show(over_runs([cell["tests"][t]["bleu"] for cell in by_seed.values()])) for t in tests[1:])]
        for v, by_seed in finished.items()
    ]
    lines = [
        f"## {dataset}, split {digest[:16]}\n\n",
        _tables.markdown([*header, "paper, IWSLT14"], rows),
        f"\n{any_soft['tests'][main]['bleu_signature']}; paired bootstrap of 1,000 resamples.\n\n",
        *(
            f"{variant}, seed {seed}, diverged: {cell['diverged']}.\n\n"
            for variant, by_seed in cells.items()
            for seed, cell in by_seed.items()
            if "diverged" in cell
        ),
    ]
    if tests[1:]:
        lines += [_tables.markdown(["BLEU", *tests[1:]], others), "\n"]
    lines += [_tables.markdown(_UNCERTAINTY_HEADER, _uncertainty_rows(finished)), "\n"]
    return "".join(lines)


def _quality_row(variant: str, by_seed: dict[int, Any], soft: dict[int, Any], main: str, pairs: Pairs) -> list[str]:
    def each(cells: dict[int, Any], name: str) -> dict[int, float]:
        return {seed: cell["tests"][main][name] for seed, cell in cells.items()}

    common = {seed: cell for seed, cell in by_seed.items() if seed in soft}
    difference, p_values = "–", "–"
    if variant != "soft" and common:
        difference = _tables.show(_tables.paired(each(common, "bleu"), each(soft, "bleu")).difference)
        texts = [[cells[seed]["tests"][main]["outputs"] for cells in (soft, common)] for seed in common]
        p_values = ", ".join(_tables.show_p(bleu.bootstrap_p_value(*both, pairs.targets)) for both in texts)
    return [
        variant,
        str(len(by_seed)),
        _tables.show(over_runs(list(each(by_seed, "bleu").values()))),
        difference,
        p_values,
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
            columns = zip(*numbers, strict=True)
            shown = [_tables.show(over_runs(list(c)), digits=d) for c, d in zip(columns, (3, 3, 2, 2), strict=True)]
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
