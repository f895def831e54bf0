"""The host's work in a training step of a converted encoder, per layer, and the part that soft attention does not have.

    python benchmarks/host_profile.py                                   BERT-base, batch 32, 128 tokens, padded
    python benchmarks/host_profile.py --length 512 --batch 16 --compile

For each variant: time per step, time until the host is done launching, time the GPU is busy, launches, operators and
synchronisations per layer, all from one warm process. Then the host's time by operators and autograd nodes
(torch.profiler), and by Python functions of the forward pass (cProfile). Without a GPU, `fake_gpu.py` has the host's part.
"""

import argparse
import cProfile
import io
import pstats
import statistics
import time
import warnings
from collections import Counter
from collections.abc import Callable

import torch
from torch import nn
from torch.profiler import ProfilerActivity, profile

from bayesattn.config import AttentionConfig, Variant
from bayesattn.convert import bayesianize
from bayesattn.kl import record_kl
from bayesattn_recipes.bench.harness import measure_in_turn
from bayesattn_recipes.bench.step import Case

VARIANTS: tuple[Variant, ...] = ("soft", "BAM-NOKL", "BAM-WC", "BAM-LC")
LAUNCHES = ("cudaLaunchKernel", "cudaLaunchKernelExC", "cuLaunchKernel", "cuLaunchKernelEx", "cudaGraphLaunch")
WAITS = ("cudaStreamSynchronize", "cudaDeviceSynchronize", "cudaEventSynchronize")


def make_step(case: Case, variant: Variant, device: str, is_compiled: bool) -> Callable[[], None]:
    """Return a training step: forward under autocast, KL, backward, AdamW."""
    torch.manual_seed(0)
    model: nn.Module = case.build()
    if variant != "soft":
        model = bayesianize(model, AttentionConfig(variant))
    model.to(device).train()
    is_gpu = device == "cuda"
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5, fused=is_gpu)
    ids = torch.randint(0, 30_000, (case.batch, case.length), device=device)
    inputs = {"input_ids": ids, "labels": ids[:, 0] % 2}
    if case.padding:
        mask = torch.ones_like(ids)
        mask[::2, case.length - case.padding :] = 0
        inputs["attention_mask"] = mask
    has_kl = variant not in ("soft", "BAM-NOKL")

    def loss_of() -> torch.Tensor:
        if not has_kl:
            with torch.autocast(device, torch.bfloat16, enabled=is_gpu):
                return model(**inputs).loss
        with torch.autocast(device, torch.bfloat16, enabled=is_gpu), record_kl() as kl:
            loss = model(**inputs).loss
        return loss + 1e-3 * kl.total()

    called = torch.compile(loss_of) if is_compiled else loss_of

    def step() -> None:
        called().backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    return step


def synchronize() -> None:
    """Wait for the GPU, if there is one."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def host_time(step: Callable[[], object]) -> float:
    """Return the milliseconds until one step's last launch, from an idle GPU: the time of the host alone."""
    synchronize()
    start = time.perf_counter()
    step()
    return (time.perf_counter() - start) * 1e3


def step_time(step: Callable[[], object], calls: int = 5) -> float:
    """Return the milliseconds per step over several steps in a row."""
    synchronize()
    start = time.perf_counter()
    for _ in range(calls):
        step()
    synchronize()
    return (time.perf_counter() - start) / calls * 1e3


def where_it_waits(step: Callable[[], object]) -> Counter[str]:
    """Return the source lines that make the host wait for the GPU, and how often in one step."""
    if not torch.cuda.is_available():
        return Counter()
    torch.cuda.set_sync_debug_mode("warn")
    try:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            step()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    lines = (f"{w.filename.split('site-packages/')[-1]}:{w.lineno}" for w in caught if "synchroniz" in str(w.message))
    return Counter(lines)


def traced(step: Callable[[], object], calls: int = 3) -> tuple[dict[str, float], Counter[str], Counter[str]]:
    """Return, per step, totals and, for every operator, node and driver call, its self time in µs and its number of runs."""
    activities = [ProfilerActivity.CPU] + ([ProfilerActivity.CUDA] if torch.cuda.is_available() else [])
    with profile(activities=activities) as found:
        for _ in range(calls):
            step()
        synchronize()
    spent, counts, totals = Counter(), Counter(), Counter()
    for event in found.key_averages():
        if event.device_type == torch.autograd.DeviceType.CUDA:
            totals["GPU busy, ms"] += event.self_device_time_total / calls / 1e3
            totals["kernels"] += event.count / calls
            continue
        spent[event.key] += event.self_cpu_time_total / calls
        counts[event.key] += event.count / calls
        totals["launches"] += event.count / calls * (event.key in LAUNCHES)
        totals["waits"] += event.count / calls * (event.key in WAITS)
        totals["operators"] += event.count / calls * event.key.startswith(("aten::", "bayesattn::"))
    return dict(totals), spent, counts


def functions_of(step: Callable[[], object], calls: int = 5, most: int = 40) -> str:
    """Return the Python functions in which steps spend their time; autograd runs in the caller's thread to be visible."""
    profiler = cProfile.Profile()
    with torch.autograd.set_multithreading_enabled(False):
        profiler.enable()
        for _ in range(calls):
            step()
        profiler.disable()
    text = io.StringIO()
    pstats.Stats(profiler, stream=text).sort_stats("tottime").print_stats(most)
    pstats.Stats(profiler, stream=text).sort_stats("cumulative").print_stats("bayesattn", most)
    return text.getvalue()


def main() -> None:
    """Parse the arguments, measure, print."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--length", type=int, default=128)
    parser.add_argument("--padding", type=int, default=32, help="tokens missing at the end of every second example")
    parser.add_argument("--hidden", type=int, default=768)
    parser.add_argument("--rounds", type=int, default=11)
    parser.add_argument("--variants", nargs="+", default=list(VARIANTS), choices=VARIANTS)
    parser.add_argument("--compile", action="store_true")
    given = parser.parse_args()
    sizes = {"hidden_size": given.hidden, "num_hidden_layers": given.layers, "num_attention_heads": given.hidden // 64}
    sizes["intermediate_size"] = 4 * given.hidden
    case = Case("bert", "bert", sizes, given.batch, given.length, given.padding)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    steps = {variant: make_step(case, variant, device, given.compile) for variant in given.variants}
    for step in steps.values():
        for _ in range(5):
            step()
    times = measure_in_turn(list(steps.values()), rounds=given.rounds, clock=step_time)
    hosts = measure_in_turn(list(steps.values()), rounds=given.rounds, clock=host_time)
    mode = "compiled" if given.compile else "plain"
    print(f"{case}, padding {given.padding}, {mode}, {given.layers} layers, torch {torch.__version__}")
    results = {}
    for (variant, step), step_ms, host_ms in zip(steps.items(), times, hosts, strict=True):
        waits = where_it_waits(step)
        totals, spent, counts = traced(step)
        step_median, host_median = statistics.median(step_ms), statistics.median(host_ms)
        totals = {"step, ms": step_median, "host, ms": host_median, **totals}
        results[variant] = totals, spent, counts
        print(f"\n== {variant}: " + ", ".join(f"{name} {value:.2f}" for name, value in totals.items()))
        print("   waits at " + (", ".join(f"{line} × {n}" for line, n in waits.items()) or "no line of Python"))
    base = next(iter(results))
    for variant, (totals, spent, counts) in list(results.items())[1:]:
        print(f"\n== {variant} − {base}, per layer")
        for name, value in totals.items():
            print(f"   {name:14s} {(value - results[base][0].get(name, 0.0)) / given.layers:8.3f}")
        more = {name: (value - results[base][1][name]) / given.layers for name, value in spent.items()}
        print("   host's own time by operator, node and driver call (µs per layer, calls per layer):")
        for name, value in sorted(more.items(), key=lambda item: -abs(item[1]))[:40]:
            calls = (counts[name] - results[base][2][name]) / given.layers
            print(f"   {value:9.1f} {calls:7.2f}  {name[:110]}")
    for variant, step in steps.items():
        print(f"\n== Python functions of {variant}, five steps\n{functions_of(step)}")


if __name__ == "__main__":
    main()
