"""Attention on the edges of a graph."""

from typing import Literal, get_args

from jaxtyping import Float
from torch import Tensor

from bayesattn import checks
from bayesattn.config import AttentionConfig
from bayesattn.functional.dense import zeros_like_kl
from bayesattn.noise import keyed
from bayesattn.noise.specification import Seed
from bayesattn.ops.prior.nodes import NodePrior
from bayesattn.ops.segment import csr, plain, reference, support
from bayesattn.ops.segment.edges import Edges
from bayesattn.ops.segment.pairs import FeatureScores, PairScores
from bayesattn.ops.segment.reference import PRIOR_SCOPES, EdgeAttention, PriorScope
from bayesattn.precision import without_autocast
from bayesattn.scalars import check_choice, check_rate

EdgeBackend = Literal["auto", "reference", "csr", "triton"]
EDGE_BACKENDS = get_args(EdgeBackend)


def edge_attention(
    scores: Float[Tensor, "e h"] | PairScores | FeatureScores,
    value: Float[Tensor, "n h d"],
    edges: Edges,
    *,
    config: AttentionConfig,
    log_prior: Float[Tensor, "n prior_heads"] | NodePrior | None = None,
    prior_scope: PriorScope = "graph",
    dropout_p: float = 0.0,
    seed: Seed | None = None,
    sample: bool = True,
    need_kl: bool = True,
    need_weights: bool = False,
    backend: EdgeBackend = "auto",
) -> EdgeAttention:
    """Compute Bayesian attention on the edges of a graph: O_i = Σ_e W_e V_source(e), W a softmax over the edges into i.

    Dense attention with the adjacency matrix as its mask computes the same, with n² instead of e entries in memory.

    Args:
        scores: Φ of each edge, in the order of `edges`; or the parts it is made of, with which the kernels save gathers and
            scatters.
        value: Features of each node that may be a source.
        edges: The graph, from `Edges.sort`.
        config: Posterior, prior and conventions.
        log_prior: ln Ψ of each source from a contextual prior, per head or shared by all heads; or a `NodePrior`, from
            which the kernels compute ln Ψ.
        prior_scope: Ψ sums to one over all nodes that are a source (`graph`, as published), or over the sources of each
            target (`neighborhood`, as the derivation requires, which has one softmax per row).
        dropout_p: Dropout rate of the weights; the KL does not depend on it.
        seed: The same seed gives the same draw, on every backend and in every order of the edges (`ops/segment/draws.py`);
            None draws from torch's generator, or per example inside `keyed_noise`.
        sample: False gives the posterior mean.
        need_kl: Whether to compute the KL.
        need_weights: Whether to compute weights that the backend does not need.
        backend: `auto` is `csr` on a CPU and `triton` on a GPU if these support the call (both need sorted edges), otherwise
            `reference`. Any other runs or raises an error.

    Returns:
        Output in the dtype of `value`; weights before and after dropout, None if a kernel did not store them; KL of the
        graph as one entry, zero for variants without a KL and None without `need_kl`.

    Raises:
        ValueError: An argument has a wrong type, shape or value.

    Example:
        >>> import torch
        >>> edges = Edges.sort(torch.tensor([0, 1, 2]), torch.tensor([0, 0, 1]), 3, 3)
        >>> scores, value = torch.zeros(3, 2), torch.randn(3, 2, 4)  # three edges, three nodes, two heads
        >>> found = edge_attention(scores, value, edges, config=AttentionConfig("BAM-WF"), seed=0)
        >>> found.output.shape, found.kl.shape
        (torch.Size([3, 2, 4]), torch.Size([1]))
    """
    # `like` has the device, type and heads of the scores in each of their forms
    if isinstance(scores, Tensor):
        checks.edge_scores(scores, len(edges))
        like = scores
    elif isinstance(scores, PairScores):
        checks.edge_pair(*scores, edges.num_sources, edges.num_targets)
        like = scores.source
    elif isinstance(scores, FeatureScores):
        checks.edge_features(*scores, edges.num_sources, edges.num_targets)
        like = scores.features
    else:
        raise ValueError(f"scores must be a Tensor, PairScores or FeatureScores, got {type(scores).__name__}")
    heads = like.shape[1]
    checks.edge_value(value, edges.num_sources, heads)
    given = log_prior.key if isinstance(log_prior, NodePrior) else log_prior
    checks.same_device("scores", like.device, value=value, edges=edges.source, log_prior=given)
    if isinstance(log_prior, NodePrior):
        checks.edge_prior_shape(tuple(log_prior.key.shape[:2]), heads, edges.num_sources, config)
    else:
        checks.edge_prior(log_prior, heads, edges.num_sources, config, need_kl)
    check_choice("prior_scope", prior_scope, PRIOR_SCOPES)
    check_rate("dropout_p", dropout_p)
    check_choice("backend", backend, EDGE_BACKENDS)
    sample = sample and config.is_stochastic
    # a graph is one example
    seed = keyed.next_seeds(1, like.device) if sample and seed is None else seed
    wants_kl = need_kl and config.has_kl
    chosen = _choose(backend, support.EdgeCall(like, value, edges, config, sample, dropout_p))
    options = {"config": config, "prior_scope": prior_scope, "seed": seed, "need_kl": wants_kl}
    if isinstance(log_prior, NodePrior):
        log_prior = log_prior if chosen == "triton" else log_prior.log_prior()
    elif log_prior is not None and log_prior.shape[1] != heads:
        log_prior = log_prior.expand(-1, heads)
    options["log_prior"] = log_prior
    with without_autocast(like.device.type):
        if chosen == "triton":
            from bayesattn.ops.segment import triton

            result = triton.attention(scores, value, edges, need_weights=need_weights, **options)
        else:
            ops = csr if chosen == "csr" else plain
            phi = scores if isinstance(scores, Tensor) else scores.on_edges(edges, ops)
            result = reference.attention(phi, value, edges, sample=sample, dropout_p=dropout_p, ops=ops, **options)
    if need_kl and result.kl is None:
        result = result._replace(kl=zeros_like_kl(like.new_zeros(1)))
    return result


def _choose(backend: EdgeBackend, call: support.EdgeCall) -> EdgeBackend:
    if backend == "auto":
        if call.scores.device.type == "cuda":
            return "reference" if support.why_not_triton(call) else "triton"
        return "reference" if support.why_not_csr(call) else "csr"
    reasons = {"triton": support.why_not_triton, "csr": support.why_not_csr}
    reason = reasons[backend](call) if backend in reasons else ""
    if reason:
        raise ValueError(f"backend {backend!r} cannot be used here: {reason}. Use 'auto' or 'reference'")
    return backend
