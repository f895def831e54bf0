"""The score-function estimator against exact gradients, on a problem small enough to write out its expectation."""

import pytest
import torch
from torch import nn

from bayesattn_recipes.baselines import AttentionChoice, HardWeights, with_score_function
from bayesattn_recipes.baselines.score_function import cost_to_go, score_function
from helpers import assert_within_standard_errors

# two decoding steps over three keys; the second loss depends on both choices, and both have a common offset
FIRST = torch.tensor([7.0, 5.0, 6.0], dtype=torch.float64)
SECOND = torch.tensor([[6.0, 9.0, 5.5], [5.0, 6.5, 8.0], [7.5, 6.0, 5.0]], dtype=torch.float64)
SCORES = torch.tensor([[0.3, -0.5, 0.9], [-0.2, 0.4, 0.1]], dtype=torch.float64)
DRAWS = 20_011


class TwoSteps(nn.Module):
    """A "decoder" whose losses are linear in the weights, so that soft attention gives their expectation."""

    def __init__(self, scores, **options):
        super().__init__()
        self.scores = scores
        self.weights = HardWeights(AttentionChoice("hard-reinforce", **options)).double()

    def forward(self):
        first, second = (self.weights(self.scores[:, t : t + 1])[:, 0] for t in range(2))
        return torch.stack([first @ FIRST, torch.einsum("bi,bj,ij->b", first, second, SECOND)], dim=1)


def exact_gradient():
    scores = SCORES.clone().requires_grad_()
    p, q = torch.softmax(scores, dim=-1)
    (p @ FIRST + p @ SECOND @ q).backward()
    return scores.grad


def draw_gradients(by_step=True, warm_up=0, **options):
    """One gradient for every draw: each has scores of its own."""
    torch.manual_seed(3)
    scores = SCORES.expand(DRAWS, 2, 3).clone().requires_grad_()
    model = TwoSteps(scores, **options)
    for _ in range(1 + warm_up):
        scores.grad = None
        loss = with_score_function(model, model if by_step else lambda: model().sum(dim=1))
        loss.sum().backward()
    return scores.grad


@pytest.mark.parametrize("baseline", ["none", "moving-average", "self-critical"])
@pytest.mark.parametrize("by_step", [True, False])
def test_gradient_is_unbiased(baseline, by_step):
    gradients = draw_gradients(by_step, warm_up=2 if baseline == "moving-average" else 0, baseline=baseline)
    for step in range(2):
        for key in range(3):
            expected = float(exact_gradient()[step, key])
            assert_within_standard_errors(gradients[:, step, key], expected, (baseline, step, key))


def variance(gradients):
    return float(gradients.var(dim=0).sum())


def test_baselines_reduce_the_variance():
    plain = variance(draw_gradients(baseline="none"))
    # an offset of about 6 a step makes up most of the variance; its relative standard error is about 1 %
    assert variance(draw_gradients(baseline="moving-average", warm_up=2)) < 0.2 * plain
    assert variance(draw_gradients(baseline="self-critical")) < 0.2 * plain


def test_charging_only_later_losses_reduces_the_variance():
    assert variance(draw_gradients(by_step=True, baseline="none")) < 0.8 * variance(draw_gradients(False, baseline="none"))


def test_values_are_the_losses_themselves():
    scores = SCORES.expand(7, 2, 3).clone().requires_grad_()
    model = TwoSteps(scores, baseline="self-critical", entropy_bonus=0.3)
    seen = []

    def run():
        seen.append(model().detach())
        return model_losses(model, seen)

    attached = with_score_function(model, run)
    assert torch.equal(attached.detach(), seen[0])
    # the second call is the baseline's: soft attention, so all rows agree
    assert len(seen) == 2
    assert torch.allclose(seen[1], seen[1][:1].expand(7, 2))


def model_losses(model, seen):
    # the choices of this pass were made in `seen[-1]`; a constant with the graph of the scores
    return seen[-1] + 0.0 * model.scores.sum()


def test_entropy_bonus_adds_the_gradient_of_the_entropy():
    plain, bonus = (draw_gradients(baseline="none", entropy_bonus=value) for value in (0.0, 0.7))
    scores = SCORES.clone().requires_grad_()
    log_p = torch.log_softmax(scores, dim=-1)
    (-0.7 * -(log_p.exp() * log_p).sum()).backward()
    # the same draws: nothing but the bonus differs, up to rounding of float64
    assert torch.allclose(bonus - plain, scores.grad.expand_as(plain), atol=1e-12)


def test_steps_without_a_label_earn_no_bonus_and_no_baseline():
    scores = SCORES.expand(5, 2, 3).clone().requires_grad_()
    model = TwoSteps(scores, baseline="moving-average", entropy_bonus=0.5)
    steps = torch.tensor([True, False]).expand(5, 2)
    model.weights.average_cost.fill_(9.0)
    model.weights.num_averaged.fill_(1e6)
    with_score_function(model, lambda: model() * steps, steps).sum().backward()
    assert not scores.grad[:, 1].any()
    assert scores.grad[:, 0].any()


def test_moving_average_is_of_the_loss_a_label():
    model = TwoSteps(SCORES.expand(1009, 2, 3).clone().requires_grad_(), baseline="moving-average")
    for _ in range(30):
        losses = with_score_function(model, model)
    known = model.weights.average_cost / (1.0 - 0.9**model.weights.num_averaged)
    # a mean of 2,018 losses with a deviation below 1.5, averaged over about ten calls; five standard errors
    assert abs(float(known) - float(losses.detach().mean())) < 5 * 1.5 / 2018**0.5


def test_training_outside_of_the_wrapper_is_an_error():
    model = TwoSteps(SCORES[None].clone().requires_grad_())
    with pytest.raises(RuntimeError, match=r"hard-reinforce attention must be trained inside baselines.with_score_function"):
        model()
    with torch.no_grad():
        model()


def test_losses_by_step_need_one_choice_a_step():
    model = TwoSteps(SCORES[None].clone().requires_grad_())
    with pytest.raises(ValueError, match=r"got losses of shape \(1, 3\) for 2 choices per example"):
        with_score_function(model, lambda: torch.cat([model(), model.scores[:, :1, 0]], dim=1))
    # nothing is left behind
    assert model.weights.choices is None


def test_models_without_hard_attention_are_called_once_and_unchanged():
    calls = []
    losses = torch.ones(3, 2, requires_grad=True)
    assert with_score_function(nn.Linear(2, 2), lambda: calls.append(1) or losses) is losses
    assert calls == [1]


def test_term_has_value_zero_and_the_gradient_of_the_advantage():
    log_prob = torch.tensor([-0.3, -1.7], requires_grad=True)
    term = score_function(torch.tensor([2.0, 5.0]), log_prob, torch.tensor([0.5, 1.0]))
    term.sum().backward()
    assert torch.equal(term.detach(), torch.zeros(2))
    assert torch.equal(log_prob.grad, torch.tensor([1.5, 4.0]))


def test_cost_to_go_sums_from_each_step_on():
    assert cost_to_go(torch.tensor([[1.0, 2.0, 4.0]])).tolist() == [[7.0, 6.0, 4.0]]
