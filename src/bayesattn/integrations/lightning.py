"""A Lightning callback that adds the KL to whatever loss `training_step` returns.

    trainer = pytorch_lightning.Trainer(callbacks=[KLCallback(KLSchedule("sigmoid", anneal_rate=0.2))])

The KL of the batch is recorded while `training_step` runs and added to the loss just before backward. Like the loss, it is
divided by the number of accumulated batches and multiplied by the gradient scaler's factor.
"""

from contextlib import ExitStack
from typing import Any

from torch import Tensor

from bayesattn.kl import KLScope, record_kl
from bayesattn.objective import MAX_SHARE, KLSchedule, check_max_share, elbo
from bayesattn.optional import needs_extra
from bayesattn.scalars import check_positive
from bayesattn.watch import KLWatch, check_optimizers

with needs_extra("bayesattn.integrations.lightning", "lightning"):
    import pytorch_lightning as pl


class KLCallback(pl.Callback):
    """Turns the loss of any LightningModule with Bayesian attention into the negative ELBO.

    Logs `nll` (the loss that `training_step` returned), `kl` and `kl_weight`.

    Args:
        schedule: Weight λ of the KL as a function of the optimizer step; None is a constant 1. It follows
            `trainer.global_step`, so it resumes with a checkpoint.
        max_share: The weighted KL is at most this share of the NLL, as in `elbo`; None for no cap.
        labels_per_example: Labels that share one example's KL, as in `elbo`.

    Example:
        >>> callback = KLCallback(KLSchedule("sigmoid", anneal_rate=0.2), max_share=0.05)
        >>> options = {"max_epochs": 1, "accelerator": "cpu", "logger": False, "enable_checkpointing": False}
        >>> trainer = pl.Trainer(callbacks=[callback], **options)  # then trainer.fit(module, loader), as always
        >>> callback in trainer.callbacks, [round(callback.schedule(step), 2) for step in (0, 10, 20)]
        (True, [0.5, 0.88, 0.98])
    """

    def __init__(
        self, schedule: KLSchedule | None = None, *, max_share: float | None = MAX_SHARE, labels_per_example: float = 1.0
    ) -> None:
        super().__init__()
        check_positive(labels_per_example=labels_per_example)
        check_max_share(max_share)
        self.schedule = KLSchedule() if schedule is None else schedule
        self.labels_per_example = labels_per_example
        self.max_share = max_share
        self._watch = KLWatch()
        self._open: ExitStack | None = None
        self._scope: KLScope | None = None

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Warn about priors that would not be trained."""
        check_optimizers(pl_module, trainer.optimizers)

    def on_train_batch_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule, batch: Any, batch_idx: int) -> None:
        """Start recording."""
        self._close()
        self._open = ExitStack()
        self._scope = self._open.enter_context(record_kl())

    def on_before_backward(self, trainer: pl.Trainer, pl_module: pl.LightningModule, loss: Tensor) -> None:
        """Add the KL to the loss, in place, because Lightning ignores what this returns."""
        scope = self._scope
        self._close()
        if scope is None:
            raise RuntimeError(
                "KLCallback supports one backward pass per batch, got a second. The KL is already part of the first loss"
            )
        scaler = getattr(trainer.precision_plugin, "scaler", None)
        # the factor by which Lightning multiplied the loss that training_step returned
        factor = (1.0 if scaler is None else scaler.get_scale()) / trainer.accumulate_grad_batches
        parts = elbo(
            loss / factor,
            scope.total().to(loss.device),
            kl_weight=self.schedule(trainer.global_step),
            labels_per_example=self.labels_per_example,
            max_share=self.max_share,
        )
        loss.copy_(parts.loss * factor)
        self._watch.add(parts.nll, parts.kl, parts.weighted_kl)
        pl_module.log_dict({"nll": parts.nll, "kl": parts.kl, "kl_weight": parts.kl_weight})

    def on_exception(self, trainer: pl.Trainer, pl_module: pl.LightningModule, exception: BaseException) -> None:
        """Leave no scope open."""
        self._close()

    def _close(self) -> None:
        if self._open is not None:
            self._open.close()
        self._open, self._scope = None, None
