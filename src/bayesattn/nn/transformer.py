"""Transformer layers whose attention is sampled: torch's layers with the attention exchanged, nothing else."""

from torch import nn

from bayesattn.config import AttentionConfig
from bayesattn.nn.multihead import MultiheadAttention


def _exchange(layer: nn.Module, names: tuple[str, ...], config: AttentionConfig) -> None:
    """Replace stock attention modules by Bayesian ones with the same weights."""
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
        )
        bayesian.load_state_dict(stock.state_dict())
        setattr(layer, name, bayesian)


class TransformerEncoderLayer(nn.TransformerEncoderLayer):
    """`torch.nn.TransformerEncoderLayer` with Bayesian self-attention.

    While it samples, the attention module declines torch's fused path (which would never call it); in eval mode
    without sampling that path is taken as usual. Arguments as in torch, and `config`.
    """

    def __init__(self, *args, config: AttentionConfig, **kwargs) -> None:
        super().__init__(*args, **kwargs)
        _exchange(self, ("self_attn",), config)


class TransformerDecoderLayer(nn.TransformerDecoderLayer):
    """`torch.nn.TransformerDecoderLayer` with Bayesian self- and cross-attention. Arguments as in torch, and `config`."""

    def __init__(self, *args, config: AttentionConfig, **kwargs) -> None:
        super().__init__(*args, **kwargs)
        _exchange(self, ("self_attn", "multihead_attn"), config)
