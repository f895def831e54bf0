"""Controls: the margin's sensitivity elsewhere than at the attention scores, from one backward pass of the same model.

The claim "attention scores tell where a model errs" needs these beside it: perhaps any squared gradient would do.

| place | noise that it stands for |
|---|---|
| `embeddings` | added to the embedded tokens |
| `hidden` | added to the output of every layer |
| `scaled hidden` | multiplied with the output of every layer: dropout, to first order |
| `attention outputs` | added to what every attention call returns |
| `parameters` | added to the weights and biases of every linear map |
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn

PLACES = ("embeddings", "hidden", "scaled hidden", "attention outputs", "parameters")


def squared_gradients(model: nn.Module, batch: dict[str, Tensor]) -> dict[str, Float[Tensor, " b"]]:
    """Return Σ (∂d/∂x)² for every place x, with d the margin of the two largest logits; one number per example.

    Args:
        model: A BERT-like classifier of Hugging Face, in eval mode and not converted.
        batch: Its inputs.
    """
    with torch.enable_grad(), _watching(model) as seen:
        logits = model(**batch).logits
        first, second = logits.topk(2, dim=-1).values.unbind(dim=-1)
        outputs = [output for values in seen.values() for output, _ in values]
        found = torch.autograd.grad((first - second).sum(), outputs, allow_unused=True)
    gradients = iter(torch.zeros_like(x) if g is None else g for x, g in zip(outputs, found, strict=True))
    total = {place: logits.new_zeros(len(logits)) for place in PLACES}
    for place, values in seen.items():
        for output, given in values:
            gradient = next(gradients)
            if place == "parameters":
                total[place] += _of_linear(given, gradient)
                continue
            total[place] += gradient.square().flatten(1).sum(dim=1)
            if place == "hidden":
                total["scaled hidden"] += (gradient * output.detach()).square().flatten(1).sum(dim=1)
    return total


def _of_linear(given: Float[Tensor, "b *t i"], gradient: Float[Tensor, "b *t o"]) -> Float[Tensor, " b"]:
    """Return the squared norm of each example's gradient in weight and bias, without forming either.

    The gradient in the weight is Σ_t g_t x_tᵀ, whose squared norm is Σ_tu (g_t · g_u)(x_t · x_u).
    """
    given, gradient = (x.reshape(len(x), -1, x.shape[-1]) for x in (given, gradient))
    products = (given @ given.transpose(1, 2)) * (gradient @ gradient.transpose(1, 2))
    return products.sum(dim=(1, 2)) + gradient.sum(dim=1).square().sum(dim=1)


@contextmanager
def _watching(model: nn.Module) -> Iterator[dict[str, list[tuple[Tensor, Tensor]]]]:
    """Note the output and the input of every module that a control looks at."""
    body: Any = model.base_model
    layers = list(body.encoder.layer)
    places = {
        "embeddings": [body.embeddings],
        "hidden": layers,
        "attention outputs": [layer.attention.self for layer in layers],
        "parameters": [module for module in model.modules() if isinstance(module, nn.Linear)],
    }
    seen: dict[str, list[tuple[Tensor, Tensor]]] = {place: [] for place in places}
    hooks = []

    def note(place: str) -> Any:
        def hook(module: nn.Module, given: tuple, output: Any) -> None:
            tensor = output if isinstance(output, Tensor) else output[0]
            # gradients must pass here although no parameter requires them
            if not tensor.requires_grad:
                tensor.requires_grad_()
            seen[place].append((tensor, given[0].detach() if given else tensor.detach()))

        return hook

    try:
        for place, modules in places.items():
            hooks += [module.register_forward_hook(note(place)) for module in modules]
        yield seen
    finally:
        for hook in hooks:
            hook.remove()
