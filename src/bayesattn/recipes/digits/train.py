"""Train a digit classifier with soft or Bayesian attention: data, model, loop, run folder."""

import dataclasses
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F

from bayesattn.config import AttentionConfig
from bayesattn.objective import KLSchedule, elbo
from bayesattn.recipes._train import MetricLog, build_config, find_config, load_yaml, one_thread, override, seed_everything
from bayesattn.recipes.digits.data import CLASS_NAMES, Split, load_splits
from bayesattn.recipes.digits.model import DigitClassifier
from bayesattn.recording import record_kl
from bayesattn.runs import CHECKPOINT_FILE, LOG_FILE, make_run_folder, read_run, read_tensors, write_run, write_tensors

CONFIGS = Path(__file__).parent / "configs"


@dataclass(frozen=True)
class DigitsConfig:
    """Everything that decides a run; with the same values it repeats exactly on the same machine.

    Args:
        attention: Soft or Bayesian attention.
        kl_schedule: KL weight by optimiser step.
        seed: Initialisation, batch order, dropout and attention noise.
        train_size: Training images.
        width: Features of a token.
        num_heads: Attention heads.
        num_layers: Encoder layers.
        dropout: Dropout of the encoder layers.
        epochs: Passes over the training images.
        batch_size: Images per step.
        learning_rate: Peak of a one-cycle schedule.
        weight_decay: AdamW's.
    """

    attention: AttentionConfig = field(default_factory=lambda: AttentionConfig("soft"))
    kl_schedule: KLSchedule = field(default_factory=KLSchedule)
    seed: int = 0
    train_size: int = 200
    width: int = 32
    num_heads: int = 4
    num_layers: int = 1
    dropout: float = 0.1
    epochs: int = 100
    batch_size: int = 50
    learning_rate: float = 5e-3
    weight_decay: float = 1e-2

    def __post_init__(self) -> None:
        for name in ("num_layers", "epochs", "batch_size"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} is {getattr(self, name)!r}; allowed: an integer of at least 1")
        if self.learning_rate <= 0.0 or not math.isfinite(self.learning_rate):
            raise ValueError(f"learning_rate is {self.learning_rate!r}; allowed: a finite number above 0")

    @property
    def num_steps(self) -> int:
        """Optimiser steps of the whole run."""
        return self.epochs * math.ceil(self.train_size / self.batch_size)


def load_config(name: str, settings: Sequence[str] = ()) -> DigitsConfig:
    """Read a config by its name (`wc`) or path, with `name=value` settings on top."""
    return build_config(DigitsConfig, override(load_yaml(find_config(name, CONFIGS)), settings))


def build_model(config: DigitsConfig) -> DigitClassifier:
    """Build the classifier a config describes, with fresh parameters."""
    return DigitClassifier(
        config.attention,
        width=config.width,
        num_heads=config.num_heads,
        num_layers=config.num_layers,
        dropout=config.dropout,
        num_classes=len(CLASS_NAMES),
    )


@one_thread()
def fit(config: DigitsConfig, on_step: Callable[[], Any] = lambda: None) -> tuple[DigitClassifier, MetricLog]:
    """Train a model and return it with its log.

    Args:
        config: The run.
        on_step: Called after every optimiser step, for a progress bar.
    """
    splits = load_splits(config.train_size)
    train = splits["train"]
    assert train.labels is not None
    seed_everything(config.seed)
    model = build_model(config)
    optimizer = torch.optim.AdamW(model.parameters(), lr=config.learning_rate, weight_decay=config.weight_decay)
    warmup = torch.optim.lr_scheduler.OneCycleLR(
        optimizer, config.learning_rate, total_steps=config.num_steps, pct_start=0.1
    )
    log, step = MetricLog(), 0
    for epoch in range(config.epochs):
        model.train()
        nll = kl = 0.0
        for batch in torch.randperm(config.train_size).split(config.batch_size):
            with record_kl(model) as scope:
                logits = model(train.images[batch])
            recorded = scope.total() if config.attention.has_kl else logits.new_zeros(())
            loss = elbo(F.cross_entropy(logits, train.labels[batch]), recorded, kl_weight=config.kl_schedule(step))
            optimizer.zero_grad()
            loss.loss.backward()
            optimizer.step()
            warmup.step()
            step += 1
            nll += float(loss.nll) * len(batch) / config.train_size
            kl += float(loss.kl) * len(batch) / config.train_size
            on_step()
        log.add(epoch=epoch, kl_weight=config.kl_schedule(step - 1), train_nll=nll, train_kl=kl, **_validate(model, splits))
    return model.eval(), log


@torch.no_grad()
def _validate(model: DigitClassifier, splits: dict[str, Split]) -> dict[str, float]:
    split = splits["validation"]
    assert split.labels is not None
    model.eval()
    logits = model(split.images)
    accuracy = (logits.argmax(dim=-1) == split.labels).float().mean()
    return {"validation_nll": float(F.cross_entropy(logits, split.labels)), "validation_accuracy": float(accuracy)}


def train_run(
    config: DigitsConfig, out: Path, on_step: Callable[[], Any] = lambda: None, *, overwrite: bool = False
) -> MetricLog:
    """Train and write a run folder: parameters, log, and last of all `run.json`, whose presence means "complete"."""
    make_run_folder(out, overwrite=overwrite)
    start = time.perf_counter()
    model, log = fit(config, on_step)
    write_tensors(out / CHECKPOINT_FILE, model.state_dict())
    log.write(out / LOG_FILE)
    write_run(
        out,
        recipe="digits",
        variant=config.attention.variant,
        config=dataclasses.asdict(config),
        seed=config.seed,
        num_parameters=sum(parameter.numel() for parameter in model.parameters()),
        train_seconds=round(time.perf_counter() - start, 3),
    )
    return log


def load_run(folder: Path) -> tuple[DigitsConfig, DigitClassifier]:
    """Read a run folder back: its config and the trained model, in eval mode."""
    config = build_config(DigitsConfig, read_run(folder)["config"])
    model = build_model(config)
    tensors, _ = read_tensors(folder / CHECKPOINT_FILE)
    try:
        model.load_state_dict(tensors)
    except RuntimeError as error:
        reason = " ".join(str(error).split())
        raise ValueError(f"{folder / CHECKPOINT_FILE} does not fit the config of its run: {reason}") from None
    return config, model.eval()
