"""Noise for one call: a plain model is converted, measured, and restored.

`bayesianize` looks at every module of a model and tries the attention of every layer on a small example: for a twelve-layer
model this takes longer than running it. So its changes are stored outside the model. The next call applies and reverts
them, if the converted modules have not changed since.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from weakref import WeakKeyDictionary, ref

from torch import nn

from bayesattn.config import AttentionConfig
from bayesattn.convert import bayesianize, restore
from bayesattn.convert.adapters import bayesian_names
from bayesattn.convert.hosted import HostedAttention
from bayesattn.modes import all_modules, one_thread
from bayesattn.nn import BayesianModule

# the config of a plain model for the call; without a KL it needs no prior, so no parameters are added
DEFAULT = AttentionConfig("BAM-NOKL")

_ABSENT: Any = object()


@contextmanager
def bayesian(
    model: nn.Module, config: AttentionConfig | None
) -> Iterator[tuple[dict[BayesianModule, str], list[nn.Module]]]:
    """Yield the stochastic attention modules with their names, and all modules; a plain model is converted for the scope.

    Raises:
        ValueError: The model is Bayesian and a config is given as well, or it cannot be converted.
    """
    if not isinstance(model, nn.Module):
        raise ValueError(f"model must be a torch.nn.Module, got {type(model).__name__}")
    with one_thread(model):
        yield from _bayesian(model, config)


def _bayesian(
    model: nn.Module, config: AttentionConfig | None
) -> Iterator[tuple[dict[BayesianModule, str], list[nn.Module]]]:
    modules = all_modules(model)
    if any(isinstance(module, BayesianModule) for module in modules):
        if config is not None:
            raise ValueError("config is given, but the model is already Bayesian. Leave it out, or call restore(model)")
        yield _stochastic(model), modules
        return
    config = DEFAULT if config is None else config
    known = _KNOWN.get(model)
    if known is not None and known.fits(modules, config):
        known.put_in()
        try:
            # children that the conversion adds are not in the list yet
            yield known.names, [*modules, *known.names]
        finally:
            known.take_out()
        return
    before = [_State(module) for module in modules]
    bayesianize(model, config)
    try:
        names = _stochastic(model)
        # a layer that became another class keeps state between calls, which only `restore` removes
        if all(isinstance(part, HostedAttention) for part in names):
            _KNOWN[model] = _Conversion(config, names, before)
        yield names, all_modules(model)
    finally:
        restore(model)


def _stochastic(model: nn.Module) -> dict[BayesianModule, str]:
    found = {part: name for part, name in bayesian_names(model).items() if part.config.is_stochastic}
    if not found:
        if any(isinstance(part, BayesianModule) and part.is_observed for part in model.modules()):
            raise ValueError("the model is being observed. Call this outside `with ba.observe(model)`")
        weights = [getattr(part, "bayes_weights", None) for part in model.modules()]
        custom = next((part for part in weights if part is not None), None)
        kind = "the weights 'soft'" if custom is None else f"its own weights {custom.name!r}"
        raise ValueError(
            f"the attention of this {type(model).__name__} has {kind}, which have no noise that can be measured. "
            "Call restore(model), or convert it with another config"
        )
    sampling = [name for part, name in found.items() if part.samples_in_eval]
    if sampling:
        raise ValueError(f"{sampling[0]!r} is being sampled. Call this outside `with ba.sampling(model)`")
    return found


class _State:
    """A module's class and attributes; dictionaries among them (children, hooks) one level deep."""

    def __init__(self, module: nn.Module) -> None:
        self.module, self.kind = ref(module), type(module)
        self.attributes = dict(vars(module))
        self.entries = {name: dict(value) for name, value in self.attributes.items() if isinstance(value, dict)}


class _Change:
    """One entry of a module's attributes, or of a dictionary among them, before and after the conversion."""

    def __init__(self, module: nn.Module, owner: str | None, key: Any, before: Any, after: Any) -> None:
        self.module, self.owner, self.key, self.before, self.after = ref(module), owner, key, before, after
        # `bayesianize` copies a config that it replaces: after a change to the original a new copy is needed
        self.looks = dict(vars(before)) if hasattr(before, "__dict__") and not isinstance(before, type) else None

    def is_as_before(self) -> bool:
        module = self.module()
        if module is None or self._entries(module).get(self.key, _ABSENT) is not self.before:
            return False
        return self.looks is None or vars(self.before) == self.looks

    def set(self, value: Any) -> None:
        module = self.module()
        assert module is not None
        if value is _ABSENT:
            self._entries(module).pop(self.key, None)
        else:
            self._entries(module)[self.key] = value

    def _entries(self, module: nn.Module) -> dict:
        return vars(module) if self.owner is None else vars(module)[self.owner]


class _Conversion:
    """The changes of `bayesianize`, computed from the states of the modules before and after."""

    def __init__(self, config: AttentionConfig, names: dict[BayesianModule, str], before: list[_State]) -> None:
        self.config, self.names = config, names
        # modules are compared by identity; one that is gone cannot be mistaken for another: its changes would not fit
        self.modules, self.kinds = [id(state.module()) for state in before], [state.kind for state in before]
        self.classes: list[tuple[ref, type, type]] = []
        self.changes: list[_Change] = []
        for state in before:
            module = state.module()
            assert module is not None
            if type(module) is not state.kind:
                self.classes.append((state.module, state.kind, type(module)))
            now = vars(module)
            plain = ({k: v for k, v in x.items() if k not in state.entries} for x in (state.attributes, now))
            self._compare(module, None, *plain)
            for name, entries in state.entries.items():
                self._compare(module, name, entries, now[name])

    def _compare(self, module: nn.Module, owner: str | None, before: dict, now: dict) -> None:
        for key in [*before, *(key for key in now if key not in before)]:
            first, second = before.get(key, _ABSENT), now.get(key, _ABSENT)
            if first is not second:
                self.changes.append(_Change(module, owner, key, first, second))

    def fits(self, modules: list[nn.Module], config: AttentionConfig) -> bool:
        """Whether the model has the same modules, and what was converted in them is unchanged."""
        return (
            config == self.config
            and [*map(id, modules)] == self.modules
            and [*map(type, modules)] == self.kinds
            and all(change.is_as_before() for change in self.changes)
        )

    def put_in(self) -> None:
        """Convert the model."""
        for module, _, bayesian_class in self.classes:
            module().__class__ = bayesian_class
        for change in self.changes:
            change.set(change.after)

    def take_out(self) -> None:
        """Restore the model."""
        for change in reversed(self.changes):
            change.set(change.before)
        for module, plain_class, _ in self.classes:
            module().__class__ = plain_class


_KNOWN: WeakKeyDictionary[nn.Module, _Conversion] = WeakKeyDictionary()
