"""The Lightning callback gives the gradient of the negative ELBO, whatever the accumulation."""

import warnings

import pytest
import torch
from torch import nn

import bayesattn as ba
from bayesattn.convert import bayesianize

with warnings.catch_warnings():
    # the package's own imports warn about other packages
    warnings.simplefilter("ignore")
    pl = pytest.importorskip("pytorch_lightning", reason="pytorch-lightning is not installed")
    from bayesattn.integrations.lightning import KLCallback

pytestmark = pytest.mark.filterwarnings("ignore")
EXAMPLES = 8


def network() -> nn.Module:
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(6, 2, 7, dropout=0.0, batch_first=True)
    return bayesianize(
        nn.TransformerEncoder(layer, 2, enable_nested_tensor=False), ba.AttentionConfig("BAM-LC", sigma_q=1e-7)
    )


class Module(pl.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.net = network()

    def training_step(self, batch, index):
        return nn.functional.cross_entropy(self.net(batch[0]).mean(dim=1), batch[1])

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=1.0)


def data() -> torch.utils.data.TensorDataset:
    generator = torch.Generator().manual_seed(1)
    return torch.utils.data.TensorDataset(torch.randn(EXAMPLES, 5, 6, generator=generator), torch.arange(EXAMPLES) % 6)


@pytest.mark.parametrize(("batch", "accumulation"), [(8, 1), (2, 4)])
def test_kl_weighs_the_same_under_accumulation(batch, accumulation, tmp_path):
    module = Module()
    before = {n: p.detach().clone() for n, p in module.named_parameters()}
    trainer = pl.Trainer(
        accelerator="cpu", max_epochs=1, accumulate_grad_batches=accumulation,
        callbacks=[KLCallback(ba.KLSchedule(final=0.3), max_share=None)], logger=False, enable_checkpointing=False,
        enable_progress_bar=False, enable_model_summary=False, default_root_dir=tmp_path,
    )  # fmt: skip
    trainer.fit(module, torch.utils.data.DataLoader(data(), batch_size=batch))
    assert trainer.global_step == 1
    by_hand = network().train()
    x, y = data().tensors
    with ba.record_kl() as kl:
        nll = nn.functional.cross_entropy(by_hand(x).mean(dim=1), y)
    (nll + 0.3 * kl.total()).backward()
    for name, parameter in by_hand.named_parameters():
        step = before[f"net.{name}"] - module.get_parameter(f"net.{name}").detach()
        torch.testing.assert_close(step, parameter.grad, rtol=1e-3, atol=1e-5, msg=name)
    assert float(trainer.callback_metrics["kl"]) > 0
    if accumulation == 1:
        assert float(trainer.callback_metrics["nll"]) == pytest.approx(float(nll.detach()), rel=1e-5)


class Weights(pl.Callback):
    """Notes the KL weight of every optimizer step."""

    def __init__(self) -> None:
        self.seen: list[float] = []

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        self.seen.append(float(trainer.callback_metrics["kl_weight"]))


def test_the_schedule_follows_the_steps_and_resumes_with_a_checkpoint(tmp_path):
    def fit(epochs: int, checkpoint: str | None = None) -> tuple[pl.Trainer, list[float]]:
        weights = Weights()
        trainer = pl.Trainer(
            accelerator="cpu", max_epochs=epochs,
            callbacks=[KLCallback(ba.KLSchedule("linear", period=4.0), max_share=None), weights], logger=False,
            enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False, default_root_dir=tmp_path,
        )  # fmt: skip
        trainer.fit(Module(), torch.utils.data.DataLoader(data(), batch_size=4), ckpt_path=checkpoint)
        return trainer, weights.seen

    trainer, seen = fit(1)
    assert seen == [0.0, 0.25]
    trainer.save_checkpoint(tmp_path / "half.ckpt")
    assert fit(2, str(tmp_path / "half.ckpt"))[1] == [0.5, 0.75]


def test_without_a_word_the_kl_is_at_most_a_hundredth_of_the_nll(tmp_path):
    trainer = pl.Trainer(
        accelerator="cpu", max_epochs=1, callbacks=[KLCallback()], logger=False, enable_checkpointing=False,
        enable_progress_bar=False, enable_model_summary=False, default_root_dir=tmp_path,
    )  # fmt: skip
    trainer.fit(Module(), torch.utils.data.DataLoader(data(), batch_size=8))
    nll, kl, weight = (float(trainer.callback_metrics[key]) for key in ("nll", "kl", "kl_weight"))
    assert weight * kl == pytest.approx(0.01 * nll, rel=1e-4)


@pytest.mark.filterwarnings("always")
def test_priors_outside_the_optimizer_are_announced(tmp_path):
    class Early(Module):
        def configure_optimizers(self):
            return torch.optim.SGD([p for n, p in self.named_parameters() if "bayes_prior" not in n], lr=0.1)

    trainer = pl.Trainer(
        accelerator="cpu", max_epochs=1, callbacks=[KLCallback()], logger=False, enable_checkpointing=False,
        enable_progress_bar=False, enable_model_summary=False, default_root_dir=tmp_path,
    )  # fmt: skip
    with pytest.warns(UserWarning, match="parameters of priors are in no optimizer"):
        trainer.fit(Early(), torch.utils.data.DataLoader(data(), batch_size=8))


def test_a_scope_is_not_left_open_by_an_error(tmp_path):
    class Failing(Module):
        def training_step(self, batch, index):
            raise RuntimeError("out of memory")

    trainer = pl.Trainer(
        accelerator="cpu", max_epochs=1, callbacks=[KLCallback()], logger=False, enable_checkpointing=False,
        enable_progress_bar=False, enable_model_summary=False, default_root_dir=tmp_path,
    )  # fmt: skip
    with pytest.raises(RuntimeError, match="out of memory"):
        trainer.fit(Failing(), torch.utils.data.DataLoader(data(), batch_size=4))
    with ba.record_kl():
        pass
