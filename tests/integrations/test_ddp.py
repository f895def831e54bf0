"""Two processes under DDP give the gradients of one, and a KL weight of 0 leaves no parameter without a gradient."""

import os

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import bayesattn as ba
from bayesattn import elbo, record_kl
from processes import leave, run_on_two

EXAMPLES, WORLD = 6, 2


class _Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        config = ba.AttentionConfig("BAM-WC", gamma_beta=0.5)
        self.layers = nn.ModuleList(
            ba.nn.MultiheadAttention(6, 2, batch_first=True, config=config, dtype=torch.float64) for _ in range(2)
        )
        self.head = nn.Linear(6, 3, dtype=torch.float64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = x + layer(x, x, x, need_weights=False)[0]
        return self.head(x.mean(dim=1))


def _batch() -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(4)
    x = torch.randn(EXAMPLES, 5, 6, dtype=torch.float64, generator=generator)
    return x, torch.randint(0, 3, (EXAMPLES,), generator=generator)


def _step(model: nn.Module, x: torch.Tensor, labels: torch.Tensor, kl_weight: float) -> None:
    with record_kl() as kl:
        logits = model(x)
    elbo(nn.functional.cross_entropy(logits, labels), kl.total(), kl_weight=kl_weight, max_share=None).loss.backward()


def _train_mode(model: nn.Module, sampled: bool) -> nn.Module:
    # eval mode still records the KL, and without noise two processes can be compared with one
    return model.train(sampled)


def _worker(rank: int, store: str, result: str) -> None:
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=WORLD)
    x, labels = (tensor.chunk(WORLD)[rank] for tensor in _batch())
    gradients = {}
    for name, kl_weight, sampled in (("mean, 1", 1.0, False), ("mean, 0", 0.0, False), ("sampled, 0", 0.0, True)):
        torch.manual_seed(7)
        model = DistributedDataParallel(_train_mode(_Model(), sampled))
        # a second step is where DDP complains about parameters that got no gradient in the first
        for _ in range(2):
            model.zero_grad()
            _step(model, x, labels, kl_weight)
        gradients[name] = {key: parameter.grad for key, parameter in model.module.named_parameters()}
    if rank == 0:
        torch.save(gradients, result)
    leave()


@pytest.mark.slow
def test_two_processes_equal_one_and_weight_zero_leaves_nothing_unused(tmp_path):
    result = tmp_path / "gradients.pt"
    run_on_two(_worker, str(tmp_path / "store"), str(result))
    gradients = torch.load(result)
    for name, kl_weight in (("mean, 1", 1.0), ("mean, 0", 0.0)):
        torch.manual_seed(7)
        model = _train_mode(_Model(), False)
        _step(model, *_batch(), kl_weight)
        for key, parameter in model.named_parameters():
            torch.testing.assert_close(gradients[name][key], parameter.grad, rtol=1e-9, atol=1e-12, msg=f"{name} {key}")
    prior = "layers.0.bayes_prior.weight_in"
    assert bool((gradients["mean, 1"][prior] != 0.0).any())
    for name in ("mean, 0", "sampled, 0"):
        assert all(gradient is not None for gradient in gradients[name].values())
        assert bool((gradients[name][prior] == 0.0).all())
