"""Configs are strict: an unknown key, a wrong type or an unreadable file is an error with its name."""

from dataclasses import dataclass, field
from typing import Literal

import pytest
import torch

from bayesattn.cli.registry import find
from bayesattn.evaluation.threads import one_thread
from bayesattn_recipes import DIGITS, RECIPES
from bayesattn_recipes.common.config import build_config, find_config, load_yaml, override, with_base
from bayesattn_recipes.common.folders import write_log


@dataclass(frozen=True)
class Inner:
    kind: Literal["a", "b"] = "a"
    rate: float = 0.5


@dataclass(frozen=True)
class Outer:
    inner: Inner = field(default_factory=Inner)
    size: int = 3
    limit: int | None = None
    name: str = "x"
    is_big: bool = False


def test_values_arrive_with_their_types():
    values = {"inner": {"kind": "b", "rate": 2}, "size": 5, "limit": None, "is_big": True}
    assert build_config(Outer, values) == Outer(Inner("b", 2.0), 5, None, "x", True)


def test_numbers_that_yaml_reads_as_text_are_numbers(tmp_path):
    path = tmp_path / "c.yaml"
    path.write_text("rate: 1e-2\n")
    assert load_yaml(path) == {"rate": 0.01}
    assert build_config(Inner, load_yaml(path)).rate == 0.01


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"sise": 3}, "sise is unknown. Use one of inner, is_big, limit, name, size"),
        ({"inner": {"rat": 1}}, "inner.rat is unknown. Use one of kind, rate"),
        ({"inner": 3}, "inner must be a mapping, got 3"),
        ({"size": "3"}, "size must be an integer, got '3'"),
        ({"size": True}, "size must be an integer, got True"),
        ({"size": 3.5}, "size must be an integer, got 3.5"),
        ({"limit": "a"}, "limit must be an integer, got 'a'"),
        ({"inner": {"rate": "fast"}}, "inner.rate must be a number, got 'fast'"),
        ({"inner": {"rate": True}}, "inner.rate must be a number, got True"),
        ({"inner": {"kind": "c"}}, "inner.kind must be one of 'a', 'b', got 'c'"),
    ],
)
def test_wrong_values_are_named(values, message):
    with pytest.raises(ValueError, match=message):
        build_config(Outer, values)


def test_settings_reach_into_nested_values_and_leave_the_original():
    values = {"inner": {"rate": 0.5}, "size": 3}
    changed = override(values, ["inner.rate=2", "limit=7", "name=a=b"])
    assert changed == {"inner": {"rate": 2}, "size": 3, "limit": 7, "name": "a=b"}
    assert values == {"inner": {"rate": 0.5}, "size": 3}


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ("rate", "setting must be name=value"),
        ("=3", "setting must be name=value"),
        ("size.x=3", "size is a plain value, not a mapping"),
        ("size=[", "has a value that is not valid YAML"),
    ],
)
def test_bad_settings_are_named(setting, message):
    with pytest.raises(ValueError, match=message):
        override({"size": 3}, [setting])


@pytest.mark.parametrize(
    ("content", "message"),
    [("[1]", "must hold a mapping of names to values, got list"), ("a: [", "cannot be read"), ("a: *x", "cannot be read")],
)
def test_unreadable_config_is_named(tmp_path, content, message):
    path = tmp_path / "c.yaml"
    path.write_text(content)
    with pytest.raises(ValueError, match=message) as caught:
        load_yaml(path)
    assert "\n" not in str(caught.value)


def test_config_is_found_by_name_or_path(tmp_path):
    path = tmp_path / "mine.yaml"
    path.write_text("size: 3\n")
    assert find_config("mine", tmp_path) == path
    assert find_config(str(path), DIGITS.config_folder) == path
    with pytest.raises(
        ValueError, match="config must be one of lc, lf, nokl, soft, wc, wf, or the path of a YAML file, got 'nope'"
    ):
        find_config("nope", DIGITS.config_folder)


def test_every_recipe_has_configs():
    assert all(find(name).config_names for name in RECIPES)
    with pytest.raises(ValueError, match=r"recipe must be one of .*'digits'.*, got 'nope'"):
        find("nope")


def test_one_thread_is_given_back():
    torch.set_num_threads(2)
    with one_thread():
        assert torch.get_num_threads() == 1
    assert torch.get_num_threads() == 2


def test_log_is_one_json_object_per_line(tmp_path):
    write_log(tmp_path, [{"epoch": 0, "loss": 1.5}, {"epoch": 1, "loss": 0.5}])
    assert (tmp_path / "log.jsonl").read_text() == '{"epoch": 0, "loss": 1.5}\n{"epoch": 1, "loss": 0.5}\n'


def test_config_has_the_values_of_its_base_wherever_it_names_no_others(tmp_path):
    (tmp_path / "soft.yaml").write_text("rate: 0.1\ninner: {kind: soft, size: 3}\n")
    (tmp_path / "twice.yaml").write_text("base: soft\n")
    above = {"base": "soft", "inner": {"kind": "wc"}, "steps": 5}
    expected = {"rate": 0.1, "inner": {"kind": "wc", "size": 3}, "steps": 5}
    assert with_base(above, tmp_path, "wc.yaml") == expected
    assert above["base"] == "soft"
    assert with_base({"rate": 0.2}, tmp_path, "plain.yaml") == {"rate": 0.2}
    for base in ("nope", "../soft.yaml", 3):
        with pytest.raises(ValueError, match=rf"wc\.yaml: base must be one of the configs in .*, got {base!r}"):
            with_base({"base": base}, tmp_path, "wc.yaml")
    with pytest.raises(
        ValueError, match=r"wc\.yaml: base must be a config without a base of its own, got 'twice'. Use 'soft'"
    ):
        with_base({"base": "twice"}, tmp_path, "wc.yaml")
