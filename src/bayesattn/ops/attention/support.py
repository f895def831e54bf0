"""Which backends can run a call: each function returns the reason why one cannot, or an empty string."""

import importlib.util
import os
from typing import NamedTuple

import torch
from torch import Tensor

from bayesattn.config import AttentionConfig
from bayesattn.noise.specification import Seed

# computed at import, because torch.compile can trace neither
HAS_TRITON = importlib.util.find_spec("triton") is not None
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"


class Call(NamedTuple):
    """The arguments of an attention call that decide which backends can run it."""

    query: Tensor
    key: Tensor
    value: Tensor
    config: AttentionConfig
    bias: Tensor | None
    scale: float
    seed: Seed | None
    dropout_p: float
    need_kl: bool
    is_separable: bool


def why_not_blocked(call: Call) -> str:
    """Return why the blocked CPU backend cannot run a call."""
    if call.query.device.type != "cpu":
        return f"the tensors are on {call.query.device.type}, not on the CPU"
    if call.query.dtype not in (torch.float32, torch.float64):
        return f"the inputs are {call.query.dtype}, not float32 or float64"
    if call.seed is not None:
        return "it draws from torch's generator and takes no seed"
    if call.need_kl and call.config.family != "weibull" and not call.is_separable:
        return "it has no lognormal KL where queries have keys of their own"
    if call.dropout_p > 0.0:
        return "it has no dropout"
    return _why_not_fused(call)


def why_not_triton(call: Call) -> str:
    """Return why the Triton kernels cannot run a call."""
    if not HAS_TRITON:
        return "triton is not installed"
    if call.query.device.type != "cuda" and not INTERPRETED:
        return f"the tensors are on {call.query.device.type}, not on a GPU"
    if call.query.dtype not in (torch.float32, torch.bfloat16, torch.float16):
        return f"the inputs are {call.query.dtype}, not float32, bfloat16 or float16"
    if max(call.query.shape[-1], call.value.shape[-1]) > 256:
        return f"the head dimension is {max(call.query.shape[-1], call.value.shape[-1])}, above 256"
    if call.key.shape[-2] == 0:
        return "there are no keys"
    if call.scale <= 0.0:
        return f"scale is {call.scale}, not above 0"
    # the kernels use the same maximum for clean and noisy scores, which is safe while the noise stays within 2^±100
    if call.config.family == "weibull" and call.config.weibull_k < 0.25:
        return f"weibull_k is {call.config.weibull_k}, below 0.25"
    if call.config.family == "lognormal" and call.config.sigma_q > 8.0:
        return f"sigma_q is {call.config.sigma_q}, above 8"
    return _why_not_fused(call)


def _why_not_fused(call: Call) -> str:
    if torch._C._are_functorch_transforms_active():
        return "torch.func (grad, vmap, …) cannot trace it"
    if call.bias is not None:
        return "it takes no additive bias"
    return ""
