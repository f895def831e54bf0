"""The decoder's loop: noise drawn ahead is that of the modules, and every way to run the loop is the plain one."""

import math

import pytest
import torch
from torch import nn
from translation_models import SOURCES, TARGETS, build, losses, translator

from bayesattn import record_kl
from bayesattn.noise.keyed import keyed_noise
from bayesattn_recipes.baselines import AttentionChoice, build_step_attention
from bayesattn_recipes.translation.batches import make_batch
from bayesattn_recipes.translation.decoder import lstm_cell
from bayesattn_recipes.translation.graphs import GraphedUnroll
from helpers import assert_finite, number


def test_cell_is_torchs_lstm():
    cell = nn.LSTMCell(3, 4).double()
    x, h, c = (torch.randn(2, size, dtype=torch.float64) for size in (3, 4, 4))
    gates = x @ cell.weight_ih.T + h @ cell.weight_hh.T + cell.bias_ih + cell.bias_hh
    i, f, g, o = gates.chunk(4, dim=-1)
    ours = lstm_cell(torch.cat([i, f, o, g], dim=-1).unsqueeze(1), c.unsqueeze(1))
    for one, other in zip(ours, cell(x, (h, c)), strict=True):
        assert torch.allclose(one.squeeze(1), other, atol=1e-12)


def test_planned_weights_are_those_of_the_module():
    model = build("BAM-WC").double()
    memory = model.encode(make_batch(SOURCES, TARGETS)["source"], [len(s) for s in SOURCES])
    attention, query = model.decoder.attention, torch.randn(3, 2, 7, dtype=torch.float64)
    scores = attention.scores(query, memory.keys)
    attention.eval()
    planned = torch.softmax(scores + attention.plan_bias(memory.mask, 2), dim=-1)
    _, weights = attention(query, memory.values, mask=memory.mask)
    assert torch.allclose(planned, weights, atol=1e-12)
    attention.train()
    # the noise is drawn in float32; what is drawn is tested with the core
    assert attention.plan_bias(memory.mask, 2).shape == (3, 2, 5)
    assert (attention.plan_bias(memory.mask, 2) == -math.inf).equal((~memory.mask).unsqueeze(1).expand(3, 2, 5))


def step_attention(variant, **options):
    """A planned loop of three steps over two sentences: attention, keys, mask, scores and the bias of a draw."""
    torch.manual_seed(4)
    attention = build_step_attention(AttentionChoice(variant, **options), 7, 6, 5).double()
    key, query = torch.randn(2, 4, 6, dtype=torch.float64), torch.randn(2, 3, 7, dtype=torch.float64)
    mask = torch.tensor([[True] * 4, [True, True, False, False]])
    return attention, key, mask, attention.scores(query, attention.key_proj(key)), attention.plan_bias(mask, 3).double()


def test_uniform_weights_are_planned_and_those_of_the_module():
    attention, key, mask, scores, bias = step_attention("uniform")
    assert attention.draws_ahead
    expected = torch.tensor([[0.25] * 4, [0.5, 0.5, 0.0, 0.0]], dtype=torch.float64).unsqueeze(1).expand(2, 3, 4)
    context, weights = attention.planned(scores, key, bias)
    assert torch.allclose(weights, expected)
    assert torch.allclose(context, attention.attend(scores, key, mask=mask)[0])
    # a replayed loop runs no module: the scope has to know of the steps all the same
    with record_kl() as kl:
        attention.record_steps(context, scores, key, mask=mask, steps=torch.ones(2, 3, dtype=torch.bool), bias=bias)
    assert number(kl.total()) == 0.0


@pytest.mark.parametrize("variant", ["BAM-LC", "BAM-WF", "BAM-WC"])
@pytest.mark.parametrize("reduction", ["sum", "mean"])
def test_kl_at_the_draws_of_all_steps_is_the_sum_of_one_estimate_a_step(variant, reduction):
    attention, key, mask, scores, bias = step_attention(variant, sampled_kl=True, kl_reduction=reduction)
    config = attention.bayes_weights.weights.config
    steps = torch.tensor([[True] * 3, [True, True, False]])
    with record_kl():
        found = attention.steps_kl(scores, key, mask=mask, steps=steps, bias=bias)
        prior = attention.bayes_weights.weights.log_prior(key, mask.unsqueeze(1))
    expected = torch.zeros(2, dtype=torch.float64)
    for t in range(3):
        noise = bias[:, None, t : t + 1].masked_fill(~mask[:, None, None], 0.0)
        standard = torch.exp(config.weibull_k * noise) if config.family == "weibull" else noise / config.sigma_q
        one = attention.bayes_weights.weights.kl_at(scores[:, None, t : t + 1], standard, prior, mask[:, None, None])
        expected += torch.where(steps[:, t], one, 0.0)
    assert torch.allclose(found, expected, rtol=1e-10)
    gradients = torch.autograd.grad(found.sum(), [p for p in attention.parameters() if p.requires_grad], allow_unused=True)
    assert_finite(*(g for g in gradients if g is not None))


def test_gaussian_kl_of_all_steps_is_the_sum_of_one_record_a_step():
    attention, key, mask, scores, bias = step_attention("gaussian-context")
    contexts = attention.planned_weights(scores, bias) @ key
    with record_kl() as kl:
        for t in range(3):
            attention.bayes_weights.context_noise(contexts[:, t : t + 1], key, mask)
    with record_kl():
        found = attention.steps_kl(scores, key, mask=mask, steps=torch.ones(2, 3, dtype=torch.bool), bias=bias)
        short = attention.steps_kl(scores, key, mask=mask, steps=torch.tensor([[True] * 3, [True, False, False]]), bias=bias)
    each = torch.stack([value for _, value in kl.per_call()])
    assert torch.allclose(found, each.sum(dim=0), rtol=1e-10)
    # steps beyond the end of a sentence say nothing
    assert torch.allclose(short, torch.stack([each[:, 0].sum(), each[0, 1]]), rtol=1e-10)


def test_planned_context_is_the_draw_of_the_module(monkeypatch):
    attention, key, mask, scores, bias = step_attention("gaussian-context")
    context, noise = attention.planned_weights(scores, bias) @ key, attention.plan_context(key, 3)
    monkeypatch.setattr("bayesattn.noise.normal", lambda *args, **options: noise.unsqueeze(1).double())
    module = attention.bayes_weights.context_noise
    assert torch.allclose(module.shift(context, noise), module(context, key, mask))
    attention.eval()
    assert attention.plan_context(key, 3) is None


def test_planned_choices_are_credited_as_they_were_made():
    attention, key, mask, scores, bias = step_attention("hard-reinforce", entropy_bonus=0.1)
    weights, chosen = attention.bayes_weights.weights, attention.planned_weights(scores, bias)
    assert chosen.sum(dim=-1).eq(1.0).all()
    assert not chosen[1, :, 2:].any()
    weights.choices = []
    attention.record_steps(scores, scores, key, mask=mask, steps=torch.ones(2, 3, dtype=torch.bool), bias=bias)
    (choice,) = weights.choices
    log_p = torch.log_softmax(scores.masked_fill(~mask.unsqueeze(1), -math.inf), dim=-1)
    assert torch.allclose(choice.log_prob, log_p.gather(-1, chosen.argmax(dim=-1, keepdim=True)).squeeze(-1))
    assert torch.allclose(choice.entropy, torch.special.entr(log_p.exp()).sum(dim=-1))


def test_planned_choices_follow_the_softmax():
    attention, _, mask, scores, _ = step_attention("hard-reinforce")
    count = 4000
    bias = torch.cat([attention.plan_bias(mask, 3).unsqueeze(0) for _ in range(count)]).double()
    share = torch.stack([attention.planned_weights(scores, one) for one in bias]).mean(dim=0)
    p = torch.softmax(scores.masked_fill(~mask.unsqueeze(1), -math.inf), dim=-1)
    # shares of `count` draws; five standard errors for 24 comparisons
    assert ((share - p).abs() <= 5.0 * torch.sqrt(p * (1.0 - p) / count)).all()


@pytest.mark.parametrize("variant", ["gaussian-context", "hard-reinforce"])
def test_what_is_known_of_draws_alone_needs_their_bias(variant):
    attention, key, mask, scores, _ = step_attention(variant)
    with record_kl(), pytest.raises(ValueError, match=f"bias must be the result of `plan_bias` for {variant}, got None"):
        attention.record_steps(scores, scores, key, mask=mask, steps=torch.ones(2, 3, dtype=torch.bool))


def test_recorded_graphs_need_a_gpu_and_planned_noise():
    decoder = build("soft").decoder
    memory = decoder.remember(torch.randn(1, 3, 8), torch.ones(1, 3, dtype=torch.bool))
    with pytest.raises(ValueError, match="decoder_mode must be 'eager' or 'compile' on cpu, got 'cuda-graph'"):
        GraphedUnroll(decoder)(torch.randn(1, 2, 28), *memory, torch.zeros(1, 1, 3), None, None)
    with pytest.raises(ValueError, match=r"decoder_mode must be 'eager' with hard-gumbel attention, .*, got 'compile'"):
        translator(AttentionChoice("hard-gumbel"), decoder_mode="compile")


def test_noise_of_examples_is_not_recorded():
    decoder = build("hard-gumbel").decoder
    memory = decoder.remember(torch.randn(2, 3, 8), torch.ones(2, 3, dtype=torch.bool))
    gates, found = torch.randn(2, 5, 28), []
    for run in (decoder.unroll, GraphedUnroll(decoder)):
        torch.manual_seed(3)
        with keyed_noise(torch.tensor([7, 8])):
            found.append(run(gates, *memory, None, None, None).contexts)
    # a recording would need a GPU, and repeat the noise of its first examples
    assert torch.equal(*found)


@pytest.mark.parametrize("variant", ["BAM-WC", "hard-reinforce", "gaussian-weights"])
def test_auto_runs_plain_steps_where_nothing_can_be_recorded(variant):
    plain = build(variant)
    auto = translator(AttentionChoice(variant, inference_dim=3), decoder_mode="auto")
    auto.load_state_dict(plain.state_dict())
    found = []
    for model in (plain.train(), auto.train()):
        torch.manual_seed(5)
        with record_kl():
            found.append(losses(model))
    assert torch.equal(*found)


@pytest.mark.compile
# torch hides this warning of its own tracer where warnings are no errors
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
def test_compiled_decoder_is_the_plain_one():
    plain = build("BAM-WC")
    compiled = translator(AttentionChoice("BAM-WC", inference_dim=3), decoder_mode="compile")
    compiled.load_state_dict(plain.state_dict())
    found = []
    for model in (plain, compiled):
        torch.manual_seed(5)
        with record_kl() as kl:
            nll = losses(model)
        (nll.sum() + kl.total()).backward()
        found.append((number(nll.sum()), [parameter.grad for parameter in model.parameters()]))
    assert found[0][0] == pytest.approx(found[1][0], rel=1e-5)
    for one, other in zip(found[0][1], found[1][1], strict=True):
        # float32, in another order
        assert torch.allclose(one, other, atol=1e-4)


@pytest.mark.gpu
@pytest.mark.parametrize("variant", ["hard-gumbel", "mc-dropout"])
def test_every_replay_draws_anew(variant):
    torch.manual_seed(2)
    model = translator(AttentionChoice(variant), decoder_mode="auto").cuda()
    with torch.no_grad():
        for parameter in model.parameters():
            # a fresh model hardly looks at the source
            parameter.mul_(10.0)
    batch = make_batch(SOURCES, TARGETS)
    batch = {k: v.cuda() if isinstance(v, torch.Tensor) else v for k, v in batch.items()}
    found = []
    for _ in range(3):
        found.append(model(**batch))
        found[-1].sum().backward()
    # the first call records, the others replay
    assert not torch.equal(found[1], found[2])
    assert all(torch.isfinite(parameter.grad).all() for parameter in model.parameters())


PLANNED = ("soft", "BAM-WC", "BAM-LC", "BAM-WC sampled", "gaussian-context", "mc-dropout", "uniform")


@pytest.mark.gpu
# rounded scores may choose another key, so hard attention is compared in float32 alone
@pytest.mark.parametrize(
    ("variant", "low"), [*((name, low) for name in PLANNED for low in (False, True)), ("hard-reinforce", False)]
)
def test_recorded_decoder_is_the_plain_one(variant, low):
    found = []
    for mode in ("eager", "cuda-graph"):
        torch.manual_seed(2)
        # a recording draws other masks, so there are none
        name, *sampled = variant.split()
        attention = AttentionChoice(name, attention_dropout=0.0, sampled_kl=bool(sampled))
        model = translator(attention, decoder_mode=mode).cuda()
        changes, rows = torch.Generator("cuda").manual_seed(7), []
        # the third call replays what the first recorded, after a recording of another shape in the same memory
        for call, count in enumerate((3, 2, 3, 2)):
            torch.manual_seed(5 + call)
            model.zero_grad()
            with torch.autocast("cuda", torch.bfloat16, enabled=low), record_kl() as kl:
                nll = losses(model, SOURCES[:count], TARGETS[:count])
            total = nll.sum() + kl.total()
            total.backward()
            rows.append((number(total), [parameter.grad.clone() for parameter in model.parameters()]))
            with torch.no_grad():
                # as a training step does: a low-precision copy of a weight must not outlive it
                for parameter in model.parameters():
                    parameter.add_(0.2 * torch.randn(parameter.shape, device="cuda", generator=changes))
        found.append(rows)
    # float32 in another order; bfloat16 keeps 8 bits, and sums of gradients are rounded to it in another order
    relative, absolute = (2e-2, 2e-2) if low else (1e-5, 1e-4)
    for plain, recorded in zip(*found, strict=True):
        assert plain[0] == pytest.approx(recorded[0], rel=relative)
        for one, other in zip(plain[1], recorded[1], strict=True):
            scale = float(one.abs().max()) if low else 0.0
            assert torch.allclose(one, other, atol=absolute + 0.1 * scale)
