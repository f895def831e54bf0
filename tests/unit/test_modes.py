"""The modules of a model are found once each, and eval mode is temporary."""

import pytest
from torch import nn

from bayesattn.modes import all_modules, evaluating


class Odd(nn.Module):
    """A shared child, a missing one, and two names for one module."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Sequential(nn.Linear(3, 5), nn.ReLU())
        self.again = self.first[0]
        self.missing = None
        self.register_module("absent", None)
        self.block = nn.ModuleList([self.first, nn.Dropout()])


@pytest.mark.parametrize("model", [Odd(), nn.Identity(), nn.TransformerDecoderLayer(8, 2, 11)])
def test_all_modules_are_those_of_torch(model):
    found = all_modules(model)
    assert len(found) == len(set(found))
    assert set(found) == set(model.modules())


def test_every_module_gets_its_own_mode_back():
    model = Odd().train()
    model.block[1].eval()
    before = {module: module.training for module in model.modules()}
    with pytest.raises(ZeroDivisionError):
        _fail_while_evaluating(model)
    assert {module: module.training for module in model.modules()} == before


def _fail_while_evaluating(model):
    with evaluating(model):
        assert not any(module.training for module in model.modules())
        raise ZeroDivisionError
