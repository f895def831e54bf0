"""Checks of tensors for the public functions: each error says what an argument must be and what it is."""

import torch
from torch import Tensor

from bayesattn.config import AttentionConfig

Shape = tuple[int, ...]


def floating(name: str, value: Tensor) -> None:
    """Require a floating-point tensor."""
    if not isinstance(value, Tensor) or not value.is_floating_point():
        kind = value.dtype if isinstance(value, Tensor) else type(value).__name__
        raise ValueError(f"{name} must be a floating-point tensor, got {kind}")


def query_key_value(query: Tensor, key: Tensor, value: Tensor) -> tuple[int, int, int, int]:
    """Check the three inputs of dot-product attention against each other and return (b, h, m, n)."""
    for name, tensor in (("query", query), ("key", key), ("value", value)):
        floating(name, tensor)
        if tensor.ndim != 4:
            raise ValueError(f"{name} must have four axes (batch, heads, length, features), got shape {tuple(tensor.shape)}")
    b, h, m, d = query.shape
    n, key_heads = key.shape[2], key.shape[1]
    if key.shape[0] != b or key.shape[3] != d or key_heads == 0 or h % key_heads:
        raise ValueError(
            f"key must have batch size {b}, a number of heads that divides {h}, and {d} features to fit query "
            f"{tuple(query.shape)}, got shape {tuple(key.shape)}"
        )
    if tuple(value.shape[:3]) != (b, key_heads, n):
        raise ValueError(f"value must have shape ({b}, {key_heads}, {n}, any) to fit key, got {tuple(value.shape)}")
    if not query.dtype == key.dtype == value.dtype:
        raise ValueError(f"query, key and value must have the same dtype, got {query.dtype}, {key.dtype}, {value.dtype}")
    return (b, h, m, n)


def same_device(like: str, device: torch.device, **values: Tensor | None) -> None:
    """Require tensors on one device; for a tensor on another, a kernel would read unrelated memory."""
    for name, value in values.items():
        if value is not None and value.device != device:
            raise ValueError(f"{name} must be on {device} like {like}, got {value.device}")


def mask(value: Tensor | None, shape: Shape) -> Tensor | None:
    """Require a boolean mask broadcastable to (b, h, m, n) and return it with four axes."""
    if value is None:
        return None
    if not isinstance(value, Tensor) or value.dtype != torch.bool:
        kind = value.dtype if isinstance(value, Tensor) else type(value).__name__
        raise ValueError(
            f"mask must be a torch.bool tensor where True means attend, got {kind}. Pass an additive term as `bias`"
        )
    _broadcastable("mask", value, shape)
    value = value.reshape((1,) * (4 - value.ndim) + tuple(value.shape))
    # torch's attention allows a mask with one column for all keys; expand it to all keys
    return value.expand(*value.shape[:3], shape[3]) if value.shape[3] != shape[3] else value


def window(value: int | None, is_causal: bool) -> None:
    """Require a positive number of keys with a causal mask, or None."""
    if value is None:
        return
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ValueError(f"window must be a positive integer, or None for no window, got {value!r}")
    if not is_causal:
        raise ValueError(f"window needs is_causal=True, got window={value} with is_causal=False")


def bias(value: Tensor | None, shape: Shape) -> None:
    """Require an additive bias broadcastable to (b, h, m, n)."""
    if value is not None:
        floating("bias", value)
        _broadcastable("bias", value, shape)


def log_prior(
    value: Tensor | None, shape: Shape, config: AttentionConfig, need_kl: bool, key_heads: int | None = None
) -> Tensor | None:
    """Check ln Ψ against the shape of the scores, and return it with one head or one per query head."""
    contextual = config.prior_kind == "contextual"
    if value is None:
        if contextual and need_kl:
            raise ValueError(
                f"log_prior must be ln Ψ of shape (b or 1, heads or 1, 1, {shape[3]}) for {config.variant}, got None"
            )
        return None
    if not contextual:
        raise ValueError(f"log_prior must be None for {config.variant}, got a tensor. Only BAM-LC and BAM-WC take one")
    b, h, _, n = shape
    floating("log_prior", value)
    heads = {1, h} if key_heads is None else {1, h, key_heads}
    if value.ndim != 4 or value.shape[0] not in (1, b) or value.shape[1] not in heads or tuple(value.shape[2:]) != (1, n):
        raise ValueError(
            f"log_prior must have shape ({b} or 1, {' or '.join(map(str, sorted(heads)))}, 1, {n}) with one value for each "
            f"of the {n} keys, got {tuple(value.shape)}"
        )
    return value if value.shape[1] in (1, h) else value.repeat_interleave(h // value.shape[1], dim=1)


def edge_scores(scores: Tensor, num_edges: int) -> None:
    """Check the scores of attention on edges against the graph."""
    floating("scores", scores)
    if scores.ndim != 2 or scores.shape[0] != num_edges:
        raise ValueError(f"scores must have shape ({num_edges} edges, heads), got {tuple(scores.shape)}")


def edge_pair(source: Tensor, target: Tensor, negative_slope: float, num_sources: int, num_targets: int) -> None:
    """Check the source and target parts of the edge scores against the graph."""
    for name, part, nodes in (("source", source, num_sources), ("target", target, num_targets)):
        is_part = part.is_floating_point() and part.ndim == 2 and part.shape[0] == nodes
        is_alike = (part.shape[1:], part.dtype, part.device) == (source.shape[1:], source.dtype, source.device)
        if not is_part or not is_alike:
            raise ValueError(
                f"{name} of the scores must be a floating-point tensor of shape ({nodes} {name}s, heads) with the heads, "
                f"dtype and device of the other part, got {part.dtype} of shape {tuple(part.shape)} on {part.device}"
            )
    _slope(negative_slope)


def edge_features(
    features: Tensor, att_source: Tensor, att_target: Tensor, negative_slope: float, num_sources: int, num_targets: int
) -> None:
    """Check features and vectors of the edge scores against the graph, whose sources and targets must be the same nodes."""
    floating("features of the scores", features)
    if features.ndim != 3 or features.shape[0] != num_sources or num_sources != num_targets:
        raise ValueError(
            "features of the scores must have shape (nodes, heads, features) with the same nodes as sources and targets, "
            f"got {tuple(features.shape)} for {num_sources} sources and {num_targets} targets"
        )
    expected = (1, *features.shape[1:])
    for name, vector in (("att_source", att_source), ("att_target", att_target)):
        if vector.shape != expected or vector.dtype != att_source.dtype or vector.device != features.device:
            raise ValueError(
                f"{name} of the scores must have shape {expected} on {features.device} and the dtype of the other vector, "
                f"got {vector.dtype} of shape {tuple(vector.shape)} on {vector.device}"
            )
    _slope(negative_slope)


def _slope(negative_slope: float) -> None:
    if not negative_slope >= 0.0:
        raise ValueError(f"negative_slope must be at least 0, got {negative_slope!r}")


def edge_value(value: Tensor, num_sources: int, heads: int) -> None:
    """Check the values of attention on edges against the graph and the scores."""
    floating("value", value)
    if value.ndim != 3 or value.shape[0] != num_sources or value.shape[1] != heads:
        raise ValueError(f"value must have shape ({num_sources} sources, {heads} heads, features), got {tuple(value.shape)}")


def edge_prior(value: Tensor | None, heads: int, num_sources: int, config: AttentionConfig, need_kl: bool) -> None:
    """Check ln Ψ of a graph's sources."""
    if value is None:
        if config.prior_kind == "contextual" and need_kl:
            raise ValueError(
                f"log_prior must be ln Ψ of shape ({num_sources} sources, {heads} heads or 1) for {config.variant}, got None"
            )
        return
    edge_prior_shape(tuple(value.shape), heads, num_sources, config)
    floating("log_prior", value)


def edge_prior_shape(shape: Shape, heads: int, num_sources: int, config: AttentionConfig) -> None:
    """Check the shape of ln Ψ of a graph's sources, and that the variant has a contextual prior."""
    if config.prior_kind != "contextual":
        raise ValueError(f"log_prior must be None for {config.variant}, got a tensor. Only BAM-LC and BAM-WC take one")
    if len(shape) != 2 or shape[0] != num_sources or shape[1] not in (1, heads):
        raise ValueError(f"log_prior must have shape ({num_sources} sources, {heads} heads or 1), got {shape}")


def finite(mask: Tensor | None = None, log_prior: Tensor | None = None, **tensors: Tensor | None) -> None:
    """Raise an error on NaN or infinity; ln Ψ may be infinite at a key that no query may attend to."""
    for name, value in tensors.items():
        if value is not None and not bool(torch.isfinite(value).all()):
            raise ValueError(f"{name} has NaN or infinite entries. With check_finite=True all entries must be finite")
    if log_prior is not None:
        broken = ~torch.isfinite(log_prior)
        if mask is not None:
            broken = torch.isnan(log_prior) | (broken & mask.any(dim=-2, keepdim=True))
        if bool(broken.any()):
            raise ValueError("log_prior has NaN or infinite entries. With check_finite=True all entries must be finite")


def _broadcastable(name: str, value: Tensor, shape: Shape) -> None:
    trailing = shape[len(shape) - value.ndim :] if value.ndim <= 4 else ()
    if value.ndim > 4 or any(size not in (1, full) for size, full in zip(value.shape, trailing, strict=True)):
        raise ValueError(f"{name} must be broadcastable to {shape} (b, h, m, n), got shape {tuple(value.shape)}")
