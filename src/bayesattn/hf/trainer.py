"""The transformers Trainer with the negative ELBO as its loss.

    trainer = BayesianTrainer(model, args, train_dataset=..., kl_schedule=KLSchedule("sigmoid", anneal_rate=0.2))

Over the micro-batches of all processes that make one optimiser step, the gradient is that of

    [ Σ_labels NLL + λ_t Σ_examples KL ] / (number of labels)

so the KL has the same weight at any batch size, number of accumulation steps, number of processes and label smoothing.
"""

import warnings
from typing import TYPE_CHECKING, Any, cast

import torch
from accelerate.utils import find_batch_size
from torch import Tensor, nn
from transformers import Trainer, TrainerCallback

from bayesattn.convert.adapters import converted_modules
from bayesattn.convert.saving import save_bayesian
from bayesattn.nn import BayesianModule
from bayesattn.objective import KLSchedule, elbo
from bayesattn.recording import record_kl

IGNORED_LABEL = -100

# to the type checker the mixin is a Trainer; at run time it takes the one it is mixed with
_TrainerBase = Trainer if TYPE_CHECKING else object


class BayesianTrainerMixin(_TrainerBase):
    """Put before a Trainer class: `class MyTrainer(BayesianTrainerMixin, Seq2SeqTrainer)`.

    NLL, KL and KL weight are logged beside the loss. The schedule follows `state.global_step`, so it resumes with a
    checkpoint, as does the noise, which comes from torch's generators.

    Args:
        kl_schedule: Weight λ of the KL as a function of the optimiser step; None is a constant 1.
        *args, **kwargs: The Trainer's own.
    """

    def __init__(self, *args: Any, kl_schedule: KLSchedule | None = None, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.kl_schedule = KLSchedule() if kl_schedule is None else kl_schedule
        self._elbo_sums: Tensor | None = None
        self._has_kl = check_trainable(cast(nn.Module, self.model))

    def count_labels(self, inputs: dict[str, Any]) -> int:
        """Return over how many labels the model's loss is a mean; override where `labels` does not tell.

        Without `labels` (question answering: start and end positions) it is one per example.
        """
        labels = inputs.get("shift_labels", inputs.get("labels"))
        if not isinstance(labels, Tensor):
            return int(find_batch_size(inputs))
        if "shift_labels" not in inputs and self._loss_shifts_labels:
            labels = labels[..., 1:]
        return int(labels.ne(IGNORED_LABEL).sum())

    def compute_loss(
        self, model: nn.Module, inputs: dict[str, Any], return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        """Return the negative ELBO of one micro-batch while training, the model's own loss while evaluating."""
        if not model.training:
            return super().compute_loss(model, inputs, return_outputs, num_items_in_batch)
        examples, labels = int(find_batch_size(inputs)), self.count_labels(inputs)
        # asked for no number of items, every model and the label smoother return a mean over this micro-batch's labels. With
        # one, some models divide by it and some (BERT's classifiers) ignore it, and the KL would weigh differently in each
        items = labels if self.compute_loss_func is not None else None
        with record_kl() as scope:
            nll, outputs = super().compute_loss(model, inputs, return_outputs=True, num_items_in_batch=items)
        nll = nll / self._process_factor(items)
        kl = scope.total() if self._has_kl else torch.zeros_like(nll.detach())
        weight = self.kl_schedule(self.state.global_step)
        parts = elbo(nll, kl.to(nll.device), kl_weight=weight, labels_per_example=max(labels, 1) / examples)
        self._add_to_log(parts.nll, parts.kl, weight)
        loss = parts.loss
        if num_items_in_batch is not None:
            loss = loss * (labels / num_items_in_batch) * self._process_factor(num_items_in_batch)
        elif self.compute_loss_func is not None:
            loss = loss / self.current_gradient_accumulation_steps
        return (loss, outputs) if return_outputs else loss

    def _process_factor(self, num_items: Any) -> int:
        """Return what the Trainer multiplies a loss by that is a sum over all processes: DDP averages their gradients."""
        counts = self.model_accepts_loss_kwargs or self.compute_loss_func is not None
        if num_items is None or not counts or not self.args.average_tokens_across_devices:
            return 1
        if self.args.n_gpu > 1:
            return self.args.n_gpu
        parallelism = getattr(self.accelerator, "parallelism_config", None)
        return self.accelerator.num_processes // (1 if parallelism is None else parallelism.tp_size)

    def log(self, logs: dict[str, float], *args: Any, **kwargs: Any) -> None:
        """Add the means of NLL, KL and KL weight since the last log to a training log."""
        if "loss" in logs and self._elbo_sums is not None:
            nll, kl, weight, count = cast(Tensor, self.accelerator.reduce(self._elbo_sums, reduction="sum")).tolist()
            logs = {**logs, "nll": nll / count, "kl": kl / count, "kl_weight": weight / count}
            self._elbo_sums = None
        super().log(logs, *args, **kwargs)

    def _add_to_log(self, nll: Tensor, kl: Tensor, weight: float) -> None:
        row = torch.stack(
            [nll.float(), kl.to(nll.device).float(), nll.new_tensor(weight).float(), torch.ones_like(nll).float()]
        )
        self._elbo_sums = row if self._elbo_sums is None else self._elbo_sums + row


class BayesianTrainer(BayesianTrainerMixin, Trainer):
    """`transformers.Trainer` whose loss is the negative ELBO; see `BayesianTrainerMixin`."""


class BayesianCallback(TrainerCallback):
    """Writes what `save_bayesian` writes into every checkpoint of any Trainer, and checks the model before training.

    The KL is the mixin's business: a callback cannot reach the loss.
    """

    def on_train_begin(self, args: Any, state: Any, control: Any, model: nn.Module | None = None, **kwargs: Any) -> None:
        """Raise if nothing is Bayesian, warn if priors are frozen."""
        if model is not None:
            check_trainable(model)

    def on_save(self, args: Any, state: Any, control: Any, model: nn.Module | None = None, **kwargs: Any) -> None:
        """Save the Bayesian part beside the Trainer's own files."""
        if model is not None and state.is_world_process_zero:
            save_bayesian(model, f"{args.output_dir}/checkpoint-{state.global_step}")


def check_trainable(model: nn.Module) -> bool:
    """Say whether the model has a KL; raise if it has no Bayesian attention, warn if priors would not be trained."""
    parts = [module for module in model.modules() if isinstance(module, BayesianModule) and module.config.is_stochastic]
    if not parts:
        raise ValueError(
            f"model is a {type(model).__name__} without stochastic attention; call bayesianize(model, config) first"
        )
    names = [name or "the model" for name, _, part in converted_modules(model) if _is_frozen(part)]
    if names:
        warnings.warn(
            f"the priors of {len(names)} attention modules are frozen (the first is {names[0]!r}) and will not be trained. "
            "Under PEFT name them: LoraConfig(..., modules_to_save=['bayes_prior'])",
            UserWarning,
            stacklevel=3,
        )
    return any(part.config.has_kl for part in parts)


def _is_frozen(part: BayesianModule) -> bool:
    return part.bayes_prior is not None and not any(p.requires_grad for p in part.bayes_prior.parameters())
