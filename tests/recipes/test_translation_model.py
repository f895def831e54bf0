"""The translator: every variant trains, padding changes nothing, predictions and draws are those of the training loss."""

import math

import pytest
import torch
from torch import nn
from translation_models import SOURCES, TARGETS, build, losses

from bayesattn import record_kl, sampling
from bayesattn_recipes.baselines import RIVALS
from bayesattn_recipes.translation.batches import make_batch
from bayesattn_recipes.translation.draws import decode, decode_draws, judge
from bayesattn_recipes.translation.vocabulary import END, PAD
from helpers import assert_finite, number

VARIANTS = ("soft", "BAM-NOKL", "BAM-LF", "BAM-LC", "BAM-WF", "BAM-WC", *RIVALS)


@pytest.mark.parametrize(
    ("variant", "sampled_kl"), [*((name, False) for name in VARIANTS), ("BAM-WC", True), ("BAM-LF", True)]
)
def test_every_parameter_gets_a_finite_gradient(variant, sampled_kl):
    model = build(variant, dropout=0.2, sampled_kl=sampled_kl)
    with record_kl() as kl:
        nll = losses(model)
    assert (len(kl) > 0) == model_config(model).has_kl
    total = nll.sum() + kl.total()
    total.backward()
    assert nll.shape == (3, 6)
    assert not nll.detach()[1, 6:].any()
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None, name
        assert_finite(parameter.grad)


def model_config(model):
    if model.latent is not None:
        return model.latent.config
    return model.decoder.config


@pytest.mark.parametrize("variant", ["soft", "BAM-WC", "variational-enum", "variational-dirichlet"])
def test_padding_changes_nothing(variant):
    model = build(variant).double().eval()
    together = losses(model)
    for row, (source, target) in enumerate(zip(SOURCES, TARGETS)):
        alone = losses(model, [source], [target])
        assert torch.allclose(together[row, : len(target)], alone[0], atol=1e-12)
        assert not together[row, len(target) :].any()


@pytest.mark.parametrize("variant", ["soft", "BAM-WC", "hard-reinforce", "gaussian-context", "variational-enum"])
def test_bfloat16_is_close_to_float32(variant):
    model = build(variant)
    found = []
    for enabled in (False, True):
        torch.manual_seed(3)
        with torch.autocast("cpu", torch.bfloat16, enabled=enabled), record_kl() as kl:
            nll = losses(model)
        (nll.sum() + kl.total()).backward()
        found.append(number(nll.sum()))
        assert nll.dtype == torch.float32
    assert_finite(*(parameter.grad for parameter in model.parameters()))
    # eight bits of mantissa: a relative error of 2⁻⁸ an operation, in losses of about 2.8 a token
    assert found[0] == pytest.approx(found[1], rel=0.02)


@pytest.mark.parametrize(
    ("variant", "options"),
    [
        ("soft", {}),
        ("BAM-WC", {}),
        ("variational-enum", {}),
        ("variational-exact", {}),
        ("variational-exact", {"top_keys": 2}),
        ("variational-dirichlet", {}),
    ],
)
def test_next_token_probabilities_are_those_of_the_training_loss(variant, options):
    model = build(variant, **options).double().eval()
    batch = make_batch(SOURCES, TARGETS)
    nll = model(**batch)
    memory = model.encode(batch["source"], batch["source_lengths"])
    state = model.decoder.start(memory, 2)
    for t in range(6):
        tokens = batch["target_in"][:, t : t + 1].expand(3, 2)
        log_probs, state = model.next_log_probs(tokens, state, memory)
        # a distribution over the vocabulary, for both hypotheses alike
        assert torch.allclose(log_probs.exp().sum(dim=-1), torch.ones(3, 2, dtype=torch.float64), atol=1e-6)
        chosen = log_probs.gather(-1, batch["target_out"][:, t, None, None].expand(3, 2, 1)).squeeze(-1)
        valid = batch["target_out"][:, t] != PAD
        # losses and probabilities are float32
        assert torch.allclose(-chosen[valid], nll[valid, t, None].expand(-1, 2), atol=1e-5)


def test_every_key_is_scored_as_if_it_were_all_attention_saw():
    model = build("variational-enum").double().eval()
    batch = make_batch(SOURCES, TARGETS)
    lengths = (batch["source_lengths"], batch["target_lengths"])
    memory = model.encode(batch["source"], lengths[0])
    unrolled = model.unroll(memory, batch["target_in"])
    found = model._nll_of_each_key(unrolled, memory, batch["target_out"], *lengths)
    for row, (source, target) in enumerate(zip(SOURCES, TARGETS)):
        for j in range(len(source)):
            context = memory.values[row, j].expand(len(target), -1)
            log_probs = torch.log_softmax(model.readout(unrolled.states[row, : len(target)], context), dim=-1)
            expected = -log_probs.gather(1, torch.tensor(target).unsqueeze(1)).squeeze(1)
            assert torch.allclose(found[row, : len(target), j], expected, atol=1e-12)
        assert not found[row, len(target) :].any()
        assert not found[row, :, len(source) :].any()


@pytest.mark.parametrize("top_keys", [1, 2, 3])
def test_few_keys_and_the_mean_of_the_rest_are_scored_as_their_mixture(top_keys):
    model = build("variational-exact", top_keys=top_keys).double().eval()
    with torch.no_grad():
        for parameter in model.parameters():
            # a fresh model hardly looks at the source
            parameter.mul_(10.0)
    batch = make_batch(SOURCES, TARGETS)
    memory = model.encode(batch["source"], batch["source_lengths"])
    unrolled, nll = model.unroll(memory, batch["target_in"]), losses(model)
    weights = torch.softmax(unrolled.scores.masked_fill(~memory.mask.unsqueeze(1), -math.inf), dim=-1)
    for row, (source, target) in enumerate(zip(SOURCES, TARGETS)):
        for t, token in enumerate(target):
            p = weights[row, t, : len(source)]
            order, total = p.argsort(descending=True), 0.0
            for part in filter(len, (*order[:top_keys].split(1), order[top_keys:])):
                context = p[part] @ memory.values[row, part] / p[part].sum()
                total = total + p[part].sum() * torch.softmax(model.readout(unrolled.states[row, t], context), dim=-1)[token]
            # losses are float32 or better
            assert torch.allclose(nll[row, t], -total.log(), rtol=1e-6)


def test_as_many_keys_as_there_are_is_the_exact_marginal():
    few, every = (losses(build("variational-exact", top_keys=keys).double().eval()) for keys in (4, None))
    assert torch.allclose(few, every, rtol=1e-6)
    with pytest.raises(ValueError, match=r"top_keys must be None for soft; only variational-exact has it\. Got 3"):
        build("soft", top_keys=3)


def test_enum_scores_a_few_pairs_at_a_time_without_changing_anything(monkeypatch):
    import bayesattn_recipes.translation.model as module

    gradients = []
    for largest in (2**27, 100):
        monkeypatch.setattr(module, "LARGEST_LOGITS", largest)
        model = build("variational-enum").double()
        losses(model).sum().backward()
        gradients.append([parameter.grad for parameter in model.parameters() if parameter.grad is not None])
        model.eval()
        with torch.no_grad():
            memory = model.encode(make_batch(SOURCES, TARGETS)["source"], [5, 2, 4])
            gradients[-1].append(model.next_log_probs(torch.full((3, 2), 5), model.decoder.start(memory, 2), memory)[0])
    for one, other in zip(*gradients, strict=True):
        assert torch.allclose(one, other, atol=1e-6)


def test_beams_do_not_mix_sentences():
    model = build("soft").eval()
    together = decode(model, SOURCES, beam=3)
    assert together == [decode(model, [source], beam=3)[0] for source in SOURCES]


def test_draws_of_all_sentences_are_decoded_together_and_given_back_to_their_own():
    model = build("soft", dropout=0.0).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(10.0)
        # a fresh model would end at once
        model.readout.logits.bias[END] = -9.0
    # nothing is random in this model, so every draw is the greedy translation of its sentence
    model.dropout.p = 1e-12
    expected = [[tokens] * 3 for tokens in decode(model, SOURCES, beam=1)]
    assert decode_draws(model, SOURCES, "dropout", 3) == expected
    assert len({tuple(draws[0]) for draws in expected}) > 1
    assert decode_draws(model, SOURCES, "mean", 3) == [[], [], []]


def test_draws_disagree_and_the_mean_does_not():
    model = build("BAM-WC", weibull_k=1.0).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            # a fresh model hardly looks at the source
            parameter.mul_(10.0)
    plain = judge(model, SOURCES, TARGETS, "mean", 5)
    drawn = judge(model, SOURCES, TARGETS, "attention", 5)
    # one distribution: its entropy minus itself, up to rounding of float32
    assert float(plain.mutual_information.max()) < 1e-5
    assert float(drawn.mutual_information.max()) > 1e-3
    # shares of five draws, exactly: nothing is above 1
    assert set((drawn.disagreement * 5).unique().tolist()) <= {0.0, 1.0, 2.0, 3.0, 4.0, 5.0}
    assert torch.equal(plain.steps, make_batch(SOURCES, TARGETS)["target_out"] != PAD)
    nll = model(**make_batch(SOURCES, TARGETS))
    assert torch.allclose(-plain.probability[plain.steps].log(), nll[plain.steps], atol=1e-5)


def test_draws_are_judged_side_by_side_as_one_by_one(monkeypatch):
    model = build("soft", dropout=0.0).eval()
    # nothing is random in this model, so every draw is the mean
    model.dropout.p = 1e-12
    mean = judge(model, SOURCES, TARGETS, "mean", 1)
    for tokens in (1, 4, 1000):
        monkeypatch.setattr("bayesattn_recipes.translation.draws.evaluation_tokens", lambda model, t=tokens: t)
        drawn = judge(model, SOURCES, TARGETS, "dropout", 5)
        # float32 sums of five fifths
        assert torch.allclose(drawn.probability, mean.probability, rtol=1e-5)
        assert torch.equal(drawn.is_right, mean.is_right)


def test_dropout_is_drawn_in_the_decoder_too():
    model = build("soft", dropout=0.5).eval()
    batch = make_batch(SOURCES, TARGETS)
    with torch.no_grad(), sampling(model, dropout=True):
        assert model.decoder.plan_dropout(torch.zeros(3, 6, 28)).unique().tolist() == [0.0, 2.0]
        assert not torch.equal(model(**batch), model(**batch))


def test_gaussian_weights_fail():
    """Their gradient has no finite mean: on one batch, draw after draw, it is orders of magnitude off its own median."""
    spread = {}
    for variant in ("BAM-WC", "gaussian-weights"):
        model = build(variant, num_layers=1)
        norms = []
        for draw in range(80):
            with torch.no_grad():
                for parameter in model.parameters() if draw == 0 else ():
                    # a fresh model hardly looks at the source
                    parameter.mul_(10.0)
            model.zero_grad()
            losses(model).sum().backward()
            norms.append(float(nn.utils.get_total_norm([p.grad for p in model.parameters() if p.grad is not None])))
        finite = sorted(norm if math.isfinite(norm) else math.inf for norm in norms)
        spread[variant] = finite[-1] / finite[len(finite) // 2]
    # P(norm > x) falls like 1/√x for the Gaussian: of 80 draws, about 8 a hundred times the median's
    assert spread["gaussian-weights"] > 100.0
    assert spread["BAM-WC"] < 10.0
