"""The closed form in decoders whose attention is called once per step: drawn ahead or at every step, each call counts."""

import math
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import bayesattn as ba
from bayesattn.sensitivity import score_sensitivity

B, N, T, VOCABULARY, PAD = 3, 7, 5, 13, 0
TINY = ba.AttentionConfig("BAM-NOKL", weibull_k=3000.0)


class Decoder(nn.Module):
    """A GRU that reads the last token and attends; it plans its steps or calls the attention at each."""

    def __init__(self, config=None, *, plans=True, weights=None):
        super().__init__()
        self.config = SimpleNamespace(is_encoder_decoder=True)
        self.embed = nn.Embedding(VOCABULARY, 8)
        self.attention = ba.nn.StepAttention(6, 8, 10, config=config, weights=weights)
        self.cell, self.head = nn.GRUCell(16, 6), nn.Linear(14, VOCABULARY)
        self.plans = plans
        # added to the scores, so that their gradient can be asked for
        self.added = None

    def forward(self, input_ids, decoder_input_ids):
        values, mask = self.embed(input_ids), input_ids != PAD
        keys, _ = self.attention.prepare(values, mask)
        bias = self.attention.plan_bias(mask, decoder_input_ids.shape[1])
        state = values.new_zeros(len(values), 6)
        context, logits = values.new_zeros(len(values), 8), []
        for t, token in enumerate(decoder_input_ids.unbind(1)):
            state = self.cell(torch.cat([self.embed(token), context], dim=-1), state)
            scores = self.attention.scores(state.unsqueeze(1), keys)
            scores = scores if self.added is None else scores + self.added[:, t].unsqueeze(1)
            if self.plans:
                context, _ = self.attention.planned(scores, values, bias[:, min(t, bias.shape[1] - 1)].unsqueeze(1))
            else:
                context, _ = self.attention.attend(scores, values, mask=mask)
            context = context.squeeze(1)
            logits.append(self.head(torch.cat([state, context], dim=-1)))
        return torch.stack(logits, dim=1)


def build(config=TINY, *, plans=True):
    """Return a decoder whose attention matters, a batch in which the second source has padding, and the tokens to score."""
    torch.manual_seed(5)
    model = Decoder(config, plans=plans).double().eval()
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.7)
    source, target = torch.randint(1, VOCABULARY, (B, N)), torch.randint(1, VOCABULARY, (B, T))
    source[1, 4:] = PAD
    inputs = {"input_ids": source, "decoder_input_ids": F.pad(target[:, :-1], (1, 0), value=1)}
    labels = target.masked_fill(torch.arange(T) >= torch.tensor([[T], [T], [3]]), -100)
    return model, inputs, labels


def mean_log_probability(logits, labels):
    counted = labels != -100
    logs = torch.log_softmax(logits, dim=-1).gather(2, labels.clamp(min=0).unsqueeze(2)).squeeze(2)
    return (logs * counted).sum(dim=1) / counted.sum(dim=1)


@pytest.mark.parametrize("plans", [True, False])
def test_equals_the_gradients_of_the_scores_of_every_step(plans):
    model, inputs, labels = build(plans=plans)
    with torch.no_grad():
        value = mean_log_probability(model(**inputs), labels)
    model.added = torch.zeros(B, T, N, dtype=torch.float64, requires_grad=True)
    (grad,) = torch.autograd.grad(mean_log_probability(model(**inputs), labels).sum(), model.added)
    model.added = None
    result = ba.uncertainty(model, inputs, target=lambda logits: mean_log_probability(logits, labels))
    assert torch.equal(result.value, value)
    squares = math.pi**2 / (6 * TINY.weibull_k**2) * grad.square()
    assert torch.allclose(result.by_token, squares.sum(dim=1), rtol=1e-10, atol=0)
    assert (result.by_token[1, 4:] == 0).all()
    assert (result.std > 0).all()
    (layer,) = result.by_layer
    assert layer == "attention.weights"
    assert result.by_head[layer].shape == (B, 1)
    for parts in (result.by_layer[layer], result.by_head[layer].sum(1), result.by_token.sum(1)):
        assert torch.allclose(parts, result.std.square(), rtol=1e-10)


def test_equals_the_variance_of_a_hundred_thousand_draws():
    model, inputs, labels = build()
    # the source with padding
    inputs, labels = {name: value[1:2] for name, value in inputs.items()}, labels[1:2]
    exact = ba.uncertainty(model, inputs, target=lambda logits: mean_log_probability(logits, labels))
    many = {name: value.repeat(10_000, 1) for name, value in inputs.items()}
    total = torch.zeros(2, dtype=torch.float64)
    with torch.no_grad(), ba.sampling(model):
        for _ in range(10):
            moved = mean_log_probability(model(**many), labels.repeat(10_000, 1)) - exact.value
            total += torch.stack([moved.sum(), moved.square().sum()])
    mean, square = total / 1e5
    ratio = (square - mean.square()) / exact.std.square()
    assert (ratio - 1.0).abs() < 4.0 * math.sqrt(2.0 / 1e5)


def test_a_text_is_scored():
    found = []
    for plans in (True, False):
        model, inputs, labels = build(plans=plans)
        with torch.no_grad():
            logits = model(**inputs)
        score = ba.score(model, inputs, labels)
        assert torch.equal(score.num_tokens, torch.tensor([T, T, 3]))
        assert torch.allclose(score.mean_log_probability, mean_log_probability(logits, labels), rtol=1e-12)
        assert torch.allclose(score.by_token.sum(1), score.std.square(), rtol=1e-10)
        assert score.by_token.shape == (B, N)
        found.append(score)
    assert torch.allclose(found[0].std, found[1].std, rtol=1e-10)
    # a sum over tokens has as many times the deviation of their mean
    mean = ba.uncertainty(model, inputs, target=lambda logits: mean_log_probability(logits, labels))
    assert torch.allclose(found[1].std, mean.std * score.num_tokens, rtol=1e-10)


def test_steps_that_are_run_together_are_one_call():
    model, inputs, _ = build()
    attention, values, mask = model.attention, model.embed(inputs["input_ids"]), inputs["input_ids"] != PAD
    keys = attention.prepare(values, mask)[0].detach()
    with score_sensitivity() as calls:
        scores = attention.scores(torch.randn(B, T, 6, dtype=torch.float64), keys)
        context, _ = attention.planned(scores, values.detach(), attention.plan_bias(mask, T))
    assert [call.shape for call in calls] == [(B, 1, N)]
    scores.retain_grad()
    context.square().sum().backward()
    assert torch.allclose(calls[0].squares.squeeze(1), scores.grad.square().sum(dim=1), rtol=1e-10)


class Sharp(nn.Module):
    """Weights of a user's own, drawn ahead."""

    name, has_kl, kl_reduction, has_own_dropout, runs_on_edges, is_idle = "sharp", False, None, False, False, False
    needs_kl = False

    def settings(self):
        return {}

    def forward(self, scores, key, value, *, mask, dropout_p):
        raise NotImplementedError

    def on_edges(self, scores, value, edges, ops, *, dropout_p):
        raise NotImplementedError

    def edge_weights(self, scores, edges, ops):
        raise NotImplementedError

    def plan_bias(self, mask, num_steps):
        return torch.zeros(len(mask), 1, mask.shape[1]).masked_fill(~mask.unsqueeze(1), -math.inf)

    def planned_weights(self, scores, bias):
        return torch.softmax(2.0 * scores + bias, dim=-1)


def test_weights_of_ones_own_have_no_noise_that_is_known():
    _, inputs, labels = build()
    model = Decoder(weights=Sharp()).double().eval()
    assert model.attention.draws_ahead
    with pytest.raises(ValueError, match=r"its own weights .sharp.*no noise"):
        ba.score(model, inputs, labels)
