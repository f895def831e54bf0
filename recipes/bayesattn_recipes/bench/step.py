"""Whole training steps: the same transformers model before and after `bayesianize`, with its optimizer.

A step is forward pass, ELBO, backward pass and fused AdamW. The weights are random, from transformers' configs. On a GPU
the step runs in bfloat16 autocast, in three modes:

    plain     as a training loop calls it
    compiled  forward pass, KL and ELBO by `torch.compile` in its default mode, as one graph
    recorded  the whole step replayed as a CUDA graph, without host time
"""

import copy
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any, Literal, cast
from unittest import mock

import torch
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForSequenceClassification

from bayesattn.config import AttentionConfig, Variant
from bayesattn.convert import bayesianize
from bayesattn.evaluation.threads import one_thread
from bayesattn.kl import record_kl
from bayesattn.objective import elbo
from bayesattn_recipes.bench.harness import Row, Suite, recorded

Mode = Literal["plain", "compiled", "recorded"]
MODES: tuple[Mode, ...] = ("plain", "recorded", "compiled")
VARIANTS: tuple[Variant, ...] = ("BAM-NOKL", "BAM-WC")
# turns, and steps per turn
ROUNDS, STEPS_PER_TURN = 9, 2
VOCABULARY = 30_000


@dataclass(frozen=True)
class Case:
    """A model from its config, and the batch it is trained on.

    Attributes:
        name: For the table.
        family: `model_type` of transformers.
        sizes: Values of its config that differ from the defaults.
        batch: Examples.
        length: Tokens.
        padding: Tokens missing at the end of every second example.
        modes: The modes in which it is timed on a GPU. Compiling takes up to a minute per model.
    """

    name: str
    family: str
    sizes: Mapping[str, Any] = field(default_factory=dict)
    batch: int = 8
    length: int = 128
    padding: int = 0
    modes: Sequence[Mode] = ("plain", "recorded")

    def __str__(self) -> str:
        return f"{self.name} {self.batch}x{self.length}" + (f" padded {self.padding}" if self.padding else "")

    @property
    def is_causal(self) -> bool:
        """Whether it is a language model, which predicts every next token."""
        return self.family == "llama"

    def build(self) -> nn.Module:
        """Return the model with random weights, in training mode."""
        kind = AutoModelForCausalLM if self.is_causal else AutoModelForSequenceClassification
        model = cast(nn.Module, kind.from_config(AutoConfig.for_model(self.family, **self.sizes)))
        return model.train()

    def inputs(self, device: str) -> dict[str, Tensor]:
        """Return a random batch; without padding there is no mask, as a collator leaves it out."""
        vocabulary = min(VOCABULARY, int(self.sizes.get("vocab_size", VOCABULARY)))
        ids = torch.randint(0, vocabulary, (self.batch, self.length), device=device)
        inputs = {"input_ids": ids, "labels": ids if self.is_causal else ids[:, 0] % 2}
        if self.padding:
            mask = torch.ones_like(ids)
            mask[::2, self.length - self.padding :] = 0
            inputs["attention_mask"] = mask
        return inputs


# flash attention has no dropout of its weights in the original either: the ratio is of the attention alone
ENCODER = {"attention_probs_dropout_prob": 0.0}
ALBERT_BASE = {"hidden_size": 768, "num_attention_heads": 12, "intermediate_size": 3072, **ENCODER}
# 156 million parameters
LLAMA = {
    "hidden_size": 1024, "num_hidden_layers": 8, "num_attention_heads": 16, "num_key_value_heads": 4,
    "intermediate_size": 2816, "vocab_size": 32_000, "max_position_embeddings": 2048, "use_cache": False,
}  # fmt: skip
# 11 million parameters
MINI = {"hidden_size": 256, "num_hidden_layers": 4, "num_attention_heads": 4, "intermediate_size": 1024}
CASES: dict[str, list[Case]] = {
    "cuda": [
        Case("bert-base", "bert", ENCODER, 32, 128, modes=MODES),
        Case("bert-base", "bert", ENCODER, 32, 128, padding=32),
        Case("bert-base", "bert", ENCODER, 16, 512),
        Case("bert-base", "bert", ENCODER, 16, 512, padding=128),
        Case("albert-base", "albert", ALBERT_BASE, 16, 512, padding=128),
        Case("llama-150m", "llama", LLAMA, 8, 1024, modes=MODES),
    ],
    "cpu": [
        Case("bert-mini", "bert", MINI | ENCODER, 8, 128, padding=32, modes=("plain",)),
        Case("bert-mini, dropout 0.1", "bert", MINI, 8, 128, padding=32, modes=("plain",)),
    ],
}


def run(device: str, cases: list[Case] | None = None) -> list[Row]:
    """Time every case in its modes, the original and the converted models in turns; compiled modes come last."""
    suite = Suite("step", device)
    cases = CASES[device] if cases is None else cases
    with one_thread() if device == "cpu" else nullcontext():
        for late in (False, True):
            for case in cases:
                modes: list[Mode] = [mode for mode in case.modes if (mode == "compiled") == late]
                if modes:
                    _run_case(suite, case, modes)
    return suite.rows


def _run_case(suite: Suite, case: Case, modes: list[Mode]) -> None:
    torch.manual_seed(0)
    with torch.device(suite.device):
        original = case.build()
    models = {"soft": original}
    models |= {variant: bayesianize(copy.deepcopy(original), AttentionConfig(variant)) for variant in VARIANTS}
    inputs = case.inputs(suite.device)
    _check(case, models, inputs)
    for mode in modes:
        compiler = "inductor" if mode == "compiled" else None
        steps = {name: training_step(model, inputs, compiler=compiler) for name, model in models.items()}
        if mode == "recorded":
            # during capture transformers cannot inspect a mask, and makes one of ones if none was given
            quiet = mock.patch("transformers.masking_utils.is_tracing", return_value=False)
            with nullcontext() if case.padding else quiet:
                steps = {name: recorded(step) for name, step in steps.items()}
        elif mode == "compiled":
            for name, step in steps.items():
                print(f"{case}: compiling {name}", flush=True)
                # the first call compiles, the second adapts to the layout of the gradients
                step()
                step()
        suite.compare(str(case), mode, steps, rounds=ROUNDS, calls_a_turn=STEPS_PER_TURN)
    torch._dynamo.reset()


def _check(case: Case, models: Mapping[str, nn.Module], inputs: dict[str, Tensor]) -> None:
    """Raise if a converted model differs from the original in eval mode: nothing wrong is timed."""
    with torch.no_grad():
        logits = {name: model.eval()(**inputs).logits for name, model in models.items()}
    for name, found in logits.items():
        if not torch.equal(found, logits["soft"]):
            raise RuntimeError(f"{case}: {name} differs from the original in eval mode; nothing was timed")
    for model in models.values():
        model.train()


def training_step(model: nn.Module, inputs: dict[str, Tensor], *, compiler: str | None = None) -> Callable[[], None]:
    """Return a call that makes one optimizer step as the documentation shows it, compiled by a backend of torch.compile."""
    device = inputs["input_ids"].device.type
    is_gpu = device == "cuda"
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5, fused=True, capturable=is_gpu)
    is_bayesian = any(hasattr(module, "bayes") for module in model.modules())

    def loss() -> Tensor:
        with torch.autocast(device, torch.bfloat16, enabled=is_gpu):
            if not is_bayesian:
                return model(**inputs).loss
            with record_kl() as kl:
                nll = model(**inputs).loss
        return elbo(nll, kl.total()).loss

    forward = torch.compile(loss, fullgraph=True, backend=compiler) if compiler else loss

    def step() -> None:
        forward().backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    return step
