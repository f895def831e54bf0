"""Log-probabilities of given texts and their deviation, of causal and encoder-decoder models with padding."""

import math

import pytest
import torch
import transformers as hf
from small_models import VOCABULARY

import bayesattn as ba
from helpers import no_type_checks

TINY = ba.AttentionConfig("BAM-NOKL", weibull_k=3000.0)
B, N, T = 3, 7, 5
DECODER = {
    "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 29, "vocab_size": VOCABULARY,
    "max_position_embeddings": 32, "pad_token_id": 0, "initializer_range": 0.3,
}  # fmt: skip


def _bart():
    options = {"encoder_layers": 2, "decoder_layers": 1, "encoder_attention_heads": 3, "decoder_attention_heads": 3}
    options |= {"encoder_ffn_dim": 29, "decoder_ffn_dim": 29, "d_model": 24, "init_std": 0.3, "vocab_size": VOCABULARY}
    return hf.BartForConditionalGeneration(hf.BartConfig(**options, max_position_embeddings=32, pad_token_id=0))


def _t5():
    options = {"d_model": 24, "d_kv": 8, "d_ff": 29, "num_layers": 2, "num_heads": 3, "vocab_size": VOCABULARY}
    return hf.T5ForConditionalGeneration(hf.T5Config(**options, decoder_start_token_id=0, pad_token_id=0))


CAUSAL = {
    "gpt2": lambda: hf.GPT2LMHeadModel(
        hf.GPT2Config(n_embd=24, n_layer=2, n_head=3, n_positions=32, vocab_size=VOCABULARY, initializer_range=0.3)
    ),
    "llama-grouped": lambda: hf.LlamaForCausalLM(hf.LlamaConfig(**DECODER, num_key_value_heads=2)),
    "mistral-window": lambda: hf.MistralForCausalLM(hf.MistralConfig(**DECODER, num_key_value_heads=2, sliding_window=3)),
}
SEQ2SEQ = {"bart": _bart, "t5": _t5}


def build(name):
    torch.manual_seed(1)
    model = {**CAUSAL, **SEQ2SEQ}[name]().double().eval()
    ids, mask = torch.randint(3, VOCABULARY, (B, N)), torch.ones(B, N, dtype=torch.long)
    ids[1, 5:], mask[1, 5:] = 0, 0
    labels = torch.randint(3, VOCABULARY, (B, T)) if name in SEQ2SEQ else ids.masked_fill(mask == 0, -100)
    if name in SEQ2SEQ:
        labels[2, 3:] = -100
    else:
        labels[:, :2] = -100
    return model, {"input_ids": ids, "attention_mask": mask}, labels


@pytest.mark.parametrize("name", [*CAUSAL, *SEQ2SEQ])
def test_log_probability_is_the_models_own(name):
    model, inputs, labels = build(name)
    result = ba.score(model, inputs, labels)
    for row in range(B):
        with torch.no_grad():
            own = {key: value[row : row + 1] for key, value in inputs.items()}
            loss = float(model(**own, labels=labels[row : row + 1]).loss)
        assert math.isclose(
            float(result.mean_log_probability[row]), -loss, rel_tol=1e-6
        )  # transformers rounds logits to float32
    counted = (labels != -100) & (torch.ones_like(labels, dtype=torch.bool))
    assert torch.equal(result.num_tokens, counted.sum(1))
    assert result.token_log_probabilities.shape == labels.shape
    assert ((result.token_log_probabilities != 0) == counted).all()
    assert torch.allclose(result.token_log_probabilities.sum(1), result.log_probability)


@pytest.mark.parametrize("name", [*CAUSAL, *SEQ2SEQ])
def test_deviation_is_that_of_draws_and_splits(name):
    model, inputs, labels = build(name)
    exact = ba.score(model, inputs, labels, config=TINY)
    variance = exact.std.square()
    assert torch.allclose(sum(exact.by_layer.values()), variance, rtol=1e-9)
    assert exact.by_token.shape == (B, N)
    assert (exact.by_token[1, 5:] == 0).all()
    share = exact.by_token.sum(1) / variance
    if name in CAUSAL:
        assert torch.allclose(share, torch.ones_like(share))
    else:
        # the rest is in the decoder's attention to itself
        own = [
            part
            for layer, part in exact.by_layer.items()
            if "decoder" in layer and layer.endswith(("self_attn", "SelfAttention"))
        ]
        assert torch.allclose(share + sum(own) / variance, torch.ones_like(share))
    ba.bayesianize(model, TINY)
    draws, values = 200, []
    with torch.no_grad(), ba.sampling(model):
        for _ in range(draws):
            logits = model(**inputs, labels=labels).logits.log_softmax(-1)
            logits, target = (logits, labels) if name in SEQ2SEQ else (logits[:, :-1], labels[:, 1:])
            taken = logits.gather(2, target.clamp(min=0)[..., None]).squeeze(-1)
            values.append((taken * (target != -100)).sum(1))
    drawn = torch.stack(values).var(dim=0)
    assert (drawn / variance - 1.0).abs().max() < 5.0 * math.sqrt(2.0 / (draws - 1))


def test_prompt_and_answer_of_one_length_are_told_apart():
    model, inputs, _ = build("bart")
    labels = torch.randint(3, VOCABULARY, (B, N))
    result = ba.score(model, inputs, labels)
    own = result.by_layer["model.decoder.layers.0.self_attn"]
    assert torch.allclose(result.by_token.sum(1) + own, result.std.square())
    assert (result.by_token[1, 5:] == 0).all()


def test_models_that_see_the_whole_text_are_refused():
    model = hf.BertForMaskedLM(hf.BertConfig(**DECODER))
    ids = torch.randint(3, VOCABULARY, (B, N))
    with pytest.raises(ValueError, match=r"BertForMaskedLM\.can_generate\(\) is False.*causal or encoder-decoder"):
        ba.score(model, {"input_ids": ids}, ids)


@pytest.mark.parametrize(
    ("change", "match"),
    [
        (lambda inputs, labels: (inputs["input_ids"], labels), "no tensor `input_ids`"),
        (lambda inputs, labels: (inputs, labels[:, :-1]), "aligned with its input"),
        (lambda inputs, labels: (inputs, labels.double()), "token numbers"),
        (lambda inputs, labels: (inputs, torch.full_like(labels, -100)), "no token to score"),
        (lambda inputs, labels: (inputs, labels.masked_fill(torch.arange(N) > 0, -100)), "no token to score"),
    ],
)
def test_bad_labels_are_refused_by_name(change, match, monkeypatch):
    no_type_checks(monkeypatch)
    model, inputs, labels = build("gpt2")
    with pytest.raises(ValueError, match=match):
        ba.score(model, *change(inputs, labels))
