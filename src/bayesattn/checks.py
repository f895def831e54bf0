"""Argument checks shared by the public functions: each error names the argument, its value and what is allowed."""

import torch
from torch import Tensor

from bayesattn.config import AttentionConfig

Shape = tuple[int, ...]


def floating(name: str, value: Tensor) -> None:
    """Require a floating-point tensor."""
    if not isinstance(value, Tensor) or not value.is_floating_point():
        kind = value.dtype if isinstance(value, Tensor) else type(value).__name__
        raise ValueError(f"{name} is {kind}; allowed: a floating-point tensor")


def choice(name: str, value: object, allowed: tuple[str, ...]) -> None:
    """Require one of a few strings."""
    if value not in allowed:
        raise ValueError(f"{name} is {value!r}; allowed: {', '.join(map(repr, allowed))}")


def probability(name: str, value: float) -> None:
    """Require a number in [0, 1)."""
    if not 0.0 <= value < 1.0:
        raise ValueError(f"{name} is {value!r}; allowed: at least 0 and below 1")


def query_key_value(query: Tensor, key: Tensor, value: Tensor) -> tuple[int, int, int, int]:
    """Check the three inputs of dot-product attention against each other and return (b, h, m, n)."""
    for name, tensor in (("query", query), ("key", key), ("value", value)):
        floating(name, tensor)
        if tensor.ndim != 4:
            raise ValueError(f"{name} has shape {tuple(tensor.shape)}; allowed: four axes (batch, heads, length, features)")
    b, h, m, d = query.shape
    n, key_heads = key.shape[2], key.shape[1]
    if key.shape[0] != b or key.shape[3] != d or key_heads == 0 or h % key_heads:
        raise ValueError(
            f"key has shape {tuple(key.shape)}; allowed beside query {tuple(query.shape)}: "
            f"batch {b}, a number of heads that divides {h}, {d} features"
        )
    if tuple(value.shape[:3]) != (b, key_heads, n):
        raise ValueError(f"value has shape {tuple(value.shape)}; allowed beside key: ({b}, {key_heads}, {n}, any)")
    if not query.dtype == key.dtype == value.dtype:
        raise ValueError(f"query, key, value are {query.dtype}, {key.dtype}, {value.dtype}; allowed: one dtype for all")
    return (b, h, m, n)


def same_device(like: str, device: torch.device, **values: Tensor | None) -> None:
    """Require tensors on one device: a kernel would read a stranger's memory by its address."""
    for name, value in values.items():
        if value is not None and value.device != device:
            raise ValueError(f"{name} is on {value.device}; allowed: {device}, where {like} is")


def mask(value: Tensor | None, shape: Shape) -> Tensor | None:
    """Require a boolean mask broadcastable to (b, h, m, n) and return it with four axes."""
    if value is None:
        return None
    if not isinstance(value, Tensor) or value.dtype != torch.bool:
        kind = value.dtype if isinstance(value, Tensor) else type(value).__name__
        raise ValueError(f"mask is {kind}; allowed: a torch.bool tensor, True = attend (an additive term goes into `bias`)")
    _broadcastable("mask", value, shape)
    value = value.reshape((1,) * (4 - value.ndim) + tuple(value.shape))
    # a mask that does not distinguish keys is legal in torch's attention; give it its key axis
    return value.expand(*value.shape[:3], shape[3]) if value.shape[3] != shape[3] else value


def bias(value: Tensor | None, shape: Shape) -> None:
    """Require an additive bias broadcastable to (b, h, m, n)."""
    if value is not None:
        floating("bias", value)
        _broadcastable("bias", value, shape)


def log_prior(
    value: Tensor | None, shape: Shape, config: AttentionConfig, need_kl: bool, key_heads: int | None = None
) -> Tensor | None:
    """Check ln Ψ against the scores' shape and give it one head, or one per query head."""
    contextual = config.prior_kind == "contextual"
    if value is None:
        if contextual and need_kl:
            raise ValueError(
                f"log_prior is None; allowed for {config.variant}: ln Ψ of shape (b or 1, heads or 1, 1, {shape[3]})"
            )
        return None
    if not contextual:
        raise ValueError(f"log_prior is a tensor; allowed for {config.variant}: None (only BAM-LC and BAM-WC take one)")
    b, h, _, n = shape
    floating("log_prior", value)
    heads = {1, h} if key_heads is None else {1, h, key_heads}
    if value.ndim != 4 or value.shape[0] not in (1, b) or value.shape[1] not in heads or tuple(value.shape[2:]) != (1, n):
        raise ValueError(
            f"log_prior has shape {tuple(value.shape)}; allowed: ({b} or 1, {' or '.join(map(str, sorted(heads)))}, 1, "
            f"{n}), one value for each of the {n} keys"
        )
    return value if value.shape[1] in (1, h) else value.repeat_interleave(h // value.shape[1], dim=1)


def edge_scores(scores: Tensor, num_edges: int) -> None:
    """Check the scores of attention on edges against the graph."""
    floating("scores", scores)
    if scores.ndim != 2 or scores.shape[0] != num_edges:
        raise ValueError(f"scores has shape {tuple(scores.shape)}; allowed: ({num_edges} edges, heads)")


def edge_pair(source: Tensor, target: Tensor, negative_slope: float, num_sources: int, num_targets: int) -> None:
    """Check what the scores of edges are made of against the graph."""
    for name, part, nodes in (("source", source, num_sources), ("target", target, num_targets)):
        is_part = part.is_floating_point() and part.ndim == 2 and part.shape[0] == nodes
        is_alike = (part.shape[1:], part.dtype, part.device) == (source.shape[1:], source.dtype, source.device)
        if not is_part or not is_alike:
            raise ValueError(
                f"{name} of the scores is {part.dtype} of shape {tuple(part.shape)} on {part.device}; allowed: "
                f"floating-point of shape ({nodes} {name}s, heads), and the same heads, type and device for both"
            )
    _slope(negative_slope)


def edge_features(
    features: Tensor, att_source: Tensor, att_target: Tensor, negative_slope: float, num_sources: int, num_targets: int
) -> None:
    """Check what both parts of the scores of edges are made of against the graph, whose two sides have to be the same."""
    floating("features of the scores", features)
    if features.ndim != 3 or features.shape[0] != num_sources or num_sources != num_targets:
        raise ValueError(
            f"features of the scores has shape {tuple(features.shape)}; allowed: (nodes, heads, features) where all "
            f"{num_sources} sources and {num_targets} targets are these nodes"
        )
    allowed = (1, *features.shape[1:])
    for name, vector in (("att_source", att_source), ("att_target", att_target)):
        if vector.shape != allowed or vector.dtype != att_source.dtype or vector.device != features.device:
            raise ValueError(
                f"{name} of the scores is {vector.dtype} of shape {tuple(vector.shape)} on {vector.device}; allowed: shape "
                f"{allowed} on {features.device}, and the same type for both"
            )
    _slope(negative_slope)


def _slope(negative_slope: float) -> None:
    if not negative_slope >= 0.0:
        raise ValueError(f"negative_slope is {negative_slope!r}; allowed: at least 0")


def edge_value(value: Tensor, num_sources: int, heads: int) -> None:
    """Check the values of attention on edges against graph and scores."""
    floating("value", value)
    if value.ndim != 3 or value.shape[0] != num_sources or value.shape[1] != heads:
        raise ValueError(f"value has shape {tuple(value.shape)}; allowed: ({num_sources} sources, {heads} heads, features)")


def edge_prior(value: Tensor | None, heads: int, num_sources: int, config: AttentionConfig, need_kl: bool) -> None:
    """Check ln Ψ of the sources of a graph."""
    if value is None:
        if config.prior_kind == "contextual" and need_kl:
            allowed = f"ln Ψ of shape ({num_sources} sources, {heads} heads or 1)"
            raise ValueError(f"log_prior is None; allowed for {config.variant}: {allowed}")
        return
    edge_prior_shape(tuple(value.shape), heads, num_sources, config)
    floating("log_prior", value)


def edge_prior_shape(shape: Shape, heads: int, num_sources: int, config: AttentionConfig) -> None:
    """Check the shape of ln Ψ of the sources of a graph, and that the variant has one."""
    if config.prior_kind != "contextual":
        raise ValueError(f"log_prior is a tensor; allowed for {config.variant}: None (only BAM-LC and BAM-WC take one)")
    if len(shape) != 2 or shape[0] != num_sources or shape[1] not in (1, heads):
        raise ValueError(f"log_prior has shape {shape}; allowed: ln Ψ of shape ({num_sources} sources, {heads} heads or 1)")


def finite(mask: Tensor | None = None, log_prior: Tensor | None = None, **tensors: Tensor | None) -> None:
    """Raise on NaN or infinity; ln Ψ may be infinite at a key that the mask takes from every query."""
    for name, value in tensors.items():
        if value is not None and not bool(torch.isfinite(value).all()):
            raise ValueError(f"{name} has NaN or infinite entries; allowed with check_finite=True: finite values only")
    if log_prior is not None:
        broken = ~torch.isfinite(log_prior)
        if mask is not None:
            broken = torch.isnan(log_prior) | (broken & mask.any(dim=-2, keepdim=True))
        if bool(broken.any()):
            raise ValueError("log_prior has NaN or infinite entries; allowed with check_finite=True: finite values only")


def _broadcastable(name: str, value: Tensor, shape: Shape) -> None:
    trailing = shape[len(shape) - value.ndim :] if value.ndim <= 4 else ()
    if value.ndim > 4 or any(size not in (1, full) for size, full in zip(value.shape, trailing, strict=True)):
        raise ValueError(f"{name} has shape {tuple(value.shape)}; allowed: broadcastable to {shape} (b, h, m, n)")
