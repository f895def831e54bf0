"""Where a model attends in the image: prior, mean and deviation of the attention over the regions.

The last SGA layer's self-attention W (regions × regions) is the last Bayesian attention over the image. Its rows are
averaged with the weights r that the attentional reduction gives them,

    map_j = Σ_i r_i W_ij

so the map is a distribution over regions. The prior Ψ of that layer has one weight per region and needs no average.
"""

from collections.abc import Mapping

import torch
from jaxtyping import Float
from torch import Tensor

from bayesattn_recipes.common.attention import layer_maps
from bayesattn_recipes.vqa.model import MCAN


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
    reductions: list[Tensor] = []

    def run() -> Tensor:
        model(**inputs)
        return reductions.pop()

    def read(weights: Tensor, reduction: Tensor) -> Tensor:
        return torch.einsum("bi,bhij->bhj", reduction.float(), weights.float())

    hook = model.image_reduction.register_forward_hook(lambda module, args, result: reductions.append(result[1]))
    try:
        return layer_maps(model, model.region_attention, run, read, num_samples, seed, mean_of_draws=True)
    finally:
        hook.remove()
