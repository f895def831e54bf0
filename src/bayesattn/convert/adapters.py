"""The adapters that make attention modules Bayesian, one per kind of module.

An adapter is a Python module with the functions of `Adapter`. Those for torch's modules and for callers of its attention
function are in this folder; those for transformers and torch_geometric live in `bayesattn.integrations` and are loaded only
if the library in question is already imported: a model of that library cannot exist otherwise.
"""

import importlib
import re
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol, cast, runtime_checkable

from torch import nn

from bayesattn.config import AttentionConfig
from bayesattn.convert import sdpa
from bayesattn.convert.attributes import Sizes
from bayesattn.nn import AttentionWeights, BayesianModule

# library that must be imported → adapter; the first that claims a module keeps it
ADAPTERS: dict[str, str] = {
    "torch": "bayesattn.convert.multihead",
    "transformers": "bayesattn.integrations.hf.adapter",
    "transformers.modeling_utils": "bayesattn.integrations.hf.softmax",
    "torch_geometric": "bayesattn.integrations.pyg.adapter",
    "torch.nn": "bayesattn.convert.sdpa",
}

_LOOKS_LIKE_ATTENTION = re.compile(r"Attention|Attn")


@dataclass(frozen=True)
class Candidate:
    """An attention module of a model.

    Attributes:
        name: Its name in the model.
        module: The module itself.
        adapter: The adapter that claims it, or None.
        problem: Why it cannot be converted; None where it can.
    """

    name: str
    module: nn.Module
    adapter: "Adapter | None"
    problem: str | None = None

    @property
    def kind(self) -> str:
        """Class of the module."""
        return type(self.module).__name__

    def refusal(self, weights: AttentionWeights) -> str | None:
        """Say why the module cannot take these custom weights; None where it can."""
        own = getattr(self.adapter, "refusal", None)
        return None if own is None else own(weights)


@runtime_checkable
class Adapter(Protocol):
    """The functions that `bayesianize` and `restore` need for one kind of attention.

    An adapter whose modules cannot take all custom weights also has `refusal(weights)`, as in `Candidate`.
    """

    def find(self, model: nn.Module, config: AttentionConfig) -> dict[str, str | None]:
        """Return the modules of this kind that are not Bayesian yet: by name, why it cannot be converted, or None."""
        ...

    def sizes(self, module: nn.Module) -> Sizes:
        """Return the sizes to build the custom weights of a module with."""
        ...

    def attach(
        self, model: nn.Module, name: str, config: AttentionConfig | None, weights: AttentionWeights | None = None
    ) -> None:
        """Make the module `name` of `model` Bayesian, with a config or with custom weights."""
        ...

    def bayesian_part(self, module: nn.Module) -> BayesianModule | None:
        """Return the Bayesian module behind a converted attention module, itself or its child; else None."""
        ...

    def detach(self, model: nn.Module, name: str) -> None:
        """Undo `attach`, leaving no trace."""
        ...


def loaded_adapters() -> list[Adapter]:
    """Return the adapters of all libraries that are imported."""
    # these modules are above this layer: the table names them as strings to keep the package's imports pointing inwards
    paths = [path for library, path in ADAPTERS.items() if library in sys.modules]
    return [cast(Adapter, importlib.import_module(path)) for path in paths]


def converted_modules(model: nn.Module) -> list[tuple[str, Adapter, BayesianModule]]:
    """Return (name, adapter, Bayesian part) of every converted attention module, in the model's order."""
    found = []
    adapters = loaded_adapters()
    for name, module in model.named_modules():
        for adapter in adapters:
            part = adapter.bayesian_part(module)
            if part is not None:
                found.append((name, adapter, part))
                break
    return found


def bayesian_names(model: nn.Module) -> dict[BayesianModule, str]:
    """Return every Bayesian module with its name; the child of a converted host has the host's, which users know."""
    names = {part: name for name, _, part in converted_modules(model)}
    for name, module in model.named_modules():
        if isinstance(module, BayesianModule):
            names.setdefault(module, name)
    return names


def find_candidates(model: nn.Module, config: AttentionConfig, callers: Sequence[str] = ()) -> list[Candidate]:
    """Return every attention module that is not Bayesian yet, in the model's order, even if it cannot be converted.

    `callers` names modules that are known to call `F.scaled_dot_product_attention`, though their source may not show it.
    """
    claimed: dict[str, Candidate] = {}
    for adapter in loaded_adapters():
        for name, problem in adapter.find(model, config).items():
            claimed.setdefault(name, Candidate(name, model.get_submodule(name), adapter, problem))
    for name in callers:
        module = model.get_submodule(name)
        claimed.setdefault(name, Candidate(name, module, cast(Adapter, sdpa), sdpa.problem(module, config)))
    taken = list(claimed) + [name for name, _, _ in converted_modules(model)]
    unclaimed = [
        name
        for name, module in model.named_modules()
        if _LOOKS_LIKE_ATTENTION.search(type(module).__name__)
        and not isinstance(module, BayesianModule)
        and not any(_related(name, other) for other in taken)
    ]
    for name in unclaimed:
        # if a wrapper contains the attention, only the inner module counts
        if not any(other != name and _is_inside(other, name) for other in unclaimed):
            problem = (
                "it has its own attention code: neither torch's nor PyG's, nor called through transformers' registry; if it "
                "still calls F.scaled_dot_product_attention, give bayesianize one batch as example_inputs"
            )
            claimed[name] = Candidate(name, model.get_submodule(name), None, problem)
    return [claimed[name] for name, _ in model.named_modules() if name in claimed]


def _is_inside(name: str, outer: str) -> bool:
    return outer == "" or name.startswith(outer + ".")


def _related(name: str, other: str) -> bool:
    return name == other or _is_inside(name, other) or _is_inside(other, name)
