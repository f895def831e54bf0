"""Hugging Face transformers: attention through its registry, Trainer, pipeline, generation with one draw per sequence."""

from typing import TYPE_CHECKING

from bayesattn.optional import lazy_names, needs_extra

with needs_extra("bayesattn.integrations.hf", "hf"):
    from bayesattn.integrations.hf.attention import ATTENTION_NAME

if TYPE_CHECKING:
    from bayesattn.integrations.hf.callback import BayesianCallback, KLCallback
    from bayesattn.integrations.hf.generation import SampledGenerations, generate, sequence_noise
    from bayesattn.integrations.hf.pipeline import DoubtPipeline
    from bayesattn.integrations.hf.trainer import BayesianTrainer, BayesianTrainerMixin

__all__ = [
    "ATTENTION_NAME",
    "BayesianCallback",
    "BayesianTrainer",
    "BayesianTrainerMixin",
    "DoubtPipeline",
    "KLCallback",
    "SampledGenerations",
    "generate",
    "sequence_noise",
]

if not TYPE_CHECKING:
    # converting a model must not import the Trainer (and accelerate with it)
    _LATE = {
        "bayesattn.integrations.hf.callback": ("BayesianCallback", "KLCallback"),
        "bayesattn.integrations.hf.generation": ("SampledGenerations", "generate", "sequence_noise"),
        "bayesattn.integrations.hf.pipeline": ("DoubtPipeline",),
        "bayesattn.integrations.hf.trainer": ("BayesianTrainer", "BayesianTrainerMixin"),
    }
    _MODULES = {name: module for module, names in _LATE.items() for name in names}
    __getattr__, __dir__ = lazy_names(__name__, __all__, _MODULES, extra="hf")
