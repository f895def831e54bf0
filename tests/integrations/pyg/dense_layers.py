"""The three layers over all pairs of nodes, from their parameters: n² memory, no PyG code, noise as a dense array."""

import math

import torch
import torch.nn.functional as F

from bayesattn.config import AttentionConfig
from bayesattn.divergences import kl_lognormal_lognormal, kl_weibull_gamma


def dense_layer(layer, kind, x, edge_index, edge_attr, noise):
    """Return output and KL of a layer whose edges are unique; `noise` (edges, heads) is in the order of `edge_index`."""
    heads, dim = layer.heads, layer.out_channels
    source, target = (x, x) if isinstance(x, torch.Tensor) else x
    loops = getattr(layer, "add_self_loops", False)
    if loops:
        nodes = torch.arange(min(len(source), len(target)))
        edge_index = torch.cat([edge_index, nodes.expand(2, -1)], dim=1)
        if edge_attr is not None:
            # PyG's default: a loop has the mean of the features of the edges into its node
            into = F.one_hot(edge_index[1, : len(edge_attr)], len(target)).to(edge_attr.dtype)
            edge_attr = torch.cat([edge_attr, (into.T @ edge_attr / into.sum(0).clamp(min=1.0)[:, None])[nodes]])
    place = (edge_index[1], edge_index[0])

    def spread(values):
        """Put values per edge into an array over (target, source)."""
        return values.new_zeros(len(target), len(source), *values.shape[1:]).index_put(place, values)

    adjacency = torch.zeros(len(target), len(source), dtype=torch.bool).index_put(place, torch.tensor(True))
    split = lambda linear, value: linear(value).view(-1, heads, dim)  # noqa: E731
    lin_edge = getattr(layer, "lin_edge", None)
    features = None if edge_attr is None else spread(lin_edge(edge_attr).view(-1, heads, dim))
    if kind == "gat":
        keys = values = split(layer.lin if layer.lin is not None else layer.lin_src, source)
        other = split(layer.lin if layer.lin is not None else layer.lin_dst, target)
        raw = (other * layer.att_dst).sum(-1)[:, None] + (keys * layer.att_src).sum(-1)[None]
        raw = raw if features is None else raw + (features * layer.att_edge).sum(-1)
        scores = F.leaky_relu(raw, layer.negative_slope)
    elif kind == "gatv2":
        keys = values = split(layer.lin_l, source)
        both = split(layer.lin_r, target)[:, None] + keys[None]
        scores = (F.leaky_relu(both if features is None else both + features, layer.negative_slope) * layer.att).sum(-1)
    else:
        keys, values = split(layer.lin_key, source), split(layer.lin_value, source)
        pairs = keys[None] if features is None else keys[None] + features
        scores = (split(layer.lin_query, target)[:, None] * pairs).sum(-1) / dim**0.5
    closed = ~adjacency[..., None]
    weights = torch.softmax((scores + spread(noise)).masked_fill(closed, -torch.inf), dim=1)
    weights = weights.masked_fill(closed, 0.0)
    output = torch.einsum("ijh,jhd->ihd", weights, values)
    if kind == "transformer" and features is not None:
        output = output + torch.einsum("ijh,ijhd->ihd", weights, features)
    output = output.flatten(1) if layer.concat else output.mean(1)
    if kind == "transformer":
        output = output + layer.lin_skip(target)
    else:
        output = output if layer.res is None else output + layer.res(target)
        output = output + layer.bias
    return output, dense_kl(scores, keys, adjacency, layer)


def dense_kl(scores, keys, adjacency, layer):
    """KL entry by entry over (target, source, head), then reduced; the entries that do not exist are left out."""
    config: AttentionConfig = layer.config
    entry, heads = adjacency.nonzero(as_tuple=True), scores.shape[-1]
    closed = ~adjacency[..., None]
    masked = scores.masked_fill(closed, -torch.inf)
    phi = (masked.log_softmax(dim=1) if config.score_form == "log_softmax" else scores)[entry]
    log_psi = None
    if layer.bayes_prior is not None:
        p = layer.bayes_prior
        networks = range(heads) if p.num_networks > 1 else [0] * heads
        logits = torch.stack(
            [
                (torch.relu(keys[:, h] @ p.weight_in[n] + p.bias_in[n]) @ p.weight_out[n] + p.bias_out[n]).squeeze(-1)
                for h, n in enumerate(networks)
            ],
            dim=-1,
        ).expand(len(adjacency), -1, -1)
        scope = adjacency if layer.prior_scope == "neighborhood" else adjacency.any(dim=0).expand_as(adjacency)
        log_psi = logits.masked_fill(~scope[..., None], -torch.inf).log_softmax(dim=1)[entry]
    if config.family == "weibull":
        log_alpha = torch.full_like(phi, config.gamma_alpha).log()
        if log_psi is not None:
            log_alpha = log_psi + (math.log(config.gamma_beta) if config.alpha_form == "beta_psi" else 0.0)
        kl = kl_weibull_gamma(phi, log_alpha, weibull_k=config.weibull_k, gamma_beta=config.gamma_beta)
    else:
        mu_p = torch.full_like(phi, config.mu_p)
        if log_psi is not None:
            mu_p = log_psi if config.mu_form == "log_psi" else log_psi.exp()
        kl = kl_lognormal_lognormal(phi, mu_p, sigma_q=config.sigma_q, sigma_p=config.sigma_p)
    rows = int(adjacency.any(dim=1).sum())
    return kl.sum() / {"sum": 1, "row_mean": rows * heads, "mean": len(entry[0]) * heads}[config.kl_reduction]
