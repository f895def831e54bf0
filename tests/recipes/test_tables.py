"""What the tables of all recipes share: names of variants, settings, progress, and a table that can be read."""

import io

import pytest
from rich.console import Console

import bayesattn_recipes as recipes
from bayesattn.cli.registry import Request
from bayesattn_recipes.common.progress import show_runs
from bayesattn_recipes.common.tables import choose, markdown, paired, print_tables

REPRODUCIBLE = ("graph", "language", "translation", "captioning", "vqa")


@pytest.mark.parametrize("given", [["wc", "lf"], ["BAM-WC", "BAM-LF"], ["bam-lf", "WC", "wc"], [" lf", "wc "]])
@pytest.mark.parametrize("allowed", [("soft", "lf", "wc"), ("soft", "BAM-LF", "BAM-WC", "BAM-WC+dropout")])
def test_a_variant_has_two_names(given, allowed):
    assert choose("variants", given, allowed) == list(allowed[1:3])


def test_unknown_names_are_refused_and_none_takes_the_default():
    with pytest.raises(ValueError, match="variants must be among soft, wc, got 'wd'"):
        choose("variants", ["wc", "wd"], ("soft", "wc"))
    assert choose("variants", None, ("soft", "wc")) == ["soft", "wc"]
    assert choose("datasets", None, ("a", "b"), ["b"]) == ["b"]


class Stop(Exception):
    pass


@pytest.mark.parametrize("recipe", REPRODUCIBLE)
def test_every_recipe_takes_settings_and_both_names_of_a_variant(recipe, tmp_path, monkeypatch):
    module, seen = recipes.RECIPES[recipe].load("reproduce"), []

    def load_config(name, settings=()):
        seen.append((name, list(settings)))
        raise Stop

    monkeypatch.setattr(module, "load_config", load_config)
    for name in ("load_data", "load_splits"):
        if hasattr(module, name):
            monkeypatch.setattr(module, name, lambda *_: {})
    options = {"out": tmp_path, "console": Console(quiet=True), "settings": ["training.epochs=2"]}
    names = {"graph": "cora", "language": "mrpc", "translation": "multi30k", "captioning": "shapes", "vqa": "shapes"}
    with pytest.raises(Stop):
        module.reproduce(Request(names=[names[recipe]], variants=["BAM-WC"], **options))
    assert "training.epochs=2" in seen[0][1]


def test_a_table_is_printed_in_columns():
    console = Console(file=io.StringIO(), width=30)
    table = markdown(["data set, variant", "seeds", "a|b"], [["cora soft", "5", "83.00 ± 0.31"], ["cora wc", "11", "–"]])
    print_tables(console, f"## Title\n\n{table}\nA note.\n")
    assert console.file.getvalue().splitlines() == [
        "## Title",
        "",
        "data set, variant  seeds           a|b",
        "─────────────────  ─────  ────────────",
        "cora soft              5  83.00 ± 0.31",
        "cora wc               11             –",
        "",
        "A note.",
    ]


def test_runs_are_announced_in_a_file_and_counted_in_a_terminal():
    console = Console(file=io.StringIO(), width=80)
    with show_runs(console, 3, 1) as display:
        display.begin("cora-wc")
        display.step(1, 2)
    assert console.file.getvalue() == "cora-wc: run 2 of 3\n"
    console = Console(file=io.StringIO(), width=80, force_terminal=True)
    with show_runs(console, 3, 1) as display:
        display.begin("cora-wc")
        display.step(1, 2)
        assert display.bar is not None
        assert [(task.description, task.completed, task.total) for task in display.bar.tasks] == [("cora-wc", 1.5, 3)]


def test_differences_that_are_equal_but_for_rounding_have_no_spread():
    ours, baseline = {0: 0.3, 1: 0.1 + 0.2}, {0: 0.1, 1: 0.1}
    assert ours[0] != ours[1]
    assert paired(ours, baseline).p_value == 0.0
    assert paired(baseline, baseline).p_value == 1.0
