"""Latent alignments (Deng et al., 2018): the key that explains an output is a hidden variable z with prior p(z | x, y<t).

    exact    ln p(y) = ln Σ_j p_j p(y | z=j)                              needs the likelihood of every key, or of the
                                                                          largest p_j and of the rest's mean context
    enum     ELBO = Σ_j q_j ln p(y | z=j) − KL(q ‖ p)                     with an inference network q(z | x, y)
    sample   the same at one z ~ q, its gradient in q by the score function; b = ln p(y | soft context)

Pure functions of log-probabilities; entries of keys that do not exist are −inf. `latent.py` puts them into a model.
"""

from typing import NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor

from bayesattn_recipes.baselines import categorical
from bayesattn_recipes.baselines.score_function import chosen_log_prob, score_function


class Bound(NamedTuple):
    """A negative ELBO in two parts: minus the expected log-likelihood, and KL(q ‖ p)."""

    nll: Float[Tensor, "*b"]
    kl: Float[Tensor, "*b"]


def exact_nll(log_prior: Float[Tensor, "*b n"], log_likelihood: Float[Tensor, "*b n"]) -> Float[Tensor, "*b"]:
    """Return −ln Σ_j p_j p(y | z=j), the likelihood of the marginal."""
    return -torch.logsumexp(log_prior + log_likelihood, dim=-1)


def enum_bound(
    log_prior: Float[Tensor, "*b n"], log_posterior: Float[Tensor, "*b n"], log_likelihood: Float[Tensor, "*b n"]
) -> Bound:
    """Return the bound with its expectation written out."""
    return Bound(
        -categorical.expect(log_posterior, log_likelihood),
        categorical.kl(log_posterior, log_prior),
    )


def sample_bound(
    log_prior: Float[Tensor, "*b n"],
    log_posterior: Float[Tensor, "*b n"],
    chosen: Int[Tensor, "*b"],
    log_likelihood: Float[Tensor, "*b"],
    baseline: Float[Tensor, "*b"] | float = 0.0,
) -> Bound:
    """Return the bound at one draw, with the score-function gradient in q attached to its first part.

    Args:
        log_prior: ln p(z | x, y<t).
        log_posterior: ln q(z | x, y).
        chosen: z ~ q.
        log_likelihood: ln p(y | z) of the chosen keys.
        baseline: Subtracted from the log-likelihood in the gradient of q; must not depend on z.
    """
    cost = -log_likelihood
    control = -baseline if isinstance(baseline, Tensor) else torch.full_like(cost, -baseline)
    attached = cost + score_function(cost, chosen_log_prob(log_posterior, chosen), control)
    return Bound(attached, categorical.kl(log_posterior, log_prior))


def marginal_log_probs(log_prior: Float[Tensor, "*b n"], log_probs: Float[Tensor, "*b n c"]) -> Float[Tensor, "*b c"]:
    """Return ln Σ_j p_j p(y | z=j) of every class, the prediction of these models."""
    return torch.logsumexp(log_prior.unsqueeze(-1) + log_probs, dim=-2)
