"""The Trainer's gradient is that of [Σ NLL + λ Σ KL] / labels, however the examples are cut into batches."""

import dataclasses

import pytest
import torch
import transformers as hf
from zoo import build

import bayesattn as ba
from bayesattn.convert import bayesianize, conversion_report, load_bayesian
from bayesattn.integrations.hf import BayesianCallback, BayesianTrainer

# noise of 1e-7: the gradient of a draw is that of the mean, so runs can be compared exactly
QUIET = ba.AttentionConfig("BAM-LC", sigma_q=1e-7)
EXAMPLES, LENGTH = 8, 6


def arguments(folder, **options) -> hf.TrainingArguments:
    defaults = {
        "use_cpu": True, "report_to": "none", "disable_tqdm": True, "save_strategy": "no", "optim": "sgd",
        "learning_rate": 1.0, "lr_scheduler_type": "constant", "max_grad_norm": 0.0, "max_steps": 1, "logging_steps": 1,
        "dataloader_pin_memory": False, "per_device_train_batch_size": EXAMPLES,
    }  # fmt: skip
    return hf.TrainingArguments(str(folder), **{**defaults, **options})


def dataset(name: str) -> list[dict[str, torch.Tensor]]:
    generator = torch.Generator().manual_seed(2)
    ids = torch.randint(3, 61, (EXAMPLES, LENGTH), generator=generator)
    if name == "bert":
        labels = torch.randint(0, 2, (EXAMPLES,), generator=generator)
    else:
        # examples with different numbers of labels, so that a mean over micro-batches is not the mean over labels
        labels = ids.clone()
        for i in range(EXAMPLES):
            labels[i, : i % 5] = -100
    return [{"input_ids": ids[i], "labels": labels[i]} for i in range(EXAMPLES)]


def model(name: str, config: ba.AttentionConfig = QUIET) -> hf.PreTrainedModel:
    torch.manual_seed(3)
    model = build(name, spread=0.1)
    for module in model.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.0
    for module in model.modules():
        if hasattr(module, "attention_dropout"):
            module.attention_dropout = 0.0
    return bayesianize(model, config)


def steps_taken(trainer: hf.Trainer) -> dict[str, torch.Tensor]:
    before = {n: p.detach().clone() for n, p in trainer.model.named_parameters()}
    trainer.train()
    return {n: before[n] - p.detach() for n, p in trainer.model.named_parameters()}


def by_hand(name: str, kl_weight: float, smoothing: float) -> dict[str, torch.Tensor]:
    """The gradient of the objective over all examples at once, written without the library's objective."""
    net, data = model(name).eval(), dataset(name)
    ids, labels = (torch.stack([row[key] for row in data]) for key in ("input_ids", "labels"))
    with ba.record_kl() as kl:
        logits = net(input_ids=ids).logits
    if name != "bert":
        logits, labels = logits[:, :-1], labels[:, 1:]
    log_probs = torch.log_softmax(logits.flatten(0, -2), dim=-1)
    kept = labels.flatten() != -100
    log_probs, labels = log_probs[kept], labels.flatten()[kept]
    nll = -(1 - smoothing) * log_probs.gather(1, labels[:, None]).squeeze(1) - smoothing * log_probs.mean(dim=1)
    ((nll.sum() + kl_weight * EXAMPLES * kl.total()) / len(labels)).backward()
    return {n: p.grad for n, p in net.named_parameters()}


@pytest.mark.parametrize(("batch", "accumulation"), [(8, 1), (4, 2), (2, 4), (3, 3)])
@pytest.mark.parametrize("smoothing", [0.0, 0.1])
@pytest.mark.parametrize("name", ["bert", "llama"])
def test_kl_has_the_same_weight_however_the_batch_is_cut(name, smoothing, batch, accumulation, tmp_path):
    options = {"per_device_train_batch_size": batch, "gradient_accumulation_steps": accumulation}
    trainer = BayesianTrainer(
        model(name),
        arguments(tmp_path, **options, label_smoothing_factor=smoothing),
        train_dataset=dataset(name),
        schedule=ba.KLSchedule("constant", final=0.3),
        max_share=None,
    )
    actual, expected = steps_taken(trainer), by_hand(name, 0.3, smoothing)
    if name == "bert" and batch == 3:
        # micro-batches of 3, 3 and 2; without a number of items the Trainer could only average the three means
        assert trainer.model_accepts_loss_kwargs
    for key, gradient in expected.items():
        if gradient is not None:
            torch.testing.assert_close(actual[key], gradient, rtol=2e-3, atol=2e-5, msg=lambda m, key=key: f"{key}: {m}")


def test_a_loss_function_of_one_s_own_keeps_the_kl(tmp_path):
    def loss(outputs, labels, num_items_in_batch=None):
        return torch.nn.functional.cross_entropy(outputs["logits"], labels, reduction="sum") / num_items_in_batch

    trainer = BayesianTrainer(
        model("bert"),
        arguments(tmp_path, per_device_train_batch_size=2, gradient_accumulation_steps=4),
        train_dataset=dataset("bert"),
        compute_loss_func=loss,
        schedule=ba.KLSchedule("constant", final=0.3),
        max_share=None,
    )
    actual, expected = steps_taken(trainer), by_hand("bert", 0.3, 0.0)
    for key, gradient in expected.items():
        torch.testing.assert_close(actual[key], gradient, rtol=2e-3, atol=2e-5, msg=lambda m, key=key: f"{key}: {m}")


def test_nll_and_kl_are_logged_apart_and_the_weight_follows_the_steps(tmp_path):
    schedule = ba.KLSchedule("linear", period=2.0)
    trainer = BayesianTrainer(
        model("bert"),
        arguments(tmp_path, max_steps=3, learning_rate=1e-3),
        train_dataset=dataset("bert"),
        schedule=schedule,
        max_share=None,
    )
    trainer.train()
    logs = [row for row in trainer.state.log_history if "kl" in row]
    assert [row["kl_weight"] for row in logs] == [0.0, 0.5, 1.0]
    for row in logs:
        assert row["loss"] == pytest.approx(row["nll"] + row["kl_weight"] * row["kl"], rel=1e-4)


def test_evaluation_is_the_plain_model_s_loss(tmp_path):
    trainer = BayesianTrainer(
        model("bert"), arguments(tmp_path), train_dataset=dataset("bert"), eval_dataset=dataset("bert")
    )
    data = dataset("bert")
    with torch.no_grad():
        out = trainer.model.eval()(**{k: torch.stack([row[k] for row in data]) for k in ("input_ids", "labels")})
    assert trainer.evaluate()["eval_loss"] == pytest.approx(float(out.loss), rel=1e-5)


def test_resuming_continues_schedule_and_noise(tmp_path):
    noisy = ba.AttentionConfig("BAM-WC", weibull_k=1.0)
    options = {"per_device_train_batch_size": 4, "learning_rate": 0.05, "save_strategy": "steps", "save_steps": 2}

    def trainer(folder, steps):
        return BayesianTrainer(
            model("bert", noisy),
            arguments(folder, **options, max_steps=steps),
            train_dataset=dataset("bert"),
            callbacks=[BayesianCallback()],
            schedule=ba.KLSchedule("linear", period=4.0),
            max_share=None,
        )

    whole = trainer(tmp_path / "whole", 4)
    whole.train()
    resumed = trainer(tmp_path / "resumed", 4)
    resumed.train(resume_from_checkpoint=str(tmp_path / "whole" / "checkpoint-2"))
    weights = [row["kl_weight"] for row in resumed.state.log_history if "kl_weight" in row]
    assert weights[-2:] == [0.5, 0.75]
    for (name, a), (_, b) in zip(whole.model.named_parameters(), resumed.model.named_parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6, msg=name)
    # the callback's files in the checkpoint make a plain model Bayesian
    assert len(conversion_report(load_bayesian(build("bert"), tmp_path / "whole" / "checkpoint-2")).converted) == 2


def test_without_a_kl_the_loss_is_the_nll(tmp_path):
    trainer = BayesianTrainer(
        model("bert", ba.AttentionConfig("BAM-NOKL")), arguments(tmp_path), train_dataset=dataset("bert")
    )
    trainer.train()
    (log,) = (row for row in trainer.state.log_history if "kl" in row)
    assert log["kl"] == 0.0
    assert log["loss"] == pytest.approx(log["nll"], rel=1e-5)


def test_a_plain_model_is_refused(tmp_path):
    with pytest.raises(ValueError, match=r"without stochastic attention. Call bayesianize"):
        BayesianTrainer(build("bert"), arguments(tmp_path), train_dataset=dataset("bert"))


def test_frozen_priors_are_announced(tmp_path):
    net = model("bert")
    for name, parameter in net.named_parameters():
        parameter.requires_grad_("bayes_prior" not in name)
    with pytest.warns(UserWarning, match=r"priors of 2 attention modules are frozen.*modules_to_save"):
        BayesianTrainer(net, arguments(tmp_path), train_dataset=dataset("bert"))


def test_lora_trains_saves_and_reloads_the_priors(tmp_path):
    peft = pytest.importorskip("peft", reason="peft is not installed")
    net = model("bert", dataclasses.replace(QUIET, sigma_q=0.1))
    options = {"r": 2, "target_modules": ["query", "value"]}
    with pytest.warns(UserWarning, match="frozen"):
        BayesianTrainer(peft.get_peft_model(model("bert"), peft.LoraConfig(**options)), arguments(tmp_path))
    adapted = peft.get_peft_model(net, peft.LoraConfig(**options, modules_to_save=["bayes_prior"]))
    trainer = BayesianTrainer(adapted, arguments(tmp_path, learning_rate=0.1), train_dataset=dataset("bert"))
    moved = {n: float(step.abs().max()) for n, step in steps_taken(trainer).items()}
    # the output bias shifts all logits of the prior alike, so its gradient is 0 but for rounding
    saved = [value for n, value in moved.items() if "bayes_prior" in n and "modules_to_save" in n and "bias_out" not in n]
    assert len(saved) == 6
    assert min(saved) > 0
    adapted.eval().save_pretrained(tmp_path / "adapter")
    ba.convert.save_bayesian(adapted, tmp_path / "adapter")
    fresh = peft.PeftModel.from_pretrained(load_bayesian(model_plain(), tmp_path / "adapter"), tmp_path / "adapter").eval()
    ids = torch.stack([row["input_ids"] for row in dataset("bert")])
    with torch.no_grad(), ba.record_kl() as first:
        before = adapted(input_ids=ids).logits
    with torch.no_grad(), ba.record_kl() as second:
        assert torch.equal(fresh(input_ids=ids).logits, before)
    assert torch.equal(first.total(), second.total())


def model_plain() -> hf.PreTrainedModel:
    return build("bert", spread=0.1)
