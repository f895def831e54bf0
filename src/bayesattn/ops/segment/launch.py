"""Tile sizes and runs of edges for the kernels on edges."""

import torch
from jaxtyping import Int32
from torch import Tensor

from bayesattn.ops.attention.support import INTERPRETED
from bayesattn.ops.segment.edges import Edges

# a row with more edges than this is cut into runs, so that many programs share a hub
LONGEST_RUN = 512

# entries of a tile [edges, heads, features], and of them per warp: half as many where a row of the output is long
TILE = 1024
ENTRIES_PER_WARP = 1024
LONG_ROW = 64
# entries of a tile [nodes, features] of the kernels over nodes, and [edges, heads] of the sums over the edges of a node
NODE_TILE = 2048
SUM_TILE = 256

Runs = tuple[Int32[Tensor, " s1"], Int32[Tensor, " s"]]


def blocks(heads: int, features: int) -> dict[str, int]:
    """Return tile sizes and warps: at most eight heads, which share a Philox call, and at least four edges."""
    bd = _power_of_two(features)
    hb = min(8, _power_of_two(heads))
    while hb > 1 and hb * bd > TILE // 4:
        hb //= 2
    be = max(4, min(16, TILE // (hb * bd)))
    per_warp = ENTRIES_PER_WARP // (2 if bd >= LONG_ROW else 1)
    return {"BE": be, "HB": hb, "BD": bd, "num_warps": max(1, min(4, be * hb * bd // per_warp)), "num_stages": 2}


def _power_of_two(x: int) -> int:
    return 1 << max(x - 1, 0).bit_length()


def runs(edges: Edges, side: str) -> Runs:
    """Return where each run of edges begins, and its node; if there are as many runs as nodes, each node has one."""
    pointers = edges.source_pointers if side == "source" else edges.target_pointers

    def build() -> Runs:
        # `split_rows` bounds the number of runs without reading the degrees, which a compiled graph cannot do
        has_nodes = len(pointers) > 1
        if not has_nodes or (not torch.compiler.is_compiling() and int(pointers.diff().max()) <= LONGEST_RUN):
            return pointers, torch.arange(len(pointers) - 1, dtype=torch.int32, device=pointers.device)
        return split_rows(pointers, len(edges), LONGEST_RUN)

    return edges.memo(("runs", side), build)


def split_rows(pointers: Int32[Tensor, " n1"], num_edges: int, longest: int) -> Runs:
    """Cut each row into runs of at most `longest` edges; surplus runs at the end are empty and belong to the last row."""
    pieces = (-(-pointers.diff() // longest)).clamp(min=1)
    last = pieces.cumsum(0)
    count = pieces.shape[0] + num_edges // longest
    numbers = torch.arange(count, device=pointers.device)
    nodes = torch.searchsorted(last, numbers, right=True)
    is_real = nodes < pieces.shape[0]
    nodes = nodes.clamp(max=pieces.shape[0] - 1)
    begin = pointers[nodes] + (numbers - last[nodes] + pieces[nodes]) * longest
    begin = torch.where(is_real, begin, num_edges)
    return torch.cat([begin, begin.new_full((1,), num_edges)]).to(torch.int32), nodes.to(torch.int32)


def kernel_constants(heads: int, features: int, dtype: torch.dtype, **switches: object) -> dict:
    """Return a kernel's constants: tile sizes, switches and precision."""
    return {**blocks(heads, features), **switches, "FAST": dtype != torch.float32 and not INTERPRETED}


def prepare_blocks(features: int) -> dict[str, int]:
    """Return the tile of the kernels that multiply rows of features."""
    bd = _power_of_two(features)
    return {"BLOCK": max(1, NODE_TILE // bd), "BD": bd}


def node_blocks(columns: int) -> dict[str, int]:
    """Return the tile of the kernel that sums over nodes: nodes by a part of their heads × features."""
    bc = min(128, _power_of_two(columns))
    return {"BN": NODE_TILE // bc, "BC": bc}


def sum_blocks(heads: int) -> dict[str, int]:
    """Return the tile of the kernel that sums over the edges of a node."""
    hb = min(SUM_TILE // 4, _power_of_two(heads))
    return {"BE": SUM_TILE // hb, "HB": hb, "num_warps": 1}
