"""What a type checker says to a user: right calls pass, a misspelled name or option does not."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("pyright")

ROOT = Path(__file__).parents[2]
# lines with "wrong" must be refused, all others accepted
SNIPPET = """
import dataclasses

import bayesattn as ba
import bayesattn.metrics
import torch
from bayesattn_recipes.baselines import AttentionChoice

x, model = torch.zeros(2, 3, 5, 7), torch.nn.Linear(7, 3)

config = ba.AttentionConfig("BAM-WC", preset="paper", kl_reduction="row_mean", mu_form="psi")
ba.AttentionConfig("BAM-XX")  # wrong
ba.AttentionConfig("hard-gumbel")  # wrong
ba.AttentionConfig(posterior="weibull", prior="contextual", weibull_k=3.0)
ba.AttentionConfig(posterior="none", prior=None)
ba.AttentionConfig(posterior=None)
ba.AttentionConfig(posterior="wiebull")  # wrong
ba.AttentionConfig(posterior="weibull", prior="contextul")  # wrong
dataclasses.replace(config, preset="paper").kl_reduction
ba.AttentionConfig(preset="papers")  # wrong
ba.AttentionConfig(score_form="log-softmax")  # wrong
ba.AttentionConfig(alpha_form="log_psi")  # wrong
ba.AttentionConfig(mu_form="beta_psi")  # wrong
ba.AttentionConfig(kl_reduction="median")  # wrong
AttentionChoice("hard-gumbel", context_prior="zero")
AttentionChoice("BAM-WF", weibull_k=3.0)
AttentionChoice("hard-gumble")  # wrong
ba.predict(model, x, task="multilabel")
ba.predict(model, x, task="multi-label")  # wrong
ba.predct  # wrong
ba.Any  # wrong
ba.metrics.aurc
ba.metrics.aurcc  # wrong
ba.KLSchedule("cyclic", anneal_unit="epoch", steps_per_epoch=7)
ba.KLSchedule("cycle")  # wrong
ba.functional.attention(x, x, x, config=config, backend="blocked")
ba.functional.attention(x, x, x, config=config, backend="block")  # wrong
ba.bayesianize(model, config)
print(ba.conversion_report(model))
print(ba.convert.conversion_report(model))
ba.conversion_reprot  # wrong
ba.convert.reprot  # wrong
edges = ba.functional.Edges(x, x, 3, 3)
ba.bayesianize(model, "BAM-WC")  # wrong
"""


def test_type_checker_refuses_what_is_misspelled_and_nothing_else(tmp_path):
    (tmp_path / "snippet.py").write_text(SNIPPET, encoding="utf-8")
    # extraPaths: this source, whatever is installed; type checkers do not see editable installs
    paths = [str(ROOT / "src"), str(ROOT / "recipes")]
    settings = {"extraPaths": paths, "reportUnusedExpression": False, "reportInvalidTypeForm": False}
    (tmp_path / "pyrightconfig.json").write_text(json.dumps(settings), encoding="utf-8")
    command = [sys.executable, "-m", "pyright", "--pythonpath", sys.executable, "--outputjson", "snippet.py"]
    result = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    found = {error["range"]["start"]["line"]: error["message"] for error in json.loads(result.stdout)["generalDiagnostics"]}
    lines = SNIPPET.splitlines()
    assert {lines[number] for number in found} == {line for line in lines if line.endswith("# wrong")}, found
