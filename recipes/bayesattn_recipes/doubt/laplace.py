"""Laplace approximation of the last layer: the rival that also needs no retraining (Daxberger et al., 2021).

The head is linear in its features φ (with a 1 for the bias). Its posterior is normal around the trained weights. Its
precision is Σ_n (diag p_n − p_n p_nᵀ) ⊗ φ_n φ_nᵀ + λ over the training data. λ is chosen on validation labels.
"""

from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor

from bayesattn.doubt.predictive import averaged_probabilities
from bayesattn.metrics import negative_log_likelihood

PRECISIONS = tuple(10.0 ** (step / 2.0) for step in range(-4, 11))


@dataclass(frozen=True)
class Features:
    """The inputs of the last layer and its outputs."""

    inputs: Float[Tensor, "n d"]
    logits: Float[Tensor, "n c"]

    @property
    def with_bias(self) -> Float[Tensor, "n d1"]:
        """The inputs with a column of ones."""
        return torch.cat([self.inputs, torch.ones_like(self.inputs[:, :1])], dim=1).double()


@dataclass(frozen=True)
class LastLayer:
    """The posterior of a linear head: eigenvectors and eigenvalues of the data's part of the precision."""

    vectors: Float[Tensor, "p p"]
    values: Float[Tensor, " p"]
    precision: float

    def covariance(self, features: Features) -> Float[Tensor, "n c c"]:
        """Return the covariance of each example's logits."""
        phi, classes = features.with_bias, features.logits.shape[1]
        # row (class, feature) of the flattened weights
        vectors = self.vectors.reshape(classes, phi.shape[1], -1)
        projected = torch.einsum("cdp,nd->ncp", vectors, phi)
        return torch.einsum("ncp,p,nep->nce", projected, 1.0 / (self.values + self.precision), projected)


def fit(train: Features, validation: Features, labels: Int[Tensor, " n"]) -> LastLayer:
    """Fit the posterior to the training data, and its prior's precision to validation labels."""
    phi, p = train.with_bias, torch.softmax(train.logits.double(), dim=-1)
    curvature = torch.diag_embed(p) - p.unsqueeze(2) * p.unsqueeze(1)
    classes, width = p.shape[1], phi.shape[1]
    hessian = torch.zeros(classes, width, classes, width, dtype=torch.float64, device=phi.device)
    for a in range(classes):
        for b in range(classes):
            hessian[a, :, b, :] = torch.einsum("n,nd,ne->de", curvature[:, a, b], phi, phi)
    values, vectors = torch.linalg.eigh(hessian.reshape(classes * width, -1))
    values = values.clamp(min=0.0)

    def nll(precision: float) -> float:
        predicted = predict(LastLayer(vectors, values, precision), validation)[0]
        return float(negative_log_likelihood(predicted, labels).mean())

    return LastLayer(vectors, values, min(PRECISIONS, key=nll))


def predict(head: LastLayer, features: Features) -> tuple[Float[Tensor, "n c"], Float[Tensor, " n"]]:
    """Return probabilities averaged over the posterior, and margin / std of the two largest logits."""
    covariance, logits = head.covariance(features), features.logits.double()
    order = logits.argsort(dim=1, descending=True)
    ranked = logits.gather(1, order)
    differences = ranked[:, :1] - ranked[:, 1:]
    rows = covariance.gather(1, order.unsqueeze(2).expand_as(covariance))
    rows = rows.gather(2, order.unsqueeze(1).expand_as(covariance))
    # Cov(z_1 − z_a, z_1 − z_b) = C_11 − C_1a − C_1b + C_ab
    first = rows[:, :1, :1]
    spread = first - rows[:, :1, 1:] - rows[:, 1:, :1] + rows[:, 1:, 1:]
    mean = averaged_probabilities(torch.softmax(logits, dim=-1), order, differences, spread)
    return mean, differences[:, 0] / spread[:, 0, 0].clamp(min=1e-30).sqrt()
