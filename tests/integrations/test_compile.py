"""torch.compile(fullgraph=True) for every module, in train and eval mode, with and without a recorded KL.

`aot_eager` traces forward and backward like inductor but compiles nothing, so it is quick; inductor runs once.
"""

import pytest
import torch
from torch import nn

import bayesattn as ba
from bayesattn import elbo, record_kl, sampling

pytestmark = pytest.mark.compile

X = torch.randn(2, 5, 12, generator=torch.Generator().manual_seed(2))
MEMORY = torch.randn(2, 7, 12, generator=torch.Generator().manual_seed(3))
MASK = torch.tensor([[True] * 7, [True] * 4 + [False] * 3])


class _Attention(nn.Module):
    def __init__(self, config: ba.AttentionConfig, need_weights: bool) -> None:
        super().__init__()
        self.inner, self.need_weights = ba.nn.MultiheadAttention(12, 2, batch_first=True, config=config), need_weights

    def forward(self) -> torch.Tensor:
        return self.inner(X, MEMORY, MEMORY, key_padding_mask=~MASK, need_weights=self.need_weights)[0]


class _Call(nn.Module):
    def __init__(self, inner: nn.Module, call) -> None:
        super().__init__()
        self.inner, self.call = inner, call

    def forward(self) -> torch.Tensor:
        return self.call(self.inner)


MODULES = {
    "multihead": lambda config: _Attention(config, False),
    "multihead, weights": lambda config: _Attention(config, True),
    "encoder layer": lambda config: _Call(
        ba.nn.TransformerEncoderLayer(12, 2, 16, dropout=0.0, batch_first=True, config=config), lambda m: m(X)
    ),
    "decoder layer": lambda config: _Call(
        ba.nn.TransformerDecoderLayer(12, 2, 16, dropout=0.0, batch_first=True, config=config), lambda m: m(X, MEMORY)
    ),
    "additive": lambda config: _Call(
        ba.nn.AdditiveAttention(12, 12, 5, config=config), lambda m: m(X, MEMORY, mask=MASK)[0]
    ),
    "weights": lambda config: _Call(
        ba.nn.BayesianWeights(config, key_dim=12), lambda m: m(X @ MEMORY.mT, MEMORY, mask=MASK[:, None])
    ),
}


@pytest.fixture(autouse=True)
def _fresh_compiler():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def _gradients(module: nn.Module) -> list[torch.Tensor]:
    return [parameter.grad for parameter in module.parameters() if parameter.grad is not None]


def _assert_close(first: list[torch.Tensor], second: list[torch.Tensor]) -> None:
    assert len(first) == len(second) > 0
    for one, other in zip(first, second, strict=True):
        # float32, the same operations but for fused accumulations
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(("name", "variant"), [*((name, "BAM-WC") for name in MODULES), ("weights", "BAM-LC")])
def test_every_module_compiles_whole_in_train_and_eval_mode(name, variant):
    """Noise of k = 1e9, σ = 1e-9 is below float32, so compiled and plain results can be compared."""
    module = MODULES[name](ba.AttentionConfig(variant, weibull_k=1e9, sigma_q=1e-9))
    compiled = torch.compile(module, backend="aot_eager", fullgraph=True)
    for train in (True, False):
        module.train(train)
        with record_kl() as plain_kl:
            expected = module()
        module.zero_grad()
        (expected.square().sum() + plain_kl.total()).backward()
        gradients = _gradients(module)
        module.zero_grad()
        with record_kl() as kl:
            output = compiled()
        assert len(kl) == len(plain_kl)
        torch.testing.assert_close(output, expected, rtol=1e-4, atol=1e-5)
        total = kl.total()
        assert total.requires_grad
        (output.square().sum() + total).backward()
        _assert_close(_gradients(module), gradients)
        # and without a scope: nothing may be left over from the graph that recorded
        torch.testing.assert_close(compiled(), expected, rtol=1e-4, atol=1e-5)
        assert len(kl) == len(plain_kl)


@pytest.mark.parametrize("train", [True, False])
@pytest.mark.parametrize("variant", ["soft", "BAM-NOKL"])
@pytest.mark.parametrize("name", MODULES)
def test_compiled_calls_without_a_kl_are_noticed(name, variant, train):
    module = MODULES[name](ba.AttentionConfig(variant)).train(train)
    compiled = torch.compile(module, backend="eager", fullgraph=True)
    for _ in range(2):
        with record_kl() as kl:
            compiled()
        assert kl.total().item() == 0.0


@pytest.mark.parametrize("variant", ["BAM-NOKL", "BAM-LF"])
def test_compiled_modules_draw_anew_and_follow_manual_seed(variant):
    module = MODULES["multihead"](ba.AttentionConfig(variant, weibull_k=1.0, sigma_q=1.0))
    compiled = torch.compile(module, backend="aot_eager", fullgraph=True)
    torch.manual_seed(1)
    first, second = compiled(), compiled()
    torch.manual_seed(1)
    again = compiled()
    assert not torch.equal(first, second)
    assert torch.equal(first, again)


def test_switching_between_mean_and_samples_is_noticed():
    module = MODULES["multihead"](ba.AttentionConfig("BAM-WC", weibull_k=1.0)).eval()
    compiled = torch.compile(module, backend="aot_eager", fullgraph=True)
    mean = compiled()
    with sampling(module):
        assert not torch.equal(compiled(), compiled())
    assert torch.equal(compiled(), mean)
    torch.testing.assert_close(mean, module(), rtol=1e-5, atol=1e-6)


def test_the_functional_core_compiles_with_a_seed():
    """The counter-based noise is integer arithmetic; compiled, it must still be the specified bits."""
    config = ba.AttentionConfig("BAM-NOKL", weibull_k=2.0)
    scores = torch.randn(2, 3, 5, 7)

    def draw(scores: torch.Tensor, seed: torch.Tensor) -> torch.Tensor:
        return ba.functional.attention_weights(scores, config=config, seed=seed, need_kl=False)[0]

    seeds = torch.tensor([5, 2**40])
    compiled = torch.compile(draw, backend="aot_eager", fullgraph=True)
    torch.testing.assert_close(compiled(scores, seeds), draw(scores, seeds))


# torch 2.13's tracer makes an instance of every autograd function it meets and warns about itself
@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")
@pytest.mark.parametrize("variant", ["BAM-WF", "BAM-LF"])
def test_the_functional_core_compiles_in_float16_and_its_gradients_saturate(variant):
    config = ba.AttentionConfig(variant, preset="paper", gamma_alpha=1.0, gamma_beta=1.0, sigma_p=1.0)
    inputs = [torch.full((1, 2, 11, 4), 90.0, dtype=torch.float16, requires_grad=True) for _ in range(3)]

    def loss(*tensors: torch.Tensor) -> torch.Tensor:
        output, kl = ba.functional.attention(*tensors, config=config)
        assert kl is not None
        return output.float().sum() + kl.sum()

    gradients = torch.autograd.grad(torch.compile(loss, backend="aot_eager", fullgraph=True)(*inputs), inputs)
    assert all(bool(gradient.isfinite().all()) for gradient in gradients)
    assert float(gradients[0].max()) == 65504.0


@pytest.mark.slow
def test_a_training_step_compiles_with_inductor():
    config = ba.AttentionConfig("BAM-WC", weibull_k=1e9)
    module = MODULES["additive"](config)
    plain = MODULES["additive"](config)
    plain.load_state_dict(module.state_dict())
    for model, call in ((plain, plain), (module, torch.compile(module, fullgraph=True))):
        with record_kl() as kl:
            output = call()
        elbo(output.square().mean(), kl.total(), kl_weight=0.3).loss.backward()
        assert all(parameter.grad is not None for parameter in model.parameters())
    _assert_close(_gradients(module), _gradients(plain))


def test_the_cap_is_compiled_whole_and_the_same():
    def loss(nll: torch.Tensor, kl: torch.Tensor) -> torch.Tensor:
        return elbo(nll, kl, kl_weight=0.7).loss

    inputs = torch.tensor(2.0), torch.tensor(60.0)
    assert (
        torch.compile(loss, backend="eager", fullgraph=True)(*inputs).item() == loss(*inputs).item() == pytest.approx(2.02)
    )
