"""Which backends can run a call on edges: each function returns why one cannot, or an empty string if it can."""

from typing import NamedTuple

import torch
from torch import Tensor

from bayesattn.config import AttentionConfig
from bayesattn.ops.attention.support import HAS_TRITON, INTERPRETED
from bayesattn.ops.segment.edges import Edges


class EdgeCall(NamedTuple):
    """The arguments of a call on edges that determine which backends can run it."""

    scores: Tensor
    value: Tensor
    edges: Edges
    config: AttentionConfig
    sample: bool
    dropout_p: float


def why_not_csr(call: EdgeCall) -> str:
    """Check for the sparse products: a CPU, and no compiler or function transform, which cannot trace them."""
    if call.scores.device.type != "cpu":
        return f"the tensors are on {call.scores.device.type}, not on the CPU"
    if call.scores.dtype not in (torch.float32, torch.float64):
        return f"the scores are {call.scores.dtype}, not float32 or float64"
    if torch.compiler.is_compiling() or torch._C._are_functorch_transforms_active():
        return "torch.compile and torch.func cannot trace it"
    return _why_not_sorted(call)


def why_not_triton(call: EdgeCall) -> str:
    """Check for the Triton kernels: a GPU (or Triton's interpreter), sampled weights, up to 256 features per head."""
    if not HAS_TRITON:
        return "triton is not installed"
    if call.scores.device.type != "cuda" and not INTERPRETED:
        return f"the tensors are on {call.scores.device.type}, not on a GPU"
    if call.value.dtype not in (torch.float32, torch.bfloat16, torch.float16):
        return f"the values are {call.value.dtype}, not float32, bfloat16 or float16"
    if 0 in call.value.shape[1:]:
        return "the values have no heads or no features"
    if call.value.shape[-1] > 256:
        return f"a head has {call.value.shape[-1]} features, more than 256"
    if torch._C._are_functorch_transforms_active():
        return "torch.func (grad, vmap, …) cannot trace it"
    if not call.sample:
        return "the weights are not sampled"
    if call.dropout_p > 0.0:
        return "it has no dropout"
    return _why_not_sorted(call)


def _why_not_sorted(call: EdgeCall) -> str:
    if call.edges.order is None:
        return "the edges are not sorted; Edges.sort makes sorted ones"
    if len(call.edges) * call.scores.shape[1] >= 2**31:
        return f"there are {len(call.edges)} edges with {call.scores.shape[1]} heads, too many for 32-bit indices"
    return ""
