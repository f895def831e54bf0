"""The paper's VQA table beside ours: accuracy and PAvPU on clean and noisy features, several seeds, paired tests.

As in the paper, the accuracy is that of the deterministic prediction, and the certainty of an answer comes from M = 20
draws of attention and dropout together (dropout alone where attention is soft), by Welch's test on the probabilities.
"""

import dataclasses
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

from bayesattn.evaluation.runs import read_run, write_bytes
from bayesattn.evaluation.threads import one_thread
from bayesattn.metrics import expected_calibration_error, pavpu
from bayesattn.metrics.pavpu import THRESHOLDS
from bayesattn_recipes.common.tables import choose, print_tables, read_cell, write_cell, write_csv
from bayesattn_recipes.vision.cells import Cells, at_hand, collect, deadline_after
from bayesattn_recipes.vqa.accuracy import soft_targets, wordnet, wups
from bayesattn_recipes.vqa.daquar import is_single
from bayesattn_recipes.vqa.data import Split, load_splits
from bayesattn_recipes.vqa.evaluate import (
    PAPER_VARIANCE,
    Condition,
    available_methods,
    choose_device,
    tabulate,
    training_precision,
)
from bayesattn_recipes.vqa.model import MCAN
from bayesattn_recipes.vqa.tables import LEVELS, draw_curve, render
from bayesattn_recipes.vqa.train import VQAConfig, load_config, load_run, train_run

DATASETS = ("shapes", "daquar", "vqa2")
VARIANTS = ("soft", "nokl", "lf", "lc", "wf", "wc")
NUM_SAMPLES = 20


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
    """Train every variant on every data set with several seeds; write and print the tables, and return their file.

    Args:
        names: Data sets; None takes those whose files are in `data`, and shapes.
        variants: Of `VARIANTS`; None takes all. Differences are to `soft`, where it is among them.
        num_seeds: Runs per variant.
        data: The folder of the data sets.
        out: Folder of the runs; a finished one is not repeated.
        console: Where to print.
        minutes: No run begins later than this; the tables are of what is finished, and the same call goes on later.
        settings: `name=value` on top of every config.
    """
    names = choose("datasets", names, DATASETS, at_hand(DATASETS, data))
    variants = choose("variants", variants, VARIANTS)
    deadline = deadline_after(minutes)
    results: dict[str, Cells] = {}
    for dataset in names:
        results[dataset] = collect(
            dataset,
            variants,
            num_seeds,
            read=lambda variant, seed, name=dataset: Cell(name, variant, seed, out, tuple(settings)).read(),
            run=lambda variant, seed, on_progress, name=dataset: Cell(name, variant, seed, out, tuple(settings)).run(
                data, on_progress
            ),
            deadline=deadline,
            console=console,
        )
    text = "".join(render(dataset, by_variant, NUM_SAMPLES) for dataset, by_variant in results.items())
    rows = [
        {"dataset": dataset, "variant": variant, "seed": seed, "measure": measure, "value": value}
        for dataset, by_variant in results.items()
        for variant, by_seed in by_variant.items()
        for seed, cell in by_seed.items()
        for measure, value in cell.items()
    ]
    write_csv(out / "vqa.csv", rows)
    for dataset, by_variant in results.items():
        draw_curve(dataset, by_variant, out / f"vqa-{dataset}-noise.png")
    write_bytes(out / "vqa.md", text.encode())
    print_tables(console, text)
    return out / "vqa.md"


@dataclasses.dataclass(frozen=True)
class Cell:
    """One run of the table, in a folder `out` where it is found again."""

    dataset: str
    variant: str
    seed: int
    out: Path
    settings: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        """Of the run folder and of the file with the measures."""
        return f"{self.dataset}-{self.variant}-{self.seed}"

    def read(self) -> dict[str, Any] | None:
        """Return what an earlier call measured, or None."""
        return read_cell(self._path, self._identity())

    def run(self, data: Path | None, on_progress: Callable[[int, int], Any] = lambda done, total: None) -> dict[str, Any]:
        """Train and measure."""
        folder = self.out / self.name
        train_run(self._config, folder, on_progress, data=data, resume=True)
        measures = measure_run(folder, self._config, data)
        write_cell(self._path, self._identity(), measures)
        return measures

    @property
    def _path(self) -> Path:
        return self.out / "cells" / f"{self.name}.json"

    @property
    def _config(self) -> VQAConfig:
        return load_config(f"{self.dataset}-{self.variant}", [*self.settings, f"seed={self.seed}"])

    def _identity(self) -> dict[str, Any]:
        levels = LEVELS[self.dataset]
        return {"config": dataclasses.asdict(self._config), "num_samples": NUM_SAMPLES, "levels": levels}


@one_thread()
def measure_run(folder: Path, config: VQAConfig, data: Path | None, split_name: str = "test") -> dict[str, float | int]:
    """Return every measure of a run, by `condition measure`; nothing is kept per question.

    Args:
        folder: The run.
        config: Its config.
        data: The folder of the data sets.
        split_name: Of the questions; `validation` to choose settings by.
    """
    _, model = load_run(folder)
    model = model.to(choose_device())
    split = load_splits(config.data, data)[split_name]
    conditions = [Condition("clean", split)]
    levels = LEVELS[config.data.dataset]
    conditions += [Condition(f"noise {level:g}x", split, level * split.regions.variance) for level in levels]
    if config.data.dataset != "shapes":
        conditions.append(Condition("variance 5", split, PAPER_VARIANCE))
    facts = read_run(folder)
    measures = {"num_parameters": facts["num_parameters"], "train_seconds": facts["train_seconds"]}
    with training_precision(config):
        for condition in conditions:
            for name, value in measure(model, condition, available_methods(config)[1]).items():
                measures[f"{condition.name} {name}"] = value
    return measures


def measure(model: MCAN, condition: Condition, method: str, num_samples: int = NUM_SAMPLES) -> dict[str, float]:
    """Return the measures of one condition: accuracies of the deterministic answer, the rest from draws."""
    split = condition.split
    tables = tabulate(model, condition, ["mean", method], num_samples, seed=0)
    plain_table, drawn = tables["mean"], tables[method]
    assert drawn.p_value is not None
    accuracy = plain_table.accuracy
    official = _accuracy_of(plain_table.predicted, split, model)
    measures = {
        "accuracy": float(accuracy.mean()),
        "accuracy_leave_one_out": float(official.mean()),
        "accuracy_drawn": float(drawn.accuracy.mean()),
        "nll": float(drawn.nll.mean()),
        "ece": float(expected_calibration_error(drawn.confidence, drawn.accuracy)),
    }
    for threshold, value in zip(THRESHOLDS, pavpu(accuracy, drawn.p_value, THRESHOLDS).tolist(), strict=True):
        measures[f"pavpu_{round(100 * threshold):02d}"] = value
    kinds = [question.kind for question in split.questions]
    for kind in sorted(set(kinds)):
        chosen = torch.tensor([other == kind for other in kinds])
        measures[f"accuracy {kind}"] = float(accuracy[chosen].mean())
        measures[f"pavpu_05 {kind}"] = float(pavpu(accuracy[chosen], drawn.p_value[chosen]))
    if all(len(question.answers) == 1 for question in split.questions):
        single = torch.tensor([is_single(question.answers[0]) for question in split.questions])
        measures["accuracy_single"] = float(accuracy[single].mean())
        measures |= _wups(plain_table.predicted.tolist(), split, model)
    return measures


def _accuracy_of(predicted: torch.Tensor, split: Split, model: MCAN) -> torch.Tensor:
    """Return the leave-one-out accuracy of the predicted answers, a few questions at a time."""
    parts = []
    for start in range(0, len(split), 1024):
        targets = soft_targets(split.questions[start : start + 1024], model.vocabulary, "leave_one_out")
        parts.append(targets.gather(1, predicted[start : start + 1024, None]).squeeze(1))
    return torch.cat(parts)


def _wups(predicted: list[int], split: Split, model: MCAN) -> dict[str, float]:
    """Return WUPS at both usual thresholds, or nothing where WordNet is not at hand."""
    try:
        reader = wordnet()
    except ValueError:
        return {}
    said = [model.vocabulary.answers[index] for index in predicted]
    right = [question.answers[0] for question in split.questions]
    return {f"wups_{threshold:g}": wups(said, right, threshold, reader) for threshold in (0.9, 0.0)}
