"""Make the attention of an existing model Bayesian in place, and undo it.

    model = bayesianize(model, AttentionConfig("BAM-WC"))    # torch, transformers or PyTorch Geometric
    print(conversion_report(model))
    save_bayesian(model, "dir"); load_bayesian(model, "dir")
    restore(model)

Each kind of attention has an adapter (`adapters.py` lists them); transformers and torch_geometric are imported only if the
model's code already did.
"""

from bayesattn.convert.bayesianize import bayesianize, restore
from bayesattn.convert.card import MeasuredUncertainty
from bayesattn.convert.saving import load_bayesian, save_bayesian
from bayesattn.convert.summary import ConversionReport, conversion_report

__all__ = [
    "ConversionReport",
    "MeasuredUncertainty",
    "bayesianize",
    "conversion_report",
    "load_bayesian",
    "restore",
    "save_bayesian",
]
