"""`bayesianize` and `restore`: everything is checked before the model changes."""

from collections.abc import Sequence
from fnmatch import fnmatchcase
from typing import Any, TypeVar

from torch import nn

from bayesattn.config import AttentionConfig
from bayesattn.convert import sdpa
from bayesattn.convert.adapters import Candidate, converted_modules, find_candidates
from bayesattn.nn import AttentionWeights, WeightsFactory
from bayesattn.nn.custom_weights import build_weights
from bayesattn.nn.module import checked_config

Model = TypeVar("Model", bound=nn.Module)
Selection = Sequence[int | str]

# an error lists at most this many attention modules by name
MOST_NAMES = 24
# also for callers that convert a model for one call, such as ba.uncertainty, and take no example_inputs
SHOW_CALLS = (
    "; if the source does not show that call, convert the model first, with one batch that shows it: "
    "bayesianize(model, config, example_inputs=batch)"
)


def bayesianize(
    model: Model,
    config: AttentionConfig | None = None,
    *,
    weights: WeightsFactory | None = None,
    layers: Selection | None = None,
    exclude: Selection | None = None,
    example_inputs: Any = None,
) -> Model:
    """Make the attention of `model` Bayesian, in place.

    In eval mode the converted model computes exactly what it computed before. In train mode, and inside
    `sampling(model)`, attention weights are drawn; `record_kl()` collects the KL of every call. `conversion_report(model)`
    says what was converted and how many parameters were added: BAM-WC and BAM-LC add one small prior network per attention
    module, the other variants none. Build the optimizer afterwards, or it will not train the priors.

    On a pretrained model the default noise, k = 5, changes almost nothing when drawn: the mutual information of a
    classifier's draws is 0.001 to 0.004 nats. `tune_noise` chooses the noise on validation data.

    Args:
        model: A model of torch (`nn.MultiheadAttention`, `nn.Transformer*`, modules that call
            `F.scaled_dot_product_attention`), transformers or PyTorch Geometric, or a mixture.
        config: Variant, noise and prior.
        weights: Instead of a config, a function that builds the object that replaces softmax and average
            (`nn/custom_weights.py`); called once per attention module with `head_dim`, `num_heads`, `device`, `dtype`.
        layers: Convert only these: names or glob patterns (`"*.encoder.*"`), or positions in the model's order of
            attention modules; None means all.
        exclude: Leave these alone; the same forms as `layers`.
        example_inputs: One batch, as for `predict`. The model is run on it once, in eval mode, to find modules that call
            `F.scaled_dot_product_attention` in a way that their source does not show.

    Returns:
        The same model.

    Raises:
        ValueError: Nothing can be converted, or a module that was not excluded cannot be. The message names the modules;
            the model is unchanged.

    Example:
        >>> model = bayesianize(nn.TransformerEncoderLayer(8, 2, 16), AttentionConfig("BAM-WC"))
        >>> sum(parameter.numel() for name, parameter in model.named_parameters() if "bayes" in name) > 0
        True
    """
    if not isinstance(model, nn.Module):
        raise ValueError(f"model must be a torch.nn.Module, got {type(model).__name__}")
    stated = checked_config(config, weights)
    if isinstance(weights, nn.Module) or (weights is not None and not callable(weights)):
        raise ValueError(
            f"weights must be a function that builds one object per attention module, got {type(weights).__name__}"
        )
    already = converted_modules(model)
    if already:
        raise ValueError(
            f"model already has {len(already)} Bayesian attention modules, the first is {already[0][0]!r}; "
            "call restore(model) before converting it again"
        )
    candidates = find_candidates(model, stated, () if example_inputs is None else sdpa.callers(model, example_inputs))
    if not candidates:
        raise ValueError(
            f"model is a {type(model).__name__}, and no attention was found in it. Give a model with "
            "nn.MultiheadAttention, a transformers model whose attention goes through its AttentionInterface, GATConv, "
            "GATv2Conv or TransformerConv of PyTorch Geometric, or modules that call F.scaled_dot_product_attention"
            + ("" if example_inputs is not None else SHOW_CALLS)
        )
    attach_selected(model, config, candidates, layers, exclude, weights)
    return model


def attach_selected(
    model: nn.Module,
    config: AttentionConfig | None,
    candidates: list[Candidate],
    layers: Selection | None,
    exclude: Selection | None = None,
    weights: WeightsFactory | None = None,
) -> None:
    """Convert the candidates that `layers` and `exclude` select; if one fails, convert none of them."""
    selected = _select(candidates, layers, exclude)
    _raise_on_problems(model, candidates, selected)
    built = [_build(candidate, weights) for candidate in selected]
    attached: list[Candidate] = []
    try:
        for candidate, own in zip(selected, built, strict=True):
            assert candidate.adapter is not None
            candidate.adapter.attach(model, candidate.name, config, own)
            attached.append(candidate)
    except BaseException:
        for candidate in reversed(attached):
            assert candidate.adapter is not None
            candidate.adapter.detach(model, candidate.name)
        raise


def restore(model: Model) -> Model:
    """Undo `bayesianize`: class, config, hooks and state_dict are what they were before.

    Raises:
        ValueError: The model has no converted attention.

    Example:
        >>> model = nn.TransformerEncoderLayer(8, 2, 16)
        >>> names = list(model.state_dict())
        >>> restore(bayesianize(model, AttentionConfig("BAM-WC"))) is model and list(model.state_dict()) == names
        True
    """
    converted = converted_modules(model)
    if not converted:
        raise ValueError(
            f"model is a {type(model).__name__} without converted attention. Give a model that bayesianize converted"
        )
    for name, adapter, _ in converted:
        adapter.detach(model, name)
    return model


def _build(candidate: Candidate, weights: WeightsFactory | None) -> AttentionWeights | None:
    """Return the custom weights of one attention module; raise where it cannot take them."""
    adapter = candidate.adapter
    assert adapter is not None
    own = None if weights is None else build_weights(weights, **adapter.sizes(candidate.module)._asdict())
    problem = None if own is None else candidate.refusal(own)
    if problem is not None:
        raise ValueError(f"{candidate.name or 'the model'} ({candidate.kind}) cannot be converted: {problem}")
    return own


def _select(candidates: list[Candidate], layers: Selection | None, exclude: Selection | None) -> list[Candidate]:
    wanted = set(range(len(candidates))) if layers is None else _positions("layers", layers, candidates)
    unwanted = set() if exclude is None else _positions("exclude", exclude, candidates)
    selected = [candidate for i, candidate in enumerate(candidates) if i in wanted - unwanted]
    if not selected:
        raise ValueError(
            f"layers is {layers!r} and exclude is {exclude!r}, which leaves nothing to convert; the attention modules are "
            f"{_names(candidates)}"
        )
    return selected


def _positions(argument: str, selection: Selection, candidates: list[Candidate]) -> set[int]:
    if isinstance(selection, str) or not isinstance(selection, Sequence):
        raise ValueError(f"{argument} must be a list of names, glob patterns or positions, got {selection!r}")
    found: set[int] = set()
    for entry in selection:
        if isinstance(entry, str):
            hits = {i for i, candidate in enumerate(candidates) if fnmatchcase(candidate.name, entry)}
        elif isinstance(entry, int) and not isinstance(entry, bool) and -len(candidates) <= entry < len(candidates):
            hits = {entry % len(candidates)}
        else:
            hits = set()
        if not hits:
            raise ValueError(
                f"{argument} has {entry!r}, which matches nothing; the attention modules are {_names(candidates)}"
            )
        found |= hits
    return found


def _raise_on_problems(model: nn.Module, candidates: list[Candidate], selected: list[Candidate]) -> None:
    broken = [candidate for candidate in selected if candidate.problem is not None]
    if not broken:
        return
    # one line per class and reason, not one per layer
    reasons: dict[tuple[str, str], list[str]] = {}
    for candidate in broken:
        reasons.setdefault((candidate.kind, str(candidate.problem)), []).append(candidate.name)
    lines = [
        f"  {kind} ({', '.join(map(repr, _shortened(names)))}): {problem}" for (kind, problem), names in reasons.items()
    ]
    advice = (
        "Name them in exclude=[...] to leave them deterministic."
        if len(broken) < len(candidates)
        else "Nothing of this model can be converted."
    )
    raise ValueError(
        f"{len(broken)} of the {len(candidates)} attention modules of this {type(model).__name__} cannot be made Bayesian:\n"
        + "\n".join(lines)
        + f"\n{advice}"
    )


def _names(candidates: list[Candidate]) -> str:
    return ", ".join(repr(name) for name in _shortened([candidate.name for candidate in candidates]))


def _shortened(names: list[str]) -> list[str]:
    return names if len(names) <= MOST_NAMES else [*names[:MOST_NAMES], f"and {len(names) - MOST_NAMES} more"]
