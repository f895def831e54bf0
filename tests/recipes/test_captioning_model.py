"""Att2in and its decoding: the paper's size, shared features, no KL after the end, search that finds the best caption."""

import itertools

import pytest
import torch
import torch.nn.functional as F
from torch._subclasses.fake_tensor import DataDependentOutputException, FakeTensorMode

from bayesattn import record_kl
from bayesattn_recipes.baselines import AttentionChoice, build_step_attention, with_score_function
from bayesattn_recipes.captioning.batches import teacher_forced
from bayesattn_recipes.captioning.decoding import beam_search
from bayesattn_recipes.captioning.model import Att2in
from bayesattn_recipes.captioning.train import CaptioningConfig, build_model
from bayesattn_recipes.captioning.vocabulary import BOUNDARY, SPECIAL_WORDS, UNKNOWN, Vocabulary
from helpers import no_type_checks

FEATURES, REGIONS, WIDTH = 7, 5, 11


def vocabulary_of(size: int) -> Vocabulary:
    return Vocabulary((*SPECIAL_WORDS, *(f"w{number}" for number in range(size - len(SPECIAL_WORDS)))))


def small_model(variant: str = "soft", size: int = 13, **options) -> Att2in:
    attention = build_step_attention(AttentionChoice(variant=variant, **options), WIDTH, WIDTH, 3)
    return Att2in(attention, vocabulary_of(size), feature_dim=FEATURES, width=WIDTH, dropout=0.5)


def marginal_model(top_keys) -> Att2in:
    model = small_model().double().eval()
    model.top_keys = top_keys
    with torch.no_grad():
        for parameter in model.parameters():
            # a fresh model hardly looks at the image
            parameter.mul_(3.0)
    return model


def count(model: torch.nn.Module) -> int:
    return sum(parameter.numel() for parameter in model.parameters())


def test_parameters_are_the_papers_less_two_biases_without_effect():
    # 9,487 words and the boundary, 2,048 features a region, width 512: 14,451,985 in the authors' base code, which also
    # has a bias of the query projection (512; adds to that of the keys) and one of the score (1; cancels in the softmax)
    soft = build_model(CaptioningConfig(), vocabulary_of(9488), 2048)
    assert count(soft) == 14_451_985 - 512 - 1
    assert count(soft) == (
        9488 * 512  # words
        + 2049 * 512  # regions
        + (512 * 512 + 512 * 513 + 512)  # query, key and score of the attention
        + 2 * (513 * 5 * 512)  # word and state into gates and candidates
        + 513 * 2 * 512  # view into candidates
        + 513 * 9488  # head
    )


def test_contextual_prior_adds_the_papers_5141_parameters():
    sizes = [
        count(build_model(CaptioningConfig(attention=AttentionChoice(variant=variant)), vocabulary_of(9), 3))
        for variant in ("soft", "BAM-WC")
    ]
    assert sizes[1] - sizes[0] == 512 * 10 + 10 + 10 + 1 == 5141


def test_one_step_is_the_maxout_lstm_written_by_hand():
    model = small_model().eval()
    regions, words = torch.randn(1, REGIONS, FEATURES), torch.tensor([[BOUNDARY]])
    keys = F.relu(model.region_embed(regions))[0]
    attend = model.attention
    scores = attend.score_proj(torch.tanh(attend.key_proj(keys))).squeeze(1)  # the first query is zero
    view = model.view_proj(torch.softmax(scores, 0) @ keys)
    sums = model.word_proj(F.relu(model.word_embed.weight[BOUNDARY])) + model.hidden_proj.bias
    gate_in, _, gate_out = torch.sigmoid(sums[: 3 * WIDTH]).split(WIDTH)
    candidates = sums[3 * WIDTH :] + view
    cell = gate_in * torch.maximum(candidates[:WIDTH], candidates[WIDTH:])
    expected = model.head(gate_out * torch.tanh(cell))
    # float32, a few sums of 33 terms
    torch.testing.assert_close(model(regions, words)[0, 0], expected, atol=1e-5, rtol=1e-5)


def test_captions_that_share_an_image_equal_captions_with_copies_of_it():
    model = small_model("BAM-WC").eval()
    regions, mask = torch.randn(2, REGIONS, FEATURES), torch.rand(2, REGIONS) < 0.7
    mask[:, 0] = True
    rows, words = torch.tensor([1, 0, 1, 1]), torch.randint(13, (4, 6))
    lengths = torch.tensor([6, 3, 1, 4])
    results = []
    for arguments in (
        {"regions": regions, "region_mask": mask, "image_rows": rows},
        {"regions": regions[rows], "region_mask": mask[rows]},
    ):
        with record_kl() as kl:
            logits = model(words=words, lengths=lengths, **arguments)
        results.append((logits, [value for _, value in kl.per_call()], float(kl.total().detach())))
    # the same sums over batches of another size
    torch.testing.assert_close(results[0][0], results[1][0], atol=1e-5, rtol=1e-5)
    for ours, theirs in zip(results[0][1], results[1][1], strict=True):
        torch.testing.assert_close(ours, theirs, atol=1e-5, rtol=1e-5)
    assert results[0][2] == pytest.approx(results[1][2], rel=1e-5)


@pytest.mark.parametrize(
    ("variant", "reduction"), [*(("BAM-WC", name) for name in ("sum", "row_mean", "mean")), ("gaussian-context", "sum")]
)
def test_kl_of_a_caption_does_not_depend_on_its_padding(variant, reduction):
    model = small_model(variant, kl_reduction=reduction).eval()
    regions, words, lengths = torch.randn(3, REGIONS, FEATURES), torch.randint(13, (3, 7)), torch.tensor([7, 2, 5])
    with record_kl() as together:
        model(regions, words, lengths=lengths)
    total = torch.stack([value for _, value in together.per_call()]).sum(dim=0)
    for row, length in enumerate(lengths):
        with record_kl() as alone:
            model(regions[row : row + 1], words[row : row + 1, :length])
        # float32 sums over at most 35 entries
        assert float(total[row].detach()) == pytest.approx(float(alone.total().detach()), rel=1e-4)


def test_keys_and_prior_are_computed_once_for_all_steps_and_captions():
    model, seen = small_model("BAM-WC"), []
    for name in ("key_proj", "weights.bayes_prior"):
        model.attention.get_submodule(name).register_forward_hook(
            lambda module, args, result, name=name: seen.append((name, len(result)))
        )
    with record_kl():
        model(torch.randn(2, REGIONS, FEATURES), torch.randint(13, (6, 4)), image_rows=torch.arange(6) // 3)
    assert sorted(seen) == [("key_proj", 2), ("weights.bayes_prior", 2)]


@pytest.mark.parametrize("variant", ["soft", "BAM-WC", "BAM-LF"])
@pytest.mark.parametrize("is_training", [False, True])
def test_steps_planned_together_equal_single_steps(variant, is_training):
    """Outputs, weights, KL and gradients; with next to no noise, and no dropout, since the draws are not the same ones."""
    options = {"weibull_k": 1e6} if variant == "BAM-WC" else {"sigma_q": 1e-6} if variant == "BAM-LF" else {}
    model = small_model(variant, kl_reduction="sum", **options)
    model.dropout.p = 0.0
    model.train(is_training)
    regions, words = torch.randn(3, REGIONS, FEATURES), torch.randint(0, 13, (3, 6))
    goes_on = torch.tensor([6, 2, 4])[:, None] > torch.arange(6)
    found = []
    for unroll in (model._unroll, model._unroll_planned):
        with record_kl() as kl:
            image = model.look(regions)
            hidden, _, weights, _ = unroll(model.read(words), image, goes_on)
        total = hidden[goes_on].square().sum() + (kl.total() if is_training and variant != "soft" else 0.0)
        names = [name for name, p in model.named_parameters() if p.requires_grad]
        gradients = torch.autograd.grad(total, [model.get_parameter(name) for name in names], allow_unused=True)
        found.append([hidden[goes_on], weights[goes_on], total, *(g for g in gradients if g is not None)])
    for single, planned in zip(*found, strict=True):
        # noise of 1e-6 in the weights; sums over some dozens of entries
        torch.testing.assert_close(planned, single, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("is_training", [False, True])
def test_planned_hard_attention_equals_single_steps_where_its_choice_is_sure(is_training):
    """Outputs, choices and gradients, with scores so far apart that every draw takes the largest."""
    model = small_model("hard-reinforce", entropy_bonus=0.3)
    with torch.no_grad():
        model.attention.score_proj.weight.mul_(1e4)
    model.dropout.p = 0.0
    model.train(is_training)
    regions, words = torch.randn(3, REGIONS, FEATURES), torch.randint(0, 13, (3, 6))
    goes_on = torch.tensor([6, 2, 4])[:, None] > torch.arange(6)
    found = []
    for unroll in (model._unroll, model._unroll_planned):
        seen: list[tuple] = []

        def run(unroll=unroll, seen=seen):
            unrolled = unroll(model.read(words), model.look(regions), goes_on)
            seen.append((unrolled.hidden, unrolled.weights))
            return seen[0][0].square().sum(dim=-1) * goes_on

        model.attention.bayes_weights.weights.average_cost.fill_(0.7)
        model.attention.bayes_weights.weights.num_averaged.fill_(1.0)
        loss = with_score_function(model, run, goes_on)
        gradients = torch.autograd.grad(loss.sum(), list(model.parameters()), allow_unused=True)
        hidden, weights = (x[goes_on] for x in seen[0])
        found.append([hidden, weights, loss, *(g for g in gradients if g is not None)])
    assert found[0][1].max(dim=-1).values.min() > 0.999
    for single, planned in zip(*found, strict=True):
        # float32 sums in another order
        torch.testing.assert_close(planned, single, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("is_training", [False, True])
def test_planned_contexts_equal_single_steps(is_training):
    """Outputs, KL and gradients; with next to no noise, since the draws are not the same ones."""
    model = small_model("gaussian-context")
    with torch.no_grad():
        model.attention.bayes_weights.context_noise.log_sigma.bias.fill_(-12.0)
    model.dropout.p = 0.0
    model.train(is_training)
    regions, words, found = torch.randn(3, REGIONS, FEATURES), torch.randint(0, 13, (3, 6)), []
    for unroll in (model._unroll, model._unroll_planned):
        with record_kl() as kl:
            hidden, _, weights, _ = unroll(model.read(words), model.look(regions), None)
        total = hidden.square().sum() + (kl.total() if is_training else 0.0)
        gradients = torch.autograd.grad(total, list(model.parameters()), allow_unused=True)
        found.append([hidden, weights, total, *(g for g in gradients if g is not None)])
    for single, planned in zip(*found, strict=True):
        # deviations of e⁻¹² in the contexts
        torch.testing.assert_close(planned, single, rtol=1e-3, atol=1e-3)


def test_noise_on_the_context_is_drawn_for_every_step():
    model = small_model("gaussian-context").train()
    model.dropout.p = 0.0
    regions, words = torch.randn(1, REGIONS, FEATURES).expand(2, -1, -1), torch.randint(0, 13, (1, 6)).expand(2, -1)
    noise = model.attention.plan_context(model.look(regions).keys, 6)
    assert noise.shape == (2, 6, WIDTH)
    assert len(noise.flatten(0, 1).unique(dim=0)) == 12
    first, second = model(regions, words)
    assert not torch.allclose(first, second)


def test_positions_select_steps_of_the_whole():
    model = small_model().eval()
    regions, words = torch.randn(2, REGIONS, FEATURES), torch.randint(13, (2, 4))
    chosen = torch.tensor([0, 3, 6])
    whole, some = model(regions, words), model(regions, words, positions=chosen)
    # the same rows in a product of another height
    torch.testing.assert_close(some, whole.flatten(0, 1)[chosen], atol=1e-6, rtol=1e-5)


def test_noise_in_training_and_none_in_eval():
    soft, noisy = small_model(), small_model("BAM-WF")
    noisy.load_state_dict(soft.state_dict())
    noisy.dropout.p = soft.dropout.p = 0.0
    arguments = torch.randn(2, REGIONS, FEATURES), torch.randint(13, (2, 4))
    assert torch.equal(noisy.eval()(*arguments), soft.eval()(*arguments))
    assert not torch.equal(noisy.train()(*arguments), noisy(*arguments))


def test_masked_regions_have_no_influence():
    model, mask = small_model().eval(), torch.tensor([[True, False, True, True, False]])
    regions, words = torch.randn(1, REGIONS, FEATURES), torch.randint(13, (1, 4))
    other = regions.masked_fill(~mask.unsqueeze(-1), 100.0)
    logits = [model(found, words, region_mask=mask) for found in (regions, other)]
    assert torch.equal(*logits)


def test_neither_training_nor_search_waits_for_the_device():
    # a fake tensor has a shape and no values: whatever the host asks for is an error
    model = small_model("BAM-WC")
    regions, words, rows = torch.randn(2, REGIONS, FEATURES), torch.zeros(4, 3, dtype=torch.long), torch.arange(4) // 2
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        with pytest.raises(DataDependentOutputException):
            float(mode.from_tensor(regions).sum())
        fake = [mode.from_tensor(value) for value in (regions, words, rows)]
        with record_kl() as kl:
            logits = model(*fake[:2], image_rows=fake[2], lengths=fake[2], positions=fake[2])
        (logits.sum() + kl.total()).backward()
        beam_search(model.eval(), fake[0], num_beams=3, max_length=4)


def log_probs_of(model: Att2in, regions: torch.Tensor, captions: list[tuple[int, ...]], max_length: int) -> list[float]:
    """ln p of captions and, if they are shorter than allowed, of their end; unknown words are left out of the choice."""
    said = torch.tensor([[*words, *[BOUNDARY] * (max_length - len(words))] for words in captions])
    logits = model(regions, teacher_forced(said), image_rows=torch.zeros(len(said), dtype=torch.long))
    logits[:, :, UNKNOWN] = -torch.inf
    each = torch.log_softmax(logits, dim=-1).gather(2, said.unsqueeze(2)).squeeze(2)
    return [float(row[: len(words) + 1].sum()) for row, words in zip(each, captions)]


def sharp_model(size: int) -> Att2in:
    """A model whose words depend strongly on the words before."""
    model = small_model(size=size).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(3.0)
    return model


@torch.no_grad()
def test_wide_beam_equals_exhaustive_search():
    model, length = sharp_model(size=5), 4
    regions = torch.randn(3, REGIONS, FEATURES)
    known = range(2, 5)
    every = [words for size in range(length + 1) for words in itertools.product(known, repeat=size)]
    found = beam_search(model, regions, num_beams=len(every), max_length=length)
    for row in range(3):
        scores = dict(zip(every, log_probs_of(model, regions[row : row + 1], every, length)))
        best = max(scores, key=lambda words: scores[words])
        assert model.vocabulary.decode(found.words[row]) == [model.vocabulary.words[word] for word in best]
        # float32 sums of four logarithms
        assert float(found.log_prob[row]) == pytest.approx(scores[best], abs=1e-4)


@torch.no_grad()
def test_length_penalty_one_ranks_by_the_mean_per_word():
    model, length = sharp_model(size=4), 3
    regions = torch.randn(1, REGIONS, FEATURES)
    every = [words for size in range(length + 1) for words in itertools.product((2, 3), repeat=size)]
    found = log_probs_of(model, regions, every, length)
    scores = {words: value / min(len(words) + 1, length) for words, value in zip(every, found)}
    found = beam_search(model, regions, num_beams=len(every), max_length=length, length_penalty=1.0)
    best = max(scores, key=lambda words: scores[words])
    assert model.vocabulary.decode(found.words[0]) == [model.vocabulary.words[word] for word in best]


@torch.no_grad()
def test_one_beam_is_greedy_search():
    model, regions = sharp_model(size=13), torch.randn(1, REGIONS, FEATURES)
    said = [BOUNDARY]
    for _ in range(9):
        logits = model(regions, torch.tensor([said]))[0, -1]
        logits[UNKNOWN] = -torch.inf
        said.append(int(logits.argmax()))
        if said[-1] == BOUNDARY:
            break
    found = beam_search(model, regions, num_beams=1, max_length=9)
    assert model.vocabulary.decode(found.words[0]) == model.vocabulary.decode(said[1:])


@torch.no_grad()
def test_unknown_is_never_said():
    model = small_model().eval()
    model.head.bias[UNKNOWN] = 100.0
    found = beam_search(model, torch.randn(2, REGIONS, FEATURES), num_beams=2, max_length=5)
    assert not (found.words == UNKNOWN).any()


@torch.no_grad()
def test_images_do_not_disturb_each_other_in_a_beam():
    model, regions = sharp_model(size=13), torch.randn(3, REGIONS, FEATURES)
    together = beam_search(model, regions, num_beams=3, max_length=6).words
    alone = [beam_search(model, regions[row : row + 1], num_beams=3, max_length=6).words for row in range(3)]
    assert torch.equal(together, torch.cat(alone))


def test_an_unknown_decoder_mode_is_refused(monkeypatch):
    no_type_checks(monkeypatch)
    with pytest.raises(ValueError, match="decoder_mode"):
        CaptioningConfig(decoder_mode="never")  # type: ignore[arg-type]


@pytest.mark.parametrize("name", ["num_beams", "max_length"])
def test_impossible_searches_are_refused(name):
    with pytest.raises(ValueError, match=r"beam and max_length must be integers of at least 1, got"):
        beam_search(small_model(), torch.randn(1, REGIONS, FEATURES), **{name: 0})


def test_vocabulary_keeps_frequent_words_and_survives_as_bytes():
    vocabulary = Vocabulary.build(["A dog 's ball .", "a Dog", "a café"], min_count=2)
    assert vocabulary.words == (*SPECIAL_WORDS, "a", "dog")
    assert vocabulary.encode("The dog, a dog!", 3) == [UNKNOWN, 3, 2]
    assert vocabulary.decode([2, 3, BOUNDARY, 2]) == ["a", "dog"]
    rare = Vocabulary.build(["A dog 's ball .", "a café"], min_count=1)
    assert Vocabulary.from_tensor(rare.to_tensor()) == rare


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Vocabulary.build(["a dog"], 0), "min_count must be an integer of at least 1, got 0"),
        (lambda: Vocabulary.build(["a dog"], 2), "no word of the captions occurs 2 times"),
        (lambda: Vocabulary(("a", "b")), "words must begin with .*, got"),
        (lambda: Vocabulary((*SPECIAL_WORDS, "a", "a")), "more than once"),
    ],
)
def test_impossible_vocabularies_are_refused(make, message):
    with pytest.raises(ValueError, match=message):
        make()


def test_exact_marginal_is_the_mean_of_what_every_region_predicts():
    model = marginal_model(None)
    regions, words = torch.randn(2, REGIONS, FEATURES, dtype=torch.float64), torch.randint(0, 13, (2, 4))
    mask = torch.tensor([[True] * REGIONS, [True, False, True, True, False]])
    logits, weights = model(regions, words, region_mask=mask, need_weights=True)
    image, state = model.look(regions, mask), model.start(regions)
    for t in range(4):
        read, expected = model.read(words[:, t]), torch.zeros(2, 13, dtype=torch.float64)
        for j in range(REGIONS):
            hidden = model._feel(read, state, image.keys[:, j : j + 1])[0]
            expected += weights[:, t, j : j + 1] * torch.softmax(model.head(hidden), dim=-1)
        state = model.step(read, state, image)[0]
        torch.testing.assert_close(logits[:, t].exp(), expected)


@pytest.mark.parametrize("top_keys", [1, 2, 3])
def test_few_regions_and_the_mean_of_the_rest_predict_as_their_mixture_does(top_keys):
    model = marginal_model(top_keys)
    regions, words = torch.randn(3, REGIONS, FEATURES, dtype=torch.float64), torch.randint(0, 13, (3, 4))
    logits, weights = model(regions, words, need_weights=True)
    image, state = model.look(regions), model.start(regions)
    for t in range(4):
        read, expected = model.read(words[:, t]), torch.zeros(3, 13, dtype=torch.float64)
        for row in range(3):
            order = weights[row, t].argsort(descending=True)
            for part in (*order[:top_keys].split(1), order[top_keys:]):
                p = weights[row, t, part]
                view = (p @ image.keys[row, part] / p.sum()).view(1, 1, -1)
                hidden = model._feel(read[row : row + 1], tuple(s[row : row + 1] for s in state), view)[0]
                expected[row] += p.sum() * torch.softmax(model.head(hidden), dim=-1)[0]
        state = model.step(read, state, image)[0]
        torch.testing.assert_close(logits[:, t].exp(), expected)


@pytest.mark.parametrize("top_keys", [0, 2, None])
def test_words_are_decoded_with_the_probabilities_of_training(top_keys):
    model = marginal_model(top_keys)
    regions, words = torch.randn(3, REGIONS, FEATURES, dtype=torch.float64), torch.randint(0, 13, (3, 5))
    mask = torch.rand(3, REGIONS) < 0.7
    mask[:, 0] = True
    expected = torch.log_softmax(model(regions, words, region_mask=mask), dim=-1)
    image = model.look(regions, mask)
    state = model.start(image.keys)
    for t in range(5):
        logits, state = model.next_logits(words[:, t], state, image)
        torch.testing.assert_close(torch.log_softmax(logits, dim=-1), expected[:, t])


@pytest.mark.parametrize("top_keys", [2, None])
def test_marginal_has_finite_gradients_and_ignores_padding(top_keys):
    model = marginal_model(top_keys)
    regions, words = torch.randn(2, REGIONS, FEATURES, dtype=torch.float64), torch.randint(0, 13, (2, 3))
    mask = torch.tensor([[True] * REGIONS, [False, True, False, False, False]])
    positions = torch.tensor([0, 1, 3, 5])
    logits = model(regions, words, region_mask=mask, positions=positions)
    together = model(regions, words, region_mask=mask).flatten(0, 1)[positions]
    torch.testing.assert_close(logits, together)
    loud = regions.masked_fill(~mask.unsqueeze(2), 100.0)
    torch.testing.assert_close(model(loud, words, region_mask=mask, positions=positions), logits)
    F.cross_entropy(logits, torch.tensor([3, 1, 4, 1])).backward()
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None, name
        assert bool(parameter.grad.isfinite().all()), name
    scores = model.attention.score_proj
    assert bool(scores.weight.grad.any())
