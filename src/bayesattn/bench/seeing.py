"""Training steps of the two models that look at images, MCAN and Att2in, with soft and with Bayesian attention.

A step is what training does: forward, backward, clipping, Adam. Random regions, words and targets of the paper's sizes. Soft
attention comes first and again last: its second ratio says how far 1 is from 1 in this run.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bayesattn.bench.harness import Row, Suite, recorded
from bayesattn.objective import elbo
from bayesattn.recipes._train import one_thread
from bayesattn.recipes.captioning import train as captioning
from bayesattn.recipes.captioning import vocabulary as captioning_words
from bayesattn.recipes.vqa import train as vqa
from bayesattn.recipes.vqa import vocabulary as vqa_words
from bayesattn.recording import record_kl

PROVIDERS = {"soft": "soft", "BAM-NOKL": "nokl", "BAM-WC": "wc", "soft, again": "soft"}


@dataclass(frozen=True)
class Case:
    """Sizes of a batch; the model is that of the configs `CONFIG-soft`, `CONFIG-nokl` and `CONFIG-wc`.

    Attributes:
        model: `MCAN` or `Att2in`.
        config: First part of the configs' names.
        batch: Questions or captions; five captions share an image.
        words: Of a question or caption.
        regions: Of an image.
        features: Of a region.
        vocabulary: Words known.
        answers: That MCAN can give.
        settings: Of the config, as on the command line.
    """

    model: str
    config: str
    batch: int
    words: int
    regions: int
    features: int
    vocabulary: int
    answers: int = 0
    settings: tuple[str, ...] = ()

    def __str__(self) -> str:
        return f"{self.model} {self.config} b{self.batch} t{self.words} r{self.regions}"


CASES = {
    "cuda": [
        Case("MCAN", "vqa2", 64, 14, 100, 2048, 20_572, 3129),
        Case("Att2in", "coco", 50, 16, 36, 2048, 9488),
        Case("MCAN", "daquar", 128, 24, 63, 512, 1000, 372),
        Case("Att2in", "flickr8k", 250, 20, 49, 512, 2540),
    ],
    "cpu": [Case("MCAN", "shapes", 64, 8, 16, 12, 40, 20), Case("Att2in", "shapes", 100, 16, 16, 12, 60)],
}


def run(device: str, cases: list[Case] | None = None) -> list[Row]:
    """Time every case: on a GPU in bfloat16, eager and as a CUDA graph; on a CPU one thread, in turn."""
    suite = Suite("seeing", device)
    with one_thread():
        for case in CASES[device] if cases is None else cases:
            calls = {name: training_step(*_build(case, suffix, device)) for name, suffix in PROVIDERS.items()}
            suite.compare(str(case), "train step", calls, rounds=11)
            if device == "cuda":
                graphs = {name: recorded(call) for name, call in calls.items()}
                suite.compare(str(case), "train step, CUDA graph", graphs, rounds=11)
    return suite.rows


def training_step(
    model: nn.Module, inputs: Mapping[str, Tensor], nll: Callable[[Tensor], Tensor], num_labels: int, batch: int
) -> Callable[[], None]:
    """Return a call that makes one optimiser step.

    Args:
        model: In training mode.
        inputs: What it is called with.
        nll: Of its logits, summed.
        num_labels: That the loss is averaged over.
        batch: Examples, over which the KL is a mean.
    """
    device = next(model.parameters()).device
    is_cuda = device.type == "cuda"
    # fused: where the steps are counted on the GPU, the plain version launches two kernels for every single parameter
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-4, capturable=is_cuda, fused=is_cuda)

    def step() -> None:
        with torch.autocast(device.type, torch.bfloat16, enabled=is_cuda), record_kl() as scope:
            loss = nll(model(**inputs))
        kl = scope.total() if len(scope) else loss.new_zeros(())
        elbo(loss / num_labels, kl, kl_weight=0.01, labels_per_example=num_labels / batch).loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    return step


def _build(case: Case, suffix: str, device: str) -> tuple[Any, ...]:
    """Return the arguments of `training_step`."""
    torch.manual_seed(0)
    build = {"MCAN": _mcan, "Att2in": _att2in}[case.model]
    model, inputs, targets, nll = build(case, suffix)
    inputs = {name: value.to(device) for name, value in inputs.items()}
    targets = targets.to(device)
    num_labels = case.batch if case.model == "MCAN" else targets.numel()
    return model.to(device).train(), inputs, lambda logits: nll(logits.float(), targets), num_labels, case.batch


def _mcan(case: Case, suffix: str) -> tuple[nn.Module, dict[str, Tensor], Tensor, Callable[..., Tensor]]:
    words = (*vqa_words.RESERVED, *(f"word{index}" for index in range(case.vocabulary - 2)))
    known = vqa_words.Vocabulary(words, tuple(f"answer{index}" for index in range(case.answers)), case.words)
    config = vqa.load_config(f"{case.config}-{suffix}", case.settings)
    inputs = {
        "words": torch.randint(2, case.vocabulary, (case.batch, case.words)),
        "word_mask": torch.ones(case.batch, case.words, dtype=torch.bool),
        "regions": torch.randn(case.batch, case.regions, case.features),
        "region_mask": torch.ones(case.batch, case.regions, dtype=torch.bool),
    }
    targets = torch.rand(case.batch, case.answers).square()

    def nll(logits: Tensor, right: Tensor) -> Tensor:
        return F.binary_cross_entropy_with_logits(logits, right, reduction="sum")

    return vqa.build_model(config, known, case.features), inputs, targets, nll


def _att2in(case: Case, suffix: str) -> tuple[nn.Module, dict[str, Tensor], Tensor, Callable[..., Tensor]]:
    words = (*captioning_words.SPECIAL_WORDS, *(f"word{index}" for index in range(case.vocabulary - 2)))
    config = captioning.load_config(f"{case.config}-{suffix}", case.settings)
    num_images = case.batch // 5
    targets = torch.randint(2, case.vocabulary, (case.batch, case.words))
    inputs = {
        "regions": torch.randn(num_images, case.regions, case.features),
        "region_mask": torch.ones(num_images, case.regions, dtype=torch.bool),
        "words": captioning.teacher_forced(targets),
        "image_rows": torch.arange(num_images).repeat_interleave(5),
        "lengths": torch.full((case.batch,), case.words),
        "positions": torch.arange(targets.numel()),
    }

    def nll(logits: Tensor, right: Tensor) -> Tensor:
        return F.cross_entropy(logits, right, reduction="sum")

    return captioning.build_model(config, captioning_words.Vocabulary(words), case.features), inputs, targets.flatten(), nll
