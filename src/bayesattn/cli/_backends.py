"""Which attention backends run here, found by asking each for a tiny forward pass."""

import torch

from bayesattn import functional
from bayesattn.config import AttentionConfig


def backends() -> dict[str, str]:
    """Return, by backend and device, `works` or the reason why not."""
    devices = ["cpu", *(["cuda"] if torch.cuda.is_available() else [])]
    return {f"{backend} on {device}": _probe(backend, device) for backend in ("reference", "triton") for device in devices}


def _probe(backend: functional.Backend, device: str) -> str:
    tensor = torch.zeros(1, 1, 16, 16, device=device)
    try:
        functional.attention(tensor, tensor, tensor, config=AttentionConfig("BAM-WF"), seed=0, backend=backend)
    # whatever is wrong with a driver or a compiler belongs in the table
    except Exception as error:
        return " ".join(str(error).split()) or type(error).__name__
    return "works"
