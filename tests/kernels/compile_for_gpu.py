"""Compile the kernels on edges for an H100/H200 without one and print what they need, one JSON object a line.

Run as a script, because Triton's interpreter, in which the other tests run, excludes its compiler in the same process.
"""

import itertools
import json
import re
import subprocess
import tempfile
from pathlib import Path

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from bayesattn.ops.segment import feature_kernels, kernels
from bayesattn.ops.segment.launch import blocks, node_blocks, prepare_blocks, sum_blocks

TARGET = GPUTarget("cuda", 90, 32)
INDICES = {"SOURCE", "TARGET", "NUMBERS", "BEGIN", "POSITIONS", "NODES", "BEGIN_SOURCE"}
IN_VALUE_DTYPE = {"VALUE", "GRAD_VALUE", "FEATURES", "GRAD_FEATURES", "GRAD_KEY", "ATT_SOURCE", "ATT_TARGET"}
NUMBERS = dict.fromkeys(("H", "D", "N", "RUNS", "ENTRIES"), "i32")
NUMBERS |= dict.fromkeys(("strength", "constant", "slope", "negative_slope"), "fp32")


def compile_kernel(name: str, dtype: str, heads: int, features: int, **switches) -> dict:
    kernel = getattr(feature_kernels if name.startswith("node") else kernels, f"{name}_kernel")
    tiles = {
        "edge_pair_grad": sum_blocks(heads),
        "node_scores": prepare_blocks(features),
        "node_grad": node_blocks(heads * features),
    }
    sizes = tiles.get(name) or blocks(heads, features)
    options = {key: sizes.pop(key) for key in ("num_warps", "num_stages") if key in sizes}
    constants = {**sizes, **switches, "FAST": dtype != "fp32"}
    constants = {key: value for key, value in constants.items() if key in kernel.arg_names}
    signature = {}
    for argument in kernel.arg_names:
        if argument in constants:
            signature[argument] = "constexpr"
        elif argument in NUMBERS:
            signature[argument] = NUMBERS[argument]
        elif argument == "SEED":
            signature[argument] = "*i64"
        else:
            signature[argument] = "*i32" if argument in INDICES else f"*{dtype if argument in IN_VALUE_DTYPE else 'fp32'}"
    compiled = triton.compile(ASTSource(kernel, signature, constants), target=TARGET, options=options)
    return {"kernel": name, "dtype": dtype, "heads": heads, "features": features, **switches, **needs(compiled.asm["ptx"])}


def needs(ptx: str) -> dict:
    """Ask ptxas for registers and spills."""
    ptxas = Path(triton.__file__).parent / "backends/nvidia/bin/ptxas"
    with tempfile.NamedTemporaryFile("w", suffix=".ptx") as file:
        file.write(ptx)
        file.flush()
        command = [str(ptxas), "-v", "--gpu-name", "sm_90a", file.name, "-o", "/dev/null"]
        said = subprocess.run(command, capture_output=True, text=True, check=True).stderr
    return {
        "registers": int(re.search(r"Used (\d+) registers", said)[1]),
        "spilled bytes": sum(int(x) for x in re.findall(r"(\d+) bytes spill", said)),
    }


def main() -> None:
    cases = [("fp32", 8, 8), ("bf16", 8, 64), ("fp32", 1, 7), ("fp32", 4, 256)]
    switches = [
        {"WEIBULL": True, "CLEAN": True, "MOMENTS": True, "KIND": 1, "FUSED": True, "RAW": False, "SPLIT": False},
        {"WEIBULL": True, "CLEAN": True, "MOMENTS": True, "KIND": 1, "FUSED": True, "RAW": True, "SPLIT": True},
        {"WEIBULL": True, "CLEAN": True, "MOMENTS": True, "KIND": 0, "FUSED": True, "RAW": False, "SPLIT": True},
        {"WEIBULL": False, "CLEAN": False, "MOMENTS": True, "KIND": 2, "FUSED": False, "RAW": False, "SPLIT": False},
        {"WEIBULL": True, "CLEAN": False, "MOMENTS": False, "KIND": 0, "FUSED": False, "RAW": False, "SPLIT": False},
    ]
    settings = [(case, switches[0]) for case in cases] + [(cases[0], other) for other in switches[1:]]
    pairs = [(case, {"PAIR": is_pair, **switch}) for case, switch in settings for is_pair in (False, True)]
    for name, (case, switch) in itertools.product(("edge_forward", "edge_backward"), pairs):
        print(json.dumps(compile_kernel(name, *case, **switch)), flush=True)
    for name, case in itertools.product(("edge_pair_grad", "node_scores", "node_grad"), cases):
        print(json.dumps(compile_kernel(name, *case, **({"HAS_KEY": True} if name == "node_grad" else {}))), flush=True)


if __name__ == "__main__":
    main()
