"""Compare two ways to predict on the same test examples: the differences, and how much the choice of examples explains.

    python -m bayesattn_recipes.language.compare runs/mrpc-soft:mean runs/mrpc-wc:attention --out differences.csv

The interval is a bootstrap over the examples, the two sides paired. It says nothing about other seeds: if there are
several, the tables of `reproduce` compare over them.
"""

import argparse
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from jaxtyping import Float
from torch import Tensor

from bayesattn.evaluation.runs import PREDICTIONS_FILE, read_predictions, read_run
from bayesattn.files import RunError
from bayesattn.metrics import bootstrap_mean
from bayesattn_recipes.common.tables import markdown, write_csv
from bayesattn_recipes.language.measure import answer_losses, read_answers
from bayesattn_recipes.language.table import MEANS_FOLDER
from bayesattn_recipes.language.tasks import find_task

NUM_RESAMPLES = 10_000


@dataclass(frozen=True)
class Difference:
    """The mean of the first side minus that of the second.

    Attributes:
        task: The task of both.
        seeds: Seeds of the two runs.
        first: Variant and method of the first side.
        second: Variant and method of the second side.
        split: The split of the examples.
        metric: The measure, taken example by example.
        num_examples: Number of examples.
        value: First minus second.
        low: Lower end of the 95 % interval.
        high: Its upper end.
    """

    task: str
    seeds: str
    first: str
    second: str
    split: str
    metric: str
    num_examples: int
    value: float
    low: float
    high: float


def compare(first: tuple[Path, str], second: tuple[Path, str], split: str = "test") -> list[Difference]:
    """Return the differences of all measures that are means over examples.

    Args:
        first: Run folder and method.
        second: Another, with the same task and the same examples.
        split: Split whose examples are compared.
    """
    runs = [read_run(folder) for folder, _ in (first, second)]
    task, other = (run["config"]["task"] for run in runs)
    ours, theirs = (example_measures(folder, method, split) for folder, method in (first, second))
    counts = [len(next(iter(side.values()))) for side in (ours, theirs)]
    if task != other or counts[0] != counts[1]:
        raise ValueError(f"both runs must have the same examples, got {counts[0]} of {task!r} and {counts[1]} of {other!r}")
    names = [f"{run['variant']}:{method}" for run, (_, method) in zip(runs, (first, second))]
    seeds = f"{runs[0]['seed']}/{runs[1]['seed']}"
    found = []
    for metric, values in ours.items():
        gap = (values - theirs[metric]).unsqueeze(1)
        low, high = bootstrap_mean(gap, num_resamples=NUM_RESAMPLES)[0].tolist()
        found.append(Difference(task, seeds, names[0], names[1], split, metric, counts[0], float(gap.mean()), low, high))
    return found


def example_measures(folder: Path, method: str, split: str) -> dict[str, Float[Tensor, " n"]]:
    """Return the measures that each example has by itself: right or wrong and −ln p, or the squared error."""
    task = find_task(read_run(folder)["config"]["task"])
    if task.kind == "spans":
        answers = read_answers(folder).get(split, {})
        if method not in answers:
            raise RunError(f"{folder} has no answers of split {split!r} and method {method!r}. It has {', '.join(answers)}")
        columns = {name: [record[name] for record in answers[method]] for name in ("exact_match", "f1")}
        measured = {name: torch.tensor(values, dtype=torch.float64) for name, values in columns.items()}
        return {**measured, "answer_nll": answer_losses(answers[method])}
    # `reproduce` may have been left with the means over draws alone
    whole = folder if (folder / PREDICTIONS_FILE).is_file() else folder / MEANS_FOLDER
    found = read_predictions(whole).splits.get(split)
    if found is None or found.labels is None or method not in found.samples:
        raise RunError(f"{folder} has no labeled predictions of split {split!r} and method {method!r}")
    mean, labels = found.samples[method].double().mean(dim=0), found.labels
    if task.kind == "regression":
        return {"squared_error": (mean[:, 0] - labels).square()}
    right = mean.gather(1, labels.unsqueeze(1)).squeeze(1).clamp(min=torch.finfo(torch.float64).tiny)
    return {"accuracy": (mean.argmax(dim=1) == labels).double(), "nll": -right.log()}


def _side(text: str) -> tuple[Path, str]:
    folder, _, method = text.rpartition(":")
    if not folder:
        raise argparse.ArgumentTypeError(f"{text!r} has no method. Write FOLDER:METHOD, such as runs/mrpc:mean")
    return Path(folder), method


def main() -> None:
    """Print the differences, and write them to a file if requested."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("first", type=_side, metavar="FOLDER:METHOD")
    parser.add_argument("second", type=_side, metavar="FOLDER:METHOD")
    parser.add_argument("--split", default="test")
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    found = compare(given.first, given.second, given.split)
    lines = [[d.metric, f"{d.value:+.4f}", f"{d.low:+.4f}", f"{d.high:+.4f}", str(d.num_examples)] for d in found]
    print(markdown([f"{found[0].first} − {found[0].second}", "difference", "low", "high", "examples"], lines))
    if given.out is not None:
        write_csv(given.out, [asdict(d) for d in found])


if __name__ == "__main__":
    main()
