"""Attention on edges against dense attention with the adjacency matrix as mask: weights, KL and gradients."""

import pytest
import torch

import bayesattn as ba
from bayesattn import noise
from bayesattn.ops.segment import csr, plain, reference
from bayesattn.ops.segment.edges import Edges
from helpers import PRESETS, REDUCTIONS, WITH_KL, kl_oracle

ROWS, SOURCES, HEADS = 7, 5, 3


def graph(dtype=torch.float64):
    """A random bipartite graph in which row 4 has no edge and source 2 has none; edges in random order."""
    generator = torch.Generator().manual_seed(0)
    adjacency = torch.rand(ROWS, SOURCES, generator=generator) < 0.5
    adjacency[4], adjacency[:, 2] = False, False
    index, source = adjacency.nonzero(as_tuple=True)
    order = torch.randperm(len(index), generator=generator)
    index, source = index[order], source[order]
    scores = torch.randn(len(index), HEADS, generator=generator, dtype=dtype)
    dense = torch.zeros(1, HEADS, ROWS, SOURCES, dtype=dtype)
    dense[0, :, index, source] = scores.T
    return index, source, scores, dense, adjacency[None, None]


def log_prior(dtype=torch.float64):
    logits = torch.randn(HEADS, SOURCES, generator=torch.Generator().manual_seed(1), dtype=dtype)
    logits[:, 2] = -torch.inf
    return torch.log_softmax(logits, dim=-1)


def test_softmax_is_the_dense_one():
    index, source, scores, dense, mask = graph()
    expected = torch.softmax(dense.masked_fill(~mask, -torch.inf), dim=-1)[0, :, index, source].T
    torch.testing.assert_close(reference.segment_softmax(scores, index, ROWS), expected)


def test_softmax_survives_scores_that_overflow():
    index = torch.tensor([0, 0, 1])
    weights = reference.segment_softmax(torch.tensor([[1e4], [-1e4], [-1e30]]), index, 3)
    assert weights.squeeze(1).tolist() == [1.0, 0.0, 1.0]


@pytest.mark.parametrize("variant", ["BAM-WF", "BAM-LF"])
def test_noise_of_edge_and_head_is_the_specified_entry(variant):
    index, _, scores, _, _ = graph()
    config = ba.AttentionConfig(variant, weibull_k=2.0, sigma_q=0.7)
    if variant == "BAM-WF":
        added = noise.exponential(11, (1, 1, len(index), HEADS), dtype=torch.float64)[0, 0].log() / 2.0
    else:
        added = 0.7 * noise.normal(11, (1, 1, len(index), HEADS), dtype=torch.float64)[0, 0]
    expected = reference.segment_softmax(scores + added, index, ROWS)
    torch.testing.assert_close(reference.sample_weights(scores, index, ROWS, 11, config), expected)


@pytest.mark.parametrize("reduction", REDUCTIONS)
@pytest.mark.parametrize("preset", PRESETS)
@pytest.mark.parametrize("variant", WITH_KL)
def test_kl_is_the_definition_s(variant, preset, reduction):
    index, source, scores, dense, mask = graph()
    config = ba.AttentionConfig(variant, preset=preset, kl_reduction=reduction, gamma_beta=0.3, weibull_k=3.0)
    prior = log_prior() if config.prior_kind == "contextual" else None
    edge_prior = None if prior is None else prior[:, source].T
    actual = reference.kl_total(scores, edge_prior, index, ROWS, config)
    expected = kl_oracle(dense, None if prior is None else prior[None, :, None], mask, config)
    torch.testing.assert_close(actual, torch.tensor(expected))


@pytest.mark.parametrize("preset", PRESETS)
@pytest.mark.parametrize("variant", WITH_KL)
def test_gradients_pass_gradcheck(variant, preset):
    index, source, scores, _, _ = graph()
    config = ba.AttentionConfig(variant, preset=preset, gamma_beta=0.3)
    prior = log_prior()[:, source].T.clone().requires_grad_() if config.prior_kind == "contextual" else None
    scores.requires_grad_()

    def both(scores, prior=None):
        weights = reference.sample_weights(scores, index, ROWS, 3, config)
        return weights, reference.kl_total(scores, prior, index, ROWS, config)

    assert torch.autograd.gradcheck(both, (scores,) if prior is None else (scores, prior), fast_mode=True)


@pytest.mark.parametrize("variant", WITH_KL)
def test_a_graph_without_edges_has_no_kl(variant):
    config = ba.AttentionConfig(variant)
    prior = torch.zeros(0, HEADS) if config.prior_kind == "contextual" else None
    none = torch.zeros(0, dtype=torch.long)
    assert reference.kl_total(torch.zeros(0, HEADS), prior, none, 3, config).tolist() == [0.0]
    assert reference.sample_weights(torch.zeros(0, HEADS), none, 3, 0, config).shape == (0, HEADS)
