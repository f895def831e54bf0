"""Bayesian attention for PyTorch: sampled attention weights, key-dependent priors, honest uncertainty."""

from typing import TYPE_CHECKING

from bayesattn.optional import lazy_names

if TYPE_CHECKING:
    from bayesattn import convert, functional, metrics, nn
    from bayesattn.config import AttentionConfig
    from bayesattn.convert import bayesianize, conversion_report, load_bayesian, restore, save_bayesian
    from bayesattn.doubt import SequenceScore, Uncertainty, score, tune_noise, uncertainty
    from bayesattn.kl import record_kl
    from bayesattn.objective import KLSchedule, elbo
    from bayesattn.observation import observe
    from bayesattn.prediction import Prediction, predict, sampling

__version__ = "0.1.0"

__all__ = [
    "AttentionConfig",
    "KLSchedule",
    "Prediction",
    "SequenceScore",
    "Uncertainty",
    "bayesianize",
    "conversion_report",
    "convert",
    "elbo",
    "functional",
    "load_bayesian",
    "metrics",
    "nn",
    "observe",
    "predict",
    "record_kl",
    "restore",
    "sampling",
    "save_bayesian",
    "score",
    "tune_noise",
    "uncertainty",
]

if not TYPE_CHECKING:  # a type checker reads the imports above; a __getattr__ would make it accept every name
    # torch takes seconds to import, and `bayesattn --help` comes through here
    _LATE = {
        "config": ("AttentionConfig",),
        "convert": ("bayesianize", "conversion_report", "load_bayesian", "restore", "save_bayesian"),
        "doubt": ("SequenceScore", "Uncertainty", "score", "tune_noise", "uncertainty"),
        "objective": ("KLSchedule", "elbo"),
        "kl": ("record_kl",),
        "observation": ("observe",),
        "prediction": ("Prediction", "predict", "sampling"),
    }
    _MODULES = (
        "config", "convert", "distributions", "divergences", "functional", "kl", "metrics", "nn", "noise", "objective",
        "priors",
    )  # fmt: skip
    __getattr__, __dir__ = lazy_names(
        __name__,
        __all__,
        {name: f"bayesattn.{name}" for name in _MODULES}
        | {name: f"bayesattn.{module}" for module, names in _LATE.items() for name in names},
    )
