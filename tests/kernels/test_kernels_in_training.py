"""The attention kernels inside what training is made of: checkpointing, DDP, autocast, CUDA graphs, very long sequences."""

import pytest
import torch
from kernel_device import DEVICE, MARKS, needs_gpu
from replays import check_replays
from torch import distributed, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

import bayesattn as ba
from bayesattn.functional import attention
from bayesattn.ops.common.launch import LAUNCHES
from bayesattn.priors import ContextualPrior
from bayesattn_recipes.bench.harness import peak_memory

pytestmark = MARKS
VARIANTS = ["BAM-NOKL", "BAM-LC", "BAM-WC"]


class Block(nn.Module):
    """Self-attention of two heads with 16 features each, by the kernels; returns output and KL, 0 without one."""

    def __init__(self, variant: str) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.config = ba.AttentionConfig(variant, weibull_k=2.0, gamma_beta=0.3)
        self.project = nn.Linear(32, 96)
        self.prior = ContextualPrior(16, 2, self.config) if self.config.prior_kind == "contextual" else None
        self.to(DEVICE)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        query, key, value = self.project(x).unflatten(-1, (3, 2, 16)).permute(2, 0, 3, 1, 4)
        prior = None if self.prior is None else self.prior(key)
        options = {"config": self.config, "log_prior": prior, "need_kl": self.config.has_kl}
        output, kl = attention(query, key, value, **options, backend="triton")
        return output, output.new_zeros(len(x)) if kl is None else kl


def gradients(block: nn.Module, call, x: torch.Tensor) -> list[torch.Tensor]:
    """Return loss and gradients of one draw, the same one at every call."""
    block.zero_grad()
    x = x.clone().requires_grad_()
    torch.manual_seed(11)
    before = sum(LAUNCHES.values())
    output, kl = call(x)
    loss = output.float().square().sum() + 0.3 * kl.sum()
    loss.backward()
    assert sum(LAUNCHES.values()) >= before + 2, "the kernels did not run"
    assert x.grad is not None
    return [loss.detach(), x.grad, *(p.grad.clone() for p in block.parameters() if p.grad is not None)]


def same(found: list[torch.Tensor], expected: list[torch.Tensor]) -> None:
    # the same kernels on the same numbers; on a GPU dQ is added in any order
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("is_reentrant", [False, True])
def test_activation_checkpointing_repeats_the_draw(variant, is_reentrant):
    block, x = Block(variant), torch.randn(2, 37, 32, device=DEVICE)
    plain = gradients(block, block, x)
    same(gradients(block, lambda x: checkpoint(block, x, use_reentrant=is_reentrant), x), plain)


@pytest.mark.parametrize("variant", VARIANTS)
def test_ddp_gives_the_gradients_of_the_plain_module(variant, monkeypatch):
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    block, x = Block(variant), torch.randn(2, 37, 32, device=DEVICE)
    plain = gradients(block, block, x)
    distributed.init_process_group("gloo", store=distributed.HashStore(), rank=0, world_size=1)
    try:
        same(gradients(block, DistributedDataParallel(block), x), plain)
    finally:
        distributed.destroy_process_group()


@needs_gpu
@pytest.mark.parametrize("variant", VARIANTS)
def test_autocast_gives_the_kernels_low_precision_and_parameters_their_own(variant):
    block, x = Block(variant), torch.randn(2, 37, 32, device=DEVICE)
    plain = gradients(block, block, x)
    with torch.autocast("cuda", torch.bfloat16):
        assert block(x)[0].dtype == torch.bfloat16
    with torch.autocast("cuda", torch.bfloat16):
        low = gradients(block, block, x)
    assert all(gradient.dtype == torch.float32 for gradient in low)
    for ours, truth in zip(low, plain, strict=True):
        # eight bits in every product: some per cent of a tensor's norm, more where a hidden unit of the prior switches
        assert float((ours - truth).norm()) <= 0.1 * float(truth.norm()) + 1e-3


@needs_gpu
@pytest.mark.parametrize("variant", VARIANTS)
def test_a_cuda_graph_draws_anew_at_every_replay_and_repeats_a_seed(variant):
    block, x = Block(variant), torch.randn(2, 37, 32, device=DEVICE)
    held: list[torch.Tensor] = []

    def call() -> None:
        output, kl = block(x)
        (output.square().sum() + kl.sum()).backward()
        held[:] = [output.detach(), block.project.weight.grad]
        block.zero_grad()

    check_replays(call, held)


@needs_gpu
def test_a_sequence_of_131072_tokens_takes_less_than_three_times_the_memory_of_flash_attention():
    config = ba.AttentionConfig("BAM-WC", weibull_k=10.0)
    inputs = [torch.randn(1, 1, 131_072, 64, device=DEVICE, dtype=torch.bfloat16, requires_grad=True) for _ in range(3)]
    prior = torch.zeros(1, 1, 1, 131_072, device=DEVICE).log_softmax(-1).requires_grad_()

    def bayesian() -> None:
        output, kl = attention(*inputs, config=config, log_prior=prior, seed=7, backend="triton")
        assert kl is not None
        gradients = torch.autograd.grad(output.float().sum() + kl.sum(), [*inputs, prior])
        assert all(bool(torch.isfinite(x).all()) for x in (output, kl, *gradients))

    def flash() -> None:
        with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
            output = nn.functional.scaled_dot_product_attention(*inputs)
        torch.autograd.grad(output.float().sum(), inputs)

    assert peak_memory(bayesian, device=DEVICE) < 3 * peak_memory(flash, device=DEVICE)
