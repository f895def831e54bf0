"""Masks of other libraries, split and shortened."""

import torch

from bayesattn.convert.masks import key_padding


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
