"""Captioning in recorded steps: batches of few shapes and the same likelihood, nothing that waits, the same training."""

from copy import deepcopy
from functools import partial

import pytest
import torch
from fake_steps import FakeSteps
from torch._subclasses.fake_tensor import FakeTensorMode

from bayesattn import noise, record_kl
from bayesattn_recipes.captioning.batches import IMAGE_MULTIPLE, REGION_MULTIPLE, step_nll
from bayesattn_recipes.captioning.data import CaptionData, CaptionSplit
from bayesattn_recipes.captioning.train import CaptioningExperiment, load_config
from bayesattn_recipes.common import loop as _loop
from bayesattn_recipes.common.config import seed_everything
from bayesattn_recipes.vision.features import StoredRegions

TINY = [
    "width=12",
    "attention_dim=5",
    "dropout=0",
    "training.batch_size=11",
    "min_count=1",
    "training.keep=last",
    "num_beams=1",
]
# so little noise that draws of another shape give the same
QUIET = {
    "soft": [],
    "BAM-WC": ["attention.weibull_k=1e6"],
    "BAM-WF": ["attention.weibull_k=1e6"],
    "BAM-LC": ["attention.sigma_q=1e-6"],
    "BAM-NOKL": ["attention.weibull_k=1e6"],
}


def make_data(num_images: int = 17, most_regions: int = 23) -> CaptionData:
    """Images with 1 to `most_regions` regions and one to four captions of 1 to 9 words each."""
    draw = torch.Generator().manual_seed(0)
    words = [f"w{number}" for number in range(13)]

    def number(least: int, most: int) -> int:
        return int(torch.randint(least, most + 1, (), generator=draw))

    captions = [
        [" ".join(words[number(0, 12)] for _ in range(number(1, 9))) for _ in range(number(1, 4))] for _ in range(num_images)
    ]
    captions[0][0] = " ".join(words[:9])
    counts = torch.randint(1, most_regions + 1, (num_images, 1), generator=draw)
    counts[0] = most_regions
    values = torch.randn(num_images, most_regions, 7, generator=draw)
    names = [f"image{index}" for index in range(num_images)]
    split = CaptionSplit(names, captions, torch.arange(num_images))
    regions = Ragged(names, values, mask=torch.arange(most_regions) < counts)
    return CaptionData(dict.fromkeys(("train", "validation"), split), regions)


class Ragged(StoredRegions):
    """Regions that come as files of boxes do: padded to the largest image of the batch, not of all."""

    def gather(self, indices):
        values, mask = super().gather(indices)
        most = int(mask.sum(dim=1).max())
        return values[:, :most], mask[:, :most]


def make_experiment(variant: str, *settings: str) -> CaptioningExperiment:
    seed_everything(3)
    config = load_config("shapes-wc", [*TINY, f"attention.variant={variant}", *QUIET.get(variant, ()), *settings])
    return CaptioningExperiment(config, make_data())


def some_batch(experiment: CaptioningExperiment) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """Return a batch of few images and no long caption, and the same padded in every way there is."""
    batch = experiment.collate((experiment.train.lengths < 8).nonzero().squeeze(1)[:6])
    padded = experiment.pad(batch)
    for name, axis in (("regions", 0), ("regions", 1), ("words", 1), ("positions", 0)):
        assert padded[name].shape[axis] > batch[name].shape[axis]
    return batch, padded


@pytest.mark.parametrize("reduction", ["sum", "row_mean", "mean"])
@pytest.mark.parametrize("variant", QUIET)
def test_padded_batch_has_the_likelihood_the_kl_and_the_gradients_of_the_batch(variant, reduction):
    experiment = make_experiment(variant, f"attention.kl_reduction={reduction}")
    model = experiment.model.train()
    batch, padded = some_batch(experiment)
    found = []
    for given in (batch, padded):
        model.zero_grad()
        with record_kl() as kl:
            nll = experiment.nll(model, given)
        (nll + kl.total()).backward()
        found.append([nll.detach(), *(p.grad.clone() for p in model.parameters() if p.grad is not None)])
    assert experiment.num_labels(padded) == experiment.num_labels(batch)
    for ours, truth in zip(found[1], found[0], strict=True):
        # noise of 1e-6 in the weights; float32 sums over some dozens of entries
        torch.testing.assert_close(ours, truth, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("variant", ["hard-reinforce", "gaussian-context"])
def test_padding_leaves_the_gradients_of_loud_noise_alone(variant, monkeypatch):
    """The same, where noise cannot be made small: a caption's step and region have the same number in any batch."""
    numbers = torch.rand(11, 1, 16, 64, generator=torch.Generator().manual_seed(7))

    def by_place(seed, shape, *, device=None):
        return numbers[tuple(slice(size) for size in shape)]

    monkeypatch.setattr(noise, "exponential", by_place)
    monkeypatch.setattr(noise, "normal", by_place)
    experiment = make_experiment(variant, "attention.baseline=moving-average", "attention.entropy_bonus=0.1")
    model, found = experiment.model.train(), []
    with_cost = experiment.collate(torch.arange(6, 11))
    for given in some_batch(experiment):
        copy = deepcopy(model)
        # the average cost of choices is known from another batch
        experiment.nll(copy, with_cost)
        experiment.nll(copy, given).backward()
        found.append([p.grad for p in copy.parameters() if p.grad is not None])
    # float32 sums over some dozens of entries
    torch.testing.assert_close(found[1], found[0], rtol=1e-4, atol=1e-4)


def test_steps_after_the_end_have_no_target_and_no_loss():
    experiment = make_experiment("soft")
    batch = experiment.collate(torch.arange(7))
    padded = experiment.pad(batch)
    assert padded["words"].shape == (7, 10)  # nine words and an end
    assert len(padded["positions"]) == len(padded["positions"].unique())
    place = dict(zip(padded["positions"].tolist(), padded["targets"].tolist(), strict=True))
    targets = iter(batch["targets"].tolist())
    for row, length in enumerate(batch["lengths"].tolist()):
        assert [place.pop(10 * row + step) for step in range(length)] == [next(targets) for _ in range(length)]
    assert set(place.values()) == {-100}
    losses = step_nll(experiment.model, padded)
    assert torch.equal(losses > 0, torch.arange(10) < batch["lengths"][:, None])


def test_padded_batches_have_few_shapes():
    experiment = make_experiment("soft")
    shapes = {False: set(), True: set()}
    for epoch in range(40):
        for indices in experiment.batches(experiment.config.training, torch.Generator().manual_seed(epoch)):
            batch = experiment.collate(indices)
            for is_padded, given in ((False, batch), (True, experiment.pad(batch))):
                shapes[is_padded].add(tuple(tuple(value.shape) for value in given.values()))
    # a whole and a last batch; at most 23 regions; at most 11 images; the words of 11 captions vary by more than many's
    assert len(shapes[True]) <= 2 * -(-23 // REGION_MULTIPLE) * -(-11 // IMAGE_MULTIPLE) * 2
    assert 3 * len(shapes[True]) < len(shapes[False])


def test_cells_of_a_grid_are_not_padded():
    experiment = make_experiment("soft")
    batch = experiment.collate(torch.arange(2))
    batch |= {
        "regions": torch.randn(1, 9, 7),
        "region_mask": torch.ones(1, 9, dtype=torch.bool),
        "image_rows": torch.zeros(2).long(),
    }
    padded = experiment.pad(batch)
    assert padded["regions"].shape == (IMAGE_MULTIPLE, 9, 7)
    assert padded["region_mask"].all()


@pytest.mark.parametrize("variant", [*QUIET, "hard-reinforce", "gaussian-context"])
def test_no_training_step_waits_for_the_device(variant):
    # a fake tensor has a shape and no values: whatever the host asks for is an error
    experiment = make_experiment(variant)
    assert experiment.is_recordable
    padded = experiment.pad(experiment.collate(torch.arange(11)))
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        batch = {name: mode.from_tensor(value) for name, value in padded.items()}
        with record_kl() as kl:
            nll = experiment.nll(experiment.model.train(), batch)
        (nll + kl.total()).backward()


@pytest.mark.parametrize(
    ("variant", "settings"), [("hard-gumbel", ()), ("gaussian-weights", ()), ("soft", ("decoder_mode=eager",))]
)
def test_what_draws_at_every_word_and_what_is_not_to_be_recorded_is_not(variant, settings):
    assert not make_experiment(variant, *settings).is_recordable


def train_a_little(experiment: CaptioningExperiment) -> list[torch.Tensor]:
    """Train three epochs by plain steps against the gradient, which keep a rounding error what it is; return parameters."""
    experiment.optimizer = torch.optim.SGD(experiment.model.parameters(), lr=0.3)
    experiment.scheduler = None
    seed_everything(5)
    _loop.train(experiment, experiment.config.training, seed=1)
    return [parameter.detach().cpu() for parameter in experiment.model.parameters()]


@pytest.mark.parametrize("variant", QUIET)
def test_training_in_recorded_steps_is_training(variant, monkeypatch):
    """All but the recording itself, which needs a GPU: padding, what a replay reads anew, whose gradients it leaves."""
    plain = train_a_little(make_experiment(variant, "training.epochs=3"))
    steps: list[FakeSteps] = []

    class Watched(FakeSteps):
        def __init__(self, *arguments):
            super().__init__(*arguments)
            steps.append(self)

    monkeypatch.setattr(_loop, "RecordedSteps", Watched)
    monkeypatch.setattr(_loop._Loop, "_can_record", lambda loop: loop.experiment.is_recordable)
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    recorded = train_a_little(make_experiment(variant, "training.epochs=3"))
    assert steps[0].captures > 0
    start = make_experiment(variant).model.parameters()
    assert all(
        not torch.equal(before.detach(), after) for before, after in zip(start, plain, strict=True) if before.numel() > 1
    )
    for ours, truth in zip(recorded, plain, strict=True):
        # noise of 1e-6 and float32 sums in another order, through some twelve steps
        torch.testing.assert_close(ours, truth, rtol=0.0, atol=1e-5)


def pad_first(experiment: CaptioningExperiment) -> None:
    """Let plain steps have the batches, and so the draws, of recorded ones."""
    collate = experiment.collate
    experiment.collate = lambda indices: experiment.pad(collate(indices))  # type: ignore[method-assign]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize(
    ("variant", "precision"),
    [(variant, "fp32") for variant in ("hard-reinforce", "gaussian-context", *QUIET)]
    + [(variant, "bf16") for variant in ("hard-reinforce", "soft", "BAM-WC")],
)
def test_recorded_training_is_the_plain_one(variant, precision):
    loud = ["attention.weibull_k=2", "attention.sigma_q=0.5", "attention.kl_reduction=sum"]
    make = partial(make_experiment, variant, "training.epochs=4", f"training.precision={precision}", *loud)
    eager = make("decoder_mode=eager")
    pad_first(eager)
    plain, recorded = train_a_little(eager), train_a_little(make())
    for ours, truth in zip(recorded, plain, strict=True):
        # the same draws; float32 sums in another order through 16 steps, products in bfloat16 of three digits
        torch.testing.assert_close(ours, truth, rtol=0.0, atol=1e-2 if precision == "bf16" else 1e-4)
