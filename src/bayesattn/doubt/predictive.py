"""Class probabilities averaged over attention noise, to first order: an average of softmax over normal logits.

The c most probable classes share their total probability; the rest keep theirs. With z_1 the largest logit and
u_a = z_1 − z_a ~ N(d_a, C) for the others, their shares are E[softmax(0, −u_2, …, −u_c)]: for two classes a one-dimensional
integral (Gauss–Hermite), for more an average over fixed quasi-random points. No pass through the model is needed.
"""

import math
from functools import cache

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor

NODES = 64
POINTS = 1024


def averaged_probabilities(
    probabilities: Float[Tensor, "b k"],
    classes: Int[Tensor, "b c"],
    differences: Float[Tensor, "b others"],
    covariance: Float[Tensor, "b others others"],
) -> Float[Tensor, "b k"]:
    """Return the probabilities of all classes, averaged over the noise.

    Args:
        probabilities: Those of the model as it is.
        classes: The c most probable ones, in order.
        differences: d_a, for the second to the last of them.
        covariance: C, for the same.
    """
    points, weights = _points(covariance.shape[-1])
    points, weights = (x.to(covariance.device, torch.float64) for x in (points, weights))
    # the square root of a matrix that rounding may have made indefinite
    values, vectors = torch.linalg.eigh(covariance.double())
    root = vectors * values.clamp(min=0.0).sqrt().unsqueeze(-2)
    moved = differences.double().unsqueeze(1) + torch.einsum("bij,pj->bpi", root, points)
    shares = torch.softmax(torch.nn.functional.pad(-moved, (1, 0)), dim=-1)
    shares = torch.einsum("bpc,p->bc", shares, weights).to(probabilities.dtype)
    together = probabilities.gather(1, classes).sum(dim=1, keepdim=True)
    return probabilities.scatter(1, classes, shares * together)


@cache
def _points(dimensions: int) -> tuple[Float[Tensor, "p d"], Float[Tensor, " p"]]:
    """Return points and weights whose weighted sum is the mean over a standard normal."""
    if dimensions == 1:
        nodes, weights = np.polynomial.hermite_e.hermegauss(NODES)
        return torch.from_numpy(nodes).unsqueeze(1), torch.from_numpy(weights / math.sqrt(2.0 * math.pi))
    uniform = torch.quasirandom.SobolEngine(dimensions).draw(POINTS + 1, dtype=torch.float64)[1:]
    # each point and its mirror image: the mean is exactly 0
    normal = math.sqrt(2.0) * torch.erfinv(2.0 * uniform - 1.0)
    return torch.cat([normal, -normal]), torch.full((2 * POINTS,), 0.5 / POINTS, dtype=torch.float64)
