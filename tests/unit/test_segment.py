"""Attention on edges against dense attention with the adjacency matrix as mask: weights, output, KL and gradients."""

import pytest
import torch

import bayesattn as ba
from bayesattn import noise
from bayesattn.functional import Edges, edge_attention
from bayesattn.ops.segment import csr, plain, reference
from bayesattn.ops.segment.draws import edge_log_noise
from bayesattn.ops.segment.pairs import FeatureScores, PairScores
from helpers import PRESETS, REDUCTIONS, WITH_KL, kl_oracle, no_type_checks

ROWS, SOURCES, HEADS, DIM = 7, 5, 3, 2
# GAT's vectors for sources and targets, and the slope of its LeakyReLU
WEIGHTS = (torch.ones(1, HEADS, DIM), torch.ones(1, HEADS, DIM), 0.2)
SCOPES = ("graph", "neighborhood")
OPS = {"plain": plain, "csr": csr}
both_ops = pytest.mark.parametrize("ops", OPS.values(), ids=OPS)


def graph(dtype=torch.float64):
    """A random bipartite graph in which row 4 has no edge and source 2 has none; edges given in random order."""
    generator = torch.Generator().manual_seed(0)
    adjacency = torch.rand(ROWS, SOURCES, generator=generator) < 0.5
    adjacency[4], adjacency[:, 2] = False, False
    target, source = adjacency.nonzero(as_tuple=True)
    order = torch.randperm(len(target), generator=generator)
    edges = Edges.sort(source[order], target[order], SOURCES, ROWS)
    scores = torch.randn(len(edges), HEADS, generator=generator, dtype=dtype)
    return edges, scores, adjacency[None, None]


def to_dense(x, edges):
    return torch.zeros(1, x.shape[1], ROWS, SOURCES, dtype=x.dtype).index_put(
        (torch.zeros(1, dtype=torch.long), torch.arange(x.shape[1])[:, None], edges.target, edges.source), x.T
    )


def log_prior(dtype=torch.float64):
    logits = torch.randn(SOURCES, HEADS, generator=torch.Generator().manual_seed(1), dtype=dtype)
    logits[2] = -torch.inf
    return torch.log_softmax(logits, dim=0)


@both_ops
def test_softmax_is_the_dense_one(ops):
    edges, scores, mask = graph()
    dense = torch.softmax(to_dense(scores, edges).masked_fill(~mask, -torch.inf), dim=-1)
    torch.testing.assert_close(ops.softmax(scores, edges), dense[0, :, edges.target, edges.source].T)


@both_ops
def test_softmax_survives_scores_that_overflow(ops):
    edges = Edges.sort(torch.tensor([0, 1, 2]), torch.tensor([0, 0, 1]), 3, 3)
    weights = ops.softmax(torch.tensor([[1e4], [-1e4], [-1e30]]), edges)
    assert weights.squeeze(1).tolist() == [1.0, 0.0, 1.0]


@pytest.mark.parametrize(
    "function", ["lift_source", "lift_target", "sum_by_source", "sum_by_target", "softmax", "logsumexp"]
)
def test_csr_is_plain_and_passes_gradcheck(function):
    edges, _, _ = graph()
    rows = {"lift_source": SOURCES, "lift_target": ROWS}.get(function, len(edges))
    x = torch.randn(rows, HEADS, dtype=torch.float64, requires_grad=True)
    torch.testing.assert_close(getattr(csr, function)(x, edges), getattr(plain, function)(x, edges))
    assert torch.autograd.gradcheck(lambda x: getattr(csr, function)(x, edges), (x,))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_weighted_sum_of_parallel_edges_is_plain_and_passes_gradcheck(dtype):
    edges, _, _ = graph(dtype)
    twice = Edges.sort(edges.source.repeat(2), edges.target.repeat(2), SOURCES, ROWS)
    weights, value = torch.rand(len(twice), HEADS, dtype=dtype), torch.randn(SOURCES, HEADS, DIM, dtype=dtype)
    torch.testing.assert_close(csr.weighted_sum(weights, value, twice), plain.weighted_sum(weights, value, twice))
    if dtype == torch.float64:
        inputs = (weights.requires_grad_(), value.requires_grad_())
        assert torch.autograd.gradcheck(lambda w, v: csr.weighted_sum(w, v, twice), inputs)


def test_dot_products_on_edges_are_plain_and_pass_gradcheck():
    edges, _, _ = graph()
    query = torch.randn(ROWS, HEADS, DIM, dtype=torch.float64, requires_grad=True)
    key = torch.randn(SOURCES, HEADS, DIM, dtype=torch.float64, requires_grad=True)
    torch.testing.assert_close(csr.dot(query, key, edges), plain.dot(query, key, edges))
    assert torch.autograd.gradcheck(lambda q, k: csr.dot(q, k, edges), (query, key))


@pytest.mark.parametrize("p", [0.0, 0.3, 0.6, 0.9])
def test_dropout_of_csr_drops_with_its_probability_and_keeps_the_mean(p):
    dropped = csr.dropout(torch.ones(50_000, 4), p)
    kept = dropped[dropped != 0.0]
    share = 1.0 - kept.numel() / dropped.numel()
    # 200,000 draws: five standard errors are below 0.006
    assert abs(share - p) < 0.006
    torch.testing.assert_close(kept, torch.full_like(kept, 1.0 / (1.0 - p)), rtol=1e-4, atol=0.0)


@pytest.mark.parametrize("heads", [3, 8, 19])
@pytest.mark.parametrize("variant", ["BAM-WF", "BAM-LF"])
def test_noise_of_edge_and_head_is_the_specified_entry(variant, heads):
    config = ba.AttentionConfig(variant, weibull_k=2.0, sigma_q=0.7)
    seed = (5 << 40) + 11
    numbers = torch.tensor([4, 0, 70_000, 3])
    entries = noise.log_noise(seed, (1, 1, 5, 96), config, dtype=torch.float64)[0, 0]
    head = torch.arange(heads)
    column = 32 * (head // 8) + 8 * (head % 8 // 2) + head % 2
    drawn = edge_log_noise(seed, numbers, heads, config, torch.float64)
    assert torch.equal(drawn[[0, 1, 3]], entries[numbers[[0, 1, 3]]][:, column])


@pytest.mark.parametrize("variant", ["BAM-WF", "BAM-LF"])
def test_a_draw_belongs_to_the_number_of_the_edge_not_to_its_place(variant):
    edges, scores, _ = graph()
    config = ba.AttentionConfig(variant, weibull_k=1.0)
    value = torch.randn(SOURCES, HEADS, DIM, dtype=torch.float64)
    given = Edges(edges.to_given(edges.source), edges.to_given(edges.target), SOURCES, ROWS)
    unsorted = edge_attention(edges.to_given(scores), value, given, config=config, seed=3, backend="reference")
    in_order = edge_attention(scores, value, edges, config=config, seed=3, backend="csr", need_weights=True)
    torch.testing.assert_close(in_order.output, unsorted.output)
    torch.testing.assert_close(edges.to_given(in_order.weights), unsorted.weights)


def neighborhood_oracle(scores, prior, edges, config):
    """KL target by target, each with its own prior: a graph of one row is dense attention with one query."""
    total, entries, rows = 0.0, 0, 0
    summed = ba.AttentionConfig.from_dict({**config.to_dict(), "kl_reduction": "sum"})
    for row in edges.target.unique():
        own = edges.target == row
        local = torch.log_softmax(prior[edges.source[own]], dim=0)
        total += kl_oracle(scores[own].T[None, :, None], local.T[None, :, None], None, summed)[0]
        entries, rows = entries + int(own.sum()) * HEADS, rows + HEADS
    return total / {"sum": 1, "row_mean": rows, "mean": entries}[config.kl_reduction]


@pytest.mark.parametrize("reduction", REDUCTIONS)
@pytest.mark.parametrize("preset", PRESETS)
@pytest.mark.parametrize("variant", WITH_KL)
@both_ops
def test_kl_is_the_definition_s(variant, preset, reduction, ops):
    edges, scores, mask = graph()
    config = ba.AttentionConfig(variant, preset=preset, kl_reduction=reduction, gamma_beta=0.3, weibull_k=3.0)
    prior = log_prior() if config.prior_kind == "contextual" else None
    actual = reference.kl_total(scores, prior, edges, config, "graph", ops)
    expected = kl_oracle(to_dense(scores, edges), None if prior is None else prior.T[None, :, None], mask, config)
    torch.testing.assert_close(actual, torch.tensor(expected))
    if prior is not None:
        actual = reference.kl_total(scores, prior, edges, config, "neighborhood", ops)
        torch.testing.assert_close(float(actual), float(neighborhood_oracle(scores, prior, edges, config)))


@pytest.mark.parametrize("scope", SCOPES)
@pytest.mark.parametrize("preset", PRESETS)
@pytest.mark.parametrize("variant", WITH_KL)
@both_ops
def test_gradients_pass_gradcheck(variant, preset, scope, ops):
    edges, scores, _ = graph()
    config = ba.AttentionConfig(variant, preset=preset, gamma_beta=0.3)
    prior = log_prior().nan_to_num(neginf=0.0).requires_grad_() if config.prior_kind == "contextual" else None
    scores.requires_grad_()

    def both(scores, prior=None):
        weights = reference.sample_weights(scores, edges, 3, config, ops)
        return weights, reference.kl_total(scores, prior, edges, config, scope, ops)

    assert torch.autograd.gradcheck(both, (scores,) if prior is None else (scores, prior), fast_mode=True)


@pytest.mark.parametrize("variant", WITH_KL)
@pytest.mark.parametrize("backend", ["reference", "csr"])
def test_a_graph_without_edges_has_no_kl_and_output_zero(variant, backend):
    config = ba.AttentionConfig(variant)
    none = torch.zeros(0, dtype=torch.long)
    edges = Edges.sort(none, none, SOURCES, ROWS)
    prior = log_prior(torch.float32) if config.prior_kind == "contextual" else None
    scores = torch.zeros(0, HEADS, requires_grad=True)
    value = torch.randn(SOURCES, HEADS, DIM, requires_grad=True)
    result = edge_attention(scores, value, edges, config=config, log_prior=prior, backend=backend)
    assert result.kl.tolist() == [0.0]
    assert torch.equal(result.output, torch.zeros(ROWS, HEADS, DIM))
    (result.output.sum() + result.kl.sum()).backward()
    assert torch.equal(value.grad, torch.zeros_like(value))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_output_has_the_dtype_of_the_value_and_the_kl_is_float32(dtype):
    edges, scores, _ = graph(torch.float32)
    value = torch.randn(SOURCES, HEADS, DIM, dtype=dtype)
    result = edge_attention(scores.to(dtype), value, edges, config=ba.AttentionConfig("BAM-WF"))
    assert (result.output.dtype, result.kl.dtype) == (dtype, torch.float32)


@pytest.mark.parametrize(("variant", "kl"), [("soft", 0.0), ("BAM-NOKL", 0.0)])
def test_variants_without_a_kl_return_zero(variant, kl):
    edges, scores, _ = graph()
    value = torch.randn(SOURCES, HEADS, DIM, dtype=torch.float64)
    assert edge_attention(scores, value, edges, config=ba.AttentionConfig(variant)).kl.tolist() == [kl]
    assert edge_attention(scores, value, edges, config=ba.AttentionConfig(variant), need_kl=False).kl is None


@pytest.mark.parametrize(("source", "target"), [([0, 5], [0, 1]), ([0, -1], [0, 1]), ([0, 1], [0, 7])])
def test_an_end_point_out_of_range_is_refused(source, target):
    with pytest.raises(ValueError, match=r"of the edges must be in \[0, \d\], got entries in \["):
        Edges.sort(torch.tensor(source), torch.tensor(target), SOURCES, ROWS)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"scores": torch.zeros(2, HEADS)}, r"scores must have shape .*, got \(2, 3\)"),
        ({"scores": torch.zeros(2, HEADS, dtype=torch.long)}, "scores must be .*, got torch.int64"),
        ({"scores": [0.5]}, "scores must be a Tensor, PairScores or FeatureScores, got list"),
        (
            {"scores": FeatureScores(torch.zeros(SOURCES, HEADS, DIM).long(), *WEIGHTS)},
            "features of the scores must be a floating-point tensor, got torch.int64",
        ),
        (
            {"scores": PairScores(torch.zeros(SOURCES, 2), torch.zeros(ROWS, 3), 0.2)},
            r"target of the scores must be .*, got .*\(7, 3\)",
        ),
        (
            {"scores": PairScores(torch.zeros(SOURCES, 3), torch.zeros(ROWS, 3, device="meta"), 0.2)},
            "device of the other part, got .* on meta",
        ),
        ({"value": torch.zeros(SOURCES, HEADS + 1, DIM)}, r"value must have shape .*, got \(5, 4, 2\)"),
        ({"log_prior": None}, "prior must be ln Ψ .* for BAM-WC, got None"),
        ({"log_prior": torch.zeros(SOURCES, 2)}, r"prior must have shape .*, got \(5, 2\)"),
        ({"config": ba.AttentionConfig("BAM-WF")}, "prior must be None for BAM-WF, got a tensor"),
        ({"prior_scope": "world"}, "prior_scope must be one of 'graph', 'neighborhood', got 'world'"),
        ({"dropout_p": 1.0}, "dropout_p must be .*, got 1.0"),
        ({"backend": "blocked"}, "backend must be one of 'auto', 'reference', 'csr', 'triton', got 'blocked'"),
        (
            {"backend": "triton"},
            "backend 'triton' cannot be used here: .*the tensors are on cpu, not on a GPU|triton is not installed",
        ),
    ],
)
def test_bad_arguments_are_named(monkeypatch, change, message):
    no_type_checks(monkeypatch)
    edges, scores, _ = graph(torch.float32)
    arguments = {
        "scores": scores,
        "value": torch.randn(SOURCES, HEADS, DIM),
        "edges": edges,
        "config": ba.AttentionConfig("BAM-WC"),
        "log_prior": log_prior(torch.float32),
        **change,
    }
    with pytest.raises(ValueError, match=message):
        edge_attention(**arguments)


@pytest.mark.parametrize("backend", ["reference", "csr"])
def test_scores_made_of_a_pair_are_those_of_their_sum_and_leave_it_alone(backend):
    edges, _, _ = graph()
    source, target = (torch.randn(size, HEADS, dtype=torch.float64, requires_grad=True) for size in (SOURCES, ROWS))
    value, before = torch.randn(SOURCES, HEADS, DIM, dtype=torch.float64), [x.detach().clone() for x in (source, target)]
    scores = torch.nn.functional.leaky_relu(source[edges.source] + target[edges.target], 0.2)
    found = []
    for given in (PairScores(source, target, 0.2), scores):
        result = edge_attention(given, value, edges, config=ba.AttentionConfig("BAM-WF"), seed=3, backend=backend)
        loss = result.output.square().sum() + result.kl.sum()
        found.append([loss.detach(), *torch.autograd.grad(loss, (source, target), retain_graph=True)])
    # float64 in another order
    torch.testing.assert_close(*found, rtol=1e-12, atol=1e-12)
    assert torch.equal(source, before[0])
    assert torch.equal(target, before[1])


def test_csr_refuses_unsorted_edges_by_name():
    edges, scores, _ = graph(torch.float32)
    unsorted = Edges(edges.source, edges.target, SOURCES, ROWS)
    with pytest.raises(ValueError, match="backend 'csr' cannot be used here: the edges are not sorted"):
        edge_attention(
            scores, torch.randn(SOURCES, HEADS, DIM), unsorted, config=ba.AttentionConfig("BAM-WF"), backend="csr"
        )
