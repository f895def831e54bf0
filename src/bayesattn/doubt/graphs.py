"""The variance that attention noise gives to the answers of a graph model, whose nodes mix.

An edge's noise moves the answers of many nodes, so one backward pass does not separate them. Few answers get one backward
pass each, which is exact. For many, the noise is drawn M times and pushed through the linearized model in forward mode,

    Var d_t ≈ (1/M) Σ_m (Σ_e ∂d_t/∂Φ_e g_e^m)²,    g ~ N(0, v)

which is unbiased for the closed form, with a relative standard error of √(2/M), and costs M passes for all nodes together.
"""

from typing import Any, Literal

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.autograd import forward_ad

from bayesattn.doubt.closed_form import Measured, Numbers, require_number
from bayesattn.noise import log_noise_variance
from bayesattn.sensitivity import Call

# up to this many answers are computed one by one; above, linearized draws are faster than as many backward passes
MOST_EXACT = 1024
# M; a relative standard error of 10 % for a variance and 5 % for its root
DRAWS = 200
# gradients of scores that are held at once
MOST_ENTRIES = 2**24

GraphMethod = Literal["closed-form", "linearized"]


def doubts(
    measured: Measured, numbers: Numbers, *, linearize: bool, seed: int
) -> tuple[list[Float[Tensor, " t"]], list[dict[str, Any]], GraphMethod]:
    """Return the numbers of the model as it is, for each what `closed_form.parts` returns, and how they were computed.

    Args:
        measured: A model all of whose attention is on edges.
        numbers: As for `closed_form.variances`.
        linearize: Whether to use linearized draws even for few answers.
        seed: Seed of these draws.
    """
    others = [name for part, name in measured.names.items() if not part.on_edges]
    if others:
        raise ValueError(
            f"{others[0]!r} attends over a sequence, other modules along the edges of a graph. Use method='draws'"
        )
    with torch.no_grad():
        # PyG's own code, which rounds differently from the path that is measured
        plain = measured.run()
    wanted = numbers(plain)
    values = [number(plain).detach() for number in wanted]
    if linearize or values[0].numel() > MOST_EXACT:
        return values, _linearized(measured, wanted, values, seed), "linearized"
    outputs, calls = measured.run_measured()
    with torch.enable_grad():
        return values, [_exact(number(outputs), calls, measured) for number in wanted], "closed-form"


def _exact(number: Float[Tensor, " t"], calls: list[Call], measured: Measured) -> dict[str, Any]:
    """Run backwards once per answer, several at a time."""
    require_number(number)
    anchors = [call.anchor for call in calls]
    at_once = max(1, MOST_ENTRIES // max(sum(anchor.numel() for anchor in anchors), 1))
    sizes = {call.edges.num_sources for call in calls if call.edges is not None}
    by_head: dict[str, Tensor] = {}
    by_source = number.new_zeros((len(number), max(sizes)), dtype=anchors[0].dtype)
    for rows in torch.arange(len(number), device=number.device).split(at_once):
        picked = torch.nn.functional.one_hot(rows, len(number)).to(number.dtype)
        grads = torch.autograd.grad(number, anchors, picked, is_grads_batched=True, allow_unused=True, retain_graph=True)
        for call, grad in zip(calls, grads, strict=True):
            if grad is None:
                continue
            squares = grad.detach().square() * log_noise_variance(call.module.config)  # type: ignore[arg-type]
            name = measured.names[call.module]  # type: ignore[index]
            heads = by_head.setdefault(name, number.new_zeros((len(number), squares.shape[-1]), dtype=squares.dtype))
            heads[rows] += squares.sum(dim=1)
            assert call.edges is not None
            by_source[rows] = by_source[rows].index_add(1, call.edges.source, squares.sum(dim=-1))
    by_layer = {name: heads.sum(dim=-1) for name, heads in by_head.items()}
    std = torch.stack(list(by_layer.values())).sum(dim=0).sqrt()
    # layers that read different sets of nodes (samples of neighbors) number them differently
    return {"std": std, "by_layer": by_layer, "by_head": by_head, "by_token": by_source if len(sizes) == 1 else None}


def _linearized(measured: Measured, wanted: list, values: list[Tensor], seed: int) -> list[dict[str, Any]]:
    generators: dict[torch.device, torch.Generator] = {}

    def direction(module: nn.Module, like: Tensor) -> Tensor:
        generator = generators.setdefault(like.device, torch.Generator(like.device).manual_seed(seed))
        noise = torch.randn(like.shape, generator=generator, device=like.device, dtype=like.dtype)
        return noise * log_noise_variance(module.config) ** 0.5  # type: ignore[arg-type]

    totals = [torch.zeros_like(value) for value in values]
    for _ in range(DRAWS):
        with forward_ad.dual_level():
            outputs, _ = measured.run_measured(direction)
            for total, number in zip(totals, wanted, strict=True):
                moved = forward_ad.unpack_dual(number(outputs)).tangent
                if moved is None:
                    raise ValueError(
                        "target does not depend on the attention: it was detached, rounded or computed outside of torch"
                    )
                total += moved.detach().square()
    return [{"std": (total / DRAWS).sqrt(), "by_layer": {}, "by_head": {}, "by_token": None} for total in totals]
