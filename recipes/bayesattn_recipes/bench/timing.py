"""One optimizer step as a call, for benchmarks: forward and backward pass, clipping and Adam, all on the device."""

from collections.abc import Callable

import torch
from jaxtyping import Float
from torch import Tensor, nn

from bayesattn.kl import record_kl
from bayesattn.objective import elbo

CLIP_NORM = 1.0
# neither changes the cost of a step
KL_WEIGHT = 0.01
LEARNING_RATE = 1e-4


def whole_step(
    model: nn.Module,
    nll: Callable[[], Float[Tensor, ""]],
    *,
    num_labels: int,
    num_examples: int,
    autocast: bool = False,
    capturable: bool = False,
) -> Callable[[], None]:
    """Return a call that makes one optimizer step; it never waits for the device.

    Args:
        model: In training mode, on its device.
        nll: Runs the model on the batch and returns the loss summed over its labels.
        num_labels: Labels of the batch.
        num_examples: Examples of the batch.
        autocast: Whether to compute in bfloat16.
        capturable: Whether the step will be recorded as a CUDA graph.
    """
    device = next(model.parameters()).device.type
    # fused: the plain version launches two kernels for every parameter
    optimizer = torch.optim.Adam(model.parameters(), lr=LEARNING_RATE, capturable=capturable, fused=True)

    def step() -> None:
        with torch.autocast(device, torch.bfloat16, enabled=autocast), record_kl() as scope:
            loss = nll()
        kl = scope.total() if len(scope) else loss.new_zeros(())
        share = num_labels / num_examples
        elbo(loss / num_labels, kl, kl_weight=KL_WEIGHT, labels_per_example=share, max_share=None).loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), CLIP_NORM)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    return step
