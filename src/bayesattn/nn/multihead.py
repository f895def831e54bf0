"""Bayesian multi-head attention, a drop-in for `torch.nn.MultiheadAttention`."""

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn

from bayesattn import functional, sensitivity
from bayesattn.config import AttentionConfig
from bayesattn.nn.custom_weights import AttentionWeights, WeightsFactory
from bayesattn.nn.module import BayesianModule
from bayesattn.nn.multihead_arguments import check_inputs, check_nested, only_forbids, split_masks
from bayesattn.ops.attention import observers, reference
from bayesattn.precision import without_autocast


class MultiheadAttention(BayesianModule, nn.MultiheadAttention):
    """`torch.nn.MultiheadAttention` whose attention weights are sampled.

    Takes the arguments of torch's module and loads its `state_dict` (a checkpoint without a prior leaves the fresh prior
    as it is). In eval mode it *is* torch's module, fused path included. Masks follow torch's conventions here: True in a
    boolean mask means "do not attend", a float mask is added to the scores.

    Args:
        embed_dim, num_heads, dropout, bias, add_bias_kv, add_zero_attn, kdim, vdim, batch_first, device, dtype:
            As in torch.
        config: Variant, noise and prior; keyword only, like `weights`.
        weights: Instead of a config, an object that replaces softmax and average (`nn/custom_weights.py`).

    In the paper: the module of Sec. 2 with `num_heads` = H, Φ = QKᵀ/√d_k, and S drawn as in Sec. 3.2.

    Example:
        >>> layer = MultiheadAttention(8, 2, batch_first=True, config=AttentionConfig("BAM-WC"))
        >>> x = torch.randn(3, 5, 8)
        >>> output, weights = layer(x, x, x)  # drawn, because the layer is in train mode
        >>> output.shape, weights.shape
        (torch.Size([3, 5, 8]), torch.Size([3, 5, 5]))
    """

    def __init__(
        self,
        embed_dim: int,
        num_heads: int,
        dropout: float = 0.0,
        bias: bool = True,
        add_bias_kv: bool = False,
        add_zero_attn: bool = False,
        kdim: int | None = None,
        vdim: int | None = None,
        batch_first: bool = False,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        *,
        config: AttentionConfig | None = None,
        weights: AttentionWeights | WeightsFactory | None = None,
    ) -> None:
        super().__init__(
            embed_dim, num_heads, dropout, bias, add_bias_kv, add_zero_attn, kdim, vdim, batch_first, device, dtype
        )
        head_dim = embed_dim // num_heads
        self.init_bayesian(config, key_dim=head_dim, num_heads=num_heads, device=device, dtype=dtype, weights=weights)

    @property
    def _qkv_same_embed_dim(self) -> bool:
        # in eval mode, stock encoder layers check this before they take a fused path that never calls this module
        is_under_construction = "config" not in self.__dict__
        return self.__dict__["_same_embed_dim"] and (is_under_construction or self.training or not self.is_own_path)

    @_qkv_same_embed_dim.setter
    def _qkv_same_embed_dim(self, value: bool) -> None:
        self.__dict__["_same_embed_dim"] = value

    @property
    def is_own_path(self) -> bool:
        """Whether a call now does what torch's module cannot: draw weights, compute a KL, drop weights in eval mode."""
        return not self.is_idle or (self.drops_in_eval and self.dropout > 0.0)

    def forward(
        self,
        query: Tensor,  # a nested tensor has no shape to check
        key: Tensor,
        value: Tensor,
        key_padding_mask: Tensor | None = None,
        need_weights: bool = True,
        attn_mask: Tensor | None = None,
        average_attn_weights: bool = True,
        is_causal: bool = False,
    ) -> tuple[Tensor, Tensor | None]:
        """Attend, with torch's arguments and results."""
        if not self.is_own_path:
            return super().forward(
                query, key, value, key_padding_mask, need_weights, attn_mask, average_attn_weights, is_causal
            )
        if is_causal and attn_mask is None:
            raise ValueError("is_causal=True needs the attn_mask that it describes, as in torch, got attn_mask=None")
        if query.is_nested or key.is_nested or value.is_nested:
            check_nested(self, query, key, value, key_padding_mask, attn_mask)
            return self._forward_nested(query, need_weights, average_attn_weights)
        check_inputs(self, query, key, value)
        is_batched = query.ndim == 3
        if not is_batched:
            query, key, value = (x.unsqueeze(0 if self.batch_first else 1) for x in (query, key, value))
            key_padding_mask = None if key_padding_mask is None else key_padding_mask.unsqueeze(0)
        if not self.batch_first:
            query, key, value = (x.transpose(0, 1) for x in (query, key, value))
        output, weights = self._attend(query, key, value, key_padding_mask, attn_mask, need_weights)
        if not self.batch_first:
            output = output.transpose(0, 1)
        if weights is not None and average_attn_weights:
            weights = weights.mean(dim=1)
        if not is_batched:
            output = output.squeeze(0 if self.batch_first else 1)
            weights = None if weights is None else weights.squeeze(0)
        return output, weights

    def _attend(
        self,
        query: Float[Tensor, "b m e"],
        key: Float[Tensor, "b n ek"],
        value: Float[Tensor, "b n ev"],
        key_padding_mask: Tensor | None,
        attn_mask: Tensor | None,
        need_weights: bool,
    ) -> tuple[Float[Tensor, "b m e"], Float[Tensor, "b h m n_all"] | None]:
        q, k, v = self._project(query, key, value)
        extra_keys = k.shape[2] - key.shape[1]
        mask, bias = split_masks(
            key_padding_mask, attn_mask, query, key.shape[1], num_heads=self.num_heads, extra_keys=extra_keys
        )
        if bias is not None and self.is_sampling and all(map(only_forbids, (key_padding_mask, attn_mask))):
            # torch's encoder turns boolean masks into numbers; the fused backends take no numbers
            bias = None
        if self.is_observed:
            observers.note_attention(self, q, k, mask=mask, bias=bias, is_causal=False, scale=self.head_dim**-0.5)
        dropout_p, scores, weights = self.dropout_now(self.dropout), None, None
        if need_weights or self.bayes_weights is not None:
            with without_autocast(q.device.type):
                scores = reference.dot_product_scores(q, k, scale=self.head_dim**-0.5, bias=bias)
        if self.bayes_weights is not None:
            heads, weights, kl = self.bayes_weights(scores, k, v, mask=mask, dropout_p=dropout_p)
            return self._merge(self.record(heads, kl)), weights
        valid = None if mask is None else mask.any(dim=-2)
        log_prior = self.bayes_prior(k, valid) if self.needs_kl and self.bayes_prior is not None else None
        options = {
            "config": self.config,
            "log_prior": log_prior,
            "mask": mask,
            "need_kl": self.needs_kl,
            "sample": self.is_sampling,
        }
        if scores is None:
            heads, kl = functional.attention(q, k, v, bias=bias, dropout_p=dropout_p, **options)
            if self.is_measured:
                heads = sensitivity.through_attention(heads, q, k, v, self, mask=mask, bias=bias, scale=self.head_dim**-0.5)
        else:
            if self.is_measured:
                scores = sensitivity.through_scores(scores, self)
            # the same computation in the same precision as above, written out; only the returned weights are rounded
            weights, kl = functional.attention_weights(scores, **options)
            with without_autocast(q.device.type):
                weights = F.dropout(weights, dropout_p)
                heads = reference.weighted_values(weights, v)
            weights = weights.to(q.dtype)
        return self._merge(self.record(heads, kl)), weights

    def _merge(self, heads: Float[Tensor, "b h m d"]) -> Float[Tensor, "b m e"]:
        return F.linear(heads.transpose(1, 2).flatten(2), self.out_proj.weight, self.out_proj.bias)

    def _project(self, query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        if self.in_proj_weight is not None:
            weights = self.in_proj_weight.chunk(3)
        else:
            weights = (self.q_proj_weight, self.k_proj_weight, self.v_proj_weight)
        # a bias of a different type than the weights is legal in torch's module
        biases = self.in_proj_bias.to(weights[0].dtype).chunk(3) if self.in_proj_bias is not None else (None, None, None)
        q, k, v = (F.linear(x, w, b) for x, w, b in zip((query, key, value), weights, biases, strict=True))
        if self.bias_k is not None and self.bias_v is not None:
            k = torch.cat([k, self.bias_k.expand(k.shape[0], 1, -1).to(k.dtype)], dim=1)
            v = torch.cat([v, self.bias_v.expand(v.shape[0], 1, -1).to(v.dtype)], dim=1)
        if self.add_zero_attn:
            k, v = F.pad(k, (0, 0, 0, 1)), F.pad(v, (0, 0, 0, 1))
        split = (x.unflatten(-1, (self.num_heads, self.head_dim)).transpose(1, 2) for x in (q, k, v))
        q, k, v = split
        return q, k, v

    def _forward_nested(self, nested: Tensor, need_weights: bool, average: bool) -> tuple[Tensor, Tensor | None]:
        """Attend within a nested tensor, as `nn.TransformerEncoder` passes it in eval mode with padding.

        The weights come back padded with zeros, as from torch's module.
        """
        lengths = torch.tensor([x.shape[0] for x in nested.unbind()], device=nested.device)
        padded = nested.to_padded_tensor(0.0)
        is_padding = torch.arange(padded.shape[1], device=nested.device) >= lengths[:, None]
        output, weights = self._attend(padded, padded, padded, is_padding, None, need_weights)
        if weights is not None:
            weights = weights.masked_fill(is_padding[:, None, :, None], 0.0)
            weights = weights.mean(dim=1) if average else weights
        return torch._nested_tensor_from_mask(output, ~is_padding), weights
