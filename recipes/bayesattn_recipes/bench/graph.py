"""Graph attention layers: Bayesian GAT against PyG's `GATConv` on the same random graph, whole layer, forward + backward."""

from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch_geometric.nn import GATConv

from bayesattn.config import AttentionConfig
from bayesattn.functional import EdgeBackend
from bayesattn.integrations.pyg import BayesianGATConv
from bayesattn.kl import record_kl
from bayesattn.noise.keyed import keyed_noise
from bayesattn_recipes.bench.harness import Row, Suite, recorded

CONFIG = AttentionConfig("BAM-WC", weibull_k=10.0, gamma_beta=1e-2)
NO_KL = AttentionConfig("BAM-NOKL", weibull_k=10.0)
HEADS = FEATURES = 8
# up to this many edges the host is the bottleneck on a GPU
SMALL = 1_000_000


class Case(NamedTuple):
    """A random graph; edges include the self loops of the data sets of this size."""

    nodes: int
    edges: int
    in_features: int

    def __str__(self) -> str:
        return f"{self.nodes}n {self.edges}e {self.in_features}f"


# Cora's graph with the input of a second layer (where projections hide nothing) and with its own; PubMed's; ogbn-arxiv's
CPU_CASES = [Case(2708, 13264, 64), Case(2708, 13264, 1433), Case(19717, 108365, 500)]
GPU_CASES = [Case(19717, 108365, 500), Case(169343, 2484941, 128)]


def check(case: Case, device: str, backend: EdgeBackend) -> None:
    """Raise if output, KL or gradients of a layer differ from the reference with the same noise: nothing wrong is timed."""
    torch.manual_seed(0)
    index = torch.randint(0, case.nodes, (2, min(case.edges, 20_000)), device=device)
    x = torch.randn(case.nodes, case.in_features, device=device)
    layer = BayesianGATConv(case.in_features, FEATURES, HEADS, config=CONFIG, add_self_loops=False).to(device)
    # the prior's last bias cancels in its softmax, so its gradient is only rounding errors
    parameters = [parameter for name, parameter in layer.named_parameters() if not name.endswith("bias_out")]
    results = []
    for name in (backend, "reference"):
        layer.backend = name
        with keyed_noise(torch.tensor([7])), record_kl() as kl:
            output = layer(x, index)
        total = kl.total()
        # the KL of one row: weighted like the output
        gradients = torch.autograd.grad(output.square().sum() + case.nodes * total, parameters)
        results.append([y.detach().double() for y in (output, total, *gradients)])
    for ours, plain in zip(*results, strict=True):
        error = float((ours - plain).norm() / plain.norm())
        if not error < 1e-4:
            raise RuntimeError(f"{case}: {backend} and reference differ by {error:.2e}; nothing was timed")


def run(device: str, cases: list[Case] | None = None) -> list[Row]:
    """Time forward + backward, and the forward of Monte Carlo prediction, for every graph and layer."""
    suite = Suite("graph", device)
    backends: tuple[EdgeBackend, ...] = ("reference", "triton") if device == "cuda" else ("csr", "reference")
    for case in cases or (GPU_CASES if device == "cuda" else CPU_CASES):
        for backend in backends:
            check(case, device, backend)
        _run_case(suite, case, device, backends)
    return suite.rows


def _run_case(suite: Suite, case: Case, device: str, backends: tuple[EdgeBackend, ...]) -> None:
    """Time every layer on one graph; on a GPU, the compared ones also as CUDA graphs, which time the device alone."""
    measure = partial(suite.run_all, str(case), in_turns=device == "cuda" and case.edges <= SMALL)
    torch.manual_seed(0)
    index = torch.randint(0, case.nodes, (2, case.edges), device=device)
    x = torch.randn(case.nodes, case.in_features, device=device)
    upstream = torch.randn(case.nodes, HEADS * FEATURES, device=device)
    sizes = {"in_channels": case.in_features, "out_channels": FEATURES, "heads": HEADS, "add_self_loops": False}
    layers: dict[str, nn.Module] = {"GATConv": GATConv(**sizes)}
    for backend in backends:
        layers[f"BAM-NOKL {backend}"] = BayesianGATConv(**sizes, config=NO_KL, backend=backend)
        layers[f"BAM-WC {backend}"] = BayesianGATConv(**sizes, config=CONFIG, backend=backend)
    steps = {name: training_step(layer.to(device), x, index, upstream, "WC" in name) for name, layer in layers.items()}
    measure("fwd+bwd", steps)
    with torch.no_grad():
        measure("forward", {name: partial(layer, x, index) for name, layer in layers.items() if "WC" not in name})
    if device == "cuda":
        shown = ("GATConv", "BAM-NOKL triton", "BAM-WC triton")
        measure("fwd+bwd, CUDA graph", {name: recorded(steps[name]) for name in shown})


def training_step(layer: nn.Module, x: Tensor, index: Tensor, upstream: Tensor, with_kl: bool):
    """Return a call that runs a layer forward and backward once."""
    kl_weight = upstream.new_tensor(1e-3)
    # collected once, as in an optimizer: finding them is not part of a layer's step
    parameters = list(layer.parameters())

    def step() -> None:
        if with_kl:
            with record_kl() as kl:
                output = layer(x, index)
            torch.autograd.backward([output, kl.total()], [upstream, kl_weight])
        else:
            layer(x, index).backward(upstream)
        for parameter in parameters:
            parameter.grad = None

    return step
