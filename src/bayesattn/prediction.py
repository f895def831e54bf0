"""Prediction: M samples and their summaries (Sec. 4, App. C).

    with sampling(model):            # draw in eval mode
        model(x)
    pred = predict(model, x, num_samples=20, seed=0)
    pred.mean, pred.entropy, pred.mutual_information, pred.p_value

The posterior mean is one ordinary `eval()` pass.
"""

import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import Any, Literal

import torch
from jaxtyping import Float, Shaped
from torch import Tensor, nn
from torch.nn.modules.dropout import _DropoutNd

from bayesattn.batching import BatchDims, batch_axes, repeated, split_draws
from bayesattn.metrics.disagreement import entropy, information_of_draws
from bayesattn.metrics.significance import top_two_p_value
from bayesattn.modes import evaluating, one_thread
from bayesattn.nn import BayesianModule
from bayesattn.noise.keyed import example_seeds, keyed_noise
from bayesattn.noise.specification import draw_seed
from bayesattn.scalars import check_choice, check_count

Task = Literal["multiclass", "multilabel", "regression"]


@contextmanager
def sampling(model: nn.Module, *, dropout: bool = False) -> Iterator[nn.Module]:
    """Sample attention weights although the model is in eval mode; everything else stays as in eval mode.

    Nested scopes add up. A copy of the model made inside a scope does not sample attention weights, but dropout layers that
    are switched on stay on in the copy until its `eval()`.

    Args:
        model: A model with Bayesian attention somewhere inside.
        dropout: Also switch dropout on (MC dropout), in `nn.Dropout` modules and inside attention.

    Raises:
        ValueError: There is nothing to sample: no stochastic attention, and dropout is False.

    Example:
        >>> import bayesattn as ba
        >>> model = ba.bayesianize(nn.TransformerEncoderLayer(8, 2, 16), ba.AttentionConfig("BAM-NOKL")).eval()
        >>> x = torch.randn(5, 3, 8)
        >>> with sampling(model):
        ...     bool((model(x) == model(x)).all())
        False
        >>> bool((model(x) == model(x)).all())
        True
    """
    bayesian = [module for module in model.modules() if isinstance(module, BayesianModule)]
    drops = [module for module in model.modules() if _is_dropout(module)] if dropout else []
    if not any(module.config.is_stochastic for module in bayesian) and not drops:
        raise ValueError(
            f"model must have stochastic attention, got {type(model).__name__} without any. Convert it with bayesianize to "
            "a variant other than 'soft', or use dropout=True on a model with dropout layers"
        )
    before = [(module, module.samples_in_eval, module.drops_in_eval) for module in bayesian]
    modes = [(module, module.training) for module in drops]
    with _without_fused_layers() if dropout else nullcontext():
        try:
            for module in bayesian:
                module.samples_in_eval = True
                module.drops_in_eval |= dropout
            for module in drops:
                module.training = True
            yield model
        finally:
            for module, samples, dropped in before:
                module.samples_in_eval, module.drops_in_eval = samples, dropped
            for module, mode in modes:
                module.training = mode


_fused_lock = threading.Lock()
# number of open scopes in all threads that need torch's switch off, and its value before the first
_fused_users, _fused_before = 0, True


@contextmanager
def _without_fused_layers() -> Iterator[None]:
    """Switch off torch's fused transformer layer, which is used in eval mode and never calls its dropout modules.

    The switch is global to the process: the first open scope of any thread turns it off, and the last one restores it.
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
        samples: Class probabilities of each draw (predicted values for regression), draws first.
        logits: The raw outputs behind the samples.
        task: How outputs become probabilities.

    Example:
        >>> samples = torch.tensor([[[0.9, 0.1]], [[0.7, 0.3]]])  # two draws, one example, two classes
        >>> prediction = Prediction(samples, samples.log(), "multiclass")
        >>> prediction.mean
        tensor([[0.8000, 0.2000]])
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
        """Entropy of the mean minus mean entropy: the uncertainty due to disagreement between draws."""
        return information_of_draws(self.samples, task=self._class_task("mutual_information"))

    @cached_property
    def p_value(self) -> Float[Tensor, " b"]:
        """p-value of a paired t-test that the two most probable classes differ; small means certain."""
        task = self._class_task("p_value")
        if self.samples.shape[0] < 2:
            raise ValueError(f"a p-value needs at least 2 draws, got num_samples={self.samples.shape[0]}")
        return top_two_p_value(self.samples, task=task)

    def _class_task(self, what: str) -> Literal["multiclass", "multilabel"]:
        if self.task == "regression":
            raise ValueError(f"{what} is defined for task 'multiclass' and 'multilabel', got 'regression'")
        return self.task


@torch.no_grad()
def predict(
    model: nn.Module,
    inputs: Any,
    num_samples: int = 20,
    seed: int | None = None,
    chunk_size: int | None = None,
    *,
    batch_dims: BatchDims | None = None,
    task: Task = "multiclass",
    dropout: bool = False,
    output: Callable[[Any], Tensor] | None = None,
) -> Prediction:
    """Draw `num_samples` predictions for one batch.

    Each draw has its own forward pass, which is correct for every model, graphs included, and for any batch axis. If
    `batch_dims` names the batch axis, several draws share a pass.

    Args:
        model: A model with Bayesian attention; it is in eval mode during the call.
        inputs: A tensor, a sequence of positional arguments, a mapping of keyword arguments, or an object such as PyG's
            `Data`.
        num_samples: Number of draws M.
        seed: The same seed gives the same draws, and torch's generators are left unchanged; None draws from them.
        chunk_size: With `batch_dims`, the most draws per forward pass; None means all. Lowering it saves memory and does not
            change the draws.
        batch_dims: The batch axis along which arguments are repeated: one for all (0 in batch-first models), or a sequence
            or mapping with one per argument, None for an argument that all draws share. A model that merges the batch with
            another axis must keep the batch outermost. With dropout, each draw still has its own pass.
        task: `multiclass` (softmax over the last axis), `multilabel` (sigmoid) or `regression` (as is).
        dropout: Also sample the dropout layers.
        output: Extracts the logits from the model's output; by default the tensor itself, `.logits`, or the first entry of
            a tuple.

    Raises:
        ValueError: An argument is out of range, or the model does not treat the batch as `batch_dims` says.

    Example:
        >>> import bayesattn as ba
        >>> layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
        >>> model = nn.Sequential(layer, nn.Flatten(), nn.Linear(5 * 8, 3))
        >>> model = ba.bayesianize(model, ba.AttentionConfig("BAM-NOKL"))
        >>> prediction = predict(model, torch.randn(4, 5, 8), num_samples=20, seed=0, batch_dims=0)
        >>> prediction.samples.shape, prediction.p_value.shape
        (torch.Size([20, 4, 3]), torch.Size([4]))
    """
    check_choice("task", task, ("multiclass", "multilabel", "regression"))
    check_count("num_samples", num_samples)
    check_count("chunk_size", num_samples if chunk_size is None else chunk_size)
    args, kwargs = as_arguments(inputs)
    arguments = {**dict(enumerate(args)), **kwargs}
    axes, batch = ({}, 0) if batch_dims is None else batch_axes(arguments, batch_dims)
    found = output or find_logits

    def forward(count: int) -> Tensor:
        values = {name: repeated(v, axes[name], count) if name in axes else v for name, v in arguments.items()}
        return found(model(*(values[i] for i in range(len(args))), **{name: values[name] for name in kwargs}))

    devices = _devices(model, arguments.values())
    with one_thread(model), evaluating(model), sampling(model, dropout=dropout), seeded(seed, devices):
        if batch == 0 or dropout:
            logits = torch.stack([forward(1) for _ in range(num_samples)])
        else:
            logits = _draw_together(forward, batch, num_samples, chunk_size or num_samples)
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    link = {"multiclass": lambda x: torch.softmax(x, dim=-1), "multilabel": torch.sigmoid, "regression": lambda x: x}
    return Prediction(samples=link[task](logits), logits=logits, task=task)


_generators = threading.RLock()


@contextmanager
def seeded(seed: int | None, devices: Iterable[torch.device]) -> Iterator[None]:
    """Seed torch's generators, which belong to the process, and restore them afterwards; None leaves them alone.

    Other threads that seed wait until the scope ends.

    Args:
        seed: The seed.
        devices: The devices in use. The CPU's generator is always restored, a GPU's if it is among them.

    Example:
        >>> with seeded(3, []):
        ...     first = torch.rand(2)
        >>> with seeded(3, []):
        ...     bool((torch.rand(2) == first).all())
        True
    """
    if seed is None:
        yield
        return
    with _generators, torch.random.fork_rng([device for device in devices if device.type == "cuda"]):
        torch.manual_seed(seed)
        yield


def _draw_together(
    forward: Callable[[int], Tensor], batch: int, num_samples: int, chunk_size: int
) -> Shaped[Tensor, "s ..."]:
    """Return the draws; the noise of an example's draw does not depend on the pass that it is in."""
    seed, draws = int(draw_seed()), []
    # the first draw has its own pass: its shape shows which axis of the output is the batch
    starts = [0, *range(1, num_samples, chunk_size), num_samples]
    for start, stop in pairwise(starts):
        with keyed_noise(example_seeds(seed, 0, torch.arange(start * batch, stop * batch))):
            logits = forward(stop - start)
        draws.append(split_draws(logits, draws[0].shape[1:] if draws else logits.shape, stop - start))
    return torch.cat(draws)


def _devices(model: nn.Module, values: Iterable[Any]) -> set[torch.device]:
    return {tensor.device for tensor in (*model.parameters(), *values) if isinstance(tensor, Tensor)}


def as_arguments(inputs: Any) -> tuple[list[Any], dict[str, Any]]:
    """Return the `inputs` of `predict` as positional and keyword arguments.

    Example:
        >>> as_arguments((1, 2))
        ([1, 2], {})
        >>> as_arguments({"input_ids": 1, "attention_mask": 2})
        ([], {'input_ids': 1, 'attention_mask': 2})
    """
    if isinstance(inputs, Mapping):
        return [], dict(inputs)
    if inputs is None or isinstance(inputs, str | int | float):
        raise ValueError(
            f"inputs must be a tensor, a sequence, a mapping, or an object such as PyG's Data, got {type(inputs).__name__}"
        )
    return (list(inputs) if isinstance(inputs, Sequence) else [inputs]), {}


def find_logits(result: Any) -> Tensor:
    """Return the logits in a model's output: the tensor itself, `.logits`, `["logits"]`, or the first entry of a tuple.

    Example:
        >>> find_logits((torch.tensor([0.5, 1.5]), "hidden states"))
        tensor([0.5000, 1.5000])
    """
    if isinstance(result, Tensor):
        return result
    if isinstance(getattr(result, "logits", None), Tensor):
        return result.logits
    if isinstance(result, Mapping) and isinstance(result.get("logits"), Tensor):
        return result["logits"]
    if isinstance(result, tuple) and result and isinstance(result[0], Tensor):
        return result[0]
    if all(isinstance(getattr(result, name, None), Tensor) for name in ("start_logits", "end_logits")):
        raise ValueError(
            "the model returned start_logits and end_logits, as for question answering. Give `ba.uncertainty` "
            '`target="span"`, or `output` to pick one of them'
        )
    raise ValueError(
        f"the model must return a tensor, an object or mapping with logits, or a tuple, got {type(result).__name__}. Give "
        "`output` to pick the logits"
    )
