"""What every kernel's tests share."""

import os

import pytest
import torch


@pytest.fixture(autouse=True)
def _patched_once_per_launch(monkeypatch):
    """Triton's interpreter patches its language at every call of a device function. Once per launch is enough."""
    if os.environ.get("TRITON_INTERPRET") != "1":
        return
    # here, since triton is not installed everywhere
    import triton
    from triton.runtime import interpreter

    patch, languages = interpreter._patch_lang, (triton.language, triton.language.core)

    def patch_unless_patched(function):
        seen = [module for module in languages if any(value is module for value in function.__globals__.values())]
        is_patched = seen and not any(triton.language.core.is_builtin(module.load) for module in seen)
        return interpreter._LangPatchScope() if is_patched else patch(function)

    monkeypatch.setattr(interpreter, "_patch_lang", patch_unless_patched)


@pytest.fixture
def poisoned(monkeypatch):
    """New memory is NaN, so that what nobody wrote is seen."""
    empty, strided, like = torch.Tensor.new_empty, torch.Tensor.new_empty_strided, torch.empty_like

    def poison(x):
        return x.fill_(float("nan")) if x.is_floating_point() else x

    monkeypatch.setattr(torch.Tensor, "new_empty", lambda self, *args, **kwargs: poison(empty(self, *args, **kwargs)))
    monkeypatch.setattr(
        torch.Tensor, "new_empty_strided", lambda self, *args, **kwargs: poison(strided(self, *args, **kwargs))
    )
    monkeypatch.setattr(torch, "empty_like", lambda *args, **kwargs: poison(like(*args, **kwargs)))
