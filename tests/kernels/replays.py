"""What a recorded call has to show, for every kernel that draws."""

from collections.abc import Callable

import torch
from torch import Tensor

from bayesattn_recipes.bench.harness import recorded


def check_replays(call: Callable[[], None], held: list[Tensor]) -> None:
    """Record a call that leaves tensors in `held`: every replay draws anew, and a seed set before it repeats its draw."""
    replay, found = recorded(call), []
    for seed in (5, None, 5):
        if seed is not None:
            torch.manual_seed(seed)
        replay()
        found.append([x.clone() for x in held])
    # the same kernels on the same numbers; some gradients are added in any order
    torch.testing.assert_close(found[2], found[0], rtol=1e-5, atol=1e-5)
    assert not torch.allclose(found[1][0], found[0][0])
