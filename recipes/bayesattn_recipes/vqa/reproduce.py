"""The paper's VQA table beside the results: accuracy and PAvPU on clean and noisy features, several seeds, paired tests.

As in the paper, the accuracy is that of the deterministic prediction, and the certainty of an answer comes from M = 20
draws of attention and dropout together (dropout alone if attention is soft), by Welch's test on the probabilities.
"""

import dataclasses
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from bayesattn.cli.registry import Request
from bayesattn.evaluation.runs import read_run
from bayesattn.evaluation.threads import one_thread
from bayesattn.files import write_bytes
from bayesattn.metrics import expected_calibration_error, pavpu
from bayesattn.metrics.pavpu import THRESHOLDS
from bayesattn_recipes.common.reproduce import at_hand, collect
from bayesattn_recipes.common.tables import Cells, choose, print_tables, write_csv
from bayesattn_recipes.vqa import tuned
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
VARIANTS = ("soft", "nokl", "lf", "lc", "wf", "wc", "uniform")
NUM_SAMPLES = 20


def reproduce(request: Request, *, search: bool = False) -> Path:
    """Train every variant on every data set with several seeds; write and print the tables, and return their file.

    Args:
        request: `names` are of `DATASETS`, by default shapes and those with files in `data`; `variants` are of `VARIANTS`.
            Differences are to `soft`, if it is among them.
        search: Compare kinds of attention, each with the same number of settings (`tuned.py`); on shapes unless named.
            Only this takes several `jobs`.
    """
    if search:
        return tuned.compare(request)
    if request.jobs > 1:
        raise ValueError("jobs is for --search; these runs use the whole machine. Leave it out")
    out, variants = request.out, choose("variants", request.variants, VARIANTS)
    results: dict[str, Cells] = {
        dataset: collect(request, dataset, variants, VQARuns(dataset, request.data, request.settings))
        for dataset in choose("datasets", request.names, DATASETS, at_hand(DATASETS, request.data))
    }
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
    print_tables(request.console, text)
    return out / "vqa.md"


@dataclasses.dataclass(frozen=True)
class VQARuns:
    """The runs of one data set."""

    dataset: str
    data: Path | None
    settings: Sequence[str] = ()

    def config(self, variant: str, seed: int) -> VQAConfig:
        """Return the config of a run."""
        return load_config(f"{self.dataset}-{variant}", [*self.settings, f"seed={seed}"])

    def identity(self, variant: str, seed: int) -> dict[str, Any]:
        """Return the config of a run, and the settings of its measurement."""
        config = dataclasses.asdict(self.config(variant, seed))
        return {"config": config, "num_samples": NUM_SAMPLES, "levels": LEVELS[self.dataset]}

    def run(self, variant: str, seed: int, folder: Path, on_progress: Callable[[int, int], Any]) -> dict[str, Any]:
        """Train and measure."""
        config = self.config(variant, seed)
        train_run(config, folder, on_progress, data=self.data, resume=True)
        return measure_run(folder, config, self.data)


@one_thread()
def measure_run(folder: Path, config: VQAConfig, data: Path | None, split_name: str = "test") -> dict[str, float | int]:
    """Return every measure of a run, by `condition measure`; nothing is kept per question.

    Args:
        folder: The run.
        config: Its config.
        data: The folder of the data sets.
        split_name: Split of the questions; `validation` to choose settings by.
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
    """Return WUPS at both usual thresholds, or nothing where WordNet is not installed."""
    try:
        reader = wordnet()
    except ValueError:
        return {}
    said = [model.vocabulary.answers[index] for index in predicted]
    right = [question.answers[0] for question in split.questions]
    return {f"wups_{threshold:g}": wups(said, right, threshold, reader) for threshold in (0.9, 0.0)}
