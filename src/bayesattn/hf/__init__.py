"""Hugging Face transformers: attention through its registry, the Trainer, generation with one noise draw per sequence."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from bayesattn.hf.attention import ATTENTION_NAME

if TYPE_CHECKING:
    from bayesattn.hf.callback import BayesianCallback, KLCallback
    from bayesattn.hf.generation import SampledGenerations, generate, sequence_noise
    from bayesattn.hf.trainer import BayesianTrainer, BayesianTrainerMixin

# converting a model must not import the Trainer (and accelerate with it)
_LAZY = {
    "SampledGenerations": "generation",
    "generate": "generation",
    "sequence_noise": "generation",
    "BayesianCallback": "callback",
    "KLCallback": "callback",
    "BayesianTrainer": "trainer",
    "BayesianTrainerMixin": "trainer",
}

__all__ = [
    "ATTENTION_NAME",
    "BayesianCallback",
    "BayesianTrainer",
    "BayesianTrainerMixin",
    "KLCallback",
    "SampledGenerations",
    "generate",
    "sequence_noise",
]


def __getattr__(name: str) -> Any:
    if name not in _LAZY:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_LAZY[name]}"), name)
