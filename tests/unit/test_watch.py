"""A KL that dwarfs the NLL and priors that no optimizer changes are said, once, and nothing else is."""

import warnings

import pytest
import torch
from torch import nn

import bayesattn as ba
from bayesattn import watch as _watch
from bayesattn.watch import KLWatch, check_optimizers

LAYER = {"dropout": 0.0, "batch_first": True}


def watch_nine_batches(monkeypatch, **options) -> None:
    monkeypatch.setattr(_watch, "BATCHES", 3)
    watch = KLWatch()
    for _ in range(9):
        parts = ba.elbo(torch.tensor(0.69), torch.tensor(258.0), **options)
        watch.add(parts.nll, parts.kl, parts.weighted_kl)


def test_a_kl_that_dwarfs_the_nll_is_said_once_with_the_numbers(monkeypatch):
    with pytest.warns(UserWarning, match=r"weighted KL was 129 \(the KL itself 258\) and the NLL 0\.69") as seen:
        watch_nine_batches(monkeypatch, kl_weight=0.5, max_share=None)
    assert len(seen) == 1


@pytest.mark.parametrize("options", [{}, {"max_share": None, "kl_weight": 0.02}])
def test_a_kl_that_is_capped_or_light_is_not_mentioned(options, monkeypatch):
    watch_nine_batches(monkeypatch, **options)


def test_a_few_heavy_batches_among_others_are_not_mentioned(monkeypatch):
    monkeypatch.setattr(_watch, "BATCHES", 7)
    watch = KLWatch()
    for index in range(14):
        watch.add(torch.tensor(0.69), torch.tensor(258.0), torch.tensor(30.0 if index % 7 == 0 else 0.1))


def converted(variant: str = "BAM-WC") -> tuple[nn.Module, torch.optim.Optimizer]:
    """A model, and an optimizer that was built before the conversion."""
    model = nn.TransformerEncoder(nn.TransformerEncoderLayer(6, 2, 7, **LAYER), 2, enable_nested_tensor=False)
    optimizer = torch.optim.Adam(model.parameters())
    return ba.bayesianize(model, ba.AttentionConfig(variant, prior_hidden_dim=5)), optimizer


def train(model: nn.Module, *optimizers: torch.optim.Optimizer, steps: int = 5, use_kl: bool = True) -> None:
    x = torch.randn(3, 5, 6)
    for _ in range(steps):
        with ba.record_kl(model) as kl:
            nll = model(x).square().mean()
        loss = ba.elbo(nll, kl.total()).loss if use_kl else nll
        model.zero_grad()
        loss.backward()
        for optimizer in optimizers:
            optimizer.step()


# two layers, of heads with three features: 2 · (3·5 + 5 + 5 + 1)
def test_an_optimizer_built_before_the_conversion_is_said_once():
    model, early = converted()
    with pytest.warns(UserWarning, match=r"52 parameters of priors \(the first is .*bayes_prior.* in no optimizer") as seen:
        train(model, early, steps=11)
    assert len(seen) == 1


def test_priors_without_a_gradient_are_said():
    model, _ = converted()
    with pytest.warns(UserWarning, match="got no gradient"):
        train(model, torch.optim.Adam(model.parameters()), use_kl=False)


@pytest.mark.parametrize("build", [torch.optim.SGD, torch.optim.Adam, lambda p: torch.optim.AdamW(p, fused=True)])
def test_a_training_that_is_right_hears_nothing(build):
    model, _ = converted()
    train(model, build(model.parameters()))


def test_a_second_optimizer_for_the_priors_a_model_without_and_frozen_ones_hear_nothing():
    model, early = converted()
    train(model, early, torch.optim.Adam(_watch.added_parameters(model).values()))
    train(*converted("BAM-WF"))
    model, early = converted()
    for parameter in _watch.added_parameters(model).values():
        parameter.requires_grad_(False)
    train(model, early)


def test_a_validation_pass_counts_for_nothing():
    model, _ = converted()
    optimizer = torch.optim.Adam(model.parameters())
    train(model, optimizer, steps=1)
    for _ in range(7):
        with torch.no_grad(), ba.record_kl(model):
            model(torch.randn(3, 5, 6))
    train(model, optimizer, steps=2)


def test_optimizers_are_searched_for_the_priors():
    model, early = converted()
    with pytest.warns(
        UserWarning, match=r"52 parameters of priors are in no optimizer .*build the optimizer after bayesianize"
    ):
        check_optimizers(model, [early])
    check_optimizers(model, [early, torch.optim.Adam(_watch.added_parameters(model).values())])
    # one over tensors of its own, as FSDP makes them: nothing is known
    check_optimizers(model, [torch.optim.Adam([torch.zeros(3, requires_grad=True)])])
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        check_optimizers(converted("BAM-WF")[0], [early])
