"""How the processes of a run share work and add up results. A single process communicates with none."""

from collections.abc import Sequence

import numpy as np
import torch
from accelerate import Accelerator
from jaxtyping import Int
from torch import Tensor


class Processes:
    """The processes of a run.

    Attributes:
        accelerator: Hugging Face Accelerate's, which detects how this process was started.
        rank: Number of this process.
        world: How many there are.
        device: Device of this process.
    """

    def __init__(self) -> None:
        # the config decides the precision, not the launcher: the loop opens the autocast
        self.accelerator = Accelerator(mixed_precision="no")
        self.rank, self.world = self.accelerator.process_index, self.accelerator.num_processes
        self.device = self.accelerator.device

    def sum(self, value: Tensor) -> Tensor:
        """Return the sum over all processes; each has to call this."""
        if self.world == 1:
            return value
        total = self.accelerator.reduce(value.to(self.device), reduction="sum")
        assert isinstance(total, Tensor)
        return total

    def agree(self, first: bool, second: bool) -> tuple[bool, bool]:
        """Return for each of two flags whether any process has set it."""
        if self.world == 1:
            return first, second
        firsts, seconds = self.sum(torch.tensor([first, second], dtype=torch.int64)).tolist()
        return firsts > 0, seconds > 0


def share(indices: Int[Tensor, " b"], rank: int, world: int, accumulation_steps: int) -> Sequence[Int[Tensor, " part"]]:
    """Return the micro-batches of one process: every process has the same number, some empty if examples are few."""
    largest = -(-len(indices) // world)
    return indices[rank::world].tensor_split(min(accumulation_steps, largest))


def process_seed(seed: int, rank: int, step: int = 0) -> int:
    """Return a seed for the generators of one process that no other process, run or step has, below 2^32 for numpy."""
    return int(np.random.SeedSequence((seed % 2**63, rank, step)).generate_state(1)[0])
