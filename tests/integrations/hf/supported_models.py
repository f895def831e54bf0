"""The tables of docs/reference/supported-models.md; as a script it tries the whole registry and rewrites the page.

Run: python tests/integrations/hf/supported_models.py
"""

import os
import re
import resource
import signal
import sys
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import registry
import torch
import transformers as hf
from torch import Tensor, nn
from zoo import ARCHITECTURES

import bayesattn as ba
from bayesattn.convert import bayesianize, restore
from bayesattn.convert.adapters import find_candidates

PAGE = Path(__file__).resolve().parents[3] / "docs" / "reference" / "supported-models.md"
CONFIG = ba.AttentionConfig("BAM-WC", weibull_k=1.0)
QUIET = ba.AttentionConfig("BAM-LF", sigma_q=1e-7)
IMPLEMENTATIONS = ("sdpa", "eager")
GROUPS = {
    "in part": "Converts, but not all of it works",
    "converts": "Converts",
    "refused": "Refused",
    "not tried": "Not tried",
}
OWN_CODE = "its attention is its own code, outside the registry"
SECONDS_PER_MODEL, MOST_MEMORY = 30, 8 << 30


@dataclass(frozen=True)
class Result:
    """What became of one model type with one implementation.

    Attributes:
        group: A key of `GROUPS`.
        note: Modules that were run and modules there are, or the reason.
    """

    group: str
    note: str


def try_type(model_type: str, implementation: str) -> Result:
    """Build a tiny model of a type, convert it, and check what `check` checks."""
    try:
        model = registry.build(model_type, implementation)
    except Exception as error:
        return Result("not tried", f"no tiny model: {_one_line(error)}")
    candidates = find_candidates(model, CONFIG)
    if not candidates:
        return Result("refused", "it has no attention")
    # the error of bayesianize says what one could try then
    reasons = {c.name: OWN_CODE if c.adapter is None else c.problem for c in candidates}
    problems = sorted({f"{c.kind}: {reasons[c.name]}" for c in candidates if c.problem is not None})
    if problems:
        rest = sum(c.problem is None for c in candidates)
        return Result(
            "refused", "; ".join(problems) + (f" (the other {rest} modules convert, with `exclude`)" if rest else "")
        )
    try:
        given = registry.inputs(model)
        _run(model, given)
    except Exception as error:
        return Result("not tried", f"`bayesianize` takes it, but the tiny model did not run: {_one_line(error)}")
    try:
        reached = check(model, given)
    except Exception as error:
        return Result("in part", _one_line(error))
    if reached == 0:
        return Result("not tried", f"`bayesianize` takes it, but {', '.join(given)} alone reach no attention")
    return Result("converts", f"{len(candidates)}" if reached == len(candidates) else f"{reached} of {len(candidates)}")


def check(model: nn.Module, given: dict[str, Tensor]) -> int:
    """Assert that a conversion is exact when off, the mean with vanishing noise, random with noise, has a KL for every
    prior, and leaves no trace.

    Returns:
        How many modules the inputs reached.
    """
    state = {name: value.clone() for name, value in model.state_dict().items()}
    before = _run(model, given)
    with ba.sampling(bayesianize(model, QUIET)):
        assert _close(_run(model, given), before), "a draw without noise is not the mean"
    bayesianize(restore(model), CONFIG)
    assert _equal(_run(model, given), before), "off is not exact"
    with ba.sampling(model), ba.record_kl(model) as kl:
        first = _run(model, given, grad=True)
    reached = list(kl.per_layer())
    if reached:
        with ba.sampling(model):
            assert not _equal(first, _run(model, given, seed=2)), "two draws are equal"
        total = kl.total()
        assert total > 0, "the KL is not positive"
        total.backward()
        for layer in reached:
            gradient: Any = model.get_submodule(layer).bayes_prior.weight_in.grad
            assert gradient is not None, f"no gradient for {layer}"
            assert torch.isfinite(gradient).all(), f"bad gradient for {layer}"
            assert gradient.abs().max() > 0, f"zero gradient for {layer}"
    restore(model)
    after = model.state_dict()
    assert list(after) == list(state), "restore leaves something behind"
    assert all(_equal([after[name]], [value]) for name, value in state.items()), "restore changes a parameter"
    assert _equal(_run(model, given), before), "restored is not exact"
    return len(reached)


def row(model_type: str, results: dict[str, Result] | None = None) -> tuple[str, str]:
    """Return the group of a type and its line; the first group that fits one of its implementations counts."""
    results = results or {implementation: try_type(model_type, implementation) for implementation in IMPLEMENTATIONS}
    group = next(group for group in GROUPS if any(result.group == group for result in results.values()))
    # eager last: every type has it, so its reason says more
    note = [result.note for result in results.values() if result.group == group][-1]
    if group != "converts":
        return group, f"| {model_type} | {note} |"
    ticks = " | ".join("✓" if results[implementation].group == group else "–" for implementation in IMPLEMENTATIONS)
    return group, f"| {model_type} | {ticks} | {note} |"


def matrix() -> str:
    """Return the table of the common suite as Markdown; a tick is a parametrised test."""
    columns = (
        "architecture", "modules / calls", "off: exact, sdpa and eager", "sampled, KL, restore, save", "padded",
        "generate: dynamic, static, no cache, beams",
    )  # fmt: skip
    rows = [_head(columns)]
    for name, a in ARCHITECTURES.items():
        exact = "✓" if a.implementations == IMPLEMENTATIONS else "✓ (eager only)"
        generates = ("✓" if a.static_cache else "✓ (static: not in transformers)") if a.generates else "–"
        rows.append(f"| {name} | {a.modules} / {a.calls} | {exact} | ✓ | {'✓' if a.can_pad else '–'} | {generates} |")
    return "\n".join(rows)


def tables(rows: list[tuple[str, str]]) -> str:
    """Return the registry's tables, one per group."""
    parts = []
    for group, title in GROUPS.items():
        lines = sorted(line for found, line in rows if found == group)
        if not lines:
            continue
        columns = ("model type", *IMPLEMENTATIONS, "modules run") if group == "converts" else ("model type", "why")
        parts.append("\n".join([f"### {title} ({len(lines)})", "", _head(columns), *lines]))
    return "\n\n".join(parts)


def replace(page: str, name: str, text: str) -> str:
    """Return the page with what stands between two markers replaced."""
    begin, end = f"<!-- {name}: begin -->", f"<!-- {name}: end -->"
    before, rest = page.split(begin)
    return f"{before}{begin}\n{text}\n{end}{rest.split(end)[1]}"


def lines_of(page: str) -> dict[str, tuple[str, str]]:
    """Return the group and the line of every model type on the page."""
    found, group = {}, ""
    for line in page.splitlines():
        if line.startswith("### "):
            group = next((name for name, title in GROUPS.items() if line.startswith(f"### {title} (")), "")
        elif group and line.startswith("| ") and not line.startswith("| model type"):
            found[line.split(" | ")[0].removeprefix("| ")] = (group, line)
    return found


def _head(columns: tuple[str, ...]) -> str:
    return f"| {' | '.join(columns)} |\n|{'---|' * len(columns)}"


def _run(model: Any, given: dict[str, Tensor], *, seed: int = 1, grad: bool = False) -> list[Tensor]:
    # some hosts draw in eval mode as well: masks of patches, buckets of hashes
    torch.manual_seed(seed)
    with torch.set_grad_enabled(grad):
        return _tensors(model(**given))


def _tensors(value: Any) -> list[Tensor]:
    if isinstance(value, Tensor):
        return [value.detach()] if value.is_floating_point() else []
    values = value.values() if isinstance(value, dict) else value if isinstance(value, list | tuple) else ()
    return [tensor for entry in values for tensor in _tensors(entry)]


def _equal(first: list[Tensor], second: list[Tensor]) -> bool:
    return len(first) == len(second) and all(
        a.shape == b.shape and bool(((a == b) | (a.isnan() & b.isnan())).all()) for a, b in zip(first, second)
    )


def _close(first: list[Tensor], second: list[Tensor]) -> bool:
    # float32 in another order, through two layers of weights larger than usual
    return all(
        torch.allclose(a, b, rtol=1e-2, atol=1e-2 * float(b.abs().nan_to_num().max()), equal_nan=True)
        for a, b in zip(first, second)
    )


def _one_line(error: Exception) -> str:
    text = re.sub(r"\s+", " ", f"{type(error).__name__}: {error}").replace("|", "/").strip()
    return text if len(text) <= 120 else f"{text[:117]}…"


class _OutOfTime(BaseException):
    """No failure of a build or a run, so nobody on the way catches it."""


def _in_time(model_type: str) -> tuple[str, str]:
    def give_up(*_: Any) -> None:
        raise _OutOfTime(f"it takes more than {SECONDS_PER_MODEL} s")

    signal.signal(signal.SIGALRM, give_up)
    signal.alarm(SECONDS_PER_MODEL)
    try:
        return row(model_type)
    except _OutOfTime as error:
        return "not tried", f"| {model_type} | {error} |"
    finally:
        signal.alarm(0)


def main(types: list[str]) -> None:
    """Try the types (all, if none is named), print what became of each, and rewrite the page."""
    warnings.simplefilter("ignore")
    hf.logging.set_verbosity_error()
    # a size that stayed large fails alone
    resource.setrlimit(resource.RLIMIT_AS, (MOST_MEMORY, MOST_MEMORY))
    rows = lines_of(PAGE.read_text(encoding="utf-8")) if types else {}
    for model_type in types or registry.MODEL_TYPES:
        rows[model_type] = _in_time(model_type)
        print(*rows[model_type], flush=True)
    page = PAGE.read_text(encoding="utf-8")
    for name, text in (
        ("version", f"transformers {hf.__version__}"),
        ("support matrix", matrix()),
        ("registry", tables(list(rows.values()))),
    ):
        page = replace(page, name, text)
    PAGE.write_text(page, encoding="utf-8")


if __name__ == "__main__":
    main(sys.argv[1:])
