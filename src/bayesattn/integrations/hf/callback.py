"""Callbacks for the stock transformers Trainer: the KL in its loss, and the Bayesian part in its checkpoints.

    trainer = Trainer(model, args, train_dataset=..., callbacks=[KLCallback(KLSchedule("sigmoid", anneal_rate=0.2))])

A callback does not see the loss, but hooks on the model's forward do: one opens a `record_kl()` scope before the forward of
a training step, the other adds the KL to the loss that the Trainer reads after it.
"""

from contextlib import ExitStack
from typing import Any

from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle
from transformers import TrainerCallback

from bayesattn.convert.saving import save_bayesian
from bayesattn.integrations.hf.objective import ElboLog, check_trainable, count_examples, count_labels, negative_elbo
from bayesattn.kl import KLScope, record_kl
from bayesattn.objective import MAX_SHARE, KLSchedule, check_max_share


class BayesianCallback(TrainerCallback):
    """Writes what `save_bayesian` writes into every checkpoint of any Trainer, and checks the model before training.

    Example:
        >>> import os, tempfile
        >>> from types import SimpleNamespace
        >>> import bayesattn as ba
        >>> model = ba.bayesianize(nn.MultiheadAttention(8, 2), ba.AttentionConfig("BAM-WC"))
        >>> with tempfile.TemporaryDirectory() as folder:  # what the Trainer does at every checkpoint
        ...     state = SimpleNamespace(is_world_process_zero=True, global_step=7)
        ...     BayesianCallback().on_save(SimpleNamespace(output_dir=folder), state, None, model=model)
        ...     sorted(os.listdir(f"{folder}/checkpoint-7"))
        ['README.md', 'bayesattn.safetensors', 'bayesattn_config.json']
    """

    def on_train_begin(self, args: Any, state: Any, control: Any, model: nn.Module | None = None, **kwargs: Any) -> None:
        """Raise if nothing is Bayesian, warn if priors are frozen or in no optimizer."""
        if model is not None:
            check_trainable(model, kwargs.get("optimizer"))

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
        schedule: Weight λ of the KL as a function of the optimizer step; None is a constant 1.
        max_share: The weighted KL is at most this share of the NLL (`elbo`); None for no cap.

    Example:
        >>> callback = KLCallback(KLSchedule("sigmoid", anneal_rate=0.2))  # for Trainer(..., callbacks=[callback])
        >>> callback.schedule(0), callback.max_share  # `BayesianTrainer` shows a whole training
        (0.5, 0.01)
    """

    def __init__(self, schedule: KLSchedule | None = None, *, max_share: float | None = MAX_SHARE) -> None:
        check_max_share(max_share)
        self.schedule = KLSchedule() if schedule is None else schedule
        self.max_share = max_share
        self._log = ElboLog()
        self._hooks: list[RemovableHandle] = []
        self._kl_weight = 0.0
        # passed from the hook before the forward to the one after it
        self._open: ExitStack | None = None
        self._scope: KLScope | None = None
        self._num_items: Tensor | int | None = None

    def on_train_begin(self, args: Any, state: Any, control: Any, model: nn.Module | None = None, **kwargs: Any) -> None:
        """Refuse settings under which the hooks cannot work, then register the hooks."""
        _refuse(args)
        self.remove()
        if model is None:
            raise ValueError("model is None. Use the callback in a Trainer that has a model")
        check_trainable(model, kwargs.get("optimizer"))
        self._log = ElboLog()
        self._hooks = [
            model.register_forward_pre_hook(self._before, with_kwargs=True),
            model.register_forward_hook(self._after, with_kwargs=True, always_call=True),
        ]

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Set the KL weight of the optimizer step that begins."""
        self._kl_weight = self.schedule(state.global_step)

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, float] | None = None, **kwargs: Any) -> None:
        """Add the means of NLL, KL and KL weight since the last log to a training log."""
        if logs is not None and "loss" in logs:
            means = self._log.take()
            logs.update(means)
            state.log_history[-1].update(means)

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Remove the hooks."""
        self.remove()

    def remove(self) -> None:
        """Remove the hooks from the model; call it yourself only after an error outside the model has ended the training."""
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
            # the forward raised: its own error propagates, and no event of the Trainer will follow
            self.remove()
            return None
        nll = output.get("loss") if isinstance(output, dict) else output[0]
        if not isinstance(nll, Tensor) or nll.ndim:
            self.remove()
            raise ValueError(
                f"{type(model).__name__} returned no loss from the inputs {', '.join(kwargs)}; KLCallback needs "
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


def _refuse(args: Any) -> None:
    """Raise on training arguments under which a hook on the model cannot see or change the loss."""
    if args.label_smoothing_factor:
        raise ValueError(
            f"label_smoothing_factor is {args.label_smoothing_factor}. Set it to 0, because KLCallback reaches only a loss "
            "that the model computes in its forward, or use BayesianTrainer"
        )
    if args.torch_compile:
        raise ValueError("KLCallback needs torch_compile=False, because the hooks of a compiled model are not traced")
    if args.n_gpu > 1:
        raise ValueError(f"KLCallback needs one GPU per process, but the Trainer uses {args.n_gpu} (DataParallel)")
    if args.deepspeed is not None:
        raise ValueError("KLCallback does not support deepspeed")
