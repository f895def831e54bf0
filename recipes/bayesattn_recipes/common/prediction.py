"""Predictions of a run: its methods, and the loop over its test sets behind every `predict_run`."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

from bayesattn.evaluation.runs import Predictions, SplitPredictions
from bayesattn_recipes.common.runs import choose_methods


def drawing_methods(*, is_stochastic: bool, drops: bool, together_first: bool = False) -> list[str]:
    """Return how predictions can be drawn from a model, the usual way second.

    Nothing is drawn for `mean`. Stochastic attention is drawn alone (`attention`) or with the dropout masks
    (`attention+dropout`); for any other model, only the `dropout` masks can be drawn.

    Args:
        is_stochastic: Whether the attention is drawn.
        drops: Whether the model has dropout.
        together_first: Whether attention and dropout together are the usual way.
    """
    if not is_stochastic:
        return ["mean", *(["dropout"] if drops else [])]
    both = ["attention+dropout"] if drops else []
    return ["mean", *both, "attention"] if together_first else ["mean", "attention", *both]


def usual_method(methods: Sequence[str], given: str | None = None) -> str:
    """Return the requested method, or the usual one; `mean` if nothing can be drawn.

    Args:
        methods: From `drawing_methods`.
        given: The requested method.
    """
    if given is None:
        return methods[:2][-1]
    if given not in methods:
        raise ValueError(f"method must be one of {', '.join(methods)} for this run, got {given!r}")
    return given


@runtime_checkable
class RunPredictor(Protocol):
    """What a recipe implements so that its runs can be predicted."""

    @property
    def variant(self) -> str:
        """What the run was trained with, for messages."""
        ...

    @property
    def methods(self) -> list[str]:
        """How it can be drawn, the usual way second."""
        ...

    def conditions(self, noise: tuple[float, ...], num_samples: int) -> Mapping[str, Any]:
        """Return the conditions to predict, by name, in the order of reports."""
        ...

    def predict(self, name: str, condition: Any, methods: Sequence[str], num_samples: int, seed: int) -> SplitPredictions:
        """Predict one condition with every method."""
        ...

    def assemble(self, splits: dict[str, SplitPredictions], methods: list[str], seed: int) -> Predictions:
        """Combine the predictions."""
        ...


@dataclass(frozen=True)
class PredictRun:
    """The `predict_run` of a recipe, which the command line calls.

    Attributes:
        open_run: Reads a run folder; its second argument is the folder of the data sets.
    """

    open_run: Callable[[Path, Any], RunPredictor]

    def __call__(
        self,
        folder: Path,
        *,
        num_samples: int = 20,
        noise: tuple[float, ...] = (0.5, 1.0),
        methods: Sequence[str] | None = None,
        seed: int = 0,
        data: Any = None,
        on_progress: Callable[[int, int], Any] = lambda done, total: None,
    ) -> Predictions:
        """Predict the validation and test sets of a run with every method, the test sets also with noise.

        Args:
            folder: The run.
            num_samples: M, at least 2.
            noise: Strengths of the noisy test sets, in standard deviations of the data.
            methods: See `drawing_methods`; None takes `mean` and the usual way to draw.
            seed: Seed of the draws and of the noise.
            data: The folder of the data sets; recipes that generate their data need none.
            on_progress: Called with the number of test sets done and to do, for a progress bar.
        """
        run = self.open_run(folder, data)
        chosen = choose_methods(methods, run.methods, num_samples, run.variant)
        conditions = run.conditions(noise, num_samples)
        splits = {}
        for done, (name, condition) in enumerate(conditions.items(), start=1):
            splits[name] = run.predict(name, condition, chosen, num_samples, seed)
            on_progress(done, len(conditions))
        return run.assemble(splits, chosen, seed)
