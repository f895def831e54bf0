"""The stock Trainer with `KLCallback` takes the step of `BayesianTrainer`, and of the objective written by hand."""

import pytest
import torch
import transformers as hf
from test_hf_trainer import QUIET, arguments, by_hand, dataset, model, steps_taken
from zoo import build

import bayesattn as ba
from bayesattn.convert import conversion_report, load_bayesian, restore
from bayesattn.integrations.hf import BayesianTrainer, KLCallback

SCHEDULE = ba.KLSchedule("constant", final=0.3)


def assert_steps(actual: dict[str, torch.Tensor], expected: dict[str, torch.Tensor | None]) -> None:
    for key, gradient in expected.items():
        if gradient is not None:
            # float32 sums in another order; the noise of 1e-7 is below
            torch.testing.assert_close(actual[key], gradient, rtol=2e-3, atol=2e-5, msg=lambda m, key=key: f"{key}: {m}")


@pytest.mark.parametrize(("batch", "accumulation"), [(8, 1), (4, 2), (3, 3)])
@pytest.mark.parametrize("name", ["bert", "llama"])
def test_the_gradient_is_the_one_by_hand_however_the_batch_is_cut(name, batch, accumulation, tmp_path):
    options = {"per_device_train_batch_size": batch, "gradient_accumulation_steps": accumulation}
    trainer = hf.Trainer(
        model(name),
        arguments(tmp_path, **options),
        train_dataset=dataset(name),
        callbacks=[KLCallback(SCHEDULE, max_share=None)],
    )
    assert type(trainer) is hf.Trainer
    # both take loss kwargs; BERT's classifier then ignores the number of items, Llama's loss divides by it
    assert trainer.model_accepts_loss_kwargs
    assert_steps(steps_taken(trainer), by_hand(name, 0.3, 0.0))


@pytest.mark.parametrize("use_reentrant", [False, True])
@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad")
def test_activation_checkpointing_keeps_the_gradient(use_reentrant, tmp_path):
    options = {"gradient_checkpointing": True, "gradient_checkpointing_kwargs": {"use_reentrant": use_reentrant}}
    net = model("bert")
    net.enable_input_require_grads()
    trainer = hf.Trainer(
        net, arguments(tmp_path, **options), train_dataset=dataset("bert"), callbacks=[KLCallback(SCHEDULE, max_share=None)]
    )
    assert_steps(steps_taken(trainer), by_hand("bert", 0.3, 0.0))


def test_a_model_that_returns_tuples_is_served_too(tmp_path):
    net = model("bert")
    net.config.return_dict = False
    trainer = hf.Trainer(
        net, arguments(tmp_path), train_dataset=dataset("bert"), callbacks=[KLCallback(SCHEDULE, max_share=None)]
    )
    assert_steps(steps_taken(trainer), by_hand("bert", 0.3, 0.0))


def test_nll_and_kl_are_logged_apart_and_the_weight_follows_the_steps(tmp_path):
    seen: list[dict[str, float]] = []

    class Reader(hf.TrainerCallback):
        def on_log(self, args, state, control, logs=None, **kwargs):
            seen.append(dict(logs))

    callbacks = [KLCallback(ba.KLSchedule("linear", period=2.0), max_share=None), Reader()]
    options = {"max_steps": 3, "learning_rate": 1e-3, "per_device_train_batch_size": 4, "gradient_accumulation_steps": 2}
    trainer = hf.Trainer(model("bert"), arguments(tmp_path, **options), train_dataset=dataset("bert"), callbacks=callbacks)
    trainer.train()
    logs = [row for row in trainer.state.log_history if "kl" in row]
    assert [row["kl_weight"] for row in logs] == [0.0, 0.5, 1.0]
    for row in logs:
        assert row["loss"] == pytest.approx(row["nll"] + row["kl_weight"] * row["kl"], rel=1e-4)
    assert [row["kl"] for row in seen if "kl" in row] == [row["kl"] for row in logs]


@pytest.mark.parametrize("name", ["bert", "llama"])
def test_without_a_word_the_kl_is_at_most_a_hundredth_of_the_nll(name, tmp_path):
    def log(trainer: hf.Trainer) -> dict[str, float]:
        trainer.train()
        return next(row for row in trainer.state.log_history if "kl" in row)

    options = {"train_dataset": dataset(name)}
    stock = log(hf.Trainer(model(name), arguments(tmp_path), **options, callbacks=[KLCallback()]))
    assert stock["loss"] == pytest.approx(1.01 * stock["nll"], rel=1e-4)
    # the log has the weight that was used, not the schedule's
    assert 0.0 < stock["kl_weight"] < 0.5
    own = log(BayesianTrainer(model(name), arguments(tmp_path), **options))
    assert {key: own[key] for key in ("loss", "kl_weight")} == pytest.approx(
        {key: stock[key] for key in ("loss", "kl_weight")}, rel=1e-4
    )
    wide = log(hf.Trainer(model(name), arguments(tmp_path), **options, callbacks=[KLCallback(max_share=0.2)]))
    assert wide["loss"] == pytest.approx(1.2 * stock["nll"], rel=1e-4)


@pytest.mark.parametrize("build_trainer", [hf.Trainer, BayesianTrainer])
def test_priors_outside_the_optimizer_are_announced(build_trainer, tmp_path):
    net = build("bert", spread=0.1)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    ba.bayesianize(net, QUIET)
    callbacks = [KLCallback()] if build_trainer is hf.Trainer else []
    with pytest.warns(UserWarning, match=r"parameters of priors are in no optimizer.*after bayesianize"):
        build_trainer(
            net, arguments(tmp_path), train_dataset=dataset("bert"), callbacks=callbacks, optimizers=(optimizer, None)
        ).train()


def test_evaluation_is_the_plain_model_s_loss_and_adds_no_kl(tmp_path):
    data = dataset("bert")
    options = {"eval_strategy": "steps", "eval_steps": 1, "learning_rate": 0.0}
    trainer = hf.Trainer(
        model("bert"),
        arguments(tmp_path, **options),
        train_dataset=data,
        eval_dataset=data,
        callbacks=[KLCallback(SCHEDULE, max_share=None)],
    )
    trainer.train()
    with torch.no_grad():
        out = trainer.model.eval()(**{k: torch.stack([row[k] for row in data]) for k in ("input_ids", "labels")})
    (row,) = (row for row in trainer.state.log_history if "eval_loss" in row)
    assert row["eval_loss"] == pytest.approx(float(out.loss), rel=1e-5)


def test_resuming_continues_schedule_and_noise(tmp_path):
    noisy = ba.AttentionConfig("BAM-WC", weibull_k=1.0)
    options = {"per_device_train_batch_size": 4, "learning_rate": 0.05, "save_strategy": "steps", "save_steps": 2}

    def trainer(folder):
        return hf.Trainer(
            model("bert", noisy),
            arguments(folder, **options, max_steps=4),
            train_dataset=dataset("bert"),
            callbacks=[KLCallback(ba.KLSchedule("linear", period=4.0), max_share=None)],
        )

    whole = trainer(tmp_path / "whole")
    whole.train()
    resumed = trainer(tmp_path / "resumed")
    resumed.train(resume_from_checkpoint=str(tmp_path / "whole" / "checkpoint-2"))
    weights = [row["kl_weight"] for row in resumed.state.log_history if "kl_weight" in row]
    assert weights == [0.0, 0.25, 0.5, 0.75]
    for (name, a), (_, b) in zip(whole.model.named_parameters(), resumed.model.named_parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6, msg=name)
    # the files in the checkpoint make a plain model Bayesian
    assert len(conversion_report(load_bayesian(build("bert"), tmp_path / "whole" / "checkpoint-2")).converted) == 2


def test_the_hooks_are_gone_after_training(tmp_path):
    net = model("bert")
    hooks = [dict(net._forward_hooks), dict(net._forward_pre_hooks)]
    hf.Trainer(net, arguments(tmp_path), train_dataset=dataset("bert"), callbacks=[KLCallback()]).train()
    assert [dict(net._forward_hooks), dict(net._forward_pre_hooks)] == hooks
    restore(net)


def test_an_error_in_the_model_leaves_neither_scope_nor_hooks(tmp_path):
    net = model("bert")
    hooks = len(net._forward_hooks)
    data = dataset("bert")
    data[0]["labels"] = torch.tensor(7)  # a class that does not exist
    with pytest.raises(IndexError, match="out of bounds"):
        hf.Trainer(net, arguments(tmp_path), train_dataset=data, callbacks=[KLCallback()]).train()
    assert len(net._forward_hooks) == hooks
    with ba.record_kl():
        pass


def test_without_a_kl_the_loss_is_the_nll(tmp_path):
    net = model("bert", ba.AttentionConfig("BAM-NOKL"))
    trainer = hf.Trainer(net, arguments(tmp_path), train_dataset=dataset("bert"), callbacks=[KLCallback()])
    trainer.train()
    (log,) = (row for row in trainer.state.log_history if "kl" in row)
    assert log["kl"] == 0.0
    assert log["loss"] == pytest.approx(log["nll"], rel=1e-5)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"label_smoothing_factor": 0.1}, r"label_smoothing_factor is 0\.1. Set it to 0.*BayesianTrainer"),
        ({"torch_compile": True}, "KLCallback needs torch_compile=False"),
    ],
)
def test_training_arguments_it_cannot_serve_are_refused_by_name(options, message, tmp_path):
    net = model("bert")
    callback = KLCallback()
    args = arguments(tmp_path, **{key: value for key, value in options.items() if key != "torch_compile"})
    args.torch_compile = options.get("torch_compile", False)
    with pytest.raises(ValueError, match=message):
        callback.on_train_begin(args, None, None, model=net)
    assert not callback._hooks


def test_several_gpus_in_one_process_and_deepspeed_are_refused_by_name(tmp_path):
    args = arguments(tmp_path)
    args._n_gpu = 2
    with pytest.raises(ValueError, match="needs one GPU per process, but the Trainer uses 2"):
        KLCallback().on_train_begin(args, None, None, model=model("bert"))
    args._n_gpu, args.deepspeed = 1, {"zero_optimization": {"stage": 2}}
    with pytest.raises(ValueError, match="KLCallback does not support deepspeed"):
        KLCallback().on_train_begin(args, None, None, model=model("bert"))


def test_a_loss_the_model_does_not_compute_is_refused_by_name(tmp_path):
    def loss(outputs, labels, num_items_in_batch=None):
        return torch.nn.functional.cross_entropy(outputs["logits"], labels)

    trainer = hf.Trainer(
        model("bert"), arguments(tmp_path), train_dataset=dataset("bert"), callbacks=[KLCallback()], compute_loss_func=loss
    )
    with pytest.raises(
        ValueError, match=r"returned no loss from the inputs input_ids.*compute_loss_func use BayesianTrainer"
    ):
        trainer.train()


def test_a_plain_model_is_refused_and_so_is_the_callback_beside_our_own_trainer(tmp_path):
    with pytest.raises(ValueError, match=r"without stochastic attention. Call bayesianize"):
        hf.Trainer(build("bert"), arguments(tmp_path), train_dataset=dataset("bert"), callbacks=[KLCallback()]).train()
    with pytest.raises(ValueError, match="callbacks has a KLCallback"):
        BayesianTrainer(model("bert", QUIET), arguments(tmp_path), callbacks=[KLCallback()])
