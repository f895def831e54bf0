"""The transformers Trainer with the negative ELBO as its loss (`objective.py` has the formula).

    trainer = BayesianTrainer(model, args, train_dataset=..., schedule=KLSchedule("sigmoid", anneal_rate=0.2))

Compared with the stock Trainer and `KLCallback`, a subclass also sees losses that the model does not compute itself: label
smoothing and `compute_loss_func`.
"""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, cast

from torch import Tensor, nn
from transformers import Trainer

from bayesattn.integrations.hf.callback import KLCallback
from bayesattn.integrations.hf.objective import ElboLog, check_trainable, count_examples, count_labels, negative_elbo
from bayesattn.kl import record_kl
from bayesattn.objective import MAX_SHARE, KLSchedule, check_max_share

# to the type checker the mixin is a Trainer; at run time it takes the one it is mixed with
_TrainerBase = Trainer if TYPE_CHECKING else object


class BayesianTrainerMixin(_TrainerBase):
    """Put before a Trainer class: `class MyTrainer(BayesianTrainerMixin, Seq2SeqTrainer)`.

    NLL, KL and KL weight are logged beside the loss. The schedule follows `state.global_step`, so it resumes with a
    checkpoint, as does the noise, which comes from torch's generators.

    Args:
        schedule: Weight λ of the KL as a function of the optimizer step; None is a constant 1.
        max_share: The weighted KL is at most this share of the NLL (`elbo`); None for no cap.
        *args, **kwargs: The Trainer's own.

    Example:
        >>> from transformers import Seq2SeqTrainer
        >>> class BayesianSeq2SeqTrainer(BayesianTrainerMixin, Seq2SeqTrainer):
        ...     def count_labels(self, inputs):  # for a model whose loss is a mean over examples
        ...         return len(inputs["input_ids"])
        >>> [parent.__name__ for parent in BayesianSeq2SeqTrainer.__mro__[1:4]]
        ['BayesianTrainerMixin', 'Seq2SeqTrainer', 'Trainer']
    """

    def __init__(
        self, *args: Any, schedule: KLSchedule | None = None, max_share: float | None = MAX_SHARE, **kwargs: Any
    ) -> None:
        super().__init__(*args, **kwargs)
        if any(isinstance(callback, KLCallback) for callback in self.callback_handler.callbacks):
            raise ValueError("callbacks has a KLCallback, but this Trainer adds the KL itself. Leave the callback out")
        self.schedule = KLSchedule() if schedule is None else schedule
        check_max_share(max_share)
        self.max_share = max_share
        self._elbo_log = ElboLog()
        check_trainable(cast(nn.Module, self.model), self.optimizer)

    def count_labels(self, inputs: dict[str, Any]) -> int:
        """Return the number of labels that the model's loss averages over; override it where `labels` does not give it."""
        return count_labels(inputs, cast(nn.Module, self.model))

    def likelihood(self, model: nn.Module, run: Callable[[], Tensor]) -> Tensor:
        """Return `run()`, the NLL of a micro-batch; override to run the model more than once, or to correct its gradient."""
        return run()

    def compute_loss(
        self, model: nn.Module, inputs: dict[str, Any], return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        """Return the negative ELBO of one micro-batch while training, the model's own loss while evaluating."""
        if not model.training:
            return super().compute_loss(model, inputs, return_outputs, num_items_in_batch)
        examples, labels = count_examples(inputs), self.count_labels(inputs)
        items = labels if self.compute_loss_func is not None else None
        stock, results = super().compute_loss, []

        def run() -> Tensor:
            nll, outputs = stock(model, inputs, return_outputs=True, num_items_in_batch=items)
            results.append(outputs)
            return nll.view(1)

        with record_kl() as scope:
            nll = self.likelihood(model, run).squeeze(0)
        outputs = results[0]
        parts = negative_elbo(
            nll / self._process_factor(items),
            scope.total(),
            kl_weight=self.schedule(self.state.global_step),
            max_share=self.max_share,
            examples=examples,
            labels=labels,
            num_items=num_items_in_batch,
        )
        self._elbo_log.add(parts)
        loss = parts.loss * self._process_factor(num_items_in_batch)
        if num_items_in_batch is None and self.compute_loss_func is not None:
            loss = loss / self.current_gradient_accumulation_steps
        return (loss, outputs) if return_outputs else loss

    def _process_factor(self, num_items: Any) -> int:
        """Return the Trainer's factor for a loss that is a sum over all processes: DDP averages their gradients."""
        counts = self.model_accepts_loss_kwargs or self.compute_loss_func is not None
        if num_items is None or not counts or not self.args.average_tokens_across_devices:
            return 1
        if self.args.n_gpu > 1:
            return self.args.n_gpu
        parallelism = getattr(self.accelerator, "parallelism_config", None)
        return self.accelerator.num_processes // (1 if parallelism is None else parallelism.tp_size)

    def log(self, logs: dict[str, float], *args: Any, **kwargs: Any) -> None:
        """Add the means of NLL, KL and KL weight since the last log to a training log."""
        super().log({**logs, **self._elbo_log.take()} if "loss" in logs else logs, *args, **kwargs)


class BayesianTrainer(BayesianTrainerMixin, Trainer):
    """`transformers.Trainer` whose loss is the negative ELBO; see `BayesianTrainerMixin`.

    Example:
        >>> import tempfile
        >>> import torch
        >>> import transformers as hf
        >>> import bayesattn as ba
        >>> sizes = {"hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2, "vocab_size": 9}
        >>> model = ba.bayesianize(hf.BertForSequenceClassification(hf.BertConfig(**sizes)), ba.AttentionConfig("BAM-WC"))
        >>> rows = [{"input_ids": torch.tensor([1, 5, 2]), "labels": torch.tensor(1)}] * 4
        >>> options = {"max_steps": 1, "logging_steps": 1, "save_strategy": "no", "use_cpu": True, "report_to": "none"}
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     args = hf.TrainingArguments(folder, disable_tqdm=True, **options)
        ...     trainer = BayesianTrainer(model, args, train_dataset=rows)
        ...     trainer.remove_callback(hf.PrinterCallback)  # the log is read below instead
        ...     _ = trainer.train()
        >>> {"nll", "kl", "kl_weight"} <= set(trainer.state.log_history[0])
        True
    """
