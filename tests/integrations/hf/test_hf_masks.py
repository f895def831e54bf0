"""Masks that transformers makes become masks of keys without a look at their values, which a CUDA graph does not allow."""

import pytest
import torch
from transformers import masking_utils
from zoo import ARCHITECTURES, build, run

import bayesattn as ba
from bayesattn.convert import bayesianize
from bayesattn.convert import masks as convert_masks
from bayesattn.convert.hosted import HostedAttention
from bayesattn.integrations.hf import attention

CONFIG = ba.AttentionConfig("BAM-WC")


@pytest.fixture
def blind(monkeypatch):
    """As during CUDA-graph capture: nobody can look at a mask."""
    monkeypatch.setattr(convert_masks, "look_once", lambda *_: None)
    monkeypatch.setattr(masking_utils, "is_tracing", lambda *_: True)


def masks_of(name, monkeypatch, padded=True):
    """Return (mask as transformers gave it, mask that attention got, whether it is causal) of every call."""
    model, found = bayesianize(build(name), CONFIG).train(), []
    given, attend = [], HostedAttention.attend
    arguments = attention._score_arguments

    def note_given(module, child, implementation, query, key, mask, kwargs):
        given.append(mask)
        return arguments(module, child, implementation, query, key, mask, kwargs)

    def note(self, query, key, value, *, mask, is_causal, window=None, **options):
        band = convert_masks.as_band(mask, window)
        found.append((given[-1], band[0], is_causal or band[1]))
        return attend(self, query, key, value, mask=mask, is_causal=is_causal, window=window, **options)

    monkeypatch.setattr(attention, "_score_arguments", note_given)
    monkeypatch.setattr(HostedAttention, "attend", note)
    run(model, ARCHITECTURES[name].inputs(padded))
    assert found
    return found


@pytest.mark.parametrize("name", ["bert", "albert", "llama"])
def test_padding_becomes_a_mask_of_keys(name, blind, monkeypatch):
    for given, mask, is_causal in masks_of(name, monkeypatch):
        assert mask.shape == (given.shape[0], 1, 1, given.shape[3])
        whole = mask.expand_as(given)
        assert torch.equal(whole.tril() if is_causal else whole, given)
        assert is_causal == (name == "llama")


def test_a_mask_of_ones_that_was_made_because_nobody_could_look_is_dropped(blind, monkeypatch):
    assert all(given.all() and mask is None for given, mask, _ in masks_of("bert", monkeypatch, padded=False))


def test_sliding_windows_and_packed_sequences_are_not_mistaken_for_padding():
    arguments = {"batch_size": 2, "q_length": 6, "kv_length": 6, "attention_mask": torch.ones(2, 6, dtype=torch.bool)}
    functions = (
        masking_utils.sliding_window_causal_mask_function(3),
        masking_utils.and_masks(masking_utils.causal_mask_function, masking_utils.bidirectional_mask_function),
    )
    for function in functions:
        mask = attention.noted_sdpa_mask(**arguments, mask_function=function, allow_is_causal_skip=False)
        assert mask is not None
        torch.testing.assert_close(
            mask, masking_utils.sdpa_mask(**arguments, mask_function=function, allow_is_causal_skip=False)
        )
        assert convert_masks._making(mask, True) is convert_masks._making(mask, False) is None


def test_a_cache_that_moves_queries_against_keys_leaves_no_note():
    arguments = {"batch_size": 2, "q_length": 6, "kv_length": 6, "q_offset": 2, "allow_is_causal_skip": False}
    mask = attention.noted_sdpa_mask(**arguments, mask_function=masking_utils.causal_mask_function)
    assert mask is not None
    assert convert_masks._making(mask, True) is None
