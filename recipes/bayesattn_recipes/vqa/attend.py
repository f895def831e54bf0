"""Where a model attends in the image: prior, mean and deviation of the attention over the regions.

The last SGA layer's self-attention W (regions × regions) is the last Bayesian attention over the image. Its rows are
averaged with the weights r that the attentional reduction gives them,

    map_j = Σ_i r_i W_ij

so the map is a distribution over regions. The prior Ψ of that layer has one weight per region and needs no average.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch
from jaxtyping import Float
from torch import Tensor

from bayesattn.kl import record_kl
from bayesattn.prediction import sampling
from bayesattn_recipes.vqa.model import MCAN


@torch.no_grad()
def attention_maps(
    model: MCAN, inputs: Mapping[str, Tensor], num_samples: int, seed: int
) -> dict[str, Float[Tensor, "b heads regions"]]:
    """Return maps over the regions: `mean`, and for Bayesian attention `std` over draws and, if contextual, `prior`.

    Args:
        model: In eval mode.
        inputs: The model's arguments.
        num_samples: Draws, at least 2.
        seed: Seed of the draws.
    """
    attend = model.region_attention
    with _watching(model) as seen:
        model(**inputs)
        if not attend.config.is_stochastic:
            return {"mean": seen[0]}
        seen.clear()
        device = inputs["regions"].device
        with sampling(model), torch.random.fork_rng([device] if device.type == "cuda" else []):
            torch.manual_seed(seed)
            for _ in range(max(num_samples, 2)):
                model(**inputs)
        maps = {"mean": torch.stack(seen).mean(dim=0), "std": torch.stack(seen).std(dim=0)}
    if attend.bayes_prior is not None:
        priors: list[Tensor] = []
        hook = attend.bayes_prior.register_forward_hook(lambda module, args, log_prior: priors.append(log_prior.exp()))
        try:
            # the prior is computed only if a KL is needed
            with record_kl():
                model(**inputs)
        finally:
            hook.remove()
        maps["prior"] = priors[-1].squeeze(-2).expand_as(maps["mean"])
    return maps


@contextmanager
def _watching(model: MCAN) -> Iterator[list[Tensor]]:
    """Collect the map of every forward pass."""
    weights: list[Tensor] = []
    maps: list[Tensor] = []

    def ask(module, args, kwargs):
        return args, {**kwargs, "need_weights": True, "average_attn_weights": False}

    def read(module, args, result):
        maps.append(torch.einsum("bi,bhij->bhj", result[1].float(), weights.pop().float()))

    attend = model.region_attention
    hooks = [
        attend.register_forward_pre_hook(ask, with_kwargs=True),
        attend.register_forward_hook(lambda module, args, result: weights.append(result[1])),
        model.image_reduction.register_forward_hook(read),
    ]
    try:
        yield maps
    finally:
        for hook in hooks:
            hook.remove()
