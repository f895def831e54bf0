"""The attention function that transformers calls for converted modules.

transformers looks up attention by the name in `module.config`. A converted module has its own config, a copy that
names this function; the model's config keeps its implementation. So masks are made for the original implementation
(`sdpa` or `eager`), other models that share the config object are unaffected, and as long as nothing is sampled or
recorded the original function gets exactly the arguments it always got.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.masking_utils import bidirectional_mask_function, causal_mask_function, sdpa_mask
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from bayesattn.config import AttentionConfig
from bayesattn.convert.attributes import dropout_rate
from bayesattn.convert.hosted import CHILD_NAME, HostedAttention
from bayesattn.convert.masks import combine_bias, key_padding, note_making, split_mask
from bayesattn.nn import AttentionWeights

# neither "sdpa" nor "flash" nor "flex_attention" may occur in it: transformers would run their support checks
ATTENTION_NAME = "bayesattn"

IMPLEMENTATIONS = ("sdpa", "eager")

# arguments that change the mathematics in a way the sampled path does not support, each with its usual name
UNSUPPORTED_ARGUMENTS = {
    "s_aux": "attention sinks",
    "indices": "sparse attention",
    "block_indices": "sparse attention",
    "cache": "a paged cache (continuous batching)",
}


class HFAttention(HostedAttention):
    """Bayesian part of a transformers attention module.

    Args:
        host_config: The config object the module had; names the implementation that runs when nothing is sampled.
        eager: `eager_attention_forward` of the module's file, which is not in the registry.
        config, key_dim, num_heads, name, weights: As in `HostedAttention`.
    """

    def __init__(
        self,
        host_config: Any,
        eager: Callable,
        config: AttentionConfig | None,
        *,
        key_dim: int | None,
        num_heads: int,
        name: str,
        weights: AttentionWeights | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        sizes = {"key_dim": key_dim, "num_heads": num_heads, "device": device, "dtype": dtype}
        super().__init__(config, name=name, weights=weights, **sizes)
        self.host_config = host_config
        self.eager = eager

    @property
    def implementation(self) -> str:
        """The model's implementation, even if `set_attn_implementation` changed it after the conversion."""
        return self.host_config._attn_implementation

    @property
    def host_attention(self) -> Callable:
        """The function that runs when nothing is sampled."""
        return ALL_ATTENTION_FUNCTIONS.get_interface(self.implementation, self.eager)


def bayesian_attention(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **kwargs: Any
) -> tuple[Tensor, Tensor | None]:
    """Attend as the registry expects: query (b, h, m, d), key and value (b, hk, n, d) → output (b, m, h, d), weights.

    The signature is the registry's. Sampled weights are returned where the original implementation returns its own.
    """
    child: HFAttention | None = getattr(module, CHILD_NAME, None)
    if child is None:
        raise ValueError(
            f"{type(module).__name__} is set to {ATTENTION_NAME!r} but was not converted. Load the model without "
            "attn_implementation and call bayesianize(model, config), or load_bayesian(model, folder)"
        )
    if child.is_idle:
        return _host_forward(module, child, query, key, value, attention_mask, kwargs)
    implementation = child.implementation
    arguments = _score_arguments(module, child, implementation, query, key, attention_mask, kwargs)
    if not child.is_sampling and child.bayes_weights is None:
        output, weights = child.host_attention(module, query, key, value, attention_mask, **kwargs)
        # the registry's functions return heads after queries
        return child.finish_mean(output, query, key, value, heads_last=True, **arguments), weights
    output, weights = child.attend(
        query,
        key,
        value,
        dropout_p=_dropout(module, child, kwargs.get("dropout", 0.0)),
        need_weights=implementation == "eager",
        key_offset=_key_offset(module, child, query, key),
        window=kwargs.get("sliding_window"),
        **arguments,
    )
    return output.transpose(1, 2).contiguous(), weights


def _host_forward(
    module: nn.Module,
    child: HFAttention,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    kwargs: dict[str, Any],
) -> tuple[Tensor, Tensor | None]:
    """Run the original function; for MC dropout of soft attention, with the dropout that eval mode leaves out."""
    if child.training or not child.drops_in_eval:
        return child.host_attention(module, query, key, value, attention_mask, **kwargs)
    kwargs = {**kwargs, "dropout": _dropout(module, child, 0.0)}
    mode = module.training
    # eager implementations read the module's mode, sdpa its argument
    module.training = True
    try:
        return child.host_attention(module, query, key, value, attention_mask, **kwargs)
    finally:
        module.training = mode


def _score_arguments(
    module: nn.Module,
    child: HFAttention,
    implementation: str,
    query: Tensor,
    key: Tensor,
    attention_mask: Tensor | None,
    kwargs: dict[str, Any],
) -> dict[str, Any]:
    """Translate the registry's arguments, with the meaning the original implementation gives them."""
    if implementation not in IMPLEMENTATIONS:
        raise ValueError(
            f"the model's attention implementation must be one of {', '.join(IMPLEMENTATIONS)} while sampling, got "
            f"{implementation!r}. Change it with model.set_attn_implementation"
        )
    for name in UNSUPPORTED_ARGUMENTS.keys() & kwargs.keys():
        if kwargs[name] is not None:
            meaning = UNSUPPORTED_ARGUMENTS[name]
            raise ValueError(f"{type(module).__name__} uses {meaning} ({name}), which sampled attention does not support")
    if child.prior_key_dim not in (None, key.shape[-1]) and child.needs_kl:
        raise ValueError(
            f"{type(module).__name__} has keys of {key.shape[-1]} features, but its prior was built for "
            f"{child.prior_key_dim}"
        )
    if attention_mask is not None and attention_mask.ndim != 4:
        raise ValueError(f"the attention mask must have four axes (b, h, m, n), got shape {tuple(attention_mask.shape)}")
    is_causal = kwargs.get("is_causal")
    is_causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
    mask, bias = split_mask(attention_mask)
    if mask is not None:
        # transformers repeats the padding for every query; a causal mask has different rows
        mask = key_padding(mask) if bias is None and not is_causal else mask
        if mask is not None and mask.shape[-1] != key.shape[2]:
            mask, bias = (None if x is None else x[..., : key.shape[2]] for x in (mask, bias))
    scale = kwargs.get("scaling")
    return {
        "mask": mask,
        "bias": combine_bias(bias, kwargs.get("position_bias")),
        # sdpa may leave out the mask and rely on the flag; eager always has its mask
        "is_causal": bool(is_causal) and implementation == "sdpa" and attention_mask is None and query.shape[2] > 1,
        "scale": query.shape[-1] ** -0.5 if scale is None else scale,
        # torch's function has no soft cap: a model that runs on it has none
        "softcap": kwargs.get("softcap") if implementation == "eager" else None,
    }


def _key_offset(module: nn.Module, child: HFAttention, query: Tensor, key: Tensor) -> int:
    # keys of cross-attention have their own positions, and none were dropped
    if child.stream is None or not getattr(module, "is_causal", False):
        return 0
    return child.stream.dropped_keys(query.shape[2], key.shape[2])


def _dropout(module: nn.Module, child: HFAttention, given: float) -> float:
    if not child.wakes_dropout:
        return given
    # in eval mode transformers passes 0.0 whatever the rate is, so MC dropout has to look it up
    rate = dropout_rate(module)
    if rate is None:
        raise ValueError(f"sampling(dropout=True): no attribute of {type(module).__name__} holds its attention dropout")
    return rate


def noted_sdpa_mask(**arguments: Any) -> Tensor | None:
    """Make the mask that transformers makes for `sdpa`, and note on it how it was made, so its values need not be read.

    transformers writes out the padding once per query. Where nothing else was combined with it (sliding windows, packed
    sequences), the mask function is one of two.
    """
    mask = sdpa_mask(**arguments)
    function, keys = arguments.get("mask_function"), arguments.get("attention_mask")
    is_causal = function is causal_mask_function
    if mask is None or not (is_causal or function is bidirectional_mask_function):
        return mask
    # a cache shifts queries relative to keys
    offset = arguments.get("q_offset", 0), arguments.get("kv_offset", 0)
    is_plain = offset == (0, 0) and (keys is None or (keys.dtype == torch.bool and keys.shape[-1] == mask.shape[-1]))
    if is_plain and (not is_causal or mask.shape[2] == mask.shape[3]):
        note_making(mask, keys, is_causal)
    return mask


AttentionInterface.register(ATTENTION_NAME, bayesian_attention)
# the same masks for every model, with a note on them
AttentionMaskInterface.register("sdpa", noted_sdpa_mask)
# read only for a model loaded with attn_implementation="bayesattn", which would silently lose its masks without it
AttentionMaskInterface.register(ATTENTION_NAME, noted_sdpa_mask)
