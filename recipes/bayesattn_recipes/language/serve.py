"""Predictions for new texts, each with a probability, a p-value and whether to trust it.

    from bayesattn_recipes.language import serve
    model = serve.load("runs/mrpc")
    print(model("He bought the firm.", "The firm was bought by him.").label)

`bayesattn predict` is the same on the command line (`commands.py`).

The p-value says whether the draws agree on the answer, and the probability is their average confidence. An answer is trusted
if its probability reaches a threshold that `bayesattn evaluate` chose on the validation split (`trust.py`). The run folder
is all that is needed. With the same seed the same inputs get the same answers.
"""

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from bayesattn.metrics import top_two_p_value
from bayesattn_recipes.common.prediction import usual_method
from bayesattn_recipes.language import squad
from bayesattn_recipes.language.features import encode
from bayesattn_recipes.language.predictor import Predictor, available_methods
from bayesattn_recipes.language.prepare import Split
from bayesattn_recipes.language.train import LoadedRun, load_run, make_collator
from bayesattn_recipes.language.trust import read_rule

NUM_SAMPLES = 20


@dataclass(frozen=True)
class Served:
    """One answer.

    Attributes:
        label: The class, the score of a regression as text, or the answer of a question ("" for none).
        probability: Probability of the class or answer, averaged over the draws; None for a score.
        p_value: p-value of a paired t-test that it is more probable than the runner-up; None for a score, and without draws.
        trust: Whether the probability reaches the threshold of the run; None if it has none (`Classifier.note`).
        probabilities: Probabilities of every class; None for a score.
        deviation: Standard deviation of a score over the draws; None otherwise.
        truncated: Whether the text was longer than the model reads, and lost its end.
    """

    label: str
    probability: float | None
    p_value: float | None
    trust: bool | None
    probabilities: dict[str, float] | None
    deviation: float | None
    truncated: bool

    def to_dict(self) -> dict[str, Any]:
        """Return plain values for JSON."""
        return dataclasses.asdict(self)

    def __str__(self) -> str:
        """Return the answer in words."""
        parts = [self.label or "(no answer)"]
        if self.probability is not None:
            parts.append(f"probability {self.probability:.3f}")
        if self.deviation is not None:
            parts.append(f"± {self.deviation:.3f}")
        if self.p_value is not None:
            parts.append(f"p-value {self.p_value:.2g}")
        if self.trust is not None:
            parts.append("trust" if self.trust else "do not trust")
        if self.truncated:
            parts.append("(text was too long: its end was not read)")
        return "  ".join(parts)


class Classifier:
    """A run that answers for new texts; from `load`.

    Args:
        run: The run.
        num_samples: Draws per answer; None takes the number that the rule of trust was chosen with, or 20.
        seed: Seed of the draws.
        method: How to draw; None takes the usual way of the run, and draws nothing if it has none.
    """

    def __init__(self, run: LoadedRun, *, num_samples: int | None = None, seed: int = 0, method: str | None = None) -> None:
        allowed = [name for name in available_methods(run.config, run.model) if name != "post-hoc"]
        self.method = usual_method(allowed, method)
        self.rule = read_rule(run.folder, self.method)
        known = NUM_SAMPLES if self.rule is None or self.method == "mean" else self.rule.num_samples
        self.run, self.num_samples, self.seed = run, known if num_samples is None else num_samples, seed
        self.predictor = Predictor(
            run.model, run.task, run.config, make_collator(run.config, run.tokenizer), run.class_names
        )

    @property
    def num_texts(self) -> int:
        """Texts that one answer takes: 1, or 2 for pairs and questions."""
        return self.run.num_texts

    @property
    def note(self) -> str:
        """The meaning of the answers' `trust`, or why there is none."""
        again = f"run `bayesattn evaluate {self.run.folder} --method {self.method}"
        if self.run.task.kind == "regression":
            return "no answer is marked: a score is neither right nor wrong"
        if self.rule is None:
            return f"no answer is marked: the run has no threshold yet for method {self.method!r}; {again}`"
        if not self._is_calibrated:
            return (
                f"no answer is marked: the threshold is for {self.rule.num_samples} draws, not {self.num_samples}; "
                f"{again} --samples {self.num_samples}`"
            )
        return str(self.rule)

    @property
    def _is_calibrated(self) -> bool:
        return self.rule is not None and (self.method == "mean" or self.rule.num_samples == self.num_samples)

    def __call__(self, *texts: str) -> Served:
        """Answer for one text, or one pair."""
        return self.answer([texts])[0]

    def answer(self, inputs: Sequence[tuple[str, ...]]) -> list[Served]:
        """Answer for several at once.

        Raises:
            ValueError: A text is empty, or there are too few or too many; the message has its number, from 1.
        """
        for number, texts in enumerate(inputs, start=1):
            self.check(texts, f"input {number}")
        if self.run.task.kind == "spans":
            return self._answer_questions(inputs)
        encoded = encode(self.run.tokenizer, inputs, self.run.config.max_length)
        samples = self.predictor.draw(Split(encoded.rows), self.method, self.num_samples, self.seed)
        if self.run.task.kind == "regression":
            return [self._score(samples[:, i, 0], cut) for i, cut in enumerate(encoded.truncated)]
        return self._classes(samples, [list(self.run.class_names)] * len(inputs), encoded.truncated)

    def check(self, texts: tuple[str, ...], where: str) -> None:
        """Raise a ValueError that begins with `where` if these texts cannot be answered for."""
        if len(texts) != self.num_texts or not all(isinstance(text, str) and text.strip() for text in texts):
            raise ValueError(
                f"{where} must be {self.num_texts} {'text that is' if self.num_texts == 1 else 'texts that are'} not empty "
                f"for task {self.run.task.name!r}, got {texts!r}"
            )

    def _answer_questions(self, inputs: Sequence[tuple[str, ...]]) -> list[Served]:
        questions = [squad.Question(str(i), question, context, (), "") for i, (question, context) in enumerate(inputs)]
        windows = squad.windows(self.run.tokenizer, questions, self.run.config.max_length)
        split = Split([window.row for window in windows], questions=questions, windows=windows)
        found = self.predictor.answers(split, self.method, self.num_samples, self.seed)
        samples = torch.stack([answer.probabilities for answer in found], dim=1)
        # "another answer" cannot be given
        return self._classes(samples[:, :, :-1], [answer.texts for answer in found], [False] * len(inputs))

    def _classes(self, samples: Tensor, names: list[list[str]], truncated: list[bool]) -> list[Served]:
        mean = samples.mean(dim=0)
        # the candidates of a question leave out the rest of its distribution, so they do not add up to 1
        task = "multilabel" if self.run.task.kind == "spans" else "multiclass"
        p_values = top_two_p_value(samples, task=task).tolist() if len(samples) > 1 else [None] * len(mean)
        threshold = self.rule.threshold if self.rule is not None and self._is_calibrated else None
        served = []
        for row, labels, p_value, cut in zip(mean, names, p_values, truncated):
            best = int(row.argmax())
            trust = None if threshold is None else float(row[best]) >= threshold
            probabilities = {label: float(value) for label, value in zip(labels, row)}
            served.append(Served(labels[best], float(row[best]), p_value, trust, probabilities, None, cut))
        return served

    def _score(self, samples: Tensor, truncated: bool) -> Served:
        deviation = float(samples.std()) if len(samples) > 1 else None
        return Served(f"{float(samples.mean()):.3f}", None, None, None, None, deviation, truncated)


def load(folder: str | Path, **options: Any) -> Classifier:
    """Read a run folder for serving; `options` are those of `Classifier`."""
    return Classifier(load_run(Path(folder)), **options)
