"""The attention kernels without gradients: predictions skip the autograd node, and are what they are with it."""

import pytest
import torch
from kernel_device import DEVICE, MARKS
from torch.autograd import forward_ad

import bayesattn as ba
from bayesattn.functional import attention

pytestmark = MARKS


def call(*tensors, variant="BAM-WF", **options):
    """Return output and KL of one draw, always the same."""
    config = ba.AttentionConfig(variant, weibull_k=2.0)
    return attention(*tensors, config=config, backend="triton", seed=77, **options)


def inputs() -> list[torch.Tensor]:
    return [torch.randn(2, 3, n, 11, device=DEVICE) for n in (5, 7, 7)]


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize("need_kl", [False, True])
@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("variant", ["BAM-NOKL", "BAM-WF", "BAM-LF"])
def test_a_prediction_is_the_forward_pass_of_training(variant, is_causal, need_kl, mode):
    tensors = inputs()
    trained = call(*(x.requires_grad_() for x in tensors), variant=variant, is_causal=is_causal, need_kl=need_kl)
    with mode():
        predicted = call(*tensors, variant=variant, is_causal=is_causal, need_kl=need_kl)
    assert trained[0].requires_grad
    for ours, truth in zip(predicted, trained, strict=True):
        assert (ours is None) == (truth is None)
        assert ours is None or (not ours.requires_grad and torch.equal(ours, truth))


def test_forward_mode_derivatives_are_refused_and_not_dropped():
    query, *rest = inputs()
    with torch.no_grad(), forward_ad.dual_level():
        dual = forward_ad.make_dual(query, torch.ones_like(query))
        with pytest.raises(NotImplementedError, match="jvp"):
            call(dual, *rest, need_kl=False)


def test_function_transforms_are_refused_by_name():
    stacked = torch.randn(3, 1, 2, 5, 8, device=DEVICE)
    with torch.no_grad(), pytest.raises(ValueError, match=r"backend 'triton' cannot be used here: torch\.func"):
        torch.vmap(lambda x: call(x, x, x, need_kl=False)[0])(stacked)
