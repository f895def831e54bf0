"""Whole training steps: the same encoder with soft and with Bayesian attention."""

from typing import cast

import torch
from torch import nn

from bayesattn.bench.harness import Row, Suite, recorded
from bayesattn.config import AttentionConfig, Variant
from bayesattn.kl import record_kl
from bayesattn.nn import TransformerEncoderLayer

PROVIDERS: dict[str, Variant] = {"soft (sdpa)": "soft", "BAM-NOKL": "BAM-NOKL", "BAM-WC": "BAM-WC"}


def build_encoder(variant: Variant, *, dim: int, heads: int, layers: int) -> nn.TransformerEncoder:
    """Build a torch encoder whose attention is of the given variant, without dropout."""
    layer = TransformerEncoderLayer(dim, heads, 4 * dim, dropout=0.0, batch_first=True, config=AttentionConfig(variant))
    return nn.TransformerEncoder(layer, layers, enable_nested_tensor=False)


def training_step(model: nn.Module, inputs: torch.Tensor, *, with_kl: bool, autocast: torch.dtype | None = None):
    """Return a call that runs forward, loss and backward once."""

    def step() -> None:
        with torch.autocast(inputs.device.type, autocast or torch.bfloat16, enabled=autocast is not None):
            if with_kl:
                with record_kl() as kl:
                    loss = model(inputs).float().square().mean()
                loss = loss + 1e-3 * kl.total()
            else:
                loss = model(inputs).float().square().mean()
        loss.backward()
        model.zero_grad(set_to_none=True)

    return step


def run(device: str) -> list[Row]:
    """Time a training step: on a CPU 4 layers, d = 256, N = 256; on a GPU 12 layers of BERT-base size in bfloat16."""
    suite = Suite("model", device)
    if device == "cuda":
        cases = [("encoder 12x768 b16 n512", {"dim": 768, "heads": 12, "layers": 12}, (16, 512, 768), torch.bfloat16)]
    else:
        cases = [
            (f"encoder 4x256 b8 n256 h{heads}", {"dim": 256, "heads": heads, "layers": 4}, (8, 256, 256), None)
            for heads in (4, 8)
        ]
    for case, sizes, shape, autocast in cases:
        inputs = torch.randn(shape, device=device)
        for provider, variant in PROVIDERS.items():
            model = build_encoder(variant, **sizes).to(device)
            step = training_step(model, inputs, with_kl=variant == "BAM-WC", autocast=autocast)
            suite.run(case, provider, "train step", step)
            if device == "cuda":
                compiled = cast(nn.Module, torch.compile(model, fullgraph=True))
                step = training_step(compiled, inputs, with_kl=variant == "BAM-WC", autocast=autocast)
                suite.run(case, provider, "compiled train step", step)
                plain = training_step(model, inputs, with_kl=variant == "BAM-WC", autocast=autocast)
                suite.run(case, provider, "train step, CUDA graph", recorded(plain))
    return suite.rows
