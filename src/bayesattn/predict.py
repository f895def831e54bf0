"""Prediction: the posterior mean is one ordinary `eval()` pass; here are M samples and what they say (Sec. 4, App. C).

with sampling(model):            # draw in eval mode
    model(x)
pred = predict(model, x, num_samples=20, seed=0)
pred.mean, pred.entropy, pred.mutual_information, pred.p_value
"""

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.nn.modules.dropout import _DropoutNd

from bayesattn import _checks
from bayesattn.metrics.disagreement import entropy
from bayesattn.metrics.significance import top_two_p_value
from bayesattn.nn import BayesianModule

Task = Literal["multiclass", "multilabel", "regression"]


@contextmanager
def sampling(model: nn.Module, *, dropout: bool = False) -> Iterator[nn.Module]:
    """Draw attention weights although the model is in eval mode; everything else stays as in eval.

    Args:
        model: A model with Bayesian attention somewhere inside.
        dropout: Also switch dropout on (MC dropout), in `nn.Dropout` modules and inside attention.

    Raises:
        ValueError: There is nothing to sample: no stochastic attention, and no dropout asked for.
    """
    bayesian = [module for module in model.modules() if isinstance(module, BayesianModule)]
    drops = [module for module in model.modules() if _is_dropout(module)] if dropout else []
    if not any(module.config.is_stochastic for module in bayesian) and not drops:
        raise ValueError(
            f"model is a {type(model).__name__} without stochastic attention; allowed: a model with a Bayesian module whose "
            "variant is not 'soft', or dropout=True and dropout layers"
        )
    before = [(module, module.samples_in_eval, module.drops_in_eval) for module in bayesian]
    modes = [(module, module.training) for module in drops]
    with _without_fused_layers() if dropout else nullcontext():
        try:
            for module in bayesian:
                module.samples_in_eval = True
                module.drops_in_eval = dropout
            for module in drops:
                module.training = True
            yield model
        finally:
            for module, samples, dropped in before:
                module.samples_in_eval, module.drops_in_eval = samples, dropped
            for module, mode in modes:
                module.training = mode


_fused_lock = threading.Lock()
# how many scopes of all threads need torch's switch off, and how it stood before the first
_fused_users, _fused_before = 0, True


@contextmanager
def _without_fused_layers() -> Iterator[None]:
    """Switch off torch's fused transformer layer, which is taken in eval mode and never calls its dropout modules.

    The switch is one for the process: the first scope of any thread turns it off, the last one puts it back.
    """
    global _fused_users, _fused_before
    with _fused_lock:
        if _fused_users == 0:
            _fused_before = torch.backends.mha.get_fastpath_enabled()
            torch.backends.mha.set_fastpath_enabled(False)
        _fused_users += 1
    try:
        yield
    finally:
        with _fused_lock:
            _fused_users -= 1
            if _fused_users == 0:
                torch.backends.mha.set_fastpath_enabled(_fused_before)


def _is_dropout(module: nn.Module) -> bool:
    if isinstance(module, nn.MultiheadAttention) and not isinstance(module, BayesianModule):
        return module.dropout > 0.0
    return isinstance(module, _DropoutNd)


@dataclass(frozen=True)
class Prediction:
    """M sampled predictions for a batch and their summaries.

    Attributes:
        samples: Class probabilities of every draw (predicted values for regression); draws first.
        logits: The model's raw outputs behind them.
        task: How outputs become probabilities.
    """

    samples: Float[Tensor, "s b *c"]
    logits: Float[Tensor, "s b *c"]
    task: Task

    @cached_property
    def mean(self) -> Float[Tensor, "b *c"]:
        """Average over the draws: the predictive distribution."""
        return self.samples.mean(dim=0)

    @cached_property
    def entropy(self) -> Float[Tensor, "b *t"]:
        """Entropy of the predictive distribution in nats: total uncertainty."""
        return entropy(self.mean, task=self._class_task("entropy"))

    @cached_property
    def mutual_information(self) -> Float[Tensor, "b *t"]:
        """Entropy of the mean minus mean entropy: the part that the draws disagree about."""
        task = self._class_task("mutual_information")
        return (self.entropy - entropy(self.samples, task=task).mean(dim=0)).clamp(min=0.0)

    @cached_property
    def p_value(self) -> Float[Tensor, " b"]:
        """p-value of a paired t-test that the two most probable classes differ; small means certain."""
        task = self._class_task("p_value")
        if self.samples.shape[0] < 2:
            raise ValueError(f"num_samples is {self.samples.shape[0]}; allowed where a p-value is asked: at least 2")
        return top_two_p_value(self.samples, task=task)

    def _class_task(self, what: str) -> Literal["multiclass", "multilabel"]:
        if self.task == "regression":
            raise ValueError(f"{what} of a regression; allowed tasks: 'multiclass', 'multilabel'")
        return self.task


@torch.no_grad()
def predict(
    model: nn.Module,
    inputs: Tensor | Sequence[Any] | Mapping[str, Any],
    num_samples: int = 20,
    seed: int | None = None,
    chunk_size: int | None = None,
    *,
    task: Task = "multiclass",
    dropout: bool = False,
    output: Callable[[Any], Tensor] | None = None,
) -> Prediction:
    """Draw `num_samples` predictions for one batch by repeating the batch, not by looping.

    Args:
        model: A model with Bayesian attention; put into eval mode for the call and back afterwards.
        inputs: One tensor, a sequence of positional arguments or a mapping of keyword arguments. Every tensor whose
            first axis has the batch's length (that of the first tensor) is repeated.
        num_samples: M.
        seed: Same seed and `chunk_size`, same draws; torch's generators are left as they were.
        chunk_size: Samples per forward pass; None runs all at once. Lower it when memory is short.
        task: `multiclass` (softmax over the last axis), `multilabel` (sigmoid) or `regression` (as is).
        dropout: Also sample the dropout layers.
        output: Gets the logits out of what the model returns; by default the tensor itself, `.logits`, or the first
            entry of a tuple.
    """
    _checks.choice("task", task, ("multiclass", "multilabel", "regression"))
    for name, value in (("num_samples", num_samples), ("chunk_size", num_samples if chunk_size is None else chunk_size)):
        if not isinstance(value, int) or value < 1:
            raise ValueError(f"{name} is {value!r}; allowed: an integer of at least 1")
    args, kwargs = _as_arguments(inputs)
    batch, device = _batch_size([*args, *kwargs.values()])
    modes = [(module, module.training) for module in model.modules()]
    devices = [device] if device.type == "cuda" else []
    draws = []
    try:
        model.eval()
        with sampling(model, dropout=dropout), nullcontext() if seed is None else torch.random.fork_rng(devices):
            if seed is not None:
                torch.manual_seed(seed)
            for start in range(0, num_samples, chunk_size or num_samples):
                count = min(chunk_size or num_samples, num_samples - start)
                result = model(
                    *(_repeat(value, batch, count) for value in args),
                    **{name: _repeat(value, batch, count) for name, value in kwargs.items()},
                )
                logits = (output or _find_logits)(result)
                draws.append(logits.reshape(count, batch, *logits.shape[1:]))
    finally:
        # one by one: train() would also wake parts that their owner keeps in eval mode
        for module, mode in modes:
            module.training = mode
    logits = torch.cat(draws)
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    link = {"multiclass": lambda x: torch.softmax(x, dim=-1), "multilabel": torch.sigmoid, "regression": lambda x: x}
    return Prediction(samples=link[task](logits), logits=logits, task=task)


def _as_arguments(inputs: Any) -> tuple[list[Any], dict[str, Any]]:
    if isinstance(inputs, Tensor):
        return [inputs], {}
    if isinstance(inputs, Mapping):
        return [], dict(inputs)
    if isinstance(inputs, Sequence) and not isinstance(inputs, str):
        return list(inputs), {}
    raise ValueError(f"inputs is {type(inputs).__name__}; allowed: a tensor, a sequence or a mapping")


def _batch_size(values: list[Any]) -> tuple[int, torch.device]:
    for value in values:
        if isinstance(value, Tensor) and value.ndim > 0:
            return value.shape[0], value.device
    raise ValueError("inputs hold no tensor with a batch axis; allowed: at least one")


def _repeat(value: Any, batch: int, count: int) -> Any:
    if isinstance(value, Tensor) and value.ndim > 0 and value.shape[0] == batch:
        return value.repeat(count, *([1] * (value.ndim - 1)))
    return value


def _find_logits(result: Any) -> Tensor:
    if isinstance(result, Tensor):
        return result
    if isinstance(getattr(result, "logits", None), Tensor):
        return result.logits
    if isinstance(result, tuple) and result and isinstance(result[0], Tensor):
        return result[0]
    raise ValueError(f"the model returned {type(result).__name__}; allowed without `output`: a tensor, .logits or a tuple")
