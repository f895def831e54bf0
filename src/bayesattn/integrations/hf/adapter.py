"""Adapter for transformers: which modules attend through the registry, which can be converted, and the conversion."""

import copy
import dis
import inspect
from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from bayesattn.config import AttentionConfig
from bayesattn.convert.attributes import key_dim, sizes
from bayesattn.convert.hosted import CHILD_NAME, Batch, HostedAttention
from bayesattn.integrations.hf.attention import ATTENTION_NAME, IMPLEMENTATIONS, HFAttention
from bayesattn.nn import AttentionWeights, BayesianModule

_BATCH_NAME = "_bayes_batch"

# arguments of an architecture's eager function that `bayesian_attention` supports, or that only repeat the mask
_KNOWN_ARGUMENTS = frozenset(
    ("module", "query", "key", "value", "attention_mask", "scaling", "dropout", "softcap", "position_bias", "sliding_window",
     "is_causal", "kwargs")
)  # fmt: skip


def find(model: nn.Module, config: AttentionConfig) -> dict[str, str | None]:
    """Return the modules whose `forward` looks attention up in transformers' registry."""
    return {
        name: _problem(module, config)
        for name, module in model.named_modules()
        if _registry_lookups(type(module)) and bayesian_part(module) is None
    }


def attach(model: nn.Module, name: str, config: AttentionConfig | None, weights: AttentionWeights | None = None) -> None:
    """Give the module a Bayesian child and a config that names our attention function."""
    module = model.get_submodule(name)
    head_dim, heads, device, dtype = sizes(module)
    child = HFAttention(
        module.config,
        _eager_function(module),
        config,
        key_dim=head_dim,
        num_heads=heads,
        name=name,
        weights=weights,
        device=device,
        dtype=dtype,
    )
    child.batch = batch_of(model, name)
    module.add_module(CHILD_NAME, child.train(module.training))
    own_config: Any = copy.copy(module.config)
    own_config._attn_implementation_internal = ATTENTION_NAME
    module.config = own_config


def bayesian_part(module: nn.Module) -> BayesianModule | None:
    """Return the child of a converted module."""
    child = getattr(module, CHILD_NAME, None)
    return child if isinstance(child, HFAttention) else None


def detach(model: nn.Module, name: str) -> None:
    """Give the module its config back and remove the child; with the last child of a model, remove its hook too."""
    module = model.get_submodule(name)
    child = getattr(module, CHILD_NAME)
    module.config = child.host_config
    delattr(module, CHILD_NAME)
    release_batch(model, name, child)


def _problem(module: nn.Module, config: AttentionConfig) -> str | None:
    """Return why `module` cannot be converted, or None; the cheapest check comes first."""
    implementation = getattr(getattr(module, "config", None), "_attn_implementation", None)
    if implementation not in IMPLEMENTATIONS:
        return (
            f"its attention implementation is {implementation!r}; use one of {', '.join(map(repr, IMPLEMENTATIONS))} "
            "(call model.set_attn_implementation first)"
        )
    if hasattr(module, CHILD_NAME):
        return f"it has an attribute {CHILD_NAME!r} of its own"
    # GPT-2 reads it twice, for a separate path (eager with reorder_and_upcast_attn) that is off by default
    harmless = implementation != "eager" or getattr(module, "reorder_and_upcast_attn", True) is False
    if _registry_lookups(type(module)) > 1 and not (hasattr(module, "reorder_and_upcast_attn") and harmless):
        return "its forward does something of its own for some implementations, beyond looking them up"
    if config.needs_key_dim and key_dim(module) is None:
        return f"{config.variant} needs the number of features of a key, and no attribute of the module gives it"
    return _unknown_mathematics(module)


def _unknown_mathematics(module: nn.Module) -> str | None:
    """Compare the architecture's own eager attention with softmax(scale · QKᵀ) V on a tiny input."""
    if getattr(module, "sinks", None) is not None:
        return "its attention is not softmax(scale · QKᵀ) V: it has attention sinks"
    try:
        eager = _eager_function(module)
    except KeyError:
        return "its file has no eager_attention_forward"
    unknown = set(inspect.signature(eager).parameters) - _KNOWN_ARGUMENTS
    if unknown:
        return f"its attention takes arguments that sampled attention does not know: {', '.join(sorted(unknown))}"
    like = next((p for p in module.parameters() if p.is_floating_point()), torch.empty(0))
    if like.is_meta:
        return "its parameters are on the meta device"
    # VideoPrism computes it as a quotient, 1.0
    heads = int(getattr(module, "num_key_value_groups", 1))
    options = {"device": like.device, "dtype": torch.float32}
    query = torch.linspace(-1.0, 1.0, heads * 6, **options).view(1, heads, 2, 3)
    key, value = (torch.linspace(-2.0, end, 15, **options).cos().view(1, 1, 5, 3) for end in (1.0, 2.0))
    # zeros, not None: ModernBERT's decoder adds its mask without checking for None
    mask = torch.zeros(1, 1, 2, 5, **options)
    weights = torch.softmax(0.5 * query @ key.transpose(-2, -1), dim=-1)
    try:
        with torch.no_grad():
            output = eager(module, query, key, value, mask, scaling=0.5, dropout=0.0)[0]
        is_plain = torch.allclose(output, (weights @ value).transpose(1, 2), atol=1e-5)
    except Exception as error:
        return f"its attention is not softmax(scale · QKᵀ) V: it failed on a small example ({type(error).__name__}: {error})"
    return None if is_plain else "its attention is not softmax(scale · QKᵀ) V"


@cache
def _registry_lookups(module_class: type[nn.Module]) -> int:
    """Count how often `forward` reads the name of the implementation, in files that use the registry; 0 elsewhere."""
    code = getattr(inspect.unwrap(module_class.forward), "__code__", None)
    if code is None or "ALL_ATTENTION_FUNCTIONS" not in code.co_names:
        return 0
    return sum(instruction.argval == "_attn_implementation" for instruction in dis.get_instructions(code))


def _eager_function(module: nn.Module) -> Callable[..., Any]:
    return inspect.unwrap(type(module).forward).__globals__["eager_attention_forward"]


def _owners(model: nn.Module, name: str) -> list[PreTrainedModel]:
    """Return the transformers models around the module, the innermost first: it splits examples into windows or channels."""
    parts = name.split(".")
    around = [model.get_submodule(".".join(parts[:length])) for length in range(len(parts) - 1, -1, -1)]
    return [owner for owner in around if isinstance(owner, PreTrainedModel)]


def batch_of(model: nn.Module, name: str) -> Batch | None:
    """Return the `Batch` of the module `name`, hooked to the innermost and outermost transformers model around it."""
    owners = _owners(model, name)
    if not owners:
        return None
    owner, outermost = owners[0], owners[-1]
    if _BATCH_NAME not in owner.__dict__:
        batch = Batch()
        handles = [
            owner.register_forward_pre_hook(batch.note, with_kwargs=True),
            outermost.register_forward_pre_hook(batch.note_whole, with_kwargs=True),
        ]
        owner.__dict__[_BATCH_NAME] = (batch, handles)
    return owner.__dict__[_BATCH_NAME][0]


def release_batch(model: nn.Module, name: str, child: HostedAttention) -> None:
    """Remove the hook of `batch_of` if `child`, which has just left the model, was the last that needed it."""
    owner = next(iter(_owners(model, name)), None)
    if owner is not None and not any(isinstance(m, HostedAttention) and m.batch is child.batch for m in owner.modules()):
        _, handles = owner.__dict__.pop(_BATCH_NAME)
        for handle in handles:
            handle.remove()
