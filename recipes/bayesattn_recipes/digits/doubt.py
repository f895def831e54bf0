"""The demo's opening: an ordinary image transformer, left as it is, and the answers on which not to trust it.

The models are trained with soft attention. Their answers are ranked by their own confidence, by doubt in closed form (one
backward pass) and by draws of the same noise; the errors that each ranking finds first are counted.
"""

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from jaxtyping import Bool, Float
from rich import box
from rich.console import Console
from rich.table import Table
from torch import Tensor

import bayesattn as ba
from bayesattn import metrics
from bayesattn.doubt import Uncertainty
from bayesattn.evaluation.aggregate import over_runs
from bayesattn.plots import plot_risk_coverage
from bayesattn_recipes.common.figures import write_figure
from bayesattn_recipes.digits.data import load_splits
from bayesattn_recipes.digits.model import DigitClassifier
from bayesattn_recipes.digits.train import load_run

FIGURE = "doubt.png"
# share of the answers, the least certain, among which errors are counted
LOOKED_AT = 0.1


@dataclass(frozen=True)
class Ranked:
    """One model's test answers: certainty under every ranking, and whether they are right."""

    certainty: dict[str, Float[Tensor, " n"]]
    correct: Bool[Tensor, " n"]

    def aurc(self, ranking: str) -> float:
        """Mean error over all coverages, in percent."""
        return 100.0 * float(metrics.aurc(self.certainty[ranking], self.correct))

    def errors_found(self, ranking: str) -> float:
        """Share of the errors among the least certain tenth of the answers, in percent."""
        looked_at = self.certainty[ranking].argsort()[: round(LOOKED_AT * len(self.correct))]
        return 100.0 * float((~self.correct[looked_at]).sum() / (~self.correct).sum().clamp(min=1))


def rank(folder: Path, num_samples: int) -> Ranked:
    """Predict the test images with a trained model and rank its answers."""
    config, trained = load_run(folder)
    # the same parameters; the noise does not affect deterministic passes
    attention = dataclasses.replace(config.attention, variant="BAM-NOKL")
    model = DigitClassifier(dataclasses.replace(config, attention=attention))
    model.load_state_dict(trained.state_dict())
    model.eval()
    test = load_splits(config.train_size, config.dataset)["test"]
    assert test.labels is not None
    found: Uncertainty = ba.uncertainty(model, test.images)
    draws = ba.uncertainty(model, test.images, method="draws", num_samples=num_samples)
    assert found.probabilities is not None
    certainty = {
        "own confidence": found.probabilities.max(dim=1).values,
        "closed form": found.t,
        f"{num_samples} draws": draws.t,
    }
    return Ranked({name: values.double() for name, values in certainty.items()}, found.label == test.labels)


def show_doubt(folders: Sequence[Path], out: Path, num_samples: int, console: Console) -> Path:
    """Print how many errors each ranking finds, draw the curves, and return the path of the figure."""
    models = [rank(folder, num_samples) for folder in folders]
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False)
    table.add_column("ranked by", no_wrap=True)
    for heading in ("AURC, % ↓", "errors found, % ↑", "passes"):
        table.add_column(heading, justify="right", no_wrap=True)
    passes = ("1", "1 + 1 backward", str(num_samples))
    for name, cost in zip(models[0].certainty, passes, strict=True):
        aurc = over_runs([model.aurc(name) for model in models])
        found = over_runs([model.errors_found(name) for model in models])
        table.add_row(name, str(aurc), str(found), cost)
    accuracy = over_runs([100.0 * float(model.correct.double().mean()) for model in models])
    console.print(
        "Which answers to trust: digit models with ordinary attention, left as they are", style="bold", highlight=False
    )
    console.print(table)
    console.print(
        f"Accuracy {accuracy} % over {len(models)} models; no ranking changes an answer. Errors found: among the least\n"
        "certain tenth. The closed form ranked errors better than confidence on fine-tuned encoders\n"
        "(docs/results/doubt.md), not on models trained from scratch like these.",
        highlight=False,
    )
    curves = {name: [(m.certainty[name], m.correct) for m in models] for name in models[0].certainty}
    figure = plot_risk_coverage(curves, title="errors left when the least certain answers are withheld")
    write_figure(out / FIGURE, figure)
    console.print(f"figure:  {out / FIGURE}\n", soft_wrap=True, highlight=False)
    return out / FIGURE
