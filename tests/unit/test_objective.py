"""The loss is the negative ELBO per label, the same at every batch size and accumulation; schedules by hand."""

import math

import pytest
import torch
from torch import nn

import bayesattn as ba
from bayesattn import KLSchedule, elbo
from helpers import no_type_checks


def test_elbo_is_nll_plus_weighted_kl():
    nll, kl = torch.tensor(2.0, requires_grad=True), torch.tensor(6.0, requires_grad=True)
    result = elbo(nll, kl, kl_weight=0.5, labels_per_example=4.0, accumulation_steps=2, max_share=None)
    assert result.loss.item() == (2.0 + 0.5 * 6.0 / 4.0) / 2
    result.loss.backward()
    assert nll.grad is not None
    assert kl.grad is not None
    assert (nll.grad.item(), kl.grad.item()) == (0.5, 0.5 / 4 / 2)
    assert (result.nll.item(), result.kl.item()) == (2.0, 6.0)
    assert (result.kl_weight.item(), result.weighted_kl.item()) == (0.5, 0.75)
    assert not any(part.requires_grad for part in result[1:])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("sign", [1.0, -1.0])
def test_the_weighted_kl_is_at_most_a_hundredth_of_the_nll_unless_told_otherwise(dtype, sign):
    nll = torch.tensor(sign * 0.6875, dtype=dtype, requires_grad=True)
    kl = torch.tensor(258.0, requires_grad=True)
    result = elbo(nll, kl, labels_per_example=7.0)
    assert result.weighted_kl.item() == pytest.approx(0.006875, rel=1e-6)
    assert result.kl_weight.item() == pytest.approx(7 * 0.006875 / 258, rel=1e-6)
    result.loss.backward()
    # the cap is a number: it changes the KL's gradient, and not that of the NLL
    assert nll.grad is not None
    assert kl.grad is not None
    assert nll.grad.item() == 1.0
    assert kl.grad.item() == pytest.approx(0.006875 / 258, rel=1e-6)


def test_a_kl_below_its_share_has_the_weight_it_was_given():
    nll, kl = torch.tensor(2.0), torch.tensor(6.0)
    assert elbo(nll, kl, kl_weight=0.003).kl_weight.item() == pytest.approx(0.003)
    assert elbo(nll, kl, kl_weight=0.5, max_share=2.0).loss.item() == 2.0 + 0.5 * 6.0


@pytest.mark.parametrize(("nll", "kl", "loss"), [(0.0, 6.0, 0.0), (0.0, 0.0, 0.0), (2.0, 0.0, 2.0), (2.0, -6.0, 1.98)])
def test_the_cap_is_finite_where_a_part_is_zero_or_a_sampled_kl_negative(nll, kl, loss):
    leaf = torch.tensor(kl, requires_grad=True)
    result = elbo(torch.tensor(nll), leaf)
    result.loss.backward()
    assert result.loss.item() == pytest.approx(loss)
    assert leaf.grad is not None
    assert math.isfinite(leaf.grad.item())


def test_the_cap_is_that_of_each_micro_batch():
    nlls, kl = (torch.tensor(1.0), torch.tensor(3.0)), torch.tensor(50.0)
    assert [elbo(nll, kl, accumulation_steps=2).weighted_kl.item() for nll in nlls] == pytest.approx([0.01, 0.03])


def test_at_weight_zero_the_kl_stays_in_the_graph():
    nll, kl = torch.tensor(2.0, requires_grad=True), torch.tensor(6.0, requires_grad=True)
    elbo(nll, kl, kl_weight=0.0).loss.backward()
    assert kl.grad is not None
    assert kl.grad.item() == 0.0


class _Model(nn.Module):
    """Eval mode is deterministic and still records its KL, so gradients can be compared exactly."""

    def __init__(self, config: ba.AttentionConfig) -> None:
        super().__init__()
        self.attention = ba.nn.MultiheadAttention(6, 2, batch_first=True, config=config, dtype=torch.float64)
        self.head = nn.Linear(6, 3, dtype=torch.float64)
        self.eval()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.attention(x, x, x, need_weights=False)[0].mean(dim=1))


@pytest.mark.parametrize("preset", ["paper", "official-code", "default"])
@pytest.mark.parametrize("variant", ["BAM-WC", "BAM-LC"])
def test_the_gradient_is_the_same_at_every_batch_size_and_accumulation(variant, preset):
    model = _Model(ba.AttentionConfig(variant, preset=preset))
    inputs, labels = torch.randn(12, 5, 6, dtype=torch.float64), torch.randint(0, 3, (12,))

    def gradient(batch_size: int) -> torch.Tensor:
        model.zero_grad()
        steps = 12 // batch_size
        for part, target in zip(inputs.split(batch_size), labels.split(batch_size), strict=True):
            with ba.record_kl() as kl:
                logits = model(part)
            nll = nn.functional.cross_entropy(logits, target)
            elbo(nll, kl.total(), kl_weight=0.7, accumulation_steps=steps, max_share=None).loss.backward()
        return torch.cat([parameter.grad.flatten() for parameter in model.parameters() if parameter.grad is not None])

    whole = gradient(12)
    assert float(whole.abs().max()) > 1e-3
    for batch_size in (1, 4, 6):
        torch.testing.assert_close(gradient(batch_size), whole, rtol=1e-9, atol=1e-12)


def test_doubling_the_kl_weight_doubles_exactly_the_kl_part():
    model, x = _Model(ba.AttentionConfig("BAM-WC")), torch.randn(4, 5, 6, dtype=torch.float64)

    def gradient(weight: float) -> torch.Tensor:
        model.zero_grad()
        with ba.record_kl() as kl:
            nll = model(x).square().mean()
        elbo(nll, kl.total(), kl_weight=weight, max_share=None).loss.backward()
        return torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])

    none, one, two = gradient(0.0), gradient(1.0), gradient(2.0)
    assert not torch.allclose(one, none)
    torch.testing.assert_close(two - none, 2 * (one - none), rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"kl_weight": -0.1}, "kl_weight must be a finite number of at least 0, got -0.1"),
        ({"kl_weight": math.nan}, "kl_weight must be a finite number of at least 0, got nan"),
        ({"labels_per_example": 0.0}, "labels_per_example must be a finite number above 0, got 0.0"),
        ({"accumulation_steps": 0}, "accumulation_steps must be an integer of at least 1, got 0"),
        ({"max_share": 0.0}, "max_share must be a finite number above 0, or None for no cap, got 0.0"),
        ({"max_share": math.nan}, "max_share must be a finite number above 0, or None for no cap, got nan"),
    ],
)
def test_elbo_refuses_bad_numbers_by_name(options, named):
    with pytest.raises(ValueError, match=named):
        elbo(torch.tensor(1.0), torch.tensor(1.0), **options)


def test_elbo_takes_scalars_only(monkeypatch):
    no_type_checks(monkeypatch)
    with pytest.raises(ValueError, match=r"nll and kl must be scalars, got shapes \(3,\) and \(\)"):
        elbo(torch.zeros(3), torch.tensor(1.0))


def test_sigmoid_starts_at_a_half_and_never_overflows():
    schedule = KLSchedule("sigmoid", anneal_rate=0.2)
    assert schedule(0) == 0.5
    assert schedule(7) == pytest.approx(1 / (1 + math.exp(-1.4)))
    assert KLSchedule("sigmoid", anneal_rate=1000.0)(10**9) == 1.0


def test_linear_starts_at_zero_and_stays_at_the_end():
    schedule = KLSchedule("linear", period=8.0, final=0.5)
    assert [schedule(step) for step in (0, 2, 4, 8, 100)] == [0.0, 0.125, 0.25, 0.5, 0.5]


def test_cyclic_ramps_over_half_a_period_and_starts_again():
    schedule = KLSchedule("cyclic", period=8.0)
    assert [schedule(step) for step in range(17)] == [0, 0.25, 0.5, 0.75, 1, 1, 1, 1] * 2 + [0]


def test_constant_is_final_from_the_start():
    assert [KLSchedule("constant", final=0.3)(step) for step in (0, 1, 999)] == [0.3] * 3


@pytest.mark.parametrize("kind", ["sigmoid", "linear", "cyclic", "constant"])
def test_epochs_hold_the_weight_for_all_their_steps(kind):
    by_epoch = KLSchedule(kind, anneal_rate=0.7, period=4.0, anneal_unit="epoch", steps_per_epoch=5)
    by_step = KLSchedule(kind, anneal_rate=0.7, period=4.0)
    assert [by_epoch(step) for step in range(40)] == [by_step(epoch) for epoch in range(8) for _ in range(5)]


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"kind": "exponential"}, "kind must be one of 'constant', 'sigmoid', 'linear', 'cyclic', got 'exponential'"),
        ({"anneal_unit": "day"}, "anneal_unit must be one of 'step', 'epoch', got 'day'"),
        ({"anneal_unit": "epoch"}, "steps_per_epoch must be at least 1 with anneal_unit='epoch', got None"),
        ({"anneal_rate": 0.0}, "anneal_rate must be a finite number above 0, got 0.0"),
        ({"period": -1.0}, "period must be a finite number above 0, got -1.0"),
        ({"final": -1.0}, "final must be a finite number of at least 0, got -1.0"),
    ],
)
def test_schedules_refuse_bad_settings_by_name(options, named, monkeypatch):
    no_type_checks(monkeypatch)
    with pytest.raises(ValueError, match=named):
        KLSchedule(**options)


def test_a_negative_step_is_refused():
    with pytest.raises(ValueError, match="step must be at least 0, got -1"):
        KLSchedule()(-1)
