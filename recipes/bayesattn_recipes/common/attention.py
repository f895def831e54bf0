"""What one attention layer of a model attends to: mean and deviation of its weights, and its prior."""

from collections.abc import Callable
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn

from bayesattn.kl import record_kl
from bayesattn.nn import MultiheadAttention
from bayesattn.prediction import sampling, seeded


@torch.no_grad()
def layer_maps(
    model: nn.Module,
    layer: MultiheadAttention,
    run: Callable[[], Any],
    read: Callable[[Float[Tensor, "b heads m n"], Any], Float[Tensor, "b heads n"]],
    num_samples: int,
    seed: int,
    *,
    mean_of_draws: bool = False,
) -> dict[str, Float[Tensor, "b heads n"]]:
    """Return maps of a layer: `mean`, and for Bayesian attention `std` over draws and, if contextual, `prior`.

    Args:
        model: In eval mode.
        layer: One of its attention layers.
        run: Runs the model.
        read: Makes a map from the layer's weights and the result of `run`.
        num_samples: Draws, at least 2.
        seed: Seed of the draws.
        mean_of_draws: Whether `mean` is that of the draws, not the weights without noise.
    """
    weights: list[Tensor] = []

    def ask(module, args, kwargs):
        return args, {**kwargs, "need_weights": True, "average_attn_weights": False}

    def look() -> Tensor:
        result = run()
        return read(weights.pop(), result)

    hooks = [
        layer.register_forward_pre_hook(ask, with_kwargs=True),
        layer.register_forward_hook(lambda module, args, result: weights.append(result[1])),
    ]
    try:
        maps = {"mean": look()}
        if layer.config.is_stochastic:
            with sampling(model), seeded(seed, [maps["mean"].device]):
                drawn = torch.stack([look() for _ in range(max(num_samples, 2))])
            maps = {"mean": drawn.mean(dim=0) if mean_of_draws else maps["mean"], "std": drawn.std(dim=0)}
    finally:
        for hook in hooks:
            hook.remove()
    if layer.bayes_prior is not None:
        priors: list[Tensor] = []
        hook = layer.bayes_prior.register_forward_hook(lambda module, args, log_prior: priors.append(log_prior.exp()))
        try:
            # the prior is computed only if a KL is needed
            with record_kl():
                run()
        finally:
            hook.remove()
        maps["prior"] = priors[-1].squeeze(-2).expand_as(maps["mean"])
    return maps
