"""`import bayesattn` and its conversions import transformers and torch_geometric only where the model did."""

import subprocess
import sys

import pytest

# every optional package of pyproject.toml, and scipy, which takes long to import
OPTIONAL = (
    "accelerate", "huggingface_hub", "jinja2", "matplotlib", "peft", "pycocoevalcap", "pytorch_lightning", "rich",
    "sacrebleu", "scipy", "sklearn", "tensorboard", "tokenizers", "torch_geometric", "torchmetrics", "transformers", "typer",
    "yaml",
)  # fmt: skip

LIGHT = f"""
import importlib, sys
import torch
import bayesattn as ba
for name in ba.__all__: getattr(ba, name)
model = ba.bayesianize(torch.nn.MultiheadAttention(6, 2), ba.AttentionConfig("BAM-WC"))
ba.restore(model)
print(sorted(set({OPTIONAL}) & set(sys.modules)))
for name in {OPTIONAL}: sys.modules[name] = None
for module, name in (
    ("integrations.hf", "generate"), ("integrations.pyg", "BayesianGATConv"), ("plots", "plot_pavpu"),
    ("metrics", "running"), ("integrations.lightning", "KLCallback"), ("integrations.sklearn", "DoubtClassifier"),
):
    try:
        getattr(importlib.import_module("bayesattn." + module), name)
    except ModuleNotFoundError as error:
        print(error.name.partition(".")[0], error, sep=": ")
"""

TRAINER = """
import sys
import transformers
import bayesattn as ba
from bayesattn.convert import bayesianize
config = transformers.BertConfig(vocab_size=9, hidden_size=8, num_hidden_layers=1, num_attention_heads=2)
model = transformers.BertModel(config)
bayesianize(model, ba.AttentionConfig("BAM-WC"))
print("bayesattn.integrations.hf.trainer" in sys.modules, "torch_geometric" in sys.modules)
"""


LATE = """
import sys
import bayesattn as ba
print("torch" in sys.modules)
import bayesattn.prediction
from bayesattn.prediction import Prediction
print(ba.predict.__name__, ba.Prediction is Prediction, ba.distributions.__name__, ba.noise.philox is not None)
"""


def _run(code: str) -> str:
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.strip()


@pytest.fixture(scope="module")
def light() -> list[str]:
    return _run(LIGHT).splitlines()


def test_import_and_conversion_of_a_torch_model_import_nothing_optional(light):
    assert light[0] == "[]"


def test_a_missing_extra_is_answered_with_its_pip_line(light):
    assert light[1:] == [
        "transformers: bayesattn.integrations.hf needs the extra 'hf': pip install 'bayesattn[hf]'",
        "torch_geometric: bayesattn.integrations.pyg needs the extra 'graph': pip install 'bayesattn[graph]'",
        "matplotlib: bayesattn.plots needs the extra 'plots': pip install 'bayesattn[plots]'",
        "torchmetrics: bayesattn.metrics.running needs the extra 'metrics': pip install 'bayesattn[metrics]'",
        "pytorch_lightning: bayesattn.integrations.lightning needs the extra 'lightning': "
        "pip install 'bayesattn[lightning]'",
        "sklearn: bayesattn.integrations.sklearn needs the extra 'sklearn': pip install 'bayesattn[sklearn]'",
    ]


def test_converting_a_transformers_model_imports_neither_the_trainer_nor_pyg():
    assert _run(TRAINER) == "False False"


def test_importing_the_package_does_not_import_torch_and_its_modules_do_not_hide_its_functions():
    assert _run(LATE).split("\n") == ["False", "predict True bayesattn.distributions True"]
