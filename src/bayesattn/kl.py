"""Collect the KL of every attention call inside a scope, with gradients that survive activation checkpointing.

    with record_kl() as kl:
        loss = model(x).loss
    loss = elbo(loss, kl.total(), kl_weight=kl_weight).loss

Each *call* has an entry: ALBERT runs one module twelve times, a decoder once per step. Outside a scope, modules skip the KL.
If only Bayesian modules without a KL ran (`soft`, `BAM-NOKL`), the total is 0; if none ran, it is an error.

Usually a recorded KL is an ordinary tensor with a graph. Reentrant checkpointing is the exception: it runs the forward pass
without a graph, and again with one during the backward pass, when the scope has long been closed. For such entries, the
backward of `total()` stores the gradient that it receives (the KL weight), and the recomputed call attaches its KL to its
output with an identity that adds this gradient (`_Carry`). A KL that is not recomputed is an error, not a silent loss.

Non-reentrant checkpointing only has to compute the KL again wherever the forward pass did, so that both save the same
tensors. Each module therefore stores whether its last forward pass with gradients recorded a KL.
"""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import chain

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from bayesattn.watch import check_changes

_local = threading.local()

# graph task of a backward pass → the scope whose reentrant entries are recomputed in it
_replaying: dict[int, "KLScope"] = {}


@dataclass(eq=False)
class KLScope:
    """The KLs recorded inside one `record_kl()` block.

    Example:
        >>> import bayesattn as ba
        >>> layer = ba.nn.MultiheadAttention(8, 2, config=ba.AttentionConfig("BAM-WC"), batch_first=True)
        >>> x = torch.randn(3, 5, 8)
        >>> with record_kl(torch.nn.ModuleDict({"attention": layer})) as kl:
        ...     output, _ = layer(x, x, x)
        >>> [(name, value.shape) for name, value in kl.per_call()]
        [('attention', torch.Size([3]))]
    """

    _names: list[str] = field(default_factory=list)
    _values: list[Tensor] = field(default_factory=list)
    # whether an entry was computed under no_grad; any other without a graph is a constant (frozen parameters)
    _is_detached: list[bool] = field(default_factory=list)
    # the totals, by whether gradients were on when they were read
    _totals: dict[bool, Tensor] = field(default_factory=dict)
    # for the device of a total of 0: the last module that ran, and the device of the last output without a KL
    _caller: torch.nn.Module | None = None
    _device: torch.device | None = None
    # numbers of detached entries and of those recomputed in the backward pass, and the KL weight for them
    _num_detached: int = 0
    _num_carried: int = 0
    _weight: Tensor | None = None

    def total(self) -> Tensor:
        """Return the KL per example: summed over calls and averaged over the batch; 0 if no call had a KL.

        Every read returns the same tensor; reads inside `torch.no_grad()` share another one, without a graph.

        Raises:
            RuntimeError: No Bayesian module ran inside the scope.
        """
        has_grad = torch.is_grad_enabled()
        if has_grad not in self._totals:
            self._totals[has_grad] = self._sum_entries() if self._values else self._zero()
        return self._totals[has_grad]

    def _zero(self) -> Tensor:
        device = self._device
        if device is None:
            if self._caller is None:
                raise RuntimeError(
                    "nothing was recorded: no Bayesian attention ran inside this record_kl() scope. Run the model inside "
                    "the scope and in the same thread, and convert it first (bayesianize) if it is deterministic"
                )
            held = next(chain(self._caller.parameters(), self._caller.buffers()), None)
            device = None if held is None else held.device
        return torch.zeros((), device=device)

    def _sum_entries(self) -> Tensor:
        entries = list(zip(self._values, self._is_detached, strict=True))
        attached = [value for value, is_detached in entries if not is_detached]
        detached = [_mean(value) for value, is_detached in entries if is_detached]
        self._num_detached = len(detached)
        if len(attached) > 1 and len({(value.shape, value.dtype, value.device) for value in attached}) == 1:
            # a model's calls usually have one shape: one sum over all instead of a mean of each
            terms = [torch.stack(attached).sum() / max(attached[0].numel(), 1)]
        else:
            terms = [_mean(value) for value in attached]
        if detached and torch.is_grad_enabled():
            anchor = torch.zeros((), device=detached[0].device, requires_grad=True)
            terms.append(_NoteWeight.apply(anchor, _sum(detached), self))
        else:
            terms += detached
        return _sum(terms)

    def per_layer(self) -> dict[str, Tensor]:
        """Return the KL of each module, summed over its calls and averaged over the batch; detached, for logging."""
        layers: dict[str, Tensor] = {}
        for name, value in zip(self._names, self._values, strict=True):
            mean = _mean(value.detach())
            layers[name] = layers[name] + mean if name in layers else mean
        return layers

    def per_call(self) -> list[tuple[str, Tensor]]:
        """Return (module name, KL per example) of each call in order; detached, for logging."""
        return [(name, value.detach()) for name, value in zip(self._names, self._values, strict=True)]

    def __len__(self) -> int:
        return len(self._values)


@contextmanager
def record_kl(model: torch.nn.Module | None = None) -> Iterator[KLScope]:
    """Open a scope that collects the KL of every Bayesian attention call in this thread. Scopes cannot be nested.

    Args:
        model: Entries are named after its modules instead of their classes, and there is a warning if the optimizer does not
            change its priors.

    Example:
        >>> import bayesattn as ba
        >>> layer = ba.nn.MultiheadAttention(8, 2, config=ba.AttentionConfig("BAM-WC"), batch_first=True)
        >>> x = torch.randn(3, 5, 8)
        >>> with record_kl() as kl:
        ...     output, _ = layer(x, x, x)
        >>> len(kl), bool(kl.total() > 0)
        (1, True)
    """
    if _active_scope() is not None:
        raise RuntimeError(
            "record_kl() cannot be nested, because every KL would count twice. Use one scope for the whole step"
        )
    if model is not None:
        check_changes(model)
    for name, module in model.named_modules() if model is not None else ():
        if hasattr(module, "kl_name"):
            setattr(module, "kl_name", name)  # noqa: B010  (not every module has one)
    scope = KLScope()
    _local.scope = scope
    try:
        yield scope
    finally:
        _local.scope = None


def is_recording(module: torch.nn.Module) -> bool:
    """Return whether a call of `module` needs its KL: a scope is open, or a backward pass recomputes a recorded call.

    Example:
        >>> layer = torch.nn.Identity()
        >>> with record_kl():
        ...     is_recording(layer)
        True
        >>> is_recording(layer)
        False
    """
    if in_backward():
        return _replayed_scope() is not None or getattr(module, "_recorded_last", False)
    scope = _active_scope()
    recording = scope is not None
    if scope is not None:
        scope._caller = module
    has_graph = torch.is_grad_enabled() and not torch.compiler.is_compiling()
    # only if it changes, because setting an attribute of a module is slow
    if has_graph and getattr(module, "_recorded_last", None) is not recording:
        setattr(module, "_recorded_last", recording)  # noqa: B010  (not an attribute nn.Module knows)
    return recording


def record(output: Tensor, kl: Tensor | None, module: torch.nn.Module) -> Tensor:
    """Add one call's KL to the open scope and return `output`, with the gradient of the KL attached if necessary.

    Args:
        output: The attention output; always use the returned tensor in its place.
        kl: KL of each example; None for a call without a KL, which the scope only notes.
        module: The module that made the call; its `kl_name` names the entry.

    Example:
        >>> layer = torch.nn.Identity()
        >>> layer.kl_name = "attention"
        >>> with record_kl() as kl:
        ...     output = record(torch.zeros(2, 4), torch.tensor([1.0, 3.0]), layer)
        >>> kl.per_layer()
        {'attention': tensor(2.)}
    """
    if kl is None:
        scope = _active_scope()
        if scope is not None:
            scope._device = output.device
        return output
    if in_backward():
        # already recorded in the forward pass; a scope that is still open must not count it twice
        scope = _replayed_scope()
        return output if scope is None else _Carry.apply(output, kl, scope)
    scope = _active_scope()
    if scope is not None:
        if scope._totals:
            raise RuntimeError(
                f"{module.kl_name} was called after kl.total() was read, so its KL would not count. Read the total after "
                "the last call"
            )
        scope._names.append(str(module.kl_name))
        scope._values.append(kl)
        scope._is_detached.append(not torch.is_grad_enabled())
        # all parameters of an autograd node are reachable from each of its outputs; a compiled graph is one node, too
        if kl.requires_grad and not torch.compiler.is_compiling() and kl.grad_fn is not output.grad_fn:
            return _Link.apply(output, kl)
    return output


def _active_scope() -> KLScope | None:
    return getattr(_local, "scope", None)


def in_backward() -> bool:
    """Return whether this call is part of a backward pass, as when checkpointing runs a module again.

    Example:
        >>> in_backward()
        False
    """
    return not torch.compiler.is_compiling() and torch._C._current_graph_task_id() != -1


def _replayed_scope() -> KLScope | None:
    return _replaying.get(torch._C._current_graph_task_id())


def _mean(kl: Tensor) -> Tensor:
    # one entry, as for a graph, needs neither sum nor quotient, nor their gradients
    if kl.numel() == 1:
        return kl.reshape(())
    # 0 for a zero-length batch, where mean() is NaN
    return kl.sum() / max(kl.numel(), 1)


def _sum(values: list[Tensor]) -> Tensor:
    return values[0] if len(values) == 1 else torch.stack([value.to(values[0].device) for value in values]).sum()


class _NoteWeight(torch.autograd.Function):
    """Identity on the value; its backward runs before those of the layers and opens the scope for their recomputation."""

    @staticmethod
    def forward(ctx, anchor: Tensor, value: Tensor, scope: KLScope) -> Tensor:
        ctx.scope = scope
        return value.clone()

    @staticmethod
    @once_differentiable
    def backward(ctx, grad: Tensor):
        scope, task = ctx.scope, torch._C._current_graph_task_id()
        scope._weight, scope._num_carried = grad, 0
        _replaying[task] = scope

        def close() -> None:
            _replaying.pop(task, None)
            if scope._num_carried != scope._num_detached:
                raise RuntimeError(
                    f"{scope._num_detached - scope._num_carried} of {scope._num_detached} recorded KLs lost their gradient: "
                    "they were computed under torch.no_grad() and no backward pass recomputed them. Record the KL with "
                    "gradients on, or with one level of checkpoint(..., use_reentrant=True or False)"
                )

        torch.autograd.Variable._execution_engine.queue_callback(close)
        return None, None, None


class _Carry(torch.autograd.Function):
    """Identity on the output that passes the stored KL weight to the recomputed KL as its gradient."""

    @staticmethod
    def forward(ctx, output: Tensor, kl: Tensor, scope: KLScope) -> Tensor:
        ctx.scope, ctx.kl_shape, ctx.kl_dtype = scope, kl.shape, kl.dtype
        return output.view_as(output)

    @staticmethod
    @once_differentiable
    def backward(ctx, grad_output: Tensor):
        scope = ctx.scope
        scope._num_carried += 1
        weight = scope._weight.to(device=grad_output.device, dtype=ctx.kl_dtype)
        return grad_output, (weight / max(ctx.kl_shape.numel(), 1)).expand(ctx.kl_shape), None


class _Link(torch.autograd.Function):
    """Identity on the output that makes the KL's parameters reachable from it, without giving them a gradient.

    DDP with `find_unused_parameters=True` (the transformers Trainer's default) searches for parameters from the model's
    outputs. A prior reachable only from the KL would count as unused, and DDP would fail when its gradient arrives.
    """

    generate_vmap_rule = True

    @staticmethod
    def forward(output: Tensor, kl: Tensor) -> Tensor:
        return output.view_as(output)

    @staticmethod
    def setup_context(ctx, inputs, output) -> None:
        pass

    @staticmethod
    def backward(ctx, grad_output: Tensor):
        return grad_output, None
