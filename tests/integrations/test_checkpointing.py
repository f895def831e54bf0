"""Activation checkpointing, reentrant or not, gives the gradients of the plain model: noise and KL alike."""

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import bayesattn as ba
from bayesattn import elbo, record_kl

MODES = {"plain": None, "non-reentrant": False, "reentrant": True}
VARIANTS = ["BAM-WC", "BAM-LC", "BAM-WF"]


class _Model(nn.Module):
    """Three checkpointed blocks, one of which runs twice, and an ordinary layer."""

    def __init__(self, variant: str, need_weights: bool = False) -> None:
        super().__init__()
        config = ba.AttentionConfig(variant, gamma_beta=0.5)
        self.attentions = nn.ModuleList(
            ba.nn.MultiheadAttention(6, 2, batch_first=True, config=config, dtype=torch.float64) for _ in range(3)
        )
        self.head = nn.Linear(6, 1, dtype=torch.float64)
        self.need_weights = need_weights

    def _block(self, index: int, x: torch.Tensor) -> torch.Tensor:
        return x + self.attentions[index](x, x, x, need_weights=self.need_weights)[0]

    def forward(self, x: torch.Tensor, mode: str) -> torch.Tensor:
        reentrant = MODES[mode]
        for index in (0, 1, 1, 2):
            if reentrant is None or index == 2:
                x = self._block(index, x)
            else:
                x = checkpoint(self._block, index, x, use_reentrant=reentrant)
        return self.head(x)


def _gradients(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def _step(model: _Model, mode: str, *, weight: float = 0.3, use_kl: bool = True, inside: bool = False, keep: bool = True):
    """One training step; `keep` says whether the scope outlives the forward pass."""
    model.zero_grad(set_to_none=True)
    torch.manual_seed(5)
    x = torch.randn(2, 7, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(2)).requires_grad_()

    def loss_of(output: torch.Tensor, kl) -> torch.Tensor:
        return output.square().mean() + (weight * kl.total() if use_kl else 0.0)

    with record_kl() as kl:
        output = model(x, mode)
        assert len(kl) == 4
        if inside:
            loss_of(output, kl).backward()
            assert len(kl) == 4  # recomputation must not record again
    if not inside:
        loss = loss_of(output, kl)
        if not keep:
            del kl
        loss.backward()
    assert x.grad is not None
    return {**_gradients(model), "input": x.grad.clone()}


def _assert_same(first: dict[str, torch.Tensor], second: dict[str, torch.Tensor]) -> None:
    assert first.keys() == second.keys()
    for name in first:
        # the same operations in the same order, but for the sum of KL and output gradients
        torch.testing.assert_close(first[name], second[name], rtol=1e-10, atol=1e-13, msg=name)


@pytest.mark.parametrize("keep", [True, False], ids=["scope-kept", "scope-dropped"])
@pytest.mark.parametrize("inside", [False, True], ids=["backward-outside", "backward-inside"])
@pytest.mark.parametrize("mode", ["non-reentrant", "reentrant"])
@pytest.mark.parametrize("variant", VARIANTS)
def test_gradients_equal_the_plain_model(variant, mode, inside, keep):
    model = _Model(variant)
    plain = _step(model, "plain")
    without = _step(model, "plain", use_kl=False)
    changed = [name for name in without if not torch.allclose(plain[name], without[name])]
    assert "attentions.0.in_proj_weight" in changed  # the KL matters here, so that equality below means something
    _assert_same(_step(model, mode, inside=inside, keep=keep), plain)


@pytest.mark.parametrize("mode", ["non-reentrant", "reentrant"])
def test_a_capped_weight_is_carried_too(mode):
    model, x = _Model("BAM-WC"), torch.randn(2, 7, 6, dtype=torch.float64, requires_grad=True)

    def step(mode: str) -> dict[str, torch.Tensor]:
        model.zero_grad(set_to_none=True)
        torch.manual_seed(5)
        with record_kl() as kl:
            output = model(x, mode)
        parts = elbo(output.square().mean(), kl.total())
        # below 1, so it is the cap that decides
        assert 0.0 < parts.kl_weight.item() < 0.5
        parts.loss.backward()
        return _gradients(model)

    _assert_same(step(mode), step("plain"))


@pytest.mark.parametrize("mode", ["non-reentrant", "reentrant"])
@pytest.mark.parametrize("need_weights", [False, True])
def test_the_path_that_returns_weights_is_carried_too(mode, need_weights):
    model = _Model("BAM-WC", need_weights)
    _assert_same(_step(model, mode), _step(model, "plain"))


@pytest.mark.parametrize("keep", [True, False], ids=["scope-kept", "scope-dropped"])
@pytest.mark.parametrize("inside", [False, True], ids=["backward-outside", "backward-inside"])
@pytest.mark.parametrize("mode", ["non-reentrant", "reentrant"])
def test_a_kl_that_is_recorded_but_not_used_changes_nothing(mode, inside, keep):
    model = _Model("BAM-WC")
    expected = _step(model, "plain", use_kl=False)
    actual = _step(model, mode, use_kl=False, inside=inside, keep=keep)
    _assert_same({name: actual[name] for name in expected}, expected)


@pytest.mark.parametrize("mode", ["non-reentrant", "reentrant"])
def test_weight_zero_still_gives_every_parameter_a_gradient(mode):
    gradients = _step(_Model("BAM-WC"), mode, weight=0.0)
    assert {name for name, _ in _Model("BAM-WC").named_parameters()} < gradients.keys()
    assert bool((gradients["attentions.0.bayes_prior.weight_in"] == 0).all())


@pytest.mark.parametrize("mode", ["non-reentrant", "reentrant"])
def test_steps_with_and_without_a_scope_may_alternate(mode):
    """An old scope that is still alive must not make a later recomputation compute a KL that its forward did not."""
    model = _Model("BAM-WC")
    x = torch.randn(2, 7, 6, dtype=torch.float64, requires_grad=True)
    scopes = []
    for _ in range(2):
        with record_kl() as kl:
            output = model(x, mode)
        scopes.append(kl)
        (output.sum() + kl.total()).backward()
        model.zero_grad(set_to_none=True)
        torch.manual_seed(3)
        model(x, mode).sum().backward()
        gradients = _gradients(model)
        model.zero_grad(set_to_none=True)
        torch.manual_seed(3)
        model(x, "plain").sum().backward()
        _assert_same(gradients, _gradients(model))
        model.zero_grad(set_to_none=True)


@pytest.mark.parametrize("mode", ["non-reentrant", "reentrant"])
def test_a_validation_pass_between_forward_and_backward_does_no_harm(mode):
    model = _Model("BAM-WC")
    expected = _step(model, "plain")
    model.zero_grad(set_to_none=True)
    torch.manual_seed(5)
    x = torch.randn(2, 7, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(2)).requires_grad_()
    with record_kl() as kl:
        output = model(x, mode)
    model.eval()
    with torch.no_grad():
        model(x, "plain")
    model.train()
    (output.square().mean() + 0.3 * kl.total()).backward()
    actual = _gradients(model)
    _assert_same(actual, {name: expected[name] for name in actual})


def test_backward_twice_through_reentrant_checkpoints():
    model = _Model("BAM-WC")
    once = _step(model, "reentrant")
    model.zero_grad(set_to_none=True)
    torch.manual_seed(5)
    x = torch.randn(2, 7, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(2)).requires_grad_()
    with record_kl() as kl:
        output = model(x, "reentrant")
    loss = output.square().mean() + 0.3 * kl.total()
    loss.backward(retain_graph=True)
    loss.backward()
    _assert_same(_gradients(model), {name: 2 * once[name] for name in _gradients(model)})


def test_a_kl_that_no_recomputation_reaches_raises():
    """Reentrant inside reentrant: the inner forward is never seen with a graph by the pass that holds the KL weight."""
    model = _Model("BAM-WC")
    x = torch.randn(2, 7, 6, dtype=torch.float64, requires_grad=True)

    def inner(x: torch.Tensor) -> torch.Tensor:
        return checkpoint(model._block, 0, x, use_reentrant=True)

    with record_kl() as kl:
        output = checkpoint(inner, x, use_reentrant=True)
    loss = output.sum() + kl.total()
    try:
        loss.backward()
    except RuntimeError as error:
        assert "lost their gradient" in str(error)  # noqa: PT017  (either outcome is right, silence is not)
    else:
        assert model.attentions[0].bayes_prior.weight_in.grad is not None


def test_the_noise_of_the_recomputation_is_that_of_the_forward():
    """The gradient of the recomputed output must belong to the output that was seen."""
    for mode in ("non-reentrant", "reentrant"):
        model = _Model("BAM-NOKL")
        x = torch.randn(2, 7, 6, dtype=torch.float64, requires_grad=True)
        torch.manual_seed(1)
        output = model(x, mode)
        torch.manual_seed(99)  # the generator has moved on by the time of the backward pass
        output.sum().backward()
        gradient, x.grad = x.grad.clone(), None
        torch.manual_seed(1)
        model(x, "plain").sum().backward()
        torch.testing.assert_close(gradient, x.grad, rtol=1e-10, atol=1e-13)
