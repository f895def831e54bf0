"""A tiny experiment with everything a resumed run has to repeat: dropout, attention noise, all generators, schedules."""

import random
from dataclasses import dataclass, field

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

from bayesattn import AttentionConfig, KLSchedule
from bayesattn import nn as bnn
from bayesattn_recipes.common.loop import Experiment, TrainingConfig, num_steps

EXAMPLES, TOKENS, WIDTH, CLASSES = 23, 5, 6, 3


@dataclass(frozen=True)
class TinyConfig:
    training: TrainingConfig
    attention: AttentionConfig = field(default_factory=lambda: AttentionConfig("BAM-WC", weibull_k=2.0))
    seed: int = 5
    dropout: float = 0.2


class TinyModel(nn.Module):
    def __init__(self, attention: AttentionConfig, dropout: float) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            bnn.MultiheadAttention(WIDTH, 2, batch_first=True, config=attention, dropout=dropout) for _ in range(2)
        )
        self.norm = nn.LayerNorm(WIDTH)
        self.drop = nn.Dropout(dropout)
        self.head = nn.Linear(WIDTH, CLASSES)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = self.norm(x + self.drop(layer(x, x, x, need_weights=False)[0]))
        return self.head(x.mean(dim=1))


class TinyExperiment(Experiment):
    def __init__(self, config: TinyConfig, *, is_random: bool = True) -> None:
        generator = torch.Generator().manual_seed(11)
        self.inputs = torch.randn(EXAMPLES, TOKENS, WIDTH, generator=generator)
        self.labels = torch.randint(0, CLASSES, (EXAMPLES,), generator=generator)
        self.num_examples = EXAMPLES
        self.is_random = is_random
        self.model = TinyModel(config.attention, config.dropout)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=3e-3)
        self.scheduler = torch.optim.lr_scheduler.OneCycleLR(
            self.optimizer, 3e-3, total_steps=num_steps(self, config.training)
        )
        self.batches_seen = 0

    def collate(self, indices):
        self.batches_seen += 1
        inputs = self.inputs[indices]
        if self.is_random:
            # augmentation out of both of the other generators
            inputs = inputs * (1.0 + 0.01 * random.gauss(0.0, 1.0)) + 0.01 * float(np.random.standard_normal())
        return {"inputs": inputs, "labels": self.labels[indices]}

    def nll(self, model, batch):
        return F.cross_entropy(model(batch["inputs"]), batch["labels"], reduction="sum")

    def validate(self, model):
        logits = model(self.inputs)
        return {"validation_nll": float(F.cross_entropy(logits, self.labels)), "batches_seen": self.batches_seen}

    def extra_state(self):
        return {"batches_seen": self.batches_seen}

    def load_extra_state(self, state):
        self.batches_seen = state["batches_seen"]


def training(**changes) -> TrainingConfig:
    values = {"epochs": 3, "batch_size": 7, "kl_schedule": KLSchedule("linear", period=9.0), "keep": "validation_nll"}
    return TrainingConfig(**{**values, **changes})
