"""How large is the gradient of the KL beside that of the likelihood, in a pretrained encoder before its first step?

    python benchmarks/kl_gradient.py --data DIR --out docs/results/language-gradient.json

For a few batches of MRPC: the norm of each gradient over the pretrained parameters of e5-small, and how alike those of the
batches are (cosines of all pairs). BAM-WC once with `detach_keys`, as the configs have it, and once without; then others.
"""

import argparse
import itertools
import json
from pathlib import Path

import torch
from torch import Tensor

from bayesattn import record_kl
from bayesattn.evaluation.runs import write_bytes
from bayesattn_recipes.common.config import seed_everything
from bayesattn_recipes.language.train import LanguageExperiment, load_config

CASES = {
    "detach_keys true": [],
    "detach_keys false": ["attention.detach_keys=false"],
    **{variant: [f"attention.variant={variant}"] for variant in ("BAM-WF", "BAM-LF", "BAM-LC")},
}


def gradients(experiment: LanguageExperiment, indices: Tensor) -> tuple[Tensor, Tensor]:
    """Return the gradients of the mean NLL and of the KL of an example, each as one vector."""
    # those that were pretrained: neither the head nor the networks of the priors
    parameters = [p for name, p in experiment.model.base_model.named_parameters() if "prior" not in name]
    batch = experiment.collate(indices)
    with record_kl() as scope:
        nll = experiment.nll(experiment.model, batch) / experiment.num_labels(batch)
    found = []
    for value in (nll, scope.total()):
        parts = torch.autograd.grad(value, parameters, retain_graph=True, allow_unused=True)
        known = [torch.zeros_like(p) if part is None else part for p, part in zip(parameters, parts)]
        found.append(torch.cat([part.flatten() for part in known]))
    return found[0], found[1]


def main() -> None:
    """Measure and write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--batches", type=int, default=3)
    parser.add_argument("--batch-size", type=int, default=8)
    given = parser.parse_args()
    results = {}
    for case, settings in CASES.items():
        seed_everything(0)
        experiment = LanguageExperiment(load_config("mrpc", settings), given.data)
        experiment.model.train()
        batches = torch.randperm(experiment.num_examples)[: given.batches * given.batch_size].split(given.batch_size)
        pairs = [gradients(experiment, indices) for indices in batches]
        results[case] = {
            name: {
                "norms": [round(float(g.norm()), 4) for g in found],
                "cosines": [round(float(torch.cosine_similarity(a, b, 0)), 4) for a, b in itertools.combinations(found, 2)],
            }
            for name, found in (("nll", [p[0] for p in pairs]), ("kl", [p[1] for p in pairs]))
        }
    facts = {"config": "mrpc", "batches": given.batches, "batch_size": given.batch_size, "results": results}
    write_bytes(given.out, (json.dumps(facts, indent=1) + "\n").encode())
    print(given.out.read_text())


if __name__ == "__main__":
    main()
