"""Bayesian attention for PyTorch: sampled attention weights, key-dependent priors, honest uncertainty."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from bayesattn import functional, metrics, nn
from bayesattn.config import AttentionConfig
from bayesattn.objective import KLSchedule, elbo
from bayesattn.predict import Prediction, predict, sampling
from bayesattn.recording import record_kl

if TYPE_CHECKING:
    from bayesattn.convert import bayesianize, load_bayesian, restore, save_bayesian, tune_noise

__version__ = "0.1.0"

__all__ = [
    "AttentionConfig",
    "KLSchedule",
    "Prediction",
    "bayesianize",
    "elbo",
    "functional",
    "load_bayesian",
    "metrics",
    "nn",
    "predict",
    "record_kl",
    "restore",
    "sampling",
    "save_bayesian",
    "tune_noise",
]

_CONVERT = ("bayesianize", "load_bayesian", "restore", "save_bayesian", "tune_noise")


def __getattr__(name: str) -> Any:
    # conversion knows many foreign models; it is imported when it is first used
    if name in _CONVERT:
        return getattr(import_module("bayesattn.convert"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
