"""Draws with and without batch_dims: what is repeated, that each draw is one of the model, and no guess about the batch."""

import pytest
import torch
from torch import nn

import bayesattn as ba
from bayesattn import predict
from helpers import no_type_checks

BATCH, LENGTH, DIM, CLASSES = 3, 5, 8, 4
NOISY = ba.AttentionConfig("BAM-WC", weibull_k=1.0)
QUIET = ba.AttentionConfig("BAM-NOKL", weibull_k=1e12)


class _Encoder(nn.Module):
    """Self-attention, then a mean over the sequence; its inputs may have the batch second."""

    def __init__(
        self, config: ba.AttentionConfig = NOISY, *, batch_first: bool = True, keeps_sequence: bool = False
    ) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.attention = ba.nn.MultiheadAttention(DIM, 2, batch_first=batch_first, config=config, dtype=torch.float64)
        self.head = nn.Linear(DIM, CLASSES, dtype=torch.float64)
        self.batch_axis, self.keeps_sequence = int(not batch_first), keeps_sequence
        self.calls: list[int] = []

    def forward(self, x: torch.Tensor, mask: torch.Tensor | None = None, table: torch.Tensor | None = None):
        self.calls.append(x.shape[self.batch_axis])
        y = self.attention(x, x, x, attn_mask=mask, need_weights=False)[0]
        y = self.head(y if self.keeps_sequence else y.mean(dim=1 - self.batch_axis))
        return y if table is None else y @ table.T


def inputs(batch: int = BATCH) -> torch.Tensor:
    return torch.randn(batch, LENGTH, DIM, dtype=torch.float64, generator=torch.Generator().manual_seed(8))


@pytest.mark.parametrize("batch_first", [True, False])
@pytest.mark.parametrize("keeps_sequence", [True, False])
def test_draws_do_not_depend_on_the_chunk_size(batch_first, keeps_sequence):
    model = _Encoder(batch_first=batch_first, keeps_sequence=keeps_sequence)
    x = inputs() if batch_first else inputs().transpose(0, 1)
    axis = int(not batch_first)
    alone, *others = (
        predict(model, x, num_samples=7, seed=2, chunk_size=size, batch_dims=axis).logits for size in (1, 2, 3, 100, None)
    )
    assert alone.shape == (7, *model(x).shape)
    for other in others:
        # float64 in matrix products of another size
        torch.testing.assert_close(other, alone, rtol=1e-12, atol=1e-12)
    # every draw and every example has noise of its own
    assert len({tuple(row.tolist()) for row in alone.flatten(0, -2)}) == alone.flatten(0, -2).shape[0]
    loops = [predict(model, x, num_samples=7, seed=2, chunk_size=size).logits for size in (1, 3, None)]
    assert torch.equal(loops[0], loops[1])
    assert torch.equal(loops[0], loops[2])


def test_passes_hold_at_most_chunk_size_draws_and_one_without_batch_dims():
    model = _Encoder()
    for options, calls in (
        ({"batch_dims": 0}, [1, 6]),
        ({"batch_dims": 0, "chunk_size": 3}, [1, 3, 3]),
        ({"batch_dims": 0, "chunk_size": 4}, [1, 4, 2]),
        ({"batch_dims": 0, "chunk_size": 1}, [1] * 7),
        ({"chunk_size": 3}, [1] * 7),
        ({}, [1] * 7),
    ):
        model.calls = []
        predict(model, inputs(), num_samples=7, seed=0, **options)
        assert model.calls == [BATCH * count for count in calls], options


def test_fewer_draws_are_the_first_of_many():
    model = _Encoder()
    for options in ({}, {"batch_dims": 0}):
        many, few = (predict(model, inputs(), num_samples=count, seed=2, **options).logits for count in (9, 4))
        torch.testing.assert_close(many[:4], few, rtol=1e-12, atol=1e-12)


def test_sequence_first_models_draw_what_batch_first_ones_do():
    """Repeating the sequence, as an earlier version did, let all draws see each other: a variance forty times too small."""
    first, second = (_Encoder(batch_first=batch_first, keeps_sequence=True) for batch_first in (True, False))
    x = inputs()
    with torch.no_grad(), ba.sampling(first.eval()):
        torch.manual_seed(5)
        by_hand = torch.stack([first(x) for _ in range(80)])
    for model, given, axis in ((first, x, 0), (second, x.transpose(0, 1), 1)):
        loop = predict(model, given, num_samples=80, seed=5)
        logits = loop.logits.movedim(1 + axis, 1)
        torch.testing.assert_close(logits, by_hand, rtol=1e-12, atol=1e-12)
        together = predict(model, given, num_samples=80, seed=5, batch_dims=axis)
        for name in ("logits", "samples"):
            # a variance from 80 draws is known to 16 %, the mean of sixty of them better
            found, expected = (float(getattr(pred, name).var(dim=0).mean()) for pred in (together, loop))
            assert found == pytest.approx(expected, rel=0.3), name
        found, expected = (float(pred.mutual_information.mean()) for pred in (together, loop))
        assert found == pytest.approx(expected, rel=0.3)


def test_a_mask_of_the_batch_s_length_is_not_repeated():
    """Batch 5 and length 5: a (5, 5) mask looks like a batch of five."""
    model, x = _Encoder(), inputs(5)
    mask = torch.ones(LENGTH, LENGTH, dtype=torch.bool).triu(1)
    loop = predict(model, [x, mask], num_samples=3, seed=0).logits
    assert loop.shape == (3, 5, CLASSES)
    together, alone = (
        predict(model, [x, mask], num_samples=3, seed=0, batch_dims=[0, None], chunk_size=size).logits for size in (None, 1)
    )
    torch.testing.assert_close(together, alone, rtol=1e-12, atol=1e-12)
    quiet = _Encoder(QUIET)
    expected = quiet.eval()(x, mask).detach().expand(3, 5, CLASSES)
    for options in ({}, {"batch_dims": [0, None]}):
        torch.testing.assert_close(predict(quiet, [x, mask], 3, seed=0, **options).logits, expected, rtol=1e-6, atol=1e-6)


def test_a_shared_table_of_the_batch_s_length_is_not_repeated():
    """Repeated, it gave fifteen classes instead of five and no error."""
    model, x, table = _Encoder(QUIET), inputs(5), torch.randn(5, CLASSES, dtype=torch.float64)
    expected = model.eval()(x, table=table).detach().expand(3, 5, 5)
    given = {"x": x, "table": table}
    for options in ({}, {"batch_dims": {"x": 0, "table": None}}):
        torch.testing.assert_close(predict(model, given, 3, seed=0, **options).logits, expected, rtol=1e-6, atol=1e-6)
    # whoever says that the table is a batch is told what comes of it
    with pytest.raises(ValueError, match=r"2 draws: one draw has shape \(5, 5\), all together gave \(10, 10\)"):
        predict(model, given, num_samples=3, seed=0, batch_dims=0)


def test_settings_beside_the_data_are_passed_as_they_are():
    model = _Encoder()
    given = {"x": inputs(), "mask": None}
    a, b = (predict(model, given, 4, seed=1, batch_dims=dims).logits for dims in (0, {"x": 0}))
    assert torch.equal(a, b)


def test_dropout_is_drawn_one_by_one_so_that_chunks_do_not_matter():
    model = nn.Sequential(_Encoder(), nn.Dropout(0.5))
    a, b = (
        predict(model, inputs(), num_samples=5, seed=1, batch_dims=0, chunk_size=size, dropout=True).logits
        for size in (None, 2)
    )
    assert torch.equal(a, b)
    assert len({tuple(draw.flatten().tolist()) for draw in a}) == 5
    assert bool((a == 0.0).any())


def test_an_empty_batch_has_empty_draws():
    for options in ({}, {"batch_dims": 0}):
        assert predict(_Encoder(), inputs(0), num_samples=3, seed=0, **options).samples.shape == (3, 0, CLASSES)


def test_attention_that_all_examples_share_is_refused_not_shared_by_the_draws():
    """One draw for all of a pass would make its draws agree."""

    class Shared(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.attention = ba.nn.MultiheadAttention(DIM, 2, batch_first=True, config=NOISY)
            self.latents = nn.Parameter(torch.randn(1, 3, DIM))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x + self.attention(self.latents, self.latents, self.latents)[0].mean(dim=1)

    model, x = Shared(), torch.randn(BATCH, DIM)
    assert float(predict(model, x, num_samples=4, seed=0).logits.std(dim=0).min()) > 0.0
    with pytest.raises(
        ValueError, match=r"with 3 seeds needs .* a multiple of 3, got a batch of 1.* predict without batch_dims"
    ):
        predict(model, x, num_samples=4, seed=0, batch_dims=0)


@pytest.mark.parametrize(
    ("given", "batch_dims", "named"),
    [
        ([inputs(), inputs(2)], 0, r"batches of one length, got 3 in argument 0, 2 in argument 1"),
        (
            [inputs(), torch.tensor(2.0)],
            0,
            r"batch_dims for argument 1 must be an axis of its shape \(\), or None .*, got 0",
        ),
        ([inputs(), None], [3, None], r"batch_dims for argument 0 must be an axis of its shape \(3, 5, 8\), .*, got 3"),
        ([inputs(), None], ["0", None], r"batch_dims for argument 0 must be an axis .*, got '0'"),
        ([inputs(), [inputs()]], 0, "batch_dims gives an axis to argument 1, which is a list and has none"),
        (
            [inputs(), inputs()],
            [0],
            "batch_dims has no entry for argument 1. Give its batch axis, or None if all draws share it",
        ),
        ([inputs()], [0, 0], "batch_dims has an entry for argument 1, but the arguments are 0"),
        ({"x": inputs()}, {"y": 0}, "batch_dims has an entry for argument 'y', but the arguments are 'x'"),
        ({"x": inputs()}, {"x": None}, "batches of one length, got none at all"),
        ([inputs()], 0.5, "batch_dims must be one axis for all arguments, or one axis per argument, got 0.5"),
        ([inputs()], "0", "batch_dims must be one axis for all arguments, or one axis per argument, got '0'"),
    ],
)
def test_bad_batch_dims_are_refused_before_the_model_runs(given, batch_dims, named, monkeypatch):
    no_type_checks(monkeypatch)
    model = _Encoder()
    with pytest.raises(ValueError, match=named):
        predict(model, given, num_samples=2, seed=0, batch_dims=batch_dims)
    assert model.calls == []
    assert model.training
