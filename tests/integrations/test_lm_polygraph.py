"""The estimator for lm-polygraph, under a stand-in that calls estimators as its manager does."""

import numpy as np
import pytest
import torch
import transformers as hf

import bayesattn as ba
from bayesattn.integrations.lm_polygraph import AttentionDoubt

PROMPTS = [[5, 6, 7, 8], [9, 11], [12, 13, 14]]
ANSWERS = [[21, 22], [23, 24, 25, 2], [26]]
SIZES = {"vocab_size": 40, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}


def causal() -> hf.GPT2LMHeadModel:
    torch.manual_seed(0)
    return hf.GPT2LMHeadModel(hf.GPT2Config(n_embd=24, n_layer=2, n_head=3, n_positions=32, initializer_range=0.4, **SIZES))


def encoder_decoder() -> hf.T5ForConditionalGeneration:
    torch.manual_seed(0)
    sizes = {"d_model": 24, "d_kv": 8, "d_ff": 20, "num_layers": 2, "num_heads": 3, "decoder_start_token_id": 0}
    return hf.T5ForConditionalGeneration(hf.T5Config(**sizes, **SIZES))


def manage(estimators, stats) -> dict[tuple[str, str], list[float]]:
    """As lm-polygraph's UEManager: unique names, the statistics asked for, a list of numbers by level and name."""
    assert len({str(estimator) for estimator in estimators}) == len(estimators)
    for estimator in estimators:
        assert estimator.level in ("sequence", "token")
        assert set(estimator.stats_dependencies) <= set(stats)
    found = {(estimator.level, str(estimator)): estimator(stats) for estimator in estimators}
    assert all(isinstance(value, np.ndarray) and value.ndim == 1 for value in found.values())
    return {key: value.tolist() for key, value in found.items()}


def padded(left: bool) -> list[list[int]]:
    return [[0] * (4 - len(row)) + row if left else row + [0] * (4 - len(row)) for row in PROMPTS]


def test_it_is_the_deviation_that_score_gives_each_text_alone():
    model = causal().eval()
    stats = {"input_tokens": padded(left=True), "greedy_tokens": ANSWERS, "greedy_texts": ["x"] * 3}
    estimators = [AttentionDoubt(model, pad_token_id=0), AttentionDoubt(model, pad_token_id=0, per_token=True)]
    found = manage(estimators, stats)
    for row, (prompt, answer) in enumerate(zip(PROMPTS, ANSWERS)):
        labels = torch.tensor([[-100] * len(prompt) + answer])
        alone = ba.score(model, {"input_ids": torch.tensor([prompt + answer])}, labels)
        assert found["sequence", "AttentionDoubt"][row] == pytest.approx(float(alone.std), rel=1e-3)
        assert found["sequence", "AttentionDoubtPerToken"][row] == pytest.approx(float(alone.std) / len(answer), rel=1e-3)


@pytest.mark.parametrize("left", [False, True])
def test_encoder_decoders_read_prompts_padded_on_either_side(left):
    model = encoder_decoder().eval()
    found = AttentionDoubt(model, pad_token_id=0)({"input_tokens": padded(left), "greedy_tokens": ANSWERS})
    for row, (prompt, answer) in enumerate(zip(PROMPTS, ANSWERS)):
        alone = ba.score(model, {"input_ids": torch.tensor([prompt])}, torch.tensor([answer]))
        assert found[row] == pytest.approx(float(alone.std), rel=1e-3)


def test_settings_that_change_the_numbers_are_in_the_name():
    model = causal()
    noisy = AttentionDoubt(model, pad_token_id=0, config=ba.AttentionConfig("BAM-NOKL"))
    assert str(noisy) != str(AttentionDoubt(model, pad_token_id=0))


@pytest.mark.parametrize(
    ("stats", "message"),
    [
        ({"input_tokens": [[5]], "greedy_tokens": [[]]}, "a generation in greedy_tokens has no token"),
        ({"input_tokens": [[0, 0]], "greedy_tokens": [[5]]}, "only padding"),
    ],
)
def test_nothing_to_score_is_an_error(stats, message):
    with pytest.raises(ValueError, match=message):
        AttentionDoubt(causal(), pad_token_id=0)(stats)
