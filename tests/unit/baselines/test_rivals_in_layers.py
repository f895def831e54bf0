"""Rivals in the place of the softmax: many heads and layers, dense scores and edges, and their gradients."""

import itertools
import math

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from bayesattn import AttentionConfig, record_kl, sampling
from bayesattn.functional import Edges
from bayesattn.nn import MultiheadAttention, TransformerEncoderLayer
from bayesattn.noise.keyed import keyed_noise
from bayesattn.ops.segment import csr, plain
from bayesattn_recipes.baselines import (
    AttentionChoice,
    RivalAttention,
    attention_options,
    build_weights,
    with_score_function,
)
from bayesattn_recipes.baselines.rows import DenseRows, EdgeRows
from helpers import REDUCTIONS, assert_finite, assert_within_standard_errors

IN_LAYERS = ("hard-reinforce", "hard-gumbel", "gaussian-context", "gaussian-weights", "mc-dropout")
# the mean of Gaussian weights is Φ / ΣΦ
SOFT_ON_AVERAGE = tuple(variant for variant in IN_LAYERS if variant != "gaussian-weights")
VARIATIONAL = ("variational-exact", "variational-enum", "variational-sample", "variational-dirichlet")


def attention(variant, embed_dim=12, heads=3, dropout=0.0, **options) -> MultiheadAttention:
    torch.manual_seed(5)
    config = AttentionChoice(variant, **options)
    return MultiheadAttention(embed_dim, heads, dropout=dropout, batch_first=True, **attention_options(config))


def tokens(b=2, m=5, embed_dim=12, dtype=torch.float32):
    return torch.randn(b, m, embed_dim, dtype=dtype, generator=torch.Generator().manual_seed(7))


PADDING = torch.tensor([[False] * 5, [False, False, True, True, True]])


# many heads


@pytest.mark.parametrize("variant", SOFT_ON_AVERAGE)
@pytest.mark.parametrize("need_weights", [True, False])
def test_eval_mode_is_torchs_module_bit_for_bit(variant, need_weights):
    ours, stock = attention(variant).eval(), nn.MultiheadAttention(12, 3, batch_first=True).eval()
    own = {name: value for name, value in ours.state_dict().items() if "bayes_weights" not in name}
    stock.load_state_dict(own)
    x, options = tokens(), {"key_padding_mask": PADDING, "need_weights": need_weights}
    with torch.no_grad():
        found, expected = ours(x, x, x, **options), stock(x, x, x, **options)
    assert torch.equal(found[0], expected[0])
    assert not need_weights or torch.equal(found[1], expected[1])


@pytest.mark.parametrize("variant", [*IN_LAYERS, "BAM-WC", "BAM-LF"])
def test_training_gives_every_parameter_a_gradient_and_padding_none(variant):
    options = {"sampled_kl": True} if variant.startswith("BAM") else {}
    layer = attention(variant, dropout=0.1, **options)
    x = tokens().requires_grad_()

    def losses():
        output, weights = layer(x, x, x, key_padding_mask=PADDING, average_attn_weights=False)
        assert not weights[1, :, :, 2:].any()
        return output[:, :2].square().mean(dim=(1, 2))

    with record_kl() as kl:
        loss = with_score_function(layer, losses).sum()
    assert (len(kl) > 0) == AttentionChoice(variant, **options).has_kl
    (loss + kl.total()).backward()
    # keys that follow no query: padding
    assert_finite(x.grad, *(parameter.grad for parameter in layer.parameters()))
    names = [name for name, parameter in layer.named_parameters() if not parameter.grad.any()]
    # the last bias of the prior network cancels in its softmax
    assert all("bayes_prior" in name for name in names)


@pytest.mark.parametrize("variant", ["hard-reinforce", "hard-gumbel", "gaussian-context", "gaussian-weights"])
def test_sampling_draws_in_eval_mode_inside_torchs_encoder(variant):
    layer = TransformerEncoderLayer(12, 3, 16, 0.0, batch_first=True, **attention_options(AttentionChoice(variant))).eval()
    with torch.no_grad(), sampling(layer):
        assert not torch.equal(layer(tokens()), layer(tokens()))
    assert torch.equal(layer(tokens()), layer(tokens()))


@pytest.mark.parametrize("is_training", [True, False])
def test_uniform_attention_gives_every_open_key_the_same_weight(is_training):
    layer, x = attention("uniform").train(is_training), tokens()
    _, weights = layer(x, x, x, key_padding_mask=PADDING, average_attn_weights=False)
    assert torch.equal(
        weights, torch.where(PADDING, 0.0, 1.0 / (~PADDING).sum(dim=1, keepdim=True))[:, None, None].expand(2, 3, 5, 5)
    )


def test_mc_dropout_needs_no_other_dropout_and_replaces_the_modules_own():
    layer = attention("mc-dropout", dropout=0.9, attention_dropout=0.5)
    x = tokens()
    with torch.no_grad():
        output, weights = layer(x, x, x, average_attn_weights=False)
        assert torch.allclose(output, layer._merge(weights @ layer._project(x, x, x)[2]), atol=1e-6)
    kept = weights / layer.eval()(x, x, x, average_attn_weights=False)[1].detach()
    # dropout at 0.5 scales by 2; at 0.9 it would by 10
    assert torch.allclose(kept[kept > 0.0], torch.full_like(kept[kept > 0.0], 2.0))
    assert (kept == 0.0).any()
    with torch.no_grad(), sampling(layer, dropout=True):
        assert not torch.equal(layer(x, x, x)[0], layer(x, x, x)[0])


@pytest.mark.parametrize("variant", IN_LAYERS)
def test_autocast_leaves_weights_and_kl_in_float32(variant):
    layer, x = attention(variant), tokens()
    with torch.autocast("cpu", torch.bfloat16), record_kl() as kl:
        losses = with_score_function(layer, lambda: layer(x, x, x, need_weights=False)[0].float().square().mean(dim=(1, 2)))
    assert all(value.dtype == torch.float32 for _, value in kl.per_call())
    (losses.sum() + kl.total()).backward()
    assert_finite(*(parameter.grad for parameter in layer.parameters()))


@pytest.mark.parametrize("variant", ["soft", "BAM-WC", "BAM-LF", "BAM-NOKL"])
def test_own_variants_of_a_choice_are_those_of_a_plain_config_bit_for_bit(variant):
    results = []
    for config in (AttentionConfig(variant), AttentionChoice(variant)):
        torch.manual_seed(3)
        layer = MultiheadAttention(12, 3, batch_first=True, dropout=0.1, **attention_options(config))
        assert layer.bayes_weights is None
        x = tokens().requires_grad_()
        with record_kl() as kl:
            output = layer(x, x, x, need_weights=False)[0]
        total = output.square().sum() + kl.total()
        total.backward()
        results.append({"output": output.detach(), "x": x.grad, **{name: p.grad for name, p in layer.named_parameters()}})
    assert results[0].keys() == results[1].keys()
    assert all(torch.equal(results[0][name], results[1][name]) for name in results[0])


@pytest.mark.parametrize("variant", ["BAM-WC", "BAM-LC"])
def test_sampled_kl_of_many_heads_estimates_the_closed_form(variant):
    options = {"weibull_k": 3.0, "kl_reduction": "sum"}
    ours, closed = attention(variant, sampled_kl=True, **options), attention(variant, **options)
    state = {name.replace("bayes_weights.weights.", ""): value for name, value in ours.state_dict().items()}
    closed.load_state_dict(state)
    x, padding = tokens()[1:].expand(4001, 5, 12), PADDING[1:].expand(4001, 5)
    with torch.no_grad():
        drawn, expected = ({}, {})
        for layer, found in ((ours, drawn), (closed, expected)):
            with record_kl() as kl:
                layer(x, x, x, key_padding_mask=padding)
            found["kl"] = kl.per_call()[0][1]
    assert_within_standard_errors(drawn["kl"], float(expected["kl"][0]), variant)


def test_noise_inside_keyed_noise_belongs_to_the_example():
    for variant in ("hard-gumbel", "gaussian-context"):
        layer, x, seeds = attention(variant), tokens(), torch.tensor([101, 202])
        outputs = []
        for order in ([0, 1], [1, 0]):
            with torch.no_grad(), keyed_noise(seeds[order]):
                outputs.append(layer(x[order], x[order], x[order])[0])
        # batches of another order are multiplied in another order
        assert torch.allclose(outputs[0], outputs[1][[1, 0]], atol=1e-6)


# gradients of hard choices


class TwoLayers(nn.Module):
    """Two layers of two heads over the same three keys; the loss is not linear in what they return."""

    def __init__(self, **options):
        super().__init__()
        self.first, self.second = (attention("hard-reinforce", 4, 2, **options).double() for _ in range(2))
        with torch.no_grad():
            for parameter in self.second.parameters():
                parameter.mul_(-1.3)

    def forward(self, query, keys):
        found, _ = self.first(query, keys, keys)
        found, _ = self.second(found, keys, keys)
        return (found[:, 0] - 0.4).square().sum(dim=1) + 2.0

    def exact(self, query, keys):
        """Return the expectation over all 3⁴ choices, written out."""

        def outcomes(layer, query):
            q, k, v = layer._project(query, keys, keys)
            probabilities = torch.softmax(torch.einsum("hd,hnd->nh", q[0, :, 0], k[0]) / math.sqrt(2.0), dim=0)
            for one, two in itertools.product(range(3), repeat=2):
                heads = torch.cat([v[0, 0, one], v[0, 1, two]])
                output = heads @ layer.out_proj.weight.T + layer.out_proj.bias
                yield probabilities[one, 0] * probabilities[two, 1], output.view(1, 1, 4)

        total = 0.0
        for p, found in outcomes(self.first, query):
            for q, last in outcomes(self.second, found):
                total = total + p * q * ((last[0, 0] - 0.4).square().sum() + 2.0)
        return total


@pytest.mark.parametrize("baseline", ["none", "moving-average", "self-critical"])
def test_gradient_through_two_layers_of_two_heads_is_unbiased(baseline):
    model, draws = TwoLayers(baseline=baseline), 8009
    query, keys = tokens(1, 1, 4, torch.float64), tokens(1, 3, 4, torch.float64)
    exact = [x.clone().requires_grad_() for x in (query, keys)]
    model.exact(*exact).backward()
    torch.manual_seed(2)
    for _ in range(2 if baseline == "moving-average" else 1):
        # every draw has inputs of its own: one gradient for each
        own = [x.expand(draws, -1, -1).clone().requires_grad_() for x in (query, keys)]
        with_score_function(model, lambda own=own: model(*own)).sum().backward()
    for one, expected in zip(own, exact, strict=True):
        for place in itertools.product(*map(range, one.shape[1:])):
            samples = one.grad[(slice(None), *place)]
            assert_within_standard_errors(samples, float(expected.grad[0][place]), (baseline, place))


def test_the_loss_of_a_batch_charges_all_its_choices_and_is_unbiased_too():
    model, draws = TwoLayers(baseline="none"), 6007
    query, keys = tokens(1, 1, 4, torch.float64), tokens(1, 3, 4, torch.float64)
    exact = query.clone().requires_grad_()
    model.exact(exact, keys).backward()
    own = query.expand(2 * draws, -1, -1).clone().requires_grad_()
    # pairs of examples whose losses come as one, as a Trainer's do
    run = lambda: model(own, keys.expand(2 * draws, -1, -1)).view(draws, 2).sum(dim=1)  # noqa: E731
    with_score_function(model, run).sum().backward()
    for feature in range(4):
        assert_within_standard_errors(own.grad.view(draws, 2, 4)[:, 0, feature], float(exact.grad[0, 0, feature]), feature)


def test_checkpointed_choices_get_the_same_gradient():
    gradients = []
    for saves in (False, True):
        layer, x = attention("hard-reinforce", baseline="none"), tokens().requires_grad_()
        torch.manual_seed(1)

        def run(layer=layer, x=x, saves=saves):
            call = lambda x: layer(x, x, x)[0]  # noqa: E731
            return (checkpoint(call, x, use_reentrant=False) if saves else call(x)).square().sum(dim=(1, 2))

        with_score_function(layer, run).sum().backward()
        gradients.append([x.grad, *(parameter.grad for parameter in layer.parameters())])
    assert all(torch.equal(one, other) for one, other in zip(*gradients, strict=True))


def test_reentrant_checkpoints_are_refused_because_the_choice_would_have_no_gradient():
    layer, x = attention("hard-reinforce"), tokens().requires_grad_()
    run = lambda: checkpoint(lambda x: layer(x, x, x)[0], x, use_reentrant=True).sum(dim=(1, 2))  # noqa: E731
    with pytest.raises(RuntimeError, match=r"hard-reinforce attention ran without gradients .* use_reentrant=False"):
        with_score_function(layer, run)


def test_losses_of_more_examples_than_attention_saw_are_refused():
    layer, x = attention("hard-reinforce"), tokens()
    with pytest.raises(
        ValueError, match=r"run\(\) must return one loss per example.*, got losses of shape \(3,\) for 2 examples"
    ):
        with_score_function(layer, lambda: layer(x, x, x)[0].sum() * torch.ones(3))


# edges

HEADS, TARGETS, SOURCES, FEATURES = 3, 7, 11, 5


@pytest.fixture
def graph():
    """Edges in both forms, with a target that has none; scores and values."""
    generator = torch.Generator().manual_seed(11)
    mask = torch.rand(TARGETS, SOURCES, generator=generator) < 0.4
    mask[2] = False
    target, source = mask.nonzero().T
    edges = Edges.sort(source, target, SOURCES, TARGETS)
    scores = torch.randn(1, HEADS, TARGETS, SOURCES, dtype=torch.float64, generator=generator)
    value = torch.randn(1, HEADS, SOURCES, FEATURES, dtype=torch.float64, generator=generator)
    return edges, mask, scores, value


@pytest.fixture
def same_noise(monkeypatch):
    """The same draws for a matrix and for its edges, and for outputs in both layouts."""

    def of(draw, like):
        name = getattr(draw, "__name__", "keep")
        positive = {"exponential": lambda x: x.exp(), "normal": lambda x: x, "keep": lambda x: 2.0 * (x > 0.0)}[name]
        generator = torch.Generator().manual_seed(len(name))
        last = {SOURCES: SOURCES, FEATURES: FEATURES}[like]
        return positive(torch.randn(1, HEADS, TARGETS, last, dtype=torch.float64, generator=generator))

    def on_edges(self, draw, like):
        if like.ndim == 3:
            return of(draw, FEATURES)[0].transpose(0, 1)
        return of(draw, SOURCES)[0, :, self.edges.target, self.edges.source].T

    monkeypatch.setattr(DenseRows, "_draw", lambda self, draw, like: of(draw, like.shape[-1]))
    monkeypatch.setattr(EdgeRows, "_draw", on_edges)
    monkeypatch.setattr(DenseRows, "keep", lambda self, like, p: of(None, SOURCES))
    monkeypatch.setattr(EdgeRows, "keep", lambda self, like, p: on_edges(self, None, like))


@pytest.mark.parametrize("ops", [plain, csr], ids=["plain", "csr"])
@pytest.mark.parametrize("variant", [*IN_LAYERS, "straight-through"])
def test_edges_are_the_dense_matrix_with_the_adjacency_as_mask(variant, ops, graph, same_noise):
    edges, mask, scores, value = graph
    options = {"straight_through": True} if variant == "straight-through" else {}
    for reduction in REDUCTIONS:
        config = AttentionChoice((options and "hard-gumbel") or variant, kl_reduction=reduction, **options)
        torch.manual_seed(0)
        module = RivalAttention(config, head_dim=FEATURES, num_heads=HEADS).double()
        gradients, results = [], []
        for is_dense in (True, False):
            x, v = (y.clone().requires_grad_() for y in (scores, value))
            if module.weights is not None and hasattr(module.weights, "choices"):
                module.weights.choices = []
            with record_kl():
                if is_dense:
                    output, _, kl = module(x, v, v, mask=mask, dropout_p=0.0)
                    output = output[0].transpose(0, 1)
                else:
                    on_edges = x[0, :, edges.target, edges.source].T
                    output, _, _, kl = module.on_edges(on_edges, v[0].transpose(0, 1), edges, ops, dropout_p=0.0)
            loss = (output * torch.linspace(-1.0, 1.0, FEATURES, dtype=torch.float64)).sum()
            if variant == "hard-reinforce":
                log_prob, entropy = module.weights.choices[0]
                loss = loss + (log_prob * torch.arange(TARGETS)).sum() + 0.1 * entropy.sum()
            assert (kl is None) == (not config.has_kl)
            loss = loss if kl is None else loss + kl.sum()
            gradients.append(torch.autograd.grad(loss, (x, v)))
            results.append((output, kl))
        # the same sums in another order, in float64
        assert torch.allclose(results[0][0], results[1][0], atol=1e-10)
        assert not results[1][0][2].any()
        assert config.has_kl is False or torch.allclose(results[0][1], results[1][1], rtol=1e-10)
        for one, other in zip(*gradients, strict=True):
            assert torch.allclose(one, other, atol=1e-9 * float(one.abs().max().clamp(min=1.0)))


def test_hard_edges_are_chosen_with_the_probability_of_the_softmax():
    copies = 20_011
    scores = torch.tensor([0.5, -1.0, 0.0])
    target = torch.arange(copies).repeat_interleave(3)
    edges = Edges.sort(torch.arange(3).repeat(copies), target, 3, copies)
    with torch.no_grad():
        module = build_weights(AttentionChoice("hard-reinforce"))
        weights, _ = module.draw(scores.repeat(copies)[:, None], EdgeRows(edges, plain))
    drawn = weights.view(copies, 3)
    assert torch.equal(drawn.sum(dim=1), torch.ones(copies))
    for key, probability in enumerate(torch.softmax(scores, dim=0).tolist()):
        assert_within_standard_errors(drawn[:, key], probability, key)


def test_of_equally_large_edges_one_is_chosen():
    edges = Edges.sort(torch.tensor([0, 1, 2, 0]), torch.tensor([0, 0, 0, 1]), 3, 2)
    chosen = EdgeRows(edges, plain).largest(torch.tensor([[1.0], [2.0], [2.0], [0.0]]))
    assert chosen.flatten().tolist() == [0.0, 1.0, 0.0, 1.0]


# refusals


@pytest.mark.parametrize("variant", VARIATIONAL)
def test_latent_alignments_are_refused_by_modules_of_many_heads(variant):
    message = f"variant '{variant}' needs the likelihood .* every single key, .* Choose one of .*'mc-dropout', 'uniform'$"
    with pytest.raises(ValueError, match=message):
        attention_options(AttentionChoice(variant))
    with pytest.raises(ValueError, match=f"this module runs only 'soft', .*, got variant '{variant}'"):
        MultiheadAttention(12, 3, config=AttentionChoice(variant))


def test_the_sampled_kl_is_refused_on_edges():
    with pytest.raises(ValueError, match=r"sampled_kl must be False on edges"):
        attention_options(AttentionChoice("BAM-WC", sampled_kl=True), on_edges=True)
