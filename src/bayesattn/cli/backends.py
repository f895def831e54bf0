"""Which backends run here, found by running a tiny forward pass with each."""

from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from bayesattn import functional
from bayesattn.config import AttentionConfig
from bayesattn.functional import Edges
from bayesattn.ops.attention.support import HAS_TRITON, INTERPRETED
from bayesattn.priors import ContextualPrior

SIZE = 16


def backends() -> Iterator[tuple[str, str, dict[str, str]]]:
    """Yield operation, backend and, for each device, `works` or the reason it does not."""
    devices = ["cpu", *(["cuda"] if torch.cuda.is_available() else [])]
    tried = {
        "attention": (_attention, functional.BACKENDS),
        "attention on edges (segment)": (_edges, functional.EDGE_BACKENDS),
        "contextual prior": (_prior, ("reference", "triton")),
    }
    for operation, (probe, names) in tried.items():
        # auto is one of the others
        for name in (name for name in names if name != "auto"):
            yield operation, name, {device: _state(probe, name, device) for device in devices}


def _state(probe: Callable[[str, Tensor], object], backend: str, device: str) -> str:
    try:
        probe(backend, torch.zeros(1, 1, SIZE, SIZE, device=device))
    # the table reports any failure of a driver or a compiler
    except Exception as error:
        text = " ".join(str(error).split()) or type(error).__name__
        # keep only the reason: "backend 'triton' cannot be used here: REASON. Use …"
        return text.removeprefix(f"backend {backend!r} cannot be used here: ").partition(". Use ")[0]
    return "works"


def _attention(backend: functional.Backend, x: Tensor) -> None:
    functional.attention(x, x, x, config=AttentionConfig("BAM-WF"), backend=backend)


def _edges(backend: functional.EdgeBackend, x: Tensor) -> None:
    nodes = torch.arange(SIZE, device=x.device)
    edges, value = Edges.sort(nodes, nodes, SIZE, SIZE), x.reshape(SIZE, 1, SIZE)
    functional.edge_attention(value[..., 0], value, edges, config=AttentionConfig("BAM-WF"), backend=backend)


def _prior(backend: str, x: Tensor) -> None:
    prior = ContextualPrior(SIZE, 1, AttentionConfig("BAM-WC"), device=x.device)
    if backend == "reference":
        prior.logits(x)
        return
    # the prior chooses its backend by itself and does not report it
    if not HAS_TRITON:
        raise ValueError("triton is not installed")
    if x.device.type != "cuda" and not INTERPRETED:
        raise ValueError(f"the tensors are on {x.device.type}, not on a GPU")
    prior(x)
