"""What a user meets first: the names of the package, and what is said where an extra is missing."""

import importlib
import re
import sys
import tomllib
from pathlib import Path

import pytest

import bayesattn as ba
from bayesattn.optional import MissingExtra, lazy_names, needs_extra

ROOT = Path(__file__).parents[2]


def public(module) -> set[str]:
    return {name for name in dir(module) if not name.startswith("_")}


def test_dir_shows_what_can_be_used_and_nothing_else():
    assert public(ba) == set(ba.__all__)
    assert {"bayesianize", "restore", "tune_noise", "save_bayesian", "load_bayesian"} <= public(ba)
    assert "__version__" in dir(ba)
    assert public(ba.metrics) == {*ba.metrics.__all__, "running"}


@pytest.mark.parametrize("package", ["bayesattn", "bayesattn.metrics"])
def test_every_name_of_a_package_can_be_fetched_and_a_misspelled_one_cannot(package):
    module = importlib.import_module(package)
    for name in module.__all__:
        assert getattr(module, name) is not None
    with pytest.raises(AttributeError, match=f"module '{package}' has no attribute 'predct'"):
        module.predct  # noqa: B018


def test_late_names_are_the_functions_and_modules_themselves():
    assert ba.convert is sys.modules["bayesattn.convert"]
    assert ba.bayesianize is ba.convert.bayesianize
    fetch, listed = lazy_names("bayesattn.metrics", ["aurc"], {"scoring": "bayesattn.metrics.scoring"})
    assert fetch("scoring") is sys.modules["bayesattn.metrics.scoring"]
    assert {name for name in listed() if not name.startswith("_")} == {"aurc"}


def test_a_late_name_whose_package_is_missing_is_answered_with_the_pip_line():
    fetch, _ = lazy_names("bayesattn.integrations.hf", [], {"thing": "no_such_package.module"}, extra="hf")
    with pytest.raises(MissingExtra) as caught:
        fetch("thing")
    assert str(caught.value) == "bayesattn.integrations.hf needs the extra 'hf': pip install 'bayesattn[hf]'"
    assert caught.value.name == "no_such_package"


def test_errors_that_no_extra_puts_right_stay_what_they_are():
    with pytest.raises(ModuleNotFoundError) as caught, needs_extra("this", "hf"):
        importlib.import_module("bayesattn.no_such_part")
    assert type(caught.value) is ModuleNotFoundError
    with pytest.raises(ImportError) as refused, needs_extra("this", "hf"):
        raise ImportError("cannot import name 'x' from 'y'")
    assert type(refused.value) is ImportError
    with (
        pytest.raises(MissingExtra, match="inner needs the extra 'plots'"),
        needs_extra("outer", "hf"),
        needs_extra("inner", "plots"),
    ):
        importlib.import_module("no_such_package")


def test_every_extra_that_the_code_names_exists():
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["optional-dependencies"]
    sources = "".join(path.read_text(encoding="utf-8") for path in (ROOT / "src").rglob("*.py"))
    named = set(re.findall(r'needs_extra\("[\w.]+", "(\w+)"\)', sources))
    assert {"hf", "graph", "plots", "metrics", "lightning"} <= named <= set(extras)
