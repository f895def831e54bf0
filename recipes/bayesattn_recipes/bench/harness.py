"""Measure, record and write the median and quantiles of a call, its peak memory, and the versions that produced them.

A timing alone means little: every row has the ratio to a baseline of the same run.
"""

import csv
import os
import platform
import subprocess
import tempfile
import time
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import asdict, dataclass, fields
from functools import partial
from pathlib import Path
from typing import Any

import torch

# calls of one measurement on a CPU, at most
MOST_CALLS = 1000
# calls per turn on a GPU by default
CALLS_A_TURN = 4
# where the host is the bottleneck: rounds, and enough calls per turn that it runs ahead as in training
HOST_ROUNDS, HOST_CALLS_A_TURN = 11, 60
# the file to which the rows of a running suite are written, one by one
_partial: ContextVar[Path | None] = ContextVar("partial", default=None)


@dataclass(frozen=True)
class Row:
    """One measurement."""

    suite: str
    case: str
    provider: str
    mode: str
    median_ms: float
    p20_ms: float
    p80_ms: float
    peak_mib: float
    ratio: float
    device: str
    torch: str
    triton: str
    commit: str


COLUMNS = [item.name for item in fields(Row)]


def measure(call: Callable[[], object], *, device: str, budget_ms: float = 200.0) -> tuple[float, float, float]:
    """Return (median, 20th, 80th percentile) of the call's time in milliseconds, after a warm-up.

    On a CPU with one thread, this is the CPU time of the process, which other programs on the machine hardly affect.
    """
    if device == "cuda":
        import triton.testing

        quantiles = triton.testing.do_bench(call, warmup=25, rep=int(budget_ms), quantiles=[0.5, 0.2, 0.8])
        return quantiles[0], quantiles[1], quantiles[2]  # type: ignore[index]  (a list if quantiles are given)
    clock = time.process_time if torch.get_num_threads() == 1 else time.perf_counter
    call()
    times: list[float] = []
    spent = 0.0
    while len(times) < 5 or (spent < budget_ms and len(times) < MOST_CALLS):
        start = clock()
        call()
        times.append((clock() - start) * 1e3)
        spent += times[-1]
    return _quantiles(times)


def _quantiles(times: Sequence[float]) -> tuple[float, float, float]:
    median, low, high = torch.quantile(torch.tensor(times), torch.tensor([0.5, 0.2, 0.8])).tolist()
    return median, low, high


def _processor_time(call: Callable[[], object]) -> float:
    start = time.process_time()
    call()
    return (time.process_time() - start) * 1e3


def measure_in_turn(
    calls: Sequence[Callable[[], object]], *, rounds: int, clock: Callable[[Callable[[], object]], float] = _processor_time
) -> list[list[float]]:
    """Return the time in milliseconds of every call in every round, after a warm-up.

    The calls take turns, in alternating order. Use this for ratios near 1, which the machine's drift between two
    measurements would hide.

    Args:
        calls: The calls to compare.
        rounds: Turns of each call.
        clock: Milliseconds of a call; if not given, this process's CPU time, which other programs do not lengthen.
    """
    times: list[list[float]] = [[] for _ in calls]
    for call in calls:
        call()
    for i in range(rounds):
        for j in range(len(calls))[:: 1 if i % 2 == 0 else -1]:
            times[j].append(clock(calls[j]))
    return times


def _gpu_time(call: Callable[[], object], num_calls: int) -> float:
    """Return the milliseconds between two events around a few calls; the host can run ahead as in training."""
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    torch.cuda.synchronize()
    start.record()
    for _ in range(num_calls):
        call()
    end.record()
    end.synchronize()
    return start.elapsed_time(end) / num_calls


def recorded(call: Callable[[], object]) -> Callable[[], None]:
    """Return the replay of a call's launches as a CUDA graph: the same work, without the host's part in it.

    It holds on to the call, whose tensors the graph reads and writes by their addresses.
    """
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with warnings.catch_warnings(), torch.cuda.stream(stream):
        # gradients of parameters that were trained on another stream before
        warnings.filterwarnings("ignore", "The AccumulateGrad node's stream does not match")
        for _ in range(3):
            call()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with warnings.catch_warnings(), torch.cuda.graph(graph):
        warnings.filterwarnings("ignore", "The AccumulateGrad node's stream does not match")
        call()
    return partial(_replay, graph, call)


def _replay(graph: torch.cuda.CUDAGraph, _call: Callable[[], object]) -> None:
    graph.replay()


def peak_memory(call: Callable[[], object], *, device: str) -> float:
    """Return the peak memory that the call allocates in addition to what was allocated before, in MiB."""
    if device == "cuda":
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        call()
        torch.cuda.synchronize()
        return (torch.cuda.max_memory_allocated() - before) / 2**20
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
        call()
    results = profile.profiler.kineto_results if profile.profiler is not None else None
    events = [event for event in (results.events() if results else []) if event.name() == "[memory]"]
    level = peak = 0
    for event in sorted(events, key=lambda event: event.start_ns()):
        level += event.nbytes()  # type: ignore[attr-defined]  (the stub of memory events lacks it)
        peak = max(peak, level)
    return peak / 2**20


class Suite:
    """Collect rows; the first provider of a case and mode is the baseline of its ratios."""

    def __init__(self, name: str, device: str) -> None:
        self.name, self.device, self.rows = name, device, []
        self._versions = versions(device)

    def run(self, case: str, provider: str, mode: str, call: Callable[[], object]) -> Row:
        """Measure one call and keep its row."""
        memory = peak_memory(call, device=self.device)
        median, low, high = measure(call, device=self.device)
        baseline = next((row.median_ms for row in self.rows if (row.case, row.mode) == (case, mode)), median)
        return self._keep(case, provider, mode, (median, low, high), memory, median / baseline)

    def run_all(self, case: str, mode: str, calls: Mapping[str, Callable[[], object]], *, in_turns: bool) -> None:
        """Measure calls one after the other, or in turns if a host of varying speed is the bottleneck."""
        if in_turns:
            self.compare(case, mode, calls, rounds=HOST_ROUNDS, calls_a_turn=HOST_CALLS_A_TURN)
        else:
            for provider, call in calls.items():
                self.run(case, provider, mode, call)

    def compare(
        self,
        case: str,
        mode: str,
        calls: Mapping[str, Callable[[], object]],
        *,
        rounds: int,
        calls_a_turn: int = CALLS_A_TURN,
    ) -> None:
        """Measure calls in turns and take the median ratio, for small differences or a host of varying speed."""
        clock = partial(_gpu_time, num_calls=calls_a_turn) if self.device == "cuda" else _processor_time
        times = torch.tensor(measure_in_turn(list(calls.values()), rounds=rounds, clock=clock))
        ratios = (times / times[0]).median(dim=1).values.tolist()
        for provider, row, ratio in zip(calls, times.tolist(), ratios, strict=True):
            self._keep(case, provider, mode, _quantiles(row), peak_memory(calls[provider], device=self.device), ratio)

    def _keep(
        self, case: str, provider: str, mode: str, times: tuple[float, float, float], memory: float, ratio: float
    ) -> Row:
        row = Row(self.name, case, provider, mode, *times, memory, ratio, **self._versions)
        self.rows.append(row)
        path = _partial.get()
        if path is not None:
            _append(row, path)
        print(f"{case:24s} {mode:10s} {provider:22s} {times[0]:9.3f} ms  x{ratio:6.3f}  {memory:9.1f} MiB", flush=True)
        return row


def versions(device: str) -> dict[str, str]:
    """Return device name, torch, triton and commit, for the record."""
    name = torch.cuda.get_device_name() if device == "cuda" else platform.processor() or platform.machine()
    try:
        import triton

        triton_version = triton.__version__
    except ImportError:
        triton_version = "none"
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False).stdout
    return {"device": name, "torch": torch.__version__, "triton": triton_version, "commit": commit.strip() or "unknown"}


@contextmanager
def keeping_rows(path: Path) -> Iterator[None]:
    """Append every row to `path` as soon as it is measured, so an interrupted run loses nothing."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(",".join(COLUMNS) + "\n", encoding="utf-8")
    token = _partial.set(path)
    try:
        yield
    finally:
        _partial.reset(token)


def _append(row: Row, path: Path) -> None:
    with path.open("a", newline="", encoding="utf-8") as file:
        csv.DictWriter(file, fieldnames=COLUMNS).writerow(_formatted(row))


def _formatted(row: Row) -> dict[str, str]:
    return {name: f"{value:.5g}" if isinstance(value, float) else value for name, value in asdict(row).items()}


def write_csv(rows: Iterable[Row], path: Path) -> None:
    """Write all rows or none."""
    records = [_formatted(row) for row in rows]
    if not records:
        raise ValueError("rows must hold at least one measurement, got none")
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.NamedTemporaryFile("w", dir=path.parent, delete=False, newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, fieldnames=COLUMNS)
        writer.writeheader()
        writer.writerows(records)
    os.replace(file.name, path)


def read_csv(path: Path) -> list[Row]:
    """Return the rows of a file that `write_csv` wrote."""
    with path.open(newline="", encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    numbers = {item.name for item in fields(Row) if item.type is float}
    typed: list[dict[str, Any]] = [
        {name: float(value) if name in numbers else value for name, value in row.items()} for row in rows
    ]
    return [Row(**row) for row in typed]
