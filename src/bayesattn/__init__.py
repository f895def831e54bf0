"""Bayesian attention for PyTorch: sampled attention weights, key-dependent priors, honest uncertainty."""

from bayesattn import functional, nn
from bayesattn.config import AttentionConfig
from bayesattn.objective import KLSchedule, elbo
from bayesattn.predict import Prediction, predict, sampling
from bayesattn.recording import record_kl

__version__ = "0.1.0"

__all__ = [
    "AttentionConfig",
    "KLSchedule",
    "Prediction",
    "elbo",
    "functional",
    "nn",
    "predict",
    "record_kl",
    "sampling",
]
