"""Part of a graph: everything the logits of some nodes depend on, or a random share of it where that is too much.

Two layers read two steps far. The second layer has the wanted nodes as targets, their neighbours as sources; the first
layer has these as targets. Sources are numbered with the targets first, so a node's own features are where it is.
"""

import torch
from jaxtyping import Int
from torch import Tensor

from bayesattn.ops.segment.edges import Edges
from bayesattn_recipes.graph.features import row_positions
from bayesattn_recipes.graph.inputs import Batch, GraphInputs


def neighbourhood_inputs(
    whole: GraphInputs,
    nodes: Int[Tensor, " k"],
    *,
    fanout: int | None = None,
    generator: torch.Generator | None = None,
) -> GraphInputs:
    """Return inputs whose output is that of `nodes`, in their order.

    Args:
        whole: Inputs of the whole graph, on a CPU.
        nodes: Whose logits are wanted; each once.
        fanout: Neighbours of a node that are kept, drawn without replacement, its self-loop not counted; None keeps all, and
            then the logits are those of the whole graph.
        generator: Of the draws.
    """
    if fanout is not None and fanout < 1:
        raise ValueError(f"fanout is {fanout!r}; allowed: an integer of at least 1, or None")
    second, neighbours = _rows(whole.edges[1], nodes, fanout, generator)
    first, sources = _rows(whole.edges[0], neighbours, fanout, generator)
    batch = Batch(len(nodes), (_first_rows(first, len(nodes)), second), whole.edges[0].num_targets, len(whole.edges[0]))
    return GraphInputs(whole.features.take(sources), (first, second), batch)


def _first_rows(edges: Edges, count: int) -> Edges:
    """Return the edges into the first targets; they come first, because edges are sorted by target."""
    stop = int(edges.target_pointers[count])
    return Edges(edges.source[:stop], edges.target[:stop], edges.num_sources, count, torch.arange(stop))


def _rows(
    edges: Edges, targets: Int[Tensor, " k"], fanout: int | None, generator: torch.Generator | None
) -> tuple[Edges, Int[Tensor, " s"]]:
    """Return the edges into `targets` with local numbers, and the nodes that are their sources, targets first."""
    positions, counts = row_positions(edges.target_pointers, targets)
    rows = torch.arange(len(targets)).repeat_interleave(counts)
    sources = edges.source[positions]
    if fanout is not None:
        keys = torch.rand(len(rows), generator=generator).masked_fill_(sources == targets[rows], -1.0)
        order = torch.argsort(keys)
        order = order[torch.argsort(rows[order], stable=True)]
        rank = torch.empty_like(order)
        rank[order] = torch.arange(len(rows)) - (counts.cumsum(0) - counts)[rows[order]]
        # the self-loop, whose key is the smallest, has rank 0
        is_kept = rank <= fanout
        rows, sources = rows[is_kept], sources[is_kept]
    number = torch.full((edges.num_sources,), -1)
    number[targets] = torch.arange(len(targets))
    others = sources[number[sources] < 0].unique()
    number[others] = torch.arange(len(targets), len(targets) + len(others))
    local = Edges.sort(number[sources], rows, len(targets) + len(others), len(targets))
    return local, torch.cat([targets, others])
