"""What `bayesianize` did to a model, as rows and as a table to print."""

from dataclasses import dataclass

from torch import nn

from bayesattn.config import NOISE_FIELD, AttentionConfig
from bayesattn.convert.adapters import converted_modules, find_candidates


@dataclass(frozen=True)
class ReportRow:
    """One attention module.

    Attributes:
        name: Its name in the model.
        kind: Its class.
        variant: Variant of its Bayesian attention, or the name of its custom weights; None where it was left alone.
        noise: Amount of noise, such as `weibull_k = 5`; None without noise.
        parameters: Parameters that the conversion added.
        reason: Why it was left alone; None where it was converted.
    """

    name: str
    kind: str
    variant: str | None
    noise: str | None
    parameters: int
    reason: str | None


@dataclass(frozen=True)
class ConversionReport:
    """All attention modules of a model; `print(report)` shows a table.

    Attributes:
        rows: One per attention module, in the model's order.
        model_parameters: Parameters of the whole model, the added ones included.

    Example:
        >>> import bayesattn as ba
        >>> model = ba.bayesianize(nn.TransformerEncoderLayer(8, 2, 16), AttentionConfig("BAM-NOKL", weibull_k=3.0))
        >>> report = conversion_report(model)
        >>> report.converted, report.left_alone, report.added_parameters
        (('self_attn',), {}, 0)
    """

    rows: tuple[ReportRow, ...]
    model_parameters: int

    @property
    def converted(self) -> tuple[str, ...]:
        """Names of the Bayesian attention modules."""
        return tuple(row.name for row in self.rows if row.variant is not None)

    @property
    def left_alone(self) -> dict[str, str]:
        """Names of the others, with the reason."""
        return {row.name: row.reason or "" for row in self.rows if row.variant is None}

    @property
    def added_parameters(self) -> int:
        """Parameters that the conversion added."""
        return sum(row.parameters for row in self.rows)

    def __str__(self) -> str:
        width = max((len(row.name) for row in self.rows), default=0)
        lines = [f"{row.name:<{width}}  {row.kind}: {_outcome(row)}" for row in self.rows]
        before = self.model_parameters - self.added_parameters
        share = f" ({self.added_parameters / before:.2%} of {before:,})" if before else ""
        lines.append(
            f"{len(self.converted)} of {len(self.rows)} attention modules are Bayesian, "
            f"{self.added_parameters:,} parameters added{share}"
            + (": an optimizer built before the conversion does not have them" if self.added_parameters else "")
        )
        return "\n".join(lines)


def conversion_report(model: nn.Module) -> ConversionReport:
    """Return which attention modules of `model` were converted, which were not and why, and what was added.

    Example:
        >>> import bayesattn as ba
        >>> model = ba.bayesianize(nn.TransformerEncoderLayer(8, 2, 16), AttentionConfig("BAM-NOKL", weibull_k=3))
        >>> print(str(conversion_report(model)).splitlines()[0])
        self_attn  MultiheadAttention: BAM-NOKL, weibull_k = 3
    """
    rows = {}
    for name, _, part in converted_modules(model):
        added = sum(p.numel() for child in (part.bayes_prior, part.bayes_weights) if child for p in child.parameters())
        variant = part.config.variant if part.bayes_weights is None else part.bayes_weights.name
        rows[name] = ReportRow(name, type(model.get_submodule(name)).__name__, variant, _noise(part.config), added, None)
    for candidate in find_candidates(model, AttentionConfig("BAM-NOKL")):
        reason = candidate.problem or "not selected"
        rows[candidate.name] = ReportRow(candidate.name, candidate.kind, None, None, 0, reason)
    ordered = tuple(rows[name] for name, _ in model.named_modules() if name in rows)
    return ConversionReport(ordered, sum(p.numel() for p in model.parameters()))


def _noise(config: AttentionConfig) -> str | None:
    if config.family is None:
        return None
    field = NOISE_FIELD[config.family]
    return f"{field} = {getattr(config, field):g}"


def _outcome(row: ReportRow) -> str:
    if row.variant is None:
        return f"left alone, {row.reason}"
    return row.variant if row.noise is None else f"{row.variant}, {row.noise}"
