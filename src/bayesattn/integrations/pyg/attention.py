"""Shared by the three graph layers: edges kept sorted between calls, and the steps from scores to output, weights and KL.

The layers run PyG's own code unless something about the weights is random: `eval()` is PyG's layer bit for bit. Otherwise
`edge_updater` and `propagate`, the calls by which PyG's `forward` gets scores and sums, run `functional.edge_attention`;
projections, self loops, residuals and biases stay PyG's. Where the messages themselves are needed (hooks, explanations, an
aggregation other than the sum, sparse adjacency matrices), PyG passes them as always and only the softmax is replaced.
"""

from dataclasses import dataclass
from types import ModuleType
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary, ref

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn
from torch_geometric.nn.aggr import SumAggregation
from torch_geometric.utils import add_self_loops, is_sparse, remove_self_loops, to_edge_index

from bayesattn import sensitivity
from bayesattn.config import AttentionConfig
from bayesattn.functional import EDGE_BACKENDS, PRIOR_SCOPES, EdgeBackend, Edges, PriorScope, edge_attention
from bayesattn.integrations.pyg.batches import SeedRows
from bayesattn.nn import AttentionWeights, BayesianModule, WeightsFactory
from bayesattn.ops.prior.nodes import NodePrior
from bayesattn.ops.segment import csr, plain, reference
from bayesattn.ops.segment.pairs import FeatureScores, PairScores
from bayesattn.precision import upcast, without_autocast
from bayesattn.scalars import check_choice, check_rate


class _Sorted(NamedTuple):
    """The edges of a layer's last call, as given and sorted."""

    ends: tuple[Tensor, Tensor]
    edges: Edges
    # the tensor they came in, if it was on a GPU, and its stamp
    given: ref[Tensor] | None
    stamp: tuple[Any, ...]

    def is_from(self, edge_index: Tensor, flow: str, loops: bool) -> bool:
        """Whether that very tensor is given again, unchanged; comparing its entries would wait for the GPU."""
        return self.given is not None and self.given() is edge_index and self.stamp == _stamp(edge_index, flow, loops)


def _stamp(edge_index: Tensor, flow: str, loops: bool) -> tuple[Any, ...]:
    """Return a tensor's version and address, which of its rows are the sources, and whether loops are added."""
    return edge_index._version, edge_index.data_ptr(), edge_index.shape, edge_index.stride(), flow, loops


# of every layer; not on the layer, which is copied and pickled
_SORTED: WeakKeyDictionary[nn.Module, _Sorted] = WeakKeyDictionary()
# devices on which only operations that torch counts change a tensor; CPU memory may belong to NumPy
_COUNTING_DEVICES = ("cuda",)

_HOOKS = [
    f"_{name}_forward{when}_hooks" for name in ("propagate", "message", "aggregate", "edge_update") for when in ("_pre", "")
]


@dataclass
class Call:
    """One call of a layer."""

    edges: Edges
    # gathers of node values onto edges, in the order of `edges`
    ops: ModuleType
    passes_messages: bool
    # as `EdgeAttentionModule._takes_parts` says
    takes_parts: bool = False
    scores: Float[Tensor, "e h"] | None = None


class EdgeAttentionModule(BayesianModule):
    """Mixin for PyG's attention layers, whose constructors it extends.

    Args:
        *args: Those of PyG's layer.
        config: Posterior and prior.
        weights: Instead of a config, an object that replaces softmax and average (`bayesattn/nn/custom_weights.py`).
        prior_scope: Nodes over which the contextual prior sums to one: `graph` (all nodes that are a source, as published)
            or `neighborhood` (the sources of each target, as the derivation requires, which has one softmax per row).
        value_dropout: Dropout on the features that are averaged, not on those that scores and prior see (GAT's third).
        backend: Passed to `functional.edge_attention`.
        **kwargs: Those of PyG's layer.
    """

    on_edges = True
    # class attributes, because a converted layer never ran the constructor
    prior_scope: PriorScope = "graph"
    backend: EdgeBackend = "auto"
    value_dropout: float = 0.0
    # set from outside, by `neighbor_batch`
    seed_rows: SeedRows | None = None
    # these are set only during a call
    _call: Call | None = None
    _wants_weights: bool = False
    _weights: Tensor | None = None
    # attributes of PyG's classes
    heads: int
    out_channels: int
    flow: str
    aggr_module: Any
    explain: Any
    decomposed_layers: int

    def __init__(
        self,
        *args: Any,
        config: AttentionConfig | None = None,
        weights: AttentionWeights | WeightsFactory | None = None,
        prior_scope: PriorScope = "graph",
        value_dropout: float = 0.0,
        backend: EdgeBackend = "auto",
        **kwargs: Any,
    ) -> None:
        super().__init__(*args, **kwargs)
        check_choice("prior_scope", prior_scope, PRIOR_SCOPES)
        check_choice("backend", backend, EDGE_BACKENDS)
        check_rate("value_dropout", value_dropout)
        self.prior_scope, self.backend, self.value_dropout = prior_scope, backend, value_dropout
        self.init_bayesian(config, key_dim=self.out_channels, num_heads=self.heads, weights=weights)
        self._check_backend()

    def _check_backend(self) -> None:
        if self.bayes_weights is not None and self.backend not in ("auto", "reference"):
            name = self.bayes_weights.name
            raise ValueError(
                f"backend {self.backend!r} cannot be used with {name}, which has no kernel. Use 'auto' or 'reference'"
            )

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        # PyG gives generated versions of these two to every class whose own body has none, including subclasses of ours
        propagate, edge_updater = getattr(cls, "propagate", None), getattr(cls, "edge_updater", None)
        for prefix in ("_orig", "_jinja"):
            setattr(cls, f"{prefix}_propagate", propagate)
            setattr(cls, f"{prefix}_edge_updater", edge_updater)

    def _set_jittable_templates(self, raise_on_error: bool = False) -> None:
        """Keep PyG from overwriting `propagate` and `edge_updater`."""

    @property
    def _is_stock(self) -> bool:
        """Whether PyG's own code gives the right answer: nothing is drawn or recorded."""
        return not (self.training or self.drops_in_eval) and self.is_idle

    def _passes_messages(self, edge_index: Any) -> bool:
        """Whether PyG has to pass the messages, because hooks need them or they are not summed."""
        return bool(
            any(getattr(self, hooks) for hooks in _HOOKS)
            or self.explain
            or self.decomposed_layers > 1
            or not isinstance(self.aggr_module, SumAggregation)
            or is_sparse(edge_index)
        )

    def _takes_parts(self, on_cuda: bool) -> bool:
        """Whether `functional.edge_attention` gets the scores in parts, and may run kernels."""
        runs_kernels = self.backend == "triton" or (self.backend == "auto" and on_cuda)
        return runs_kernels and self.bayes_weights is None and self.seed_rows is None and not self.is_measured

    def _open(self, edge_index: Any, num_sources: int, num_targets: int) -> Call:
        """Find the edges of this call and decide whether this library or PyG sums over them."""
        passes_messages = self._passes_messages(edge_index)
        if passes_messages or (torch.compiler.is_compiling() and self.backend != "triton"):
            ends = _end_points(edge_index, self.flow)
            return Call(Edges(*ends, num_sources, num_targets), plain, passes_messages)
        edges = sorted_edges(self, edge_index, num_sources, num_targets)
        return Call(edges, self._gathers(edges), False, self._takes_parts(edges.source.is_cuda))

    def _gathers(self, edges: Edges) -> ModuleType:
        """Return the operations on sorted edges that suit their device."""
        takes_csr = self.backend in ("auto", "csr") and edges.source.device.type == "cpu"
        is_traced = torch.compiler.is_compiling() or torch._C._are_functorch_transforms_active()
        # doubt needs derivatives that only torch's own operations have
        return csr if takes_csr and not is_traced and not self.is_measured else plain

    def _attend(
        self,
        call: Call,
        scores: Float[Tensor, "e h"] | PairScores | FeatureScores,
        value: Float[Tensor, "n h d"],
        keys: Float[Tensor, "n h d"],
        dropout: float,
    ) -> reference.EdgeAttention:
        """Return output and weights of one draw, in the order of the call's edges, and record its KL."""
        edges, needs_kl = call.edges, self.needs_kl
        if self.bayes_weights is not None:
            self._check_backend()
            result = self.bayes_weights.on_edges(
                scores, self._drop_value(value, call.ops), edges, call.ops, dropout_p=self.dropout_now(dropout)
            )
            return result._replace(output=self.record(result.output, result.kl))
        is_whole = self.seed_rows is None
        backend = self.backend
        if self.is_measured:
            assert isinstance(scores, Tensor)
            scores, backend = sensitivity.through_edges(scores, edges, self), "reference"
        result = edge_attention(
            scores,
            self._drop_value(value, call.ops),
            edges,
            config=self.config,
            log_prior=self._prior_of(call, keys) if needs_kl and is_whole else None,
            prior_scope=self.prior_scope,
            dropout_p=self.dropout_now(dropout),
            sample=self.is_sampling,
            need_kl=needs_kl and is_whole,
            need_weights=self._wants_weights,
            backend=backend,
        )
        kl = result.kl
        if needs_kl and not is_whole:
            assert isinstance(scores, Tensor)
            kl = self._kl(upcast(scores), keys, call)
        return result._replace(output=self.record(result.output, kl))

    def _draw(self, scores: Float[Tensor, "e h"]) -> Float[Tensor, "e h"]:
        """Return only the weights, where PyG passes the messages, and keep the scores for `_record_messages`."""
        assert self._call is not None
        edges = self._call.edges
        if self.bayes_weights is not None:
            if self.bayes_weights.has_kl:
                raise ValueError(
                    f"the KL of the weights {self.bayes_weights.name!r} needs sums that are not available where PyG passes "
                    "the messages itself (hooks, explanations, sparse matrices, an aggregation other than the sum). Use "
                    "weights without a KL there"
                )
            return self.bayes_weights.edge_weights(scores, edges, plain).to(scores.dtype)
        with without_autocast(scores.device.type):
            phi = upcast(scores)
            if self.is_measured:
                phi = sensitivity.through_edges(phi, edges, self)
            self._call.scores = phi
            if self.is_sampling:
                weights = reference.sample_weights(phi, edges, None, self.config)
            else:
                weights = plain.softmax(phi, edges)
        return weights.to(scores.dtype)

    def _record_messages(self, call: Call, output: Tensor, keys: Float[Tensor, "n h d"]) -> Tensor:
        """Record the KL of the scores that `_draw` kept."""
        if not self.needs_kl:
            return output
        assert call.scores is not None
        return self.record(output, self._kl(call.scores, keys, call))

    def _kl(self, scores: Float[Tensor, "e h"], keys: Float[Tensor, "n h d"], call: Call) -> Float[Tensor, " 1"]:
        """Return the KL of the graph, or its estimate from the rows of a batch's seeds."""
        edges = call.edges
        with without_autocast(keys.device.type):
            prior = self._log_prior(keys, edges)
            if self.seed_rows is None:
                return reference.kl_total(scores, prior, edges, self.config, self.prior_scope)
            own, places = self.seed_rows.edges(edges)
            by_head = reference.kl_by_head(scores[places], prior, own, self.config, self.prior_scope, call.ops)
            heads = 1 if self.config.kl_reduction == "sum" else len(by_head)
            return by_head.sum().view(1) / (self.seed_rows.entries(self.config) * heads)

    def _drop_weights(self, weights: Tensor, p: float) -> Tensor:
        has_own = self.bayes_weights is not None and self.bayes_weights.has_own_dropout
        return weights if has_own else F.dropout(weights, self.dropout_now(p))

    def _drop_value(self, value: Float[Tensor, "n h d"], ops: ModuleType = plain) -> Float[Tensor, "n h d"]:
        p = self.dropout_now(self.value_dropout)
        return ops.dropout(value.flatten(1), p).view_as(value) if p else value

    def _prior_of(self, call: Call, keys: Float[Tensor, "n h d"]) -> Float[Tensor, "n h"] | NodePrior | None:
        """Return ln Ψ of every node or, where the kernels run, the inputs from which they compute it."""
        if self.bayes_prior is not None and call.takes_parts:
            fused = self.bayes_prior.fused_of_nodes(keys, _used(call.edges))
            if fused is not None:
                return fused
        return self._log_prior(keys, call.edges)

    def _log_prior(self, keys: Float[Tensor, "n h d"], edges: Edges) -> Float[Tensor, "n h"] | None:
        """Return ln Ψ of every node; Ψ is a softmax over the nodes that are the source of some edge."""
        if self.bayes_prior is None:
            return None
        used = _used(edges)
        with without_autocast(keys.device.type):
            return self.bayes_prior.of_nodes(keys, used)


def _used(edges: Edges) -> Bool[Tensor, "1 1 n"]:
    return edges.memo("used", lambda: (edges.out_degree > 0).view(1, 1, -1))


def _end_points(edge_index: Any, flow: str) -> tuple[Int[Tensor, " e"], Int[Tensor, " e"]]:
    """Return sources and targets of the edges."""
    if is_sparse(edge_index):
        # PyG's convention: the transposed adjacency matrix
        target, source = to_edge_index(edge_index)[0]
        return source, target
    source, target = edge_index[0], edge_index[1]
    return (source, target) if flow == "source_to_target" else (target, source)


def sorted_edges(
    layer: EdgeAttentionModule, edge_index: Tensor, num_sources: int, num_targets: int, *, loops: bool = False
) -> Edges:
    """Sort the edges, or reuse those of the layer's last call if they are the same, which is cheap to check.

    Args:
        layer: The layer that uses them.
        edge_index: As PyG has it.
        num_sources: Number of nodes on the first side.
        num_targets: Number of nodes on the second side.
        loops: Whether every node gets one edge to itself, in place of any that it has.
    """
    if torch.compiler.is_compiling():
        assert not loops, "under a compiler PyG adds the self loops"
        return Edges.sort(*_end_points(edge_index, layer.flow), num_sources, num_targets, check=False)
    known = _SORTED.get(layer)
    has_size = known is not None and (known.edges.num_sources, known.edges.num_targets) == (num_sources, num_targets)
    if known is not None and has_size and known.is_from(edge_index, layer.flow, loops):
        return known.edges
    mark = _mark(edge_index, layer.flow, loops)
    if loops:
        edge_index = add_self_loops(remove_self_loops(edge_index)[0], num_nodes=num_sources)[0]
    ends = _end_points(edge_index, layer.flow)
    if known is not None and has_size:
        is_same_place = known.ends[0].device == ends[0].device and known.ends[0].dtype == ends[0].dtype
        if is_same_place and all(torch.equal(a, b) for a, b in zip(known.ends, ends, strict=True)):
            _SORTED[layer] = known._replace(**mark)
            return known.edges
    edges = Edges.sort(*ends, num_sources, num_targets)
    # copies: the caller may change its own tensor in place
    _SORTED[layer] = _Sorted((ends[0].clone(), ends[1].clone()), edges, **mark)
    return edges


def _mark(edge_index: Tensor, flow: str, loops: bool) -> dict[str, Any]:
    """Return the tensor's stamp for the next call; inference mode has no version counter."""
    if edge_index.device.type not in _COUNTING_DEVICES or edge_index.is_inference():
        return {"given": None, "stamp": ()}
    return {"given": ref(edge_index), "stamp": _stamp(edge_index, flow, loops)}
