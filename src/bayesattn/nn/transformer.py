"""Transformer layers whose attention is sampled: torch's layers, in which only the attention is replaced."""

from torch import Tensor, nn

from bayesattn.config import AttentionConfig
from bayesattn.nn.custom_weights import AttentionWeights, WeightsFactory
from bayesattn.nn.module import checked_config
from bayesattn.nn.multihead import MultiheadAttention

Weights = AttentionWeights | WeightsFactory | None


def _exchange(layer: nn.Module, names: tuple[str, ...], config: AttentionConfig | None, weights: Weights) -> None:
    """Replace stock attention modules by Bayesian ones with the same parameters."""
    checked_config(config, weights)
    if isinstance(weights, nn.Module) and len(names) > 1:
        raise ValueError(
            f"weights must be a function that builds one object per attention module, because the layer has {len(names)}, "
            f"got one {type(weights).__name__}"
        )
    for name in names:
        stock = getattr(layer, name)
        bayesian = MultiheadAttention(
            stock.embed_dim,
            stock.num_heads,
            dropout=stock.dropout,
            bias=stock.in_proj_bias is not None,
            batch_first=stock.batch_first,
            device=stock.out_proj.weight.device,
            dtype=stock.out_proj.weight.dtype,
            config=config,
            weights=weights,
        )
        bayesian.load_state_dict(stock.state_dict())
        setattr(layer, name, bayesian)


class TransformerEncoderLayer(nn.TransformerEncoderLayer):
    """`torch.nn.TransformerEncoderLayer` with Bayesian self-attention.

    While it samples, the attention module declines torch's fused path (which would never call it); in eval mode
    without sampling that path is taken as usual. Arguments are torch's, and `config` or `weights` of `MultiheadAttention`.

    Example:
        >>> import torch
        >>> layer = TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True, config=AttentionConfig("BAM-WC"))
        >>> x = torch.randn(3, 5, 8)
        >>> torch.equal(layer(x), layer(x)), torch.equal(layer.eval()(x), layer(x))  # drawn in train mode only
        (False, True)
    """

    self_attn: MultiheadAttention  # type: ignore[assignment]

    def __init__(self, *args, config: AttentionConfig | None = None, weights: Weights = None, **kwargs) -> None:
        super().__init__(*args, **kwargs)
        _exchange(self, ("self_attn",), config, weights)

    def forward(
        self,
        src: Tensor,  # a nested tensor has no shape to check
        src_mask: Tensor | None = None,
        src_key_padding_mask: Tensor | None = None,
        is_causal: bool = False,
    ) -> Tensor:
        """Return the layer's output, with torch's arguments.

        Torch's layer turns boolean masks into numbers first. Here they reach the attention as they are: the fused backends
        take no numbers, and during CUDA-graph capture the host cannot check whether the numbers only mask.
        """
        if not self.self_attn.is_own_path:
            return super().forward(src, src_mask, src_key_padding_mask, is_causal)
        masks = (src_mask, src_key_padding_mask)
        if self.norm_first:
            src = src + self._sa_block(self.norm1(src), *masks, is_causal=is_causal)
            return src + self._ff_block(self.norm2(src))
        src = self.norm1(src + self._sa_block(src, *masks, is_causal=is_causal))
        return self.norm2(src + self._ff_block(src))


class TransformerDecoderLayer(nn.TransformerDecoderLayer):
    """`torch.nn.TransformerDecoderLayer` with Bayesian self- and cross-attention.

    Arguments are torch's, and `config`, or `weights` as a function that builds one object per attention module.

    Example:
        >>> import torch
        >>> layer = TransformerDecoderLayer(8, 2, 16, batch_first=True, config=AttentionConfig("BAM-WC"))
        >>> layer(torch.randn(3, 4, 8), torch.randn(3, 5, 8)).shape  # four target positions, five in the memory
        torch.Size([3, 4, 8])
    """

    def __init__(self, *args, config: AttentionConfig | None = None, weights: Weights = None, **kwargs) -> None:
        super().__init__(*args, **kwargs)
        _exchange(self, ("self_attn", "multihead_attn"), config, weights)
