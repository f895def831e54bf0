"""Count the instructions that the attention kernels spend on one entry of the scores, without a GPU.

    python benchmarks/instructions.py benchmarks/results/instructions.csv

Compiles for an H100/H200 (sm_90), disassembles, and divides the innermost loop by the entries of a tile that a thread holds.
"""

import collections
import csv
import re
import subprocess
import sys
import tempfile
from pathlib import Path

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from bayesattn.ops.attention import backward_kernels, forward_kernels, launch

TARGET = GPUTarget("cuda", 90, 32)
TOOLS = Path(triton.__file__).parent / "backends/nvidia/bin"
WEIBULL = {"WEIBULL": True, "CLEAN": True, "MOMENTS": False}
LOGNORMAL = {"WEIBULL": False, "CLEAN": True, "MOMENTS": True}
CASES = [
    ("forward", 64, {**WEIBULL, "CLEAN": False}),
    ("forward", 64, WEIBULL),
    ("forward", 64, LOGNORMAL),
    ("forward", 64, {**WEIBULL, "HAS_MASK": 2}),
    ("forward", 64, {**WEIBULL, "DROPOUT": True}),
    ("forward", 128, {**WEIBULL, "CLEAN": False}),
    ("grad_key", 64, WEIBULL),
    ("grad_key", 64, {**WEIBULL, "DROPOUT": True}),
    ("grad_key", 128, WEIBULL),
    ("grad_query", 128, WEIBULL),
]
ELEMENTS = {"SEED": "i64", "MASK": "i1", **dict.fromkeys(("Q", "K", "V", "OUT", "GRAD", "GRAD_K", "GRAD_V"), "bf16")}
ALIGNED = ("M", "N", "D", "DV", "stride_q", "stride_k", "stride_v", "stride_g")


def compile_kernel(name: str, head_dim: int, switches: dict[str, object]):
    """Return the compiled kernel, its constants and the entries of a tile that one thread holds."""
    kernel = getattr(forward_kernels if name == "forward" else backward_kernels, f"{name}_kernel")
    constants = {
        **launch.blocks(name, head_dim, torch.bfloat16), "BD": head_dim, "BDV": head_dim, "CAUSAL": False,
        "WINDOW": False, "SUMS": False, "SUM_BLOCK": launch.SUM_BLOCK, "EDGE_STAGES": launch.EDGE_STAGES[name],
        "DROPOUT": False, "HAS_MASK": 0, "EVEN_N": True, "EVEN_D": True, "COLUMNS": True, "ONE_PASS": head_dim <= 64,
        "FAST": True, "PRECISION": "tf32", "CHECK": bool(switches.get("HAS_MASK")), **switches,
    }  # fmt: skip
    options = {option: constants.pop(option) for option in ("num_warps", "num_stages")}
    constants = {key: value for key, value in constants.items() if key in kernel.arg_names}
    signature, hints = {}, {}
    for place, argument in enumerate(kernel.arg_names):
        if argument in constants:
            signature[argument] = "constexpr"
        elif argument in ("scale", "strength", "kept"):
            signature[argument] = "fp32"
        elif argument in ELEMENTS or (argument.isupper() and argument not in ("H", "GROUP", "M", "N", "D", "DV")):
            in_halves = argument == "GRAD_Q" and head_dim > 64
            signature[argument] = f"*{'bf16' if in_halves else ELEMENTS.get(argument, 'fp32')}"
        else:
            signature[argument] = "i32"
        if signature[argument].startswith("*") or argument in ALIGNED or argument.startswith(ALIGNED[4:]):
            hints[place,] = [["tt.divisibility", 16]]
    compiled = triton.compile(ASTSource(kernel, signature, constants, hints), target=TARGET, options=options)
    return compiled, constants["BM"] * constants["BN"] / (32 * options["num_warps"])


def innermost_loop(cubin: bytes) -> list[str]:
    """Return the names of the instructions between the nearest label and its backward branch that draw random numbers."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        command = [str(TOOLS / "nvdisasm"), "-c", file.name]
        lines = subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()
    labels, loops = {}, []
    for number, line in enumerate(lines):
        label = re.match(r"^(\.L_x_\d+):", line)
        if label:
            labels[label[1]] = number
        branch = re.search(r"BRA.*`\((\.L_x_\d+)\)", line)
        if branch and branch[1] in labels:
            found = [
                re.search(r"/\*[0-9a-f]{4}\*/\s+(?:@!?U?P\d+ )?([A-Z0-9]+)", x)
                for x in lines[labels[branch[1]] : number + 1]
            ]
            names = [match[1] for match in found if match]
            # a loop over tiles, not one that waits for a barrier
            if names.count("MUFU") > 8:
                loops.append(names)
    return min(loops, key=len)


def main(out: Path) -> None:
    """Write one row per kernel."""
    rows = []
    for name, head_dim, switches in CASES:
        compiled, entries = compile_kernel(name, head_dim, switches)
        loop = innermost_loop(compiled.asm["cubin"])
        counts = collections.Counter(loop)
        rows.append({
            "kernel": name, "head_dim": head_dim, "switches": " ".join(f"{k}={int(v)}" for k, v in switches.items()),
            "instructions": round(len(loop) / entries, 2), "special": round(counts["MUFU"] / entries, 2),
            "multiplies": round(counts["IMAD"] / entries, 2), "logic": round(counts["LOP3"] / entries, 2),
            "shared_bytes": compiled.metadata.shared, "triton": triton.__version__,
        })  # fmt: skip
        print(rows[-1], flush=True)
    with out.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, fieldnames=list(rows[0]))
        writer.writeheader()
        writer.writerows(rows)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
