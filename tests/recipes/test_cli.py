"""The command line: every command does its job, and every mistake of the user is one line and exit code 2."""

import importlib
import json
import subprocess
import sys

import pytest

import bayesattn
import bayesattn_recipes as recipes
from bayesattn.cli import main
from bayesattn.cli.registry import Recipe
from bayesattn.evaluation.report import figures

TINY = [
    f"--set={setting}"
    for setting in ("training.epochs=1", "train_size=40", "training.batch_size=20", "width=8", "num_heads=2")
]


def call(*arguments):
    with pytest.raises(SystemExit) as exited:
        main([str(argument) for argument in arguments])
    return exited.value.code


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs") / "wc"
    assert call("train", "digits", "--config", "wc", "--out", folder, *TINY) == 0
    return folder


def test_version(capsys):
    assert call("--version") == 0
    assert capsys.readouterr().out == f"bayesattn {bayesattn.__version__}\n"


def test_no_arguments_show_the_help(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    assert call() == 0
    shown = capsys.readouterr().out
    assert "\n  doctor " in shown
    # a sentence that is cut says nothing
    assert "..." not in shown.partition("Commands:")[2]


def test_help_imports_neither_torch_nor_numpy():
    # importing torch takes seconds; a clock would measure the machine
    code = """
import sys
from bayesattn.cli import main
from bayesattn.cli.commands import app
names = [command.name or command.callback.__name__ for command in app.registered_commands]
for arguments in [["--help"], ["--version"], ["list"], *([name, "--help"] for name in names)]:
    try:
        main(arguments)
    except SystemExit as exited:
        assert exited.code == 0, arguments
print(len(names), sorted({"torch", "numpy", "matplotlib", "scipy"} & set(sys.modules)), file=sys.stderr)
"""
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert ran.stderr == "14 []\n"
    assert "--tensorboard" in ran.stdout


def test_list_shows_every_recipe_and_config_a_line_for_each_data_set(capsys):
    assert call("list") == 0
    lines = capsys.readouterr().out.splitlines()
    shown = [line.split() for line in lines]
    assert ["lc", "lf", "nokl", "soft", "wc", "wf", "(needs", "no", "files)"] in shown
    assert ["generated-nokl", "generated-soft", "generated-wc", "(needs", "no", "files)"] in shown
    assert ["tolokers-nokl", "tolokers-soft", "tolokers-wc"] in shown
    words = {word for line in shown for word in line}
    for recipe in recipes.RECIPES:
        assert any(line.startswith(f"{recipe}: ") for line in lines)
        assert set(recipes.RECIPES[recipe].config_names) <= words


def test_doctor_shows_versions_and_every_backend(capsys):
    import torch

    assert call("doctor") == 0
    shown = capsys.readouterr().out
    assert torch.__version__ in shown
    rows = [[cell.strip() for cell in line.split("│")[1:-1]] for line in shown.splitlines() if line.count("│") == 4]
    found = [row[1:] for row in rows if row[1]]
    assert [row[0] for row in found] == [
        "reference",
        "blocked",
        "triton",
        "reference",
        "csr",
        "triton",
        "reference",
        "triton",
    ]
    if not torch.cuda.is_available():
        assert all(row[1] == "works" if row[0] != "triton" else row[1].startswith("the tensors are on") for row in found)


@pytest.mark.parametrize(
    ("missing", "message"),
    [
        ("no_such_package", "bayesattn list needs the extra 'all': pip install 'bayesattn[all]'"),
        ("bayesattn.no_such_part", "internal error: ModuleNotFoundError"),
    ],
)
def test_missing_extra_is_answered_with_its_pip_line(missing, message, monkeypatch, capsys):
    monkeypatch.setattr(Recipe, "config_folder", property(lambda recipe: importlib.import_module(missing)))
    assert call("list") == (1 if missing.startswith("bayesattn") else 2)
    error = capsys.readouterr().err
    assert error.startswith(f"bayesattn: {message}")
    assert error.count("\n") == 1


def test_missing_packages_of_the_command_line_are_answered_with_its_pip_line(monkeypatch, capsys):
    monkeypatch.delitem(sys.modules, "bayesattn.cli.commands", raising=False)
    monkeypatch.setitem(sys.modules, "typer", None)
    assert call("list") == 2
    assert capsys.readouterr().err == "bayesattn: the command line needs the extra 'cli': pip install 'bayesattn[cli]'\n"


def test_train_writes_a_run_with_its_settings(run):
    written = json.loads((run / "run.json").read_text())
    assert (written["recipe"], written["variant"], written["config"]["width"]) == ("digits", "BAM-WC", 8)
    assert written["num_parameters"] > 0


def test_evaluate_writes_metrics_and_prints_a_table(run, capsys):
    assert call("evaluate", run, "--samples", 3, "--noise", "0,1,2", "--resamples", 20) == 0
    shown = capsys.readouterr().out
    metrics = json.loads((run / "metrics.json").read_text())
    assert metrics["schema"] == "bayesattn.metrics/1"
    assert set(metrics["methods"]) == {"mean", "attention"}
    drawn = metrics["methods"]["attention"]
    assert drawn["num_samples"] == 3
    assert {"test", "noise-1", "noise-2", "scrambled"} <= set(drawn["splits"])
    assert "noise-0" not in drawn["splits"]
    accuracy = drawn["splits"]["test"]["metrics"]["accuracy"]
    assert 0.0 <= accuracy["low"] <= accuracy["value"] <= accuracy["high"] <= 1.0
    assert f"{accuracy['value']:.3f}" in shown
    assert "± half a 95 % bootstrap interval over examples" in shown


def test_without_resamples_no_interval_is_explained(run, capsys):
    assert call("evaluate", run, "--samples", 2, "--noise", "0", "--resamples", 0) == 0
    shown = capsys.readouterr().out
    assert "bootstrap" not in shown
    assert "PAvPU: paired t-test, threshold 0.05" in shown


@pytest.mark.parametrize(
    ("recipe", "config"),
    [("digits", "soft"), ("graph", "generated-soft"), ("vqa", "shapes-soft"), ("captioning", "shapes-soft")],
)
def test_data_that_nothing_looks_into_is_refused(recipe, config, tmp_path, capsys):
    assert call("train", recipe, "--config", config, "--out", tmp_path / "run", "--data", tmp_path) == 2
    assert f"data is '{tmp_path}', but recipe '{recipe}' reads no files with this config" in capsys.readouterr().err
    assert not (tmp_path / "run").exists()


def test_data_that_nothing_looks_into_is_refused_by_evaluate(run, tmp_path, capsys):
    assert call("evaluate", run, "--samples", 2, "--data", tmp_path) == 2
    assert "recipe 'digits' reads no files" in capsys.readouterr().err


def test_data_of_the_variable_is_for_those_who_read_files(run, tmp_path, monkeypatch):
    monkeypatch.setenv("BAYESATTN_DATA", str(tmp_path))
    assert call("train", "digits", "--config", "wc", "--out", run, *TINY, "--resume") == 0


def test_report_writes_one_page(run, tmp_path, capsys):
    assert call("evaluate", run, "--samples", 2, "--noise", "0", "--resamples", 0) == 0
    page = tmp_path / "page.html"
    assert call("report", run, "--out", page) == 0
    assert page.read_text().startswith("<!doctype html>")
    assert f"report: {page}" in capsys.readouterr().out.replace("\n", "")


def test_demo_compares_soft_and_bayesian_attention(tmp_path, capsys, monkeypatch):
    # the page of the test above has its figures; drawing them again takes most of the time
    monkeypatch.setattr(figures, "draw_all", lambda groups: [])
    assert call("demo", "--out", tmp_path, "--seeds", 2, "--samples", 2, "--epochs", 1) == 0
    shown = capsys.readouterr().out
    assert all(word in shown for word in ("soft, no draws", "soft, MC dropout", "BAM-WC, draws", "report.html"))
    summary = json.loads((tmp_path / "summary.json").read_text())
    runs = [json.loads((tmp_path / f"soft-{seed}" / "metrics.json").read_text()) for seed in (0, 1)]
    values = [run["methods"]["mean"]["splits"]["test"]["metrics"]["nll"]["value"] for run in runs]
    assert summary["soft, no draws"]["test nll"]["value"] == pytest.approx(sum(values) / 2)
    # one page for both parts, and something to read before the first model is trained
    page = (tmp_path / "report.html").read_text()
    assert "generated-wc-0" in page
    assert "wc-1" in page
    assert not (tmp_path / "graph" / "report.html").exists()
    assert shown.startswith("Small models are trained")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["train", "cats", "--config", "wc", "--out", "OUT"], "recipe must be one of 'bench', 'captioning', 'digits'"),
        (
            ["train", "digits", "--config", "zz", "--out", "OUT"],
            "config must be one of lc, lf, nokl, soft, wc, wf, or the path of a YAML file, got 'zz'",
        ),
        (["train", "digits", "--config", "wc"], "Missing option '--out'"),
        (
            ["train", "digits", "--config", "wc", "--out", "OUT", "--set", "epochs"],
            "setting must be name=value, as in attention.weibull_k=5, got 'epochs'",
        ),
        (
            ["train", "digits", "--config", "wc", "--out", "OUT", "--set", "epoch=1"],
            "wc.yaml: epoch is unknown. Use one of",
        ),
        (
            ["train", "digits", "--config", "wc", "--out", "OUT", "--set", "attention.weibull_k=-1"],
            "weibull_k must be a finite number above 0, got -1.0",
        ),
        (
            ["train", "digits", "--config", "wc", "--out", "OUT", "--set", "attention.prior_hidden_dim=9000000000000"],
            "does not fit into memory. Reduce its sizes; the largest is attention.prior_hidden_dim = 9000000000000",
        ),
        (
            ["train", "digits", "--config", "wc", "--out", "OUT", "--set", f"width={2**62}"],
            f"does not fit into memory. Reduce its sizes; the largest is width = {2**62}",
        ),
        (["evaluate", "RUN", "--data", ""], "the value of --data is empty"),
        (["evaluate", "OUT"], "is not a folder"),
        (["evaluate", "RUN", "--noise", "a,b"], "noise must be numbers separated by commas, as in 0,1,2, got 'a,b'"),
        (["evaluate", "RUN", "--noise", "-1"], "strength must be a finite number of at least 0, got -1.0"),
        (["evaluate", "RUN", "--samples", "1"], "Invalid value for '--samples'"),
        (["evaluate", "RUN", "--method", "magic"], "for BAM-WC, got 'magic'"),
        (["report", "OUT"], "is not a folder"),
        (["report"], "Missing argument"),
        (["report", "RUN", "RUN"], "is given 2 times. Give each run once"),
        (["report", "RUN", "--out", "RUN"], "out must be the path of the page to write, got the folder"),
        (["train", "digits", "--config", "wc", "--out", ""], "the value of --out is empty"),
        (["train", "digits", "--config", "wc", "--out="], "the value of --out is empty"),
        (["evaluate", ""], "an argument is empty. Leave it out, or give it a value"),
        (["fly"], "No such command 'fly'. Try: bayesattn --help"),
        (["list", "digits"], "Try: bayesattn list --help"),
        (["train", "graph", "--config", "cora", "--out", "OUT"], "names (such as cora-"),
        (["doubt", "--model", "RUN", "--text", "OUT"], "out: No such file or directory"),
    ],
)
def test_mistakes_are_one_line_and_exit_code_2(arguments, message, run, tmp_path, capsys):
    out = tmp_path / "out"
    places = {"OUT": out, "RUN": run}
    before = sorted(entry.name for entry in run.iterdir())
    capsys.readouterr()
    assert call(*(places.get(argument, argument) for argument in arguments)) == 2
    streams = capsys.readouterr()
    assert message in streams.err
    assert streams.err.count("\n") == 1
    assert "Traceback" not in streams.err
    assert not out.exists()
    assert sorted(entry.name for entry in run.iterdir()) == before


def test_finished_run_is_replaced_only_when_asked(run, capsys):
    assert call("train", "digits", "--config", "wc", "--out", run, *TINY) == 2
    assert "already holds a run. Choose a new folder, or replace it with --overwrite" in capsys.readouterr().err
    assert call("train", "digits", "--config", "wc", "--out", run, *TINY, "--overwrite") == 0


def test_debug_shows_the_traceback(tmp_path):
    with pytest.raises(ValueError, match="is not a folder"):
        main(["evaluate", str(tmp_path / "nowhere"), "--debug"])


def test_defect_of_the_program_is_not_blamed_on_the_user(monkeypatch, capsys):
    monkeypatch.setattr(Recipe, "config_folder", property(lambda recipe: 1 / 0))
    assert call("list") == 1
    assert "internal error: ZeroDivisionError" in capsys.readouterr().err
