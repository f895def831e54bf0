"""`import bayesattn` and its conversions import transformers and torch_geometric only where the model did."""

import subprocess
import sys

CHECK = """
import sys
import torch
import bayesattn as ba
from bayesattn.convert import bayesianize, restore
model = bayesianize(torch.nn.MultiheadAttention(6, 2), ba.AttentionConfig("BAM-WC"))
restore(model)
optional = {"transformers", "torch_geometric", "accelerate", "peft", "pytorch_lightning", "matplotlib"}
print(sorted(optional & set(sys.modules)))
"""

TRAINER = """
import sys
import transformers
import bayesattn as ba
from bayesattn.convert import bayesianize
config = transformers.BertConfig(vocab_size=9, hidden_size=8, num_hidden_layers=1, num_attention_heads=2)
model = transformers.BertModel(config)
bayesianize(model, ba.AttentionConfig("BAM-WC"))
print("bayesattn.hf.trainer" in sys.modules, "torch_geometric" in sys.modules)
"""


def _run(code: str) -> str:
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.strip()


def test_converting_a_torch_model_imports_nothing_optional():
    assert _run(CHECK) == "[]"


def test_converting_a_transformers_model_imports_neither_the_trainer_nor_pyg():
    assert _run(TRAINER) == "False False"
