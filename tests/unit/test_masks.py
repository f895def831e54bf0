"""Masks of other libraries, split and shortened."""

import torch

from bayesattn.convert import masks
from bayesattn.convert.masks import as_band, key_padding, note_making, split_mask


def padding(b=3, m=5, n=7) -> torch.Tensor:
    valid = torch.ones(b, 1, 1, n, dtype=torch.bool)
    valid[0, ..., 4:] = False
    return valid.expand(b, 1, m, n)


def test_equal_rows_become_one_whether_written_out_or_expanded():
    for mask in (padding(), padding().contiguous()):
        assert torch.equal(key_padding(mask), padding()[:, :, :1])


def test_rows_that_differ_stay():
    mask = padding().contiguous()
    mask[1, 0, 2, 3] = False
    assert key_padding(mask) is mask


def test_a_mask_is_looked_at_once_and_again_after_it_changed():
    mask = padding().contiguous()
    assert key_padding(mask).shape[2] == 1
    mask[1, 0, 2, 3] = False
    assert key_padding(mask) is mask
    mask[1, 0, 2, 3] = True
    assert key_padding(mask).shape[2] == 1


def test_empty_masks_and_single_rows_stay():
    for shape in ((2, 1, 0, 7), (2, 1, 3, 0), (2, 3, 1, 7)):
        mask = torch.ones(shape, dtype=torch.bool)
        assert key_padding(mask) is mask


def test_causal_masks_with_padding_become_a_mask_of_keys_and_their_window_a_number():
    valid = torch.tensor([[True] * 9, [True] * 5 + [False] * 4, [False] * 3 + [True] * 6])[:, None, None]
    triangle = torch.ones(9, 9, dtype=torch.bool).tril()
    for window, band in ((None, triangle), (4, triangle.triu(-3))):
        mask = band & valid
        keys, is_causal, found = as_band(mask, window)
        assert torch.equal(keys & band, mask)
        assert (keys.shape, is_causal, found) == ((3, 1, 1, 9), True, window)


def test_other_masks_stay_as_they_are():
    triangle = torch.ones(3, 1, 9, 9, dtype=torch.bool).tril()
    full, holed = torch.ones_like(triangle), triangle.clone()
    holed[1, 0, 5, 2] = False
    for mask, window in ((full, None), (holed, None), (triangle, 4), (triangle.triu(-3), None), (triangle[:, :, :5], None)):
        assert as_band(mask, window) == (mask, False, None)
    # changed in place: looked at again
    holed[1, 0, 5, 2] = True
    assert as_band(holed)[1]
    assert as_band(None) == (None, False, None)


def test_numbers_are_split_at_what_libraries_write_for_never():
    """A strong bias is still a bias; Swin forbids with −100 and adds to it; NaN stays."""
    mask = torch.tensor([0.5, -9.0, -79.5, -80.0, -100.0, -torch.inf, torch.nan])
    allowed, bias = split_mask(mask)
    assert allowed.tolist() == [True, True, True, False, False, False, True]
    torch.testing.assert_close(bias, torch.tensor([0.5, -9.0, -79.5, 0.0, 0.0, 0.0, torch.nan]), equal_nan=True)


def test_a_mask_whose_maker_noted_it_is_not_looked_at(monkeypatch):
    """Inside a compiler and during CUDA-graph capture `look_once` returns None."""
    monkeypatch.setattr(masks, "look_once", lambda *_: None)
    keys = torch.tensor([[True] * 6, [True] * 4 + [False] * 2])
    mask = keys[:, None, None].expand(2, 1, 6, 6).contiguous()
    assert key_padding(mask) is mask
    note_making(mask, keys, is_causal=False)
    assert torch.equal(key_padding(mask), keys[:, None, None])
    triangle = torch.ones(6, 6, dtype=torch.bool).tril() & mask
    assert as_band(triangle) == (triangle, False, None)
    note_making(triangle, keys, is_causal=True)
    # it is no mask of keys alone, and with a window something else is asked for
    assert key_padding(triangle) is triangle
    assert as_band(triangle, 3) == (triangle, False, None)
    found, is_causal, window = as_band(triangle)
    assert torch.equal(found, keys[:, None, None])
    assert (is_causal, window) == (True, None)


def test_a_note_without_keys_means_that_all_exist_and_ends_when_the_mask_changes(monkeypatch):
    monkeypatch.setattr(masks, "look_once", lambda *_: None)
    mask = torch.ones(2, 1, 6, 6, dtype=torch.bool)
    note_making(mask, None, is_causal=False)
    assert key_padding(mask) is None
    mask[0, 0, 3, 2] = False
    assert key_padding(mask) is mask
