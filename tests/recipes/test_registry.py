"""The command line finds recipes by their entry points, anyone's, and says how to get the paper's where there are none."""

import os
import subprocess
import sys
from importlib.metadata import EntryPoint, entry_points

import pytest

# commands: imported while entry points are patched, they would lack the recipes' commands in later tests, too
from bayesattn.cli import commands as commands
from bayesattn.cli import main, registry
from bayesattn.evaluation.runs import write_run
from bayesattn_recipes import BENCH, DOUBT, RECIPES

ALL = {**RECIPES, "doubt": DOUBT, "bench": BENCH}
TRAIN = """
def load_config(name, settings):
    raise ValueError(f"mine was asked for {name}")
"""
REPRODUCE = """
def reproduce(request, *, search=False):
    return f"{request.names} {request.num_seeds} {request.deadline < float('inf')} {search}"
"""
SERVE = """
class Echo:
    note = "no answer is marked"

    def __init__(self, folder, num_samples, seed, method):
        self.options = [num_samples, seed, method]

    def check(self, texts, where):
        if len(texts) != 1:
            raise ValueError(f"{where} has {len(texts)} texts; give one")

    def answer(self, inputs):
        return [Said([text, *self.options]) for (text,) in inputs]

class Said(list):
    def to_dict(self):
        return {"said": list(self)}

load = Echo
"""


def test_the_papers_recipes_are_announced():
    assert registry.installed() == ALL
    assert all(recipe.has("train") and recipe.config_names for recipe in RECIPES.values())


@pytest.mark.parametrize("arguments", [["train", "graph", "--config", "cora-wc", "--out", "nowhere"], ["fly"]])
def test_without_any_recipe_the_command_line_says_how_to_get_them(monkeypatch, capsys, arguments):
    monkeypatch.setattr(registry, "entry_points", lambda group: ())
    with pytest.raises(SystemExit) as exit_:
        main(arguments)
    assert exit_.value.code == 2
    assert registry.INSTALL in capsys.readouterr().err
    with pytest.raises(SystemExit) as exit_:
        main(["list"])
    assert exit_.value.code == 0
    assert "No recipe is installed" in capsys.readouterr().out


def test_a_recipe_of_another_package_is_found_and_run(tmp_path):
    package, facts = tmp_path / "my_package", tmp_path / "my_package-1.dist-info"
    (package / "configs").mkdir(parents=True)
    facts.mkdir()
    (package / "__init__.py").write_text(
        'from bayesattn.cli.registry import Recipe\nMINE = Recipe("mine", "a recipe of my own", "my_package")\n'
    )
    (package / "train.py").write_text(TRAIN)
    (package / "reproduce.py").write_text(REPRODUCE)
    (package / "serve.py").write_text(SERVE)
    (package / "configs" / "small-wc.yaml").write_text("{}\n")
    (facts / "METADATA").write_text("Metadata-Version: 2.1\nName: my_package\nVersion: 1\n")
    (facts / "entry_points.txt").write_text(f"[{registry.GROUP}]\nmine = my_package:MINE\n")

    def call(*arguments):
        path = os.pathsep.join([str(tmp_path), *sys.path])
        command = [sys.executable, "-m", "bayesattn", *arguments]
        return subprocess.run(command, capture_output=True, text=True, env={**os.environ, "PYTHONPATH": path}, check=False)

    listed = call("list").stdout
    assert "mine: a recipe of my own" in listed
    assert "small-wc" in listed
    refused = call("train", "mine", "--config", "small-wc", "--out", str(tmp_path / "run"))
    assert (refused.returncode, refused.stderr) == (2, "bayesattn: mine was asked for small-wc\n")
    made = call("reproduce", "mine", "--datasets", "a,b", "--seeds", "2", "--minutes", "1", "--search")
    assert made.stdout == "table: ['a', 'b'] 2 True True\n"
    refused = call("reproduce", "mine", "--splits", "3")
    assert refused.stderr == "bayesattn: recipe 'mine' does not take splits. Leave the option out\n"
    write_run(tmp_path / "done", recipe="mine", variant="soft", config={}, seed=0)
    (tmp_path / "new.txt").write_text("first\nsecond\n")
    answered = call("predict", str(tmp_path / "done"), "--file", str(tmp_path / "new.txt"), "--samples", "3")
    assert answered.stdout == '{"said": ["first", 3, 0, null]}\n{"said": ["second", 3, 0, null]}\n'
    assert answered.stderr == "no answer is marked\n"


def test_a_recipe_that_cannot_be_imported_stops_itself_alone(monkeypatch):
    broken = EntryPoint("broken", "a_package_that_is_not_there:RECIPE", registry.GROUP)
    found = entry_points(group=registry.GROUP)
    monkeypatch.setattr(registry, "entry_points", lambda group: (*found, broken))
    with pytest.warns(UserWarning, match=r"recipe 'broken' .*a_package_that_is_not_there"):
        assert registry.installed() == ALL
    with pytest.raises(ValueError, match=r"recipe 'broken' .*a_package_that_is_not_there"):
        registry.find("broken")
    assert registry.find("digits") == RECIPES["digits"]


def test_a_part_that_a_recipe_does_not_have_is_named():
    with pytest.raises(ValueError, match="recipe 'digits' has no 'serve'"):
        registry.find("digits").load("serve")


@pytest.mark.parametrize(
    ("recipe", "config", "reads"),
    [
        ("digits", {}, False),
        ("language", {"task": "own"}, True),
        ("graph", {"dataset": "generated"}, False),
        ("graph", {"dataset": "cora"}, True),
        ("vqa", {"data": {"dataset": "shapes"}}, False),
        ("vqa", {"data": {"dataset": "daquar"}}, True),
    ],
)
def test_which_configs_read_files(recipe, config, reads):
    assert RECIPES[recipe].reads_files(config) is reads
