"""The negative ELBO of one micro-batch and its log, shared by the Trainer mixin and the callback for the stock Trainer.

Over the micro-batches of all processes that make one optimizer step, the gradient is that of

    [ Σ_labels NLL + λ_t Σ_examples KL ] / (number of labels)

so the KL has the same weight at any batch size, number of accumulation steps and number of processes. To achieve this, the
model never gets the number of items: without it, every model returns a mean over this micro-batch's labels. With it, some
models divide by it and some (BERT's classifiers) ignore it, so the weight of the KL would depend on the model.
"""

import warnings
from collections.abc import Mapping
from typing import Any, cast

import torch
from accelerate.utils import find_batch_size, reduce
from torch import Tensor, nn
from torch.optim import Optimizer
from transformers.loss.loss_utils import LOSS_MAPPING, ForCausalLMLoss

from bayesattn.convert.adapters import converted_modules
from bayesattn.nn import BayesianModule
from bayesattn.objective import ELBO, IGNORED_LABEL, elbo
from bayesattn.watch import KLWatch, check_optimizers


def negative_elbo(
    nll: Tensor,
    kl: Tensor,
    *,
    kl_weight: float,
    max_share: float | None,
    examples: int,
    labels: int,
    num_items: Tensor | int | None,
) -> ELBO:
    """Return the loss of one micro-batch, as the Trainer expects it, and its parts.

    Args:
        nll: Mean over the labels of this micro-batch.
        kl: Mean over its examples.
        kl_weight: λ_t.
        max_share: Largest weighted KL, as a share of this micro-batch's NLL; None for no cap.
        examples: Examples of this micro-batch.
        labels: Labels of this micro-batch.
        num_items: Labels of the whole optimizer step. If the Trainer counts them, it sums the losses of the micro-batches;
            otherwise it averages them.
    """
    parts = elbo(
        nll, kl.to(nll.device), kl_weight=kl_weight, labels_per_example=max(labels, 1) / examples, max_share=max_share
    )
    return parts if num_items is None else parts._replace(loss=parts.loss * (labels / num_items))


def count_examples(inputs: Mapping[str, Any]) -> int:
    """Return the number of examples of a micro-batch."""
    return int(find_batch_size(inputs))


def count_labels(inputs: Mapping[str, Any], model: nn.Module) -> int:
    """Return the number of labels that the loss of `model` averages over.

    Without `labels` (question answering: start and end positions) it is one per example.
    """
    labels = inputs.get("shift_labels", inputs.get("labels"))
    if not isinstance(labels, Tensor):
        return count_examples(inputs)
    if "shift_labels" not in inputs and _shifts_labels(model):
        labels = labels[..., 1:]
    return int(labels.ne(IGNORED_LABEL).sum())


def _shifts_labels(model: nn.Module) -> bool:
    """Whether the first label of a row is not a target, as in decoders; the rule is the Trainer's."""
    base: Any = model.get_base_model() if hasattr(model, "get_base_model") else model  # pyright: ignore[reportCallIssue]
    is_causal = LOSS_MAPPING.get(getattr(base, "loss_type", None)) is ForCausalLMLoss  # pyright: ignore[reportArgumentType]
    return is_causal and not getattr(getattr(base, "config", None), "is_encoder_decoder", False)


class ElboLog:
    """Sums NLL, KL and KL weight over micro-batches, and gives their means over all processes."""

    def __init__(self) -> None:
        self._sums: Tensor | None = None
        self._watch = KLWatch()

    def add(self, parts: ELBO) -> None:
        """Add one micro-batch, without waiting for the device."""
        nll = parts.nll.float()
        row = torch.stack([nll, parts.kl.float(), parts.kl_weight.float(), torch.ones_like(nll)])
        self._sums = row if self._sums is None else self._sums + row
        self._watch.add(parts.nll, parts.kl, parts.weighted_kl)

    def take(self) -> dict[str, float]:
        """Return the means since the last call, empty if there was no micro-batch, and reset them."""
        if self._sums is None:
            return {}
        nll, kl, weight, count = cast(Tensor, reduce(self._sums, reduction="sum")).tolist()
        self._sums = None
        return {"nll": nll / count, "kl": kl / count, "kl_weight": weight / count}


def check_trainable(model: nn.Module, optimizer: Any) -> None:
    """Raise if the model has no stochastic attention, warn if priors are frozen or not in the optimizer.

    None is an optimizer that the Trainer has yet to build, with every parameter; DeepSpeed's placeholder is not checked.
    """
    if not any(isinstance(module, BayesianModule) and module.config.is_stochastic for module in model.modules()):
        raise ValueError(
            f"model is a {type(model).__name__} without stochastic attention. Call bayesianize(model, config) first"
        )
    names = [name or "the model" for name, _, part in converted_modules(model) if _is_frozen(part)]
    if names:
        warnings.warn(
            f"the priors of {len(names)} attention modules are frozen (the first is {names[0]!r}) and will not be trained. "
            "Under PEFT name them: LoraConfig(..., modules_to_save=['bayes_prior'])",
            UserWarning,
            stacklevel=3,
        )
    if isinstance(optimizer, Optimizer):
        check_optimizers(model, [optimizer])


def _is_frozen(part: BayesianModule) -> bool:
    return part.bayes_prior is not None and not any(p.requires_grad for p in part.bayes_prior.parameters())
