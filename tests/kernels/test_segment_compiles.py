"""The kernels on edges compile for a GPU that is not there, without spilling a register."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton")
pytestmark = pytest.mark.kernel


@pytest.mark.slow
def test_kernels_on_edges_compile_for_sm_90_without_spills(tmp_path):
    # a process of its own: the interpreter of the other kernel tests and the compiler exclude each other
    environment = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    environment["TRITON_CACHE_DIR"] = str(tmp_path)
    script = Path(__file__).with_name("compile_for_gpu.py")
    done = subprocess.run([sys.executable, str(script)], env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-2000:]
    kernels = [json.loads(line) for line in done.stdout.splitlines()]
    names = {"edge_forward", "edge_backward", "edge_pair_grad", "node_scores", "node_grad"}
    assert {kernel["kernel"] for kernel in kernels} == names
    assert [kernel for kernel in kernels if kernel["spilled bytes"]] == []
    # a program of one or a few warps; with more than 204 registers a multiprocessor holds fewer than ten warps
    assert max(kernel["registers"] for kernel in kernels) <= 204
