"""A model of two numbers, whose NLL, KL and gradients are known without a derivative."""

import torch
from torch import nn

from bayesattn.kl import is_recording, record
from bayesattn_recipes.common.experiment import Experiment

RATE = 0.125
# by example: input, labels, KL for z = 1
INPUTS = torch.tensor([2.0, -3.0, 5.0, 7.0, 11.0, -13.0, 17.0], dtype=torch.float64)
LABELS = torch.tensor([3, 140, 1, 2, 5, 7, 11])
COSTS = torch.tensor([0.5, 1.0, 2.0, 3.0, 5.0, 0.25, 7.0], dtype=torch.float64)
# the steps of an epoch; the last has one example only
BATCHES = (torch.tensor([4, 0, 2]), torch.tensor([6, 1, 3]), torch.tensor([5]))


class Line(nn.Module):
    """The NLL of a label is w x, the KL of an example is its cost times z: gradients are known without a derivative."""

    kl_name = "line"

    def __init__(self):
        super().__init__()
        self.w = nn.Parameter(torch.tensor(0.25, dtype=torch.float64))
        self.z = nn.Parameter(torch.tensor(40.0, dtype=torch.float64))

    def forward(self, inputs, costs):
        output = self.w * inputs
        return record(output, self.z * costs, self) if is_recording(self) else output


class LineExperiment(Experiment):
    num_examples = len(INPUTS)

    def __init__(self, scores=(0.0,) * 9):
        self.model = Line()
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=RATE)
        self.scores, self.validated = scores, []

    def batches(self, config, generator):
        return BATCHES

    def collate(self, indices):
        return {"inputs": INPUTS[indices], "labels": LABELS[indices], "costs": COSTS[indices]}

    def num_labels(self, batch):
        return int(batch["labels"].sum())

    def nll(self, model, batch):
        return (model(batch["inputs"], batch["costs"]) * batch["labels"]).sum()

    def validate(self, model):
        assert not model.training
        assert not torch.is_grad_enabled()
        self.validated.append((self.model.w.item(), self.model.z.item()))
        return {"score": self.scores[len(self.validated) - 1]}
