"""Adapter for hand-written modules that call `F.scaled_dot_product_attention`: intercept the call while sampling.

The module's class is swapped for a subclass of the same name whose `forward` runs inside a `TorchFunctionMode`. Outside
of sampling and recording the mode is not even entered, so the original code runs untouched.
"""

import dis
import inspect
import math
from collections.abc import Iterator
from functools import cache
from types import CodeType, FunctionType, ModuleType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from bayesattn.config import AttentionConfig
from bayesattn.convert.attributes import dropout_rate, key_dim, sizes
from bayesattn.convert.hosted import CHILD_NAME, HostedAttention
from bayesattn.convert.masks import split_mask
from bayesattn.modes import evaluating
from bayesattn.nn import AttentionWeights, BayesianModule
from bayesattn.prediction import as_arguments


def find(model: nn.Module, config: AttentionConfig) -> dict[str, str | None]:
    """Return modules outside torch, transformers and PyG whose source shows a call to torch's attention."""
    return {
        name: problem(module, config)
        for name, module in model.named_modules()
        if _library(type(module)) not in ("torch", "transformers", "torch_geometric")
        and not isinstance(module, _Intercepting | BayesianModule)
        and _shows_call(type(module))
    }


@torch.no_grad()
def callers(model: nn.Module, inputs: Any) -> list[str]:
    """Run the model once on `inputs` (as in `predict`) and return the modules whose own code called torch's attention.

    That is the innermost module at the time of the call. Modules of torch are left out: they have an adapter.
    """
    args, kwargs = as_arguments(inputs)
    running: list[nn.Module] = []
    watch = _Watch(running)

    def enter(module: nn.Module, args: Any) -> None:
        running.append(module)

    def leave(module: nn.Module, args: Any, output: Any) -> None:
        running.pop()

    hooks = []
    try:
        for module in model.modules():
            hooks += [module.register_forward_pre_hook(enter), module.register_forward_hook(leave, always_call=True)]
        with evaluating(model), watch:
            model(*args, **kwargs)
    finally:
        for hook in hooks:
            hook.remove()
    return [name for name, module in model.named_modules() if module in watch.found and _library(type(module)) != "torch"]


def problem(module: nn.Module, config: AttentionConfig) -> str | None:
    """Say why a module that calls torch's attention cannot be converted; None where it can."""
    if hasattr(module, CHILD_NAME):
        return f"it has an attribute {CHILD_NAME!r} of its own"
    if config.needs_key_dim and key_dim(module) is None:
        return f"{config.variant} needs the number of features of a key; give the module an integer attribute head_dim"
    return None


def is_shown(module: nn.Module) -> bool:
    """Whether `find` would find a converted module again, once it is restored."""
    return _shows_call(type(module).__mro__[2])


def attach(model: nn.Module, name: str, config: AttentionConfig | None, weights: AttentionWeights | None = None) -> None:
    """Attach the Bayesian part as a child and swap the class."""
    module = model.get_submodule(name)
    head_dim, heads, device, dtype = sizes(module)
    child = HostedAttention(
        config, key_dim=head_dim, num_heads=heads, name=name, weights=weights, device=device, dtype=dtype
    )
    module.add_module(CHILD_NAME, child.train(module.training))
    module.__class__ = intercepting(_Intercepting, type(module))


def bayesian_part(module: nn.Module) -> BayesianModule | None:
    """Return the child of a converted module."""
    return getattr(module, CHILD_NAME) if isinstance(module, _Intercepting) else None


def detach(model: nn.Module, name: str) -> None:
    """Swap the class back and remove the child."""
    module = model.get_submodule(name)
    delattr(module, CHILD_NAME)
    module.__class__ = type(module).__mro__[2]


class _Intercepting(nn.Module):
    """Mixin whose `forward` is the host's, run inside `SampledAttention` while there is something to sample or record."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        child = getattr(self, CHILD_NAME)
        if child.is_idle:
            return super().forward(*args, **kwargs)
        with SampledAttention(child, dropout_rate(self)):
            return super().forward(*args, **kwargs)


@cache
def intercepting(mixin: type[nn.Module], host_class: type[nn.Module]) -> type[nn.Module]:
    """Return the subclass of a host whose `forward` is the mixin's; `detach` swaps it back."""
    # same name: print(model), and code that looks at class names, see no change
    return type(host_class.__name__, (mixin, host_class), {"__module__": host_class.__module__})


class _Watch(TorchFunctionMode):
    """Notes which of the running modules calls `F.scaled_dot_product_attention`."""

    def __init__(self, running: list[nn.Module]) -> None:
        super().__init__()
        self.running, self.found = running, set[nn.Module]()

    def __torch_function__(self, func, types, args=(), kwargs=None):
        if func is F.scaled_dot_product_attention and self.running:
            self.found.add(self.running[-1])
        return func(*args, **(kwargs or {}))


class SampledAttention(TorchFunctionMode):
    """Replaces calls to `F.scaled_dot_product_attention` by sampled attention."""

    def __init__(self, child: HostedAttention, dropout_p: float | None) -> None:
        super().__init__()
        self.child, self.dropout_p = child, dropout_p

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if func is not F.scaled_dot_product_attention:
            return func(*args, **kwargs)
        return self._attend(func, *args, **kwargs)

    def _attend(
        self,
        func,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_mask: Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        scale: float | None = None,
        enable_gqa: bool = False,
    ) -> Tensor:
        child = self.child
        lead = query.shape[:-3]
        # torch allows any number of leading axes, this library one
        batched = [x.reshape(-1, *x.shape[-3:]) if x.ndim >= 3 else x[None, None] for x in (query, key, value)]
        mask, bias = split_mask(attn_mask if attn_mask is None or attn_mask.ndim <= 4 else attn_mask.flatten(0, -4))
        options = {"mask": mask, "bias": bias, "is_causal": is_causal}
        options["scale"] = 1.0 / math.sqrt(query.shape[-1]) if scale is None else scale
        if not child.is_sampling and child.bayes_weights is None:
            # hide the call from an enclosing converted module, whose KL would count it again
            with torch._C.DisableTorchFunction():
                output = func(query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa)
            flat = output.reshape(-1, *output.shape[-3:]) if query.ndim >= 3 else output[None, None]
            return child.finish_mean(flat, *batched, **options).reshape(output.shape)
        if child.wakes_dropout:
            if self.dropout_p is None:
                raise ValueError(
                    "sampling(dropout=True): this module's attention dropout is unknown. Give it an attribute dropout_p"
                )
            dropout_p = self.dropout_p
        output, _ = child.attend(*batched, dropout_p=dropout_p, **options)
        return output.reshape(*lead, *output.shape[1:]) if query.ndim >= 3 else output[0, 0]


def _library(thing: type | FunctionType) -> str:
    return str(thing.__module__).split(".")[0]


@cache
def _shows_call(module_class: type[nn.Module]) -> bool:
    """Whether the code of `forward`, or of any function or method it refers to, recursively, refers to torch's attention."""
    pending: list[Any] = [module_class.forward]
    seen: set[CodeType] = set()
    while pending:
        function = inspect.unwrap(pending.pop())
        # torch's own functions read it too, but call it only in some cases (`F.multi_head_attention_forward`)
        if not isinstance(function, FunctionType) or function.__code__ in seen or _library(function) == "torch":
            continue
        seen.add(function.__code__)
        # check the name as well: an import inside the function hides the value
        if F.scaled_dot_product_attention.__name__ in function.__code__.co_names:
            return True
        values = list(_values_read(function, function.__code__, module_class))
        if any(value is F.scaled_dot_product_attention for value in values):
            return True
        pending += [value for value in values if isinstance(value, FunctionType)]
    return False


def _values_read(function: FunctionType, code: CodeType, module_class: type[nn.Module]) -> Iterator[Any]:
    """Yield the values behind `f`, `module.f` and `self.f` wherever the code, or code inside it, reads them."""
    self_name = function.__code__.co_varnames[:1]
    around = inspect.getclosurevars(function).nonlocals
    value: Any = None
    for instruction in dis.get_instructions(code):
        name = instruction.argval
        if instruction.opname == "LOAD_GLOBAL":
            value = function.__globals__.get(name)
        elif instruction.opname in ("LOAD_ATTR", "LOAD_METHOD"):
            # vars() of a Python module, because getattr on a lazy one would import something
            members = vars(value) if isinstance(value, ModuleType) else {}
            value = getattr(module_class, name, None) if value is module_class else members.get(name)
        elif instruction.opname.startswith(("LOAD_FAST", "LOAD_DEREF")) and (name,) == self_name:
            value = module_class
        else:
            value = around.get(name) if instruction.opname == "LOAD_DEREF" else None
        yield value
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _values_read(function, constant, module_class)
