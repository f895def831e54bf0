"""Callbacks for the stock transformers Trainer: the KL in its loss, and the Bayesian part in its checkpoints.

    trainer = Trainer(model, args, train_dataset=..., callbacks=[KLCallback(KLSchedule("sigmoid", anneal_rate=0.2))])

A callback is not asked for the loss, but the loss passes through the model's forward, and there hooks can reach it: before
the forward of a training step a `record_kl()` scope opens, after it the KL is added to the loss that the Trainer reads.
"""

from contextlib import ExitStack
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle
from transformers import TrainerCallback

from bayesattn.convert.saving import save_bayesian
from bayesattn.integrations.hf.objective import ElboLog, check_trainable, count_examples, count_labels, negative_elbo
from bayesattn.kl import KLScope, record_kl
from bayesattn.objective import MAX_SHARE, KLSchedule, check_max_share
from bayesattn.watch import check_optimizers


class BayesianCallback(TrainerCallback):
    """Writes what `save_bayesian` writes into every checkpoint of any Trainer, and checks the model before training."""

    def on_train_begin(self, args: Any, state: Any, control: Any, model: nn.Module | None = None, **kwargs: Any) -> None:
        """Raise if nothing is Bayesian, warn if priors are frozen or in no optimizer."""
        if model is not None:
            _check(model, kwargs)

    def on_save(self, args: Any, state: Any, control: Any, model: nn.Module | None = None, **kwargs: Any) -> None:
        """Save the Bayesian part beside the Trainer's own files."""
        if model is not None and state.is_world_process_zero:
            save_bayesian(model, f"{args.output_dir}/checkpoint-{state.global_step}")


class KLCallback(BayesianCallback):
    """Turns the loss of the stock Trainer into the negative ELBO, the same as `BayesianTrainer`'s.

    `nll`, `kl` and `kl_weight` join the log: the Trainer's history, its printed lines and the callbacks after this one.
    The schedule follows `state.global_step`, so it resumes with a checkpoint, as does the noise.

    Only losses that the model computes in its forward can be reached. Label smoothing, `compute_loss_func`, compiled models,
    DataParallel and DeepSpeed are refused; the first two work with `BayesianTrainer`.

    Args:
        schedule: Weight λ of the KL as a function of the optimiser step; None is a constant 1.
        max_share: The weighted KL is at most this share of the NLL (`elbo`); None for no cap.
    """

    def __init__(self, schedule: KLSchedule | None = None, *, max_share: float | None = MAX_SHARE) -> None:
        check_max_share(max_share)
        self.schedule = KLSchedule() if schedule is None else schedule
        self.max_share = max_share
        self._log = ElboLog()
        self._hooks: list[RemovableHandle] = []
        self._kl_weight = 0.0
        # what the hook before the forward leaves for the one after it
        self._open: ExitStack | None = None
        self._scope: KLScope | None = None
        self._num_items: Tensor | int | None = None

    def on_train_begin(self, args: Any, state: Any, control: Any, model: nn.Module | None = None, **kwargs: Any) -> None:
        """Refuse what the hooks cannot reach, and register them."""
        _refuse(args)
        self.remove()
        if model is None:
            raise ValueError("model is None; allowed: a Trainer with a model")
        _check(model, kwargs)
        self._log = ElboLog()
        self._hooks = [
            model.register_forward_pre_hook(self._before, with_kwargs=True),
            model.register_forward_hook(self._after, with_kwargs=True, always_call=True),
        ]

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Set the KL weight of the optimiser step that begins."""
        self._kl_weight = self.schedule(state.global_step)

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, float] | None = None, **kwargs: Any) -> None:
        """Add the means of NLL, KL and KL weight since the last log to a training log."""
        if logs is not None and "loss" in logs:
            means = self._log.take()
            logs.update(means)
            state.log_history[-1].update(means)

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Take the hooks away."""
        self.remove()

    def remove(self) -> None:
        """Take the hooks off the model; needed by hand only after a training that an error broke off outside the model."""
        self._close()
        for hook in self._hooks:
            hook.remove()
        self._hooks = []

    def _before(self, model: nn.Module, args: tuple, kwargs: dict[str, Any]) -> tuple[tuple, dict[str, Any]] | None:
        if not model.training:
            return None
        self._close()
        self._num_items = kwargs.get("num_items_in_batch")
        self._open = ExitStack()
        self._scope = self._open.enter_context(record_kl())
        return args, {name: value for name, value in kwargs.items() if name != "num_items_in_batch"}

    def _after(self, model: nn.Module, args: tuple, kwargs: dict[str, Any], output: Any) -> Any:
        if self._scope is None:
            return output
        scope = self._scope
        self._close()
        if output is None:
            # the forward raised, its own error is on the way, and no event of the Trainer will follow
            self.remove()
            return None
        nll = output.get("loss") if isinstance(output, dict) else output[0]
        if not isinstance(nll, Tensor) or nll.ndim:
            self.remove()
            raise ValueError(
                f"{type(model).__name__} returned no loss from the inputs {', '.join(kwargs)}; allowed with KLCallback: "
                "inputs from which the model computes its loss (with compute_loss_func use BayesianTrainer)"
            )
        parts = negative_elbo(
            nll,
            scope.total(),
            kl_weight=self._kl_weight,
            max_share=self.max_share,
            examples=count_examples(kwargs),
            labels=count_labels(kwargs, model),
            num_items=self._num_items,
        )
        self._log.add(parts)
        if isinstance(output, dict):
            output["loss"] = parts.loss
            return output
        return (parts.loss, *output[1:])

    def _close(self) -> None:
        if self._open is not None:
            self._open.close()
        self._open, self._scope = None, None


def _check(model: nn.Module, event: dict[str, Any]) -> None:
    """Raise if nothing is Bayesian, warn about priors that would not be trained."""
    check_trainable(model)
    optimizer = event.get("optimizer")
    # DeepSpeed's stand-in is no optimizer
    if isinstance(optimizer, Optimizer):
        check_optimizers(model, [optimizer])


def _refuse(args: Any) -> None:
    """Raise on training arguments under which a hook on the model would not see, or not be able to change, the loss."""
    cannot = "; KLCallback reaches only a loss that the model computes in its forward"
    if args.label_smoothing_factor:
        raise ValueError(f"label_smoothing_factor is {args.label_smoothing_factor}; allowed: 0{cannot}. Use BayesianTrainer")
    if args.torch_compile:
        raise ValueError("torch_compile is True; allowed with KLCallback: False (hooks of a compiled model are not traced)")
    if args.n_gpu > 1:
        raise ValueError(f"the Trainer sees {args.n_gpu} GPUs in one process (DataParallel); allowed with KLCallback: one")
    if args.deepspeed is not None:
        raise ValueError("deepspeed is set; allowed with KLCallback: None")
