"""Causal attention operators, as language models call them: plain, grouped heads, sliding window, padding.

Every ratio is to SDPA flash with the causal flag and the same grouped heads, in turns. Flash takes no other mask; with
one, `sdpa, same mask` is torch's own alternative.
"""

from dataclasses import dataclass, replace

import torch
from torch.nn.attention import SDPBackend

from bayesattn.config import AttentionConfig
from bayesattn_recipes.bench.attention import CONFIG, LOGNORMAL, Calls, Layout, Shape, check
from bayesattn_recipes.bench.harness import Row, Suite

CONFIGS = {"BAM-NOKL": AttentionConfig("BAM-NOKL", weibull_k=10.0), "BAM-WC": CONFIG, "BAM-LC": LOGNORMAL}
# turns, and calls per turn
ROUNDS, CALLS_PER_TURN = 11, 5
# the check runs the reference, which materializes the scores
CHECKED_LENGTH = 256


@dataclass(frozen=True)
class Case:
    """One shape and mask.

    Attributes:
        shape: b, query heads, n, features.
        layout: Grouped heads and mask.
    """

    shape: Shape
    layout: Layout

    def __str__(self) -> str:
        b, h, n, d = self.shape
        heads = h if self.layout.key_heads is None else f"{h}({self.layout.key_heads})"
        parts = [f"{b}x{heads}x{n}x{d}"]
        if self.layout.window is not None:
            parts.append(f"window {self.layout.window}")
        if self.layout.padding:
            parts.append(f"padded {self.layout.padding}")
        return " ".join(parts)

    def shortened(self) -> "Case":
        """Return the same case at a length that the reference can check."""
        b, h, n, d = self.shape
        length = min(n, CHECKED_LENGTH)
        window = None if self.layout.window is None else max(1, self.layout.window * length // n)
        layout = replace(self.layout, window=window, padding=self.layout.padding * length // n)
        return Case((b, h, length, d), layout)


CAUSAL = Layout(is_causal=True)
CASES = {
    "cuda": [
        Case((4, 16, 4096, 64), CAUSAL),
        Case((4, 16, 4096, 128), CAUSAL),
        Case((2, 32, 4096, 128), replace(CAUSAL, key_heads=8)),
        Case((4, 16, 4096, 64), replace(CAUSAL, padding=1024)),
        Case((4, 16, 4096, 64), replace(CAUSAL, window=1024)),
    ],
    "cpu": [
        Case((2, 8, 512, 64), CAUSAL),
        Case((2, 8, 512, 64), replace(CAUSAL, key_heads=2)),
        Case((2, 8, 512, 64), replace(CAUSAL, padding=128)),
        Case((2, 8, 512, 64), replace(CAUSAL, window=128)),
    ],
}


def run(device: str, cases: list[Case] | None = None) -> list[Row]:
    """Time forward + backward with the KL of each variant, and the forward pass of Monte Carlo prediction (no KL)."""
    suite = Suite("causal", device)
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    flash = SDPBackend.FLASH_ATTENTION if device == "cuda" else None
    baseline = "sdpa flash" if device == "cuda" else "sdpa"
    for case in CASES[device] if cases is None else cases:
        short = case.shortened()
        for config in CONFIGS.values():
            check(short.shape, device, dtype, config, short.layout)
        calls = Calls(case.shape, device, dtype, layout=case.layout)
        trained = {baseline: calls.soft(flash)}
        trained |= {name: calls.bayesian("auto", config=config) for name, config in CONFIGS.items()}
        if case.layout.window is not None or case.layout.padding:
            trained["sdpa, same mask"] = calls.soft(None, masked=True)
        suite.compare(str(case), "fwd+bwd", trained, rounds=ROUNDS, calls_a_turn=CALLS_PER_TURN)
        # without a KL the variants of a family are the same draw
        predicted = {baseline: calls.soft_forward(flash)}
        predicted |= {name: calls.bayesian_forward(CONFIGS[name]) for name in ("BAM-WC", "BAM-LC")}
        predicted["observe"] = calls.observation()
        suite.compare(str(case), "forward", predicted, rounds=ROUNDS, calls_a_turn=2 * CALLS_PER_TURN)
    return suite.rows
