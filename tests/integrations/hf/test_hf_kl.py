"""The recorded KL against an oracle: the same model with a spy that computes every KL entry by entry from its definition."""

import pytest
import torch
import transformers as hf
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.masking_utils import eager_mask
from zoo import ARCHITECTURES, BATCH, build, run

import bayesattn as ba
from bayesattn.convert import bayesianize
from helpers import kl_oracle

CONFIGS = {
    "WC-paper": ba.AttentionConfig("BAM-WC", preset="paper"),
    "WC-default": ba.AttentionConfig("BAM-WC"),
    "LC-official": ba.AttentionConfig("BAM-LC", preset="official-code"),
    "WF-sum": ba.AttentionConfig("BAM-WF", kl_reduction="sum"),
}


def _psi(prior, key, allowed):
    """Ψ = softmax over the keys that anyone may attend to of F₂(relu(F₁(K))), written out."""
    hidden = torch.relu(key @ prior.weight_in[0] + prior.bias_in[0])
    logits = (hidden @ prior.weight_out[0] + prior.bias_out[0]).squeeze(-1)
    return torch.log_softmax(logits.masked_fill(~allowed.any(dim=2), -torch.inf), dim=-1).unsqueeze(2)


def kl_by_hand(name, model, inputs, config):
    """Run `model` with a spy in place of its attention; return the KL of every call, one row per attention batch entry."""
    calls, priors = [], {id(m): m.bayes.bayes_prior for m in model.modules() if hasattr(m, "bayes")}

    def spy(module, query, key, value, attention_mask, scaling=None, softcap=None, position_bias=None, **kwargs):
        groups = query.shape[1] // key.shape[1]
        key, value = key.repeat_interleave(groups, dim=1), value.repeat_interleave(groups, dim=1)
        scores = torch.einsum("bhid,bhjd->bhij", query, key) * scaling
        if softcap is not None:
            scores = softcap * torch.tanh(scores / softcap)
        if position_bias is not None:
            scores = scores + position_bias
        if attention_mask is not None:
            scores = scores + attention_mask
        # an additive mask of −100 (Swin) or of the smallest float forbids
        allowed = scores > -80.0
        log_prior = None if priors[id(module)] is None else _psi(priors[id(module)], key, allowed)
        calls.append(torch.tensor(kl_oracle(scores, log_prior, allowed, config)))
        weights = torch.softmax(scores, dim=-1)
        return (weights @ value).transpose(1, 2).contiguous(), weights

    AttentionInterface.register("spying", spy)
    AttentionMaskInterface.register("spying", eager_mask)
    modules = [m for m in model.modules() if id(m) in priors]
    for module in modules:
        module.config._attn_implementation_internal = "spying"
    with torch.no_grad():
        run(model, inputs)
    for module in modules:
        module.config._attn_implementation_internal = "bayesattn"
    return calls


@pytest.mark.parametrize("label", CONFIGS)
@pytest.mark.parametrize(
    "name", ["albert", "bert", "modernbert", "llama", "mistral", "gemma2", "t5", "bart", "clip", "swin", "patchtst"]
)
def test_every_call_s_kl_is_the_definition_s(name, label):
    config, architecture = CONFIGS[label], ARCHITECTURES[name]
    # scores of order 1: T5 does not scale them, and beyond e^10 the row term of the KL is linear by design
    model = bayesianize(build(name, "eager", spread=0.1), config)
    inputs = architecture.inputs(architecture.can_pad)
    expected = kl_by_hand(name, model, inputs, config)
    with torch.no_grad(), ba.record_kl() as kl:
        run(model, inputs)
    assert len(kl) == len(expected) == architecture.calls
    for (_, recorded), by_hand in zip(kl.per_call(), expected, strict=True):
        # windows and channels of one example: a sum where the config sums, else the mean of equally large parts
        parts = by_hand.view(BATCH, -1)
        example = parts.sum(dim=1) if config.kl_reduction == "sum" else parts.mean(dim=1)
        torch.testing.assert_close(recorded.double(), example, rtol=2e-4, atol=1e-4)


def test_windows_do_fold_in_this_suite():
    """The two cases above with more attention entries than examples really have them."""
    for name, entries in (("swin", 4), ("patchtst", 3)):
        model, seen = bayesianize(build(name, "eager"), CONFIGS["WF-sum"]), []
        part = next(m.bayes for m in model.modules() if hasattr(m, "bayes"))
        part.record = lambda out, kl, seen=seen: seen.append(kl.shape[0]) or out
        with torch.no_grad(), ba.record_kl():
            run(model, ARCHITECTURES[name].inputs(False))
        assert seen == [entries * BATCH], name


def test_kl_gradient_is_the_functional_core_s():
    """Queries, keys and prior of a layer get the gradient that differentiating the oracle's inputs by hand gives."""
    config = ba.AttentionConfig("BAM-WC", preset="paper")
    model, inputs = bayesianize(build("bert", "sdpa"), config).train(), ARCHITECTURES["bert"].inputs(True)
    attention, captured = model.bert.encoder.layer[0].attention.self, {}
    original = attention.bayes.attend

    def capture(query, key, value, **kwargs):
        captured.update(query=query, key=key, mask=kwargs["mask"], scale=kwargs["scale"])
        query.retain_grad()
        key.retain_grad()
        return original(query, key, value, **kwargs)

    attention.bayes.attend = capture
    with ba.record_kl(model) as kl:
        run(model, inputs)
    first = kl._values[0]
    first.mean().backward()
    leaves = {n: captured[n].detach().clone().requires_grad_() for n in ("query", "key")}
    prior = attention.bayes.bayes_prior
    expected_prior = {n: p.grad.clone() for n, p in prior.named_parameters()}
    prior.zero_grad()
    log_prior = prior(leaves["key"], captured["mask"].any(dim=-2))
    _, by_core = ba.functional.attention(
        leaves["query"], leaves["key"], leaves["key"], config=config, log_prior=log_prior, mask=captured["mask"],
        scale=captured["scale"], sample=False,
    )  # fmt: skip
    by_core.mean().backward()
    for n, leaf in leaves.items():
        torch.testing.assert_close(captured[n].grad, leaf.grad, rtol=1e-4, atol=1e-6)
    for n, parameter in prior.named_parameters():
        torch.testing.assert_close(parameter.grad, expected_prior[n], rtol=1e-4, atol=1e-6)


def test_albert_s_one_module_counts_twelve_times():
    config = CONFIGS["WC-default"]
    torch.manual_seed(3)
    sizes = {"hidden_size": 24, "embedding_size": 8, "num_attention_heads": 3, "intermediate_size": 20, "vocab_size": 40}
    albert = hf.AlbertModel(hf.AlbertConfig(num_hidden_layers=12, **sizes)).eval()
    albert.set_attn_implementation("eager")
    model = bayesianize(albert, config)
    inputs = {"input_ids": torch.randint(1, 40, (2, 5))}
    expected = kl_by_hand("albert", model, inputs, config)
    with ba.record_kl(model) as kl, torch.no_grad():
        model(**inputs)
    assert len(kl) == len(expected) == 12
    assert len(kl.per_layer()) == 1
    for (_, value), oracle in zip(kl.per_call(), expected, strict=True):
        torch.testing.assert_close(value, oracle.to(value.dtype), rtol=1e-4, atol=1e-5)
