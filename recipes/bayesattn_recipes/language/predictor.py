"""M predictions of a fine-tuned encoder.

Methods: `mean` draws nothing, `attention` draws attention weights, `dropout` draws dropout masks (for a soft model,
including those on its attention weights), `attention+dropout` both, and `post-hoc` draws attention weights of a model
trained with soft attention, with the noise that fits its validation data best (`tune_noise`; nothing is trained).
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from bayesattn.doubt import Uncertainty, tune_noise, uncertainty
from bayesattn.evaluation.runs import DoubtfulExamples, Predictions, SplitPredictions
from bayesattn.prediction import predict
from bayesattn_recipes.common.doubt import most_doubtful, with_noise
from bayesattn_recipes.common.prediction import drawing_methods
from bayesattn_recipes.common.runs import choose_methods
from bayesattn_recipes.language import metrics, spans, squad
from bayesattn_recipes.language.features import Collator, bucketed
from bayesattn_recipes.language.prepare import Split, allows_none
from bayesattn_recipes.language.tasks import Task, find_task
from bayesattn_recipes.language.train import LanguageConfig

BATCH_SIZE = 64
# on a GPU, a batch without draws has the size of texts × draws with them
MEAN_BATCH_SIZE = {"cuda": 512, "cpu": BATCH_SIZE}
# tokens per forward pass, draws included: bounds the memory of the activations
TOKENS_PER_PASS = {"cuda": 2**18, "cpu": 2**13}
# draws per candidate of `tune_noise`
TUNING_SAMPLES = 10

# by split and method, one record per question
Answers = dict[str, dict[str, list[dict[str, Any]]]]


def available_methods(config: LanguageConfig, model: PreTrainedModel) -> list[str]:
    """Return how predictions can be drawn from a model, the usual way second."""
    has_dropout = any(isinstance(module, torch.nn.Dropout) and module.p > 0.0 for module in model.modules())
    found = drawing_methods(is_stochastic=config.attention.is_stochastic, drops=has_dropout)
    is_classifier = find_task(config.task).kind == "classification"
    # post-hoc noise replaces a softmax, which a rival has replaced already
    is_soft = is_classifier and not config.attention.is_stochastic and not config.attention.is_rival
    return [*found, *(["post-hoc"] if is_soft else [])]


@dataclass(frozen=True)
class Predictor:
    """A model and everything needed for predictions.

    Attributes:
        model: In eval mode.
        task: Its task.
        config: Config of its run.
        collator: Makes batches.
        class_names: One per class.
    """

    model: PreTrainedModel
    task: Task
    config: LanguageConfig
    collator: Collator
    class_names: tuple[str, ...]

    def predict(
        self,
        splits: dict[str, Split],
        *,
        methods: Sequence[str] | None = None,
        num_samples: int = 20,
        seed: int = 0,
        on_progress: Callable[[int, int], Any] = lambda done, total: None,
    ) -> tuple[Predictions, Answers]:
        """Predict every split with every method; the answers are those of a span task, empty for the others."""
        methods = choose_methods(methods, available_methods(self.config, self.model), num_samples, "this run")
        samples: dict[str, dict[str, Tensor]] = {name: {} for name in splits}
        labels: dict[str, Tensor | None] = {}
        answers: Answers = {name: {} for name in splits} if self.task.kind == "spans" else {}
        done = 0
        for method in methods:
            with self._noise_for(method, splits["validation"], seed):
                for name, split in splits.items():
                    if self.task.kind == "spans":
                        found = self.answers(split, method, num_samples, seed)
                        drawn = torch.stack([a.probabilities for a in found], dim=1)
                        answers[name][method] = [_record(q, a) for q, a in zip(split.questions, found)]
                        right = self._right_classes(name, split, found)
                        common = labels.setdefault(name, right)
                        if right is not None and common is not None:
                            drawn = spans.exchange(drawn, right, common)
                        samples[name][method] = drawn
                    else:
                        samples[name][method] = self.draw(split, method, num_samples, seed)
                        labels[name] = None if split.labels is None else torch.tensor(split.labels)
                    done += 1
                    on_progress(done, len(splits) * len(methods))
        found_splits = {name: SplitPredictions(samples[name], labels[name]) for name in splits}
        return Predictions(found_splits, list(self.class_names), methods, seed), answers

    @contextmanager
    def _noise_for(self, method: str, validation: Split, seed: int) -> Iterator[None]:
        """Give a soft model the noise that fits its validation data best, for the method `post-hoc`."""
        if method != "post-hoc":
            yield
            return
        with with_noise(self.model):
            batches = [batch for _, batch in self._batches(validation, method, with_labels=True)]
            longest = max(batch["input_ids"].numel() for batch in batches)
            with self._autocast():
                tune_noise(
                    self.model, batches, num_samples=TUNING_SAMPLES, seed=seed,
                    chunk_size=min(self._draws_per_pass(longest), TUNING_SAMPLES), batch_dims=0, quiet=True,
                )  # fmt: skip
            yield

    def _batches(
        self, split: Split, method: str, *, with_labels: bool = False
    ) -> Iterator[tuple[list[int], dict[str, Tensor]]]:
        device = self.model.device
        for indices in bucketed(split.rows, MEAN_BATCH_SIZE[device.type] if method == "mean" else BATCH_SIZE):
            batch = self.collator([split.rows[i] for i in indices])
            wanted = ("input_ids", "token_type_ids", "attention_mask", *(("labels",) if with_labels else ()))
            yield indices, {name: batch[name].to(device) for name in wanted if name in batch}

    def _outputs(self, batch: dict[str, Tensor], method: str, num_samples: int, seed: int) -> Float[Tensor, "s b *o"]:
        """Return the head's outputs: logits, or start and end scores; one draw for `mean`."""
        get = _span_scores if self.task.kind == "spans" else _logits
        with torch.no_grad(), self._autocast():
            if method == "mean":
                return get(self.model(**batch)).float().unsqueeze(0)
            chunk = min(self._draws_per_pass(batch["input_ids"].numel()), num_samples)
            drawn = predict(
                self.model, batch, num_samples, seed, chunk, batch_dims=0,
                task="regression", dropout=method.endswith("dropout"), output=get,
            )  # fmt: skip
            return drawn.logits

    def draw(self, split: Split, method: str, num_samples: int, seed: int) -> Float[Tensor, "s n c"]:
        """Return class probabilities, or scores, of every example in its order."""
        draws = 1 if method == "mean" else num_samples
        samples = torch.empty(draws, len(split.rows), len(self.class_names))
        for number, (indices, batch) in enumerate(self._batches(split, method)):
            outputs = self._outputs(batch, method, num_samples, seed + number)
            values = outputs if self.task.kind == "regression" else torch.softmax(outputs, dim=-1)
            samples[:, indices] = values.cpu()
        return samples

    def doubtful_examples(self, split: Split, tokenizer: PreTrainedTokenizerBase) -> DoubtfulExamples | None:
        """Return the texts for which a classifier has the most doubt in closed form; None if there is no closed form."""
        if self.task.kind != "classification" or self.config.attention.is_rival:
            return None

        def ask(places: Sequence[int]) -> Uncertainty:
            batch = self.collator([split.rows[i] for i in places])
            wanted = ("input_ids", "token_type_ids", "attention_mask")
            with self._autocast():
                return uncertainty(self.model, {name: batch[name].to(self.model.device) for name in wanted if name in batch})

        with with_noise(self.model):
            places, found = most_doubtful(ask, bucketed(split.rows, BATCH_SIZE))
        if found.by_token is None:
            # an encoder whose layers see sequences of different lengths
            return None
        words = [tokenizer.convert_ids_to_tokens(split.rows[i]["input_ids"]) for i in places.tolist()]
        return DoubtfulExamples.from_uncertainty(places, found, words)

    def answers(self, split: Split, method: str, num_samples: int, seed: int) -> list[spans.Answer]:
        """Return the distribution over answers of every question."""
        pieces: list[list[tuple[squad.Window, spans.WindowScores]]] = [[] for _ in split.questions]
        for number, (indices, batch) in enumerate(self._batches(split, method)):
            start, end = self._outputs(batch, method, num_samples, seed + number).unbind(dim=2)
            windows = [split.windows[i] for i in indices]
            right = [squad.right_spans(split.questions[window.owner], window) for window in windows]
            length = start.shape[-1]
            allowed = torch.tensor(
                [[span is not None for span in w.offsets] + [False] * (length - len(w.offsets)) for w in windows]
            )
            for window, scores in zip(windows, spans.score_windows(start, end, allowed.to(start.device), right)):
                pieces[window.owner].append((window, scores))
        return [spans.answer(q, found, allows_none=allows_none(self.task)) for q, found in zip(split.questions, pieces)]

    def _right_classes(self, name: str, split: Split, found: list[spans.Answer]) -> Tensor | None:
        if name == "unanswerable":
            return None
        known = allows_none(self.task)
        return torch.tensor([spans.right_class(q, a, allows_none=known) for q, a in zip(split.questions, found)])

    def _draws_per_pass(self, tokens: int) -> int:
        return max(1, TOKENS_PER_PASS[self.model.device.type] // max(tokens, 1))

    def _autocast(self) -> torch.autocast:
        is_half = self.config.training.precision == "bf16"
        return torch.autocast(self.model.device.type, torch.bfloat16, enabled=is_half)


def _logits(result: Any) -> Tensor:
    return result.logits


def _span_scores(result: Any) -> Tensor:
    return torch.stack([result.start_logits, result.end_logits], dim=1)


def _record(question: squad.Question, found: spans.Answer) -> dict[str, Any]:
    """Return the fields of an answer for EM and F1, and for a reader.

    `answer` is the best span, whatever the probability of "no answer"; `confidence` and `is_right` are of the most probable
    answer, which "no answer" may be.
    """
    text = found.texts[0]
    # "another answer" cannot be given, however probable it is
    confidence, given = found.probabilities.mean(dim=0)[:-1].max(dim=0)
    return {
        "id": question.id,
        "answer": text,
        "probability": round(float(found.probabilities[:, 0].mean()), 6),
        "null_score": found.null_score,
        "right_probability": float(f"{float(found.right.mean()):.6g}"),
        "confidence": round(float(confidence), 6),
        "is_right": bool(metrics.exact_match(found.texts[int(given)], question.golds)),
        "has_answer": bool(question.answers),
        "exact_match": metrics.exact_match(text, question.golds),
        "f1": metrics.token_f1(text, question.golds),
    }
