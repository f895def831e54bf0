"""One training path for all recipes, on Hugging Face Accelerate: the same config runs on a CPU, a GPU or many processes.

An `Experiment` is the part that is specific to a recipe: model, optimizer, how indices become a batch, the likelihood of a
batch, what to validate. The loop does the rest. The loss of one optimizer step is the negative ELBO per label,

    loss = (Σ NLL + λ_t Σ KL) / labels                                                              (Eq. 5)

with both sums over all examples of the step: every micro-batch and every process. So the weight of the KL does not depend
on batch size, accumulation or the number of processes.
"""

import math
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from jaxtyping import Int
from torch import Tensor, nn

from bayesattn.entropy import EntropyScope, observe_entropy
from bayesattn.kl import record_kl
from bayesattn.noise.keyed import example_seeds, keyed_noise
from bayesattn.objective import elbo
from bayesattn_recipes.common import guards as guards
from bayesattn_recipes.common.checkpoints import Checkpoints
from bayesattn_recipes.common.config import MetricLog, seed_everything, shown
from bayesattn_recipes.common.experiment import Experiment, TrainingConfig, num_steps
from bayesattn_recipes.common.interrupts import Interrupted, watch_signals
from bayesattn_recipes.common.position import SUMS, Position, move
from bayesattn_recipes.common.processes import Processes, process_seed, share
from bayesattn_recipes.common.replay import RecordedSteps
from bayesattn_recipes.common.state import Generators, flatten, random_state, set_random_state, whole


def train(
    experiment: Experiment,
    config: TrainingConfig,
    *,
    seed: int,
    on_progress: Callable[[int, int], Any] = lambda done, total: None,
    on_row: Callable[[dict[str, Any]], Any] = lambda row: None,
    checkpoints: Checkpoints | None = None,
) -> MetricLog:
    """Train `experiment.model` in place and return the log, one row per epoch.

    Args:
        experiment: What to train.
        config: How.
        seed: Seed of the batch order; model, dropout and noise are seeded by the caller (`seed_everything`).
        on_progress: Called after every optimizer step with the steps done and the steps of the whole run.
        on_row: Called with every new row of the log.
        checkpoints: Where to keep the state. If it holds one, training continues from there, with the same result as without
            the interruption: on a CPU bit for bit. Ctrl-C and SIGTERM save before they end the run.
    """
    with _recording(_Loop(experiment, config, seed, on_progress, on_row, checkpoints)) as loop:
        return loop.run()


@contextmanager
def training_step(
    experiment: Experiment, config: TrainingConfig, *, seed: int
) -> Iterator[Callable[[Int[Tensor, " b"]], None]]:
    """Return a function that makes one optimizer step of `train` on given examples, for benchmarks."""
    with _recording(_Loop(experiment, config, seed, lambda done, total: None, lambda row: None, None)) as loop:
        loop.model.train()
        yield loop.advance


@contextmanager
def _recording(loop: "_Loop") -> Iterator["_Loop"]:
    """Free the recordings of a loop when it ends."""
    try:
        yield loop
    finally:
        if loop.recorded is not None:
            loop.recorded.close()


class _Loop:
    """The parts of `train`."""

    def __init__(self, experiment, config, seed, on_progress, on_row, checkpoints) -> None:
        self.experiment: Experiment = experiment
        self.config: TrainingConfig = config
        self.seed: int = seed
        self.on_progress, self.on_row = on_progress, on_row
        self.checkpoints: Checkpoints | None = checkpoints
        self.processes = Processes()
        self.accelerator, self.device = self.processes.accelerator, self.processes.device
        self.rank, self.world = self.processes.rank, self.processes.world
        self.model, self.optimizer = self.accelerator.prepare(experiment.model, experiment.optimizer)
        self.total = num_steps(experiment, config)
        self.at = Position()
        self.generators, self.extra = random_state(), experiment.extra_state()
        if self.rank > 0:
            # every process has the same model, but its own dropout and noise
            seed_everything(process_seed(seed, self.rank))
        self.recorded = RecordedSteps(self._run_recorded, list(self.model.parameters())) if self._can_record() else None

    def run(self) -> MetricLog:
        started = time.monotonic()
        generators = self._load()
        seconds_before = self.at.seconds
        self.saved_at, self.saved_step = time.monotonic(), self.at.step
        with watch_signals() if self.checkpoints is not None else nullcontext([]) as signals:
            while not self._is_done():
                self.model.train()
                # one generator per epoch: the order of epoch 7 does not depend on the first six
                order = torch.Generator().manual_seed(self.seed * 1_000_003 + self.at.epoch)
                batches = self.experiment.batches(self.config, order)
                if generators is not None:
                    set_random_state(generators)
                    generators = None
                limit = self.experiment.max_steps
                for indices in batches[self.at.batch :][: None if limit is None else limit - self.at.step]:
                    self.generators, self.extra = random_state(), self.experiment.extra_state()
                    wants_end, is_due = self.processes.agree(bool(signals), self._is_due())
                    self.at.seconds = seconds_before + time.monotonic() - started
                    if is_due or wants_end:
                        self._save()
                    if wants_end:
                        raise Interrupted(self.at.step, self.total, signals[0] if signals else None)
                    self.advance(indices)
                    self.on_progress(self.at.step, self.total)
                self._end_epoch()
        if self.at.best is not None:
            self.experiment.model.load_state_dict(self.at.best)
        self.experiment.model.eval()
        return MetricLog(self.at.rows, seconds_before + time.monotonic() - started)

    def _is_done(self) -> bool:
        limit = self.experiment.max_steps
        at_end = self.at.epoch >= self.config.epochs if limit is None else self.at.step >= limit
        return at_end or (bool(self.at.rows) and self.experiment.is_done(self.at.rows, self.config))

    def _is_due(self) -> bool:
        """Whether it is time for a checkpoint."""
        if self.checkpoints is None or self.at.step == self.saved_step:
            return False
        steps, seconds = self.config.checkpoint_steps, self.config.checkpoint_seconds
        by_steps = steps is not None and self.at.step % steps == 0
        return by_steps or (seconds is not None and time.monotonic() - self.saved_at >= seconds)

    def _can_record(self) -> bool:
        """Whether steps are recorded: one process with a GPU, one micro-batch per step, noise that a recording can draw."""
        is_alone = self.world == 1 and self.config.accumulation_steps == 1
        return self.experiment.is_recordable and self.device.type == "cuda" and is_alone and self.config.noise == "generator"

    def _run_recorded(self, batch: dict[str, Any], factors: Tensor) -> tuple[Tensor, ...]:
        """Return loss, NLL and KL of a batch after its backward pass; the factors are those of NLL and KL in the loss."""
        nll, kl, _ = self._forward(self.model, batch, observe=False)
        loss = elbo(nll * factors[0], kl * factors[1], max_share=None).loss
        loss.backward()
        return loss.detach(), nll.detach(), kl.detach()

    def advance(self, indices: Int[Tensor, " b"]) -> None:
        """Make one optimizer step on the examples `indices`; this process takes its share of them."""
        with nullcontext() if self.recorded is None else self.recorded.on_stream():
            self._step(indices)
        self.at.step += 1
        self.at.batch += 1

    def _step(self, indices: Int[Tensor, " b"]) -> None:
        parts = share(indices, self.rank, self.world, self.config.accumulation_steps)
        # if a share is empty, the step's first example takes its place
        batches = [self.experiment.collate(part if len(part) else indices[:1]) for part in parts]
        counts = [self.experiment.num_labels(batch) if len(part) else 0 for part, batch in zip(parts, batches)]
        batches = [self._place(batch) for batch in batches]
        labels = int(self.processes.sum(torch.tensor(sum(counts))))
        new: dict[str, Any] = dict.fromkeys(SUMS, 0.0)
        loss = torch.zeros((), device=self.device)
        for index, (part, batch) in enumerate(zip(parts, batches)):
            # DDP averages over processes: the average times their number is the sum. A process without an example still
            # takes part in every exchange, with zeros
            has_examples = float(len(part) > 0)
            is_last = index == len(parts) - 1
            sync = nullcontext() if is_last else self.accelerator.no_sync(self.model)
            kl_weight = self.config.kl_schedule(self.at.step)
            if self.recorded is not None and self.at.batch > 0:
                factors = torch.tensor([1.0 / labels, kl_weight * len(indices) / labels])
                part_loss, nll, kl = self.recorded(batch, factors.to(self.device, non_blocking=True))
                entropy = EntropyScope()
            else:
                with self._noise(part, indices), sync:
                    nll, kl, entropy = self._forward(self.model, batch, observe=self.at.batch == 0)
                    part_loss = elbo(
                        nll * (has_examples * self.world / labels),
                        kl * (self.world * len(part) / len(indices)),
                        kl_weight=kl_weight,
                        labels_per_example=labels / len(indices),
                        max_share=None,
                    ).loss
                    self.accelerator.backward(part_loss)
            loss = loss + part_loss.detach()
            own = (nll.detach(), kl.detach() * len(part), entropy.total, entropy.count)
            new = {name: new[name] + value * has_examples for name, value in zip(SUMS, own)}
        if self._is_finite(loss):
            for name, value in {**new, "labels": labels, "examples": len(indices)}.items():
                self.at.sums[name] = self.at.sums[name] + value
            self.optimizer.step()
            if self.experiment.scheduler is not None:
                self.experiment.scheduler.step()
        elif self.config.on_nonfinite == "skip":
            self.at.skipped += 1
        else:
            self._stop(indices, parts, batches, float(loss))
        self.optimizer.zero_grad()

    def _place(self, batch: dict[str, Any]) -> dict[str, Any]:
        """Return a micro-batch on the device, padded to one of a few shapes if steps are recorded."""
        padded = batch if self.recorded is None else self.experiment.pad(batch)
        return {name: move(value, self.device) for name, value in padded.items()}

    def _forward(self, model: nn.Module, batch: dict[str, Any], observe: bool) -> tuple[Tensor, Tensor, EntropyScope]:
        """Return NLL and KL of a micro-batch, and the entropy of its attention if it is to be observed."""
        with (
            self._autocast(),
            record_kl() as scope,
            observe_entropy() if observe else nullcontext(EntropyScope()) as entropy,
        ):
            nll = self.experiment.nll(model, batch)
        return nll, scope.total(), entropy

    def _is_finite(self, loss: Tensor) -> bool:
        """Clip the gradient, and return whether it and the loss are finite in all processes."""
        if self.config.clip_norm is not None:
            norm = self.accelerator.clip_grad_norm_(self.model.parameters(), self.config.clip_norm)
            assert norm is not None
        else:
            norm = guards.gradient_norm(self.model)
        # a sum is finite only if all its terms are
        return math.isfinite(self.processes.sum(whole(norm).to(loss.device) + loss))

    def _stop(
        self, indices: Int[Tensor, " b"], parts: Sequence[Int[Tensor, " part"]], batches: list[dict[str, Any]], loss: float
    ) -> None:
        """Save the state before the step, diagnose the failure, and raise."""
        saved = ""
        if self.checkpoints is not None:
            self._save()
            saved = f"; the state before the step is saved in {self.checkpoints.folder}"
        # the same draws again
        set_random_state(self.generators)
        left = iter(parts)

        def forward(batch: dict[str, Any]) -> None:
            with self._noise(next(left), indices):
                self._forward(self.experiment.model, batch, observe=False)

        reasons = guards.diagnose(self.experiment.model, batches, forward)
        if self.checkpoints is not None and self.rank == 0:
            facts = {"step": self.at.step, "epoch": self.at.epoch, "batch": self.at.batch, "loss": str(loss)}
            path = self.checkpoints.write_failure({**facts, "not_finite": reasons, "examples": indices.tolist()})
            saved = f"{saved}, its examples are in {path.name}"
        raise guards.step_diverged(self.at, indices, reasons, f"the loss is {loss}{saved}")

    def _noise(self, part: Int[Tensor, " part"], indices: Int[Tensor, " b"]) -> AbstractContextManager[None]:
        if self.config.noise == "generator":
            return nullcontext()
        return keyed_noise(example_seeds(self.seed, self.at.step, part if len(part) else indices[:1]))

    def _autocast(self) -> torch.autocast:
        return torch.autocast(self.device.type, torch.bfloat16, enabled=self.config.precision == "bf16")

    def _end_epoch(self) -> None:
        """Validate and add a row to the log."""
        self.model.eval()
        with torch.no_grad(), self._autocast():
            measured = self.experiment.validate(self.model)
        if not self.at.sums["labels"]:
            raise guards.Diverged(
                f"every step of epoch {self.at.epoch} was skipped, because none had a finite loss and gradient"
            )
        guards.refuse_nonfinite(measured, self.at)
        sums = {name: float(self.processes.sum(torch.as_tensor(self.at.sums[name]))) for name in SUMS}
        sums |= {name: self.at.sums[name] for name in ("labels", "examples")}
        row: dict[str, Any] = {
            "epoch": self.at.epoch,
            "step": self.at.step,
            "kl_weight": self.config.kl_schedule(self.at.step - 1),
            "train_nll": sums["nll"] / sums["labels"],
            "train_kl": sums["kl"] / sums["examples"],
            **({"attention_entropy": sums["entropy"] / sums["observed"]} if sums["observed"] else {}),
            **({"skipped_steps": self.at.skipped} if self.config.on_nonfinite == "skip" else {}),
            **measured,
        }
        if self.config.keep not in ("last", *measured):
            known = ", ".join(map(repr, ("last", *measured)))
            raise ValueError(f"training.keep must be one of {known}, got {shown(self.config.keep)}")
        best_row = next((row for row in reversed(self.at.rows) if row["is_best"]), None)
        row["is_best"] = self.experiment.is_better(row, best_row, self.config)
        if row["is_best"] and self.config.keep != "last":
            state = self.experiment.model.state_dict()
            self.at.best = {name: value.detach().clone() for name, value in state.items()}
        known = guards.detect_collapse(self.at.rows)
        self.at.rows.append(row)
        for name, text in guards.detect_collapse(self.at.rows).items():
            if name not in known and self.rank == 0:
                warnings.warn(f"after epoch {self.at.epoch}: {text}", UserWarning, stacklevel=2)
        self.at.epoch += 1
        self.at.batch, self.at.sums = 0, Position().sums
        self.on_row(row)

    def _save(self) -> None:
        """Write a checkpoint; every process takes part, the first one writes. The random generators do not advance."""
        assert self.checkpoints is not None
        state = self.at.pack(self.experiment, self.processes, self.generators, self.extra)
        flat = flatten({"identity": self.checkpoints.identity, "state": state})
        if self.rank == 0:
            self.checkpoints.save(self.at.step, flat, self.at.rows)
        set_random_state(self.generators)
        self.saved_at, self.saved_step = time.monotonic(), self.at.step

    def _load(self) -> Generators | None:
        """Restore the newest checkpoint; return the states of this process' random generators."""
        state = None if self.checkpoints is None else self.checkpoints.load()
        if state is None:
            return None
        self.at, generators = Position.unpack(state, self.experiment, self.processes, self.seed)
        return generators
