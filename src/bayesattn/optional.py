"""Parts that need more than torch: imported when first used; the error for a missing package shows its pip command."""

import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from importlib import import_module
from types import TracebackType
from typing import Any


class needs_extra:
    """Scope for imports that need an extra of the package; the error for a missing module says what to install.

        with needs_extra("bayesattn.integrations.hf", "hf"):
            from transformers import Trainer

    A class rather than a generator: type checkers then see that it swallows no error and that the imported names are bound.

    Args:
        what: What cannot be used without it.
        extra: The name of the extra in pyproject.toml.
    """

    def __init__(self, what: str, extra: str) -> None:
        self.what, self.extra = what, extra

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        # an error that already shows a pip command passes, and so does a missing module of this package, which no extra
        # installs
        if type(error) is ModuleNotFoundError and (error.name or "").partition(".")[0] != "bayesattn":
            raise MissingExtra(self.what, self.extra, error.name) from error


class MissingExtra(ModuleNotFoundError):
    """An extra that is not installed; `name` is the missing module, as for every `ModuleNotFoundError`."""

    def __init__(self, what: str, extra: str, name: str | None = None) -> None:
        super().__init__(f"{what} needs the extra {extra!r}: pip install 'bayesattn[{extra}]'", name=name)


def lazy_names(
    package: str, names: Sequence[str], modules: Mapping[str, str], extra: str | None = None
) -> tuple[Callable[[str], Any], Callable[[], list[str]]]:
    """Return `__getattr__` and `__dir__` for a package that imports some of its names on first use.

    Args:
        package: Its `__name__`.
        names: Its `__all__`.
        modules: The module that defines each of these names; a name equal to the last part of its module is that module.
        extra: The extra that these names need.
    """

    def __getattr__(name: str) -> Any:
        if name not in modules:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        with nullcontext() if extra is None else needs_extra(package, extra):
            module = import_module(modules[name])
        return module if modules[name] == f"{package}.{name}" else getattr(module, name)

    def __dir__() -> list[str]:
        return sorted({*names, *(name for name in vars(sys.modules[package]) if name.startswith("__"))})

    return __getattr__, __dir__
