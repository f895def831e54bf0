"""Words for the names in files: what tables, figures and the page call methods and metrics."""

_METHODS = {
    "mean": "no draws",
    "attention": "draws",
    "dropout": "MC dropout",
    "attention+dropout": "draws + dropout",
}

TEST_NAMES = {
    "paired": "paired t-test",
    "welch": "Welch's t-test",
    "pooled": "pooled t-test",
    "wilcoxon": "Wilcoxon's signed-rank test",
}

# metric: heading, whether larger is better
METRICS = {
    "accuracy": ("Accuracy", True),
    "nll": ("NLL", False),
    "ece": ("ECE", False),
    "pavpu_05": ("PAvPU, p ≤ 0.05", True),
    "ood_auroc_entropy": ("OOD AUROC, entropy", True),
    "ood_auroc_mutual_information": ("OOD AUROC, mutual information", True),
    "ood_fpr95_entropy": ("OOD FPR95, entropy", False),
    "aurc": ("AURC", False),
    "selective_accuracy_80": ("Accuracy at 80 % coverage", True),
    "brier": ("Brier", False),
    "adaptive_ece": ("Adaptive ECE", False),
    "scaled_nll": ("NLL, scaled", False),
    "scaled_ece": ("ECE, scaled", False),
    "pavpu_01": ("PAvPU, p ≤ 0.01", True),
    "pavpu_10": ("PAvPU, p ≤ 0.1", True),
}


def method_name(method: str) -> str:
    """Return the words for a prediction method; an unknown name is returned unchanged."""
    return _METHODS.get(method, method)
