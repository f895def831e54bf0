"""generate: token for token the original's when off; one noise draw per sequence when on, whatever the cache."""

from types import SimpleNamespace

import pytest
import torch
import transformers as hf
from zoo import ARCHITECTURES, build

import bayesattn as ba
from bayesattn.convert import bayesianize
from bayesattn.integrations.hf import generate
from bayesattn.integrations.hf.generation import sequence_noise
from bayesattn.noise.streams import NoiseStream
from helpers import no_type_checks

GENERATING = [name for name, architecture in ARCHITECTURES.items() if architecture.generates]
WITH_STATIC_CACHE = [name for name in GENERATING if ARCHITECTURES[name].static_cache]
CACHES = {
    "dynamic": {},
    "static": {"cache_implementation": "static", "disable_compile": True},
    "none": {"use_cache": False},
    "beams": {"num_beams": 3},
}
CONFIG = ba.AttentionConfig("BAM-WC", weibull_k=2.0)


def prompts(name: str = "llama") -> dict[str, torch.Tensor]:
    """Two prompts, the first padded on the left; for Whisper two pieces of sound."""
    if name == "whisper":
        return {"input_features": ARCHITECTURES[name].inputs(False)["input_features"]}
    ids = torch.tensor([[0, 0, 9, 8, 7], [5, 4, 3, 11, 12]])
    return {"input_ids": ids, "attention_mask": (ids != 0).long()}


def options(cache: str) -> dict:
    return {**CACHES[cache], "max_new_tokens": 6, "do_sample": False}


@pytest.mark.parametrize(
    ("name", "cache"),
    [(name, cache) for name in GENERATING for cache in CACHES if cache != "static" or name in WITH_STATIC_CACHE],
)
def test_off_generates_token_for_token(name, cache):
    model = build(name)
    before = model.generate(**prompts(name), **options(cache))
    bayesianize(model, CONFIG)
    assert torch.equal(model.generate(**prompts(name), **options(cache)), before)


@pytest.mark.parametrize("name", WITH_STATIC_CACHE)
def test_the_static_cache_of_these_tests_is_one(name):
    model, seen = build(name), set()

    def note(module, args, kwargs):
        cache = kwargs["past_key_values"]
        seen.add(type(getattr(cache, "self_attention_cache", cache)))

    model.register_forward_pre_hook(note, with_kwargs=True)
    model.generate(**prompts(name), **options("static"))
    assert seen == {hf.StaticCache}


@pytest.mark.parametrize("name", GENERATING)
def test_the_noise_of_a_sequence_does_not_depend_on_the_cache(name):
    """The whole sequence recomputed at every step, or the past from a cache: the same draw, so the same tokens."""
    model = bayesianize(build(name), CONFIG)
    caches = ("static", "none") if name in WITH_STATIC_CACHE else ("none",)
    results = {cache: generate(model, prompts(name), 3, seed=1, **options(cache)) for cache in ("dynamic", *caches)}
    for cache in caches:
        assert torch.equal(results[cache].sequences, results["dynamic"].sequences), cache
        torch.testing.assert_close(results[cache].log_prob, results["dynamic"].log_prob, rtol=1e-3, atol=1e-3)


def test_same_seed_same_generations_other_seed_others():
    model = bayesianize(build("llama"), ba.AttentionConfig("BAM-WC", weibull_k=0.5))
    state = torch.get_rng_state()
    first, second, other = (generate(model, prompts(), 6, seed=seed, **options("dynamic")) for seed in (3, 3, 4))
    assert torch.equal(torch.get_rng_state(), state)
    assert torch.equal(first.sequences, second.sequences)
    assert not torch.equal(first.token_log_prob, other.token_log_prob)
    assert not model.training


@pytest.mark.parametrize("training", [False, True])
def test_every_module_gets_its_own_mode_back(training):
    model = bayesianize(build("llama"), CONFIG).train(training)
    model.lm_head.train(not training)
    modes = {name: module.training for name, module in model.named_modules()}
    generate(model, prompts(), 2, seed=0, **options("dynamic"))
    assert {name: module.training for name, module in model.named_modules()} == modes


def test_chunks_give_the_same_greedy_generations():
    model = bayesianize(build("llama"), CONFIG)
    whole, chunked = (generate(model, prompts(), 5, seed=3, chunk_size=c, **options("dynamic")) for c in (None, 2))
    assert torch.equal(whole.sequences, chunked.sequences)
    torch.testing.assert_close(whole.token_entropy, chunked.token_entropy, rtol=1e-4, atol=1e-5)


def test_draws_share_the_prompt_and_disagree_about_the_rest():
    model = bayesianize(build("llama"), ba.AttentionConfig("BAM-WC", weibull_k=0.3))
    result = generate(model, prompts(), 6, seed=0, **options("dynamic"))
    assert result.sequences.shape == (6, 2, 11)
    assert torch.equal(result.sequences[:, :, :5], prompts()["input_ids"].expand(6, 2, 5))
    assert bool((result.disagreement > 0).any())
    assert bool((result.log_prob_variance > 0).all())
    assert bool((result.mean_token_entropy > 0).all())


def test_scores_equal_a_plain_forward_pass_when_there_is_hardly_any_noise():
    model = bayesianize(build("llama"), ba.AttentionConfig("BAM-LF", sigma_q=1e-7))
    inputs = {"input_ids": prompts()["input_ids"][1:]}
    result = generate(model, inputs, 2, seed=0, **options("dynamic"))
    with torch.no_grad():
        log_probs = torch.log_softmax(model(input_ids=result.sequences[0]).logits[:, 4:-1], dim=-1)
    by_hand = log_probs.gather(-1, result.tokens[0].unsqueeze(-1)).squeeze(-1)
    keep = result.valid[0]
    torch.testing.assert_close(result.token_log_prob[0][keep], by_hand[keep], rtol=1e-3, atol=1e-4)
    entropy = -(log_probs.exp() * log_probs).sum(-1)
    torch.testing.assert_close(result.token_entropy[0][keep], entropy[keep], rtol=1e-3, atol=1e-4)
    assert float(result.disagreement) == 0.0


@pytest.mark.parametrize(
    ("name", "start", "cache"),
    [("whisper", 2, "dynamic"), ("bart", 1, "beams"), ("bart", 3, "dynamic"), ("bart", 3, "beams"), ("t5", 1, "dynamic")],
)
def test_a_decoder_s_own_prompt_is_not_scored(name, start, cache):
    """Whisper begins with two tokens of its own; a decoder may be given more."""
    model = bayesianize(build(name), ba.AttentionConfig("BAM-LF", sigma_q=1e-7))
    inputs = prompts(name)
    if start == 3:
        inputs["decoder_input_ids"] = torch.tensor([[2, 9, 10], [2, 11, 12]])
    result = generate(model, inputs, 2, seed=0, **options(cache))
    inputs.pop("decoder_input_ids", None)
    with torch.no_grad():
        logits = model(**inputs, decoder_input_ids=result.sequences[0]).logits
    log_probs = torch.log_softmax(logits[:, start - 1 : -1], dim=-1)
    by_hand = log_probs.gather(-1, result.sequences[0, :, start:].unsqueeze(-1)).squeeze(-1)
    assert torch.equal(result.tokens[0], result.sequences[0, :, start:])
    keep = result.valid[0]
    # float32 through another order of sums; noise of 1e-7
    torch.testing.assert_close(result.token_log_prob[0][keep], by_hand[keep], rtol=1e-3, atol=1e-3)


def test_beams_whose_logits_do_not_come_back_are_refused_by_name():
    model = bayesianize(build("whisper"), CONFIG)
    with pytest.raises(ValueError, match=r"ForConditionalGeneration returns no logits for its beams. Use num_beams=1"):
        generate(model, prompts("whisper"), 2, seed=0, **options("beams"))


def test_a_tensor_is_the_model_s_main_input():
    for name in ("llama", "t5", "whisper"):
        model = bayesianize(build(name), CONFIG)
        inputs = prompts(name)
        main = inputs[model.main_input_name][1:]
        bare, named = (
            generate(model, given, 2, seed=1, **options("dynamic")) for given in (main, {model.main_input_name: main})
        )
        assert torch.equal(bare.sequences, named.sequences), name


@pytest.mark.parametrize("given", [[[5, 4, 3]], "a prompt", None])
def test_inputs_of_another_kind_are_refused_by_name(given, monkeypatch):
    no_type_checks(monkeypatch)
    model = bayesianize(build("llama"), CONFIG)
    with pytest.raises(
        ValueError, match=f"inputs must be the output of a tokenizer, or a tensor of token ids, got {type(given).__name__}"
    ):
        generate(model, given, 2, seed=0, **options("dynamic"))


def test_consecutive_entries_of_a_batch_are_beams_of_one_sequence():
    """transformers repeats each prompt num_beams times in place; the seeds have to follow that order."""
    layer = SimpleNamespace()
    stream = NoiseStream(torch.tensor([11, 12]), [layer])
    seeds = stream.row_seeds(layer, 6, 1).view(2, 3)
    assert torch.equal(seeds, seeds[:, :1].expand(2, 3))
    assert int(seeds[0, 0]) != int(seeds[1, 0])


def test_beams_draw_the_noise_of_the_greedy_sequence():
    """A beam search of one prompt beside another, and without it: the noise is the prompt's own either way."""
    model = bayesianize(build("llama"), CONFIG)
    ids = torch.tensor([[9, 8, 7], [5, 4, 3]]).repeat_interleave(3, dim=0)
    seeds = torch.tensor([21, 22])
    with torch.no_grad(), ba.sampling(model):
        with sequence_noise(model, seeds):
            together = model(input_ids=ids).logits
        for number in (0, 1):
            with sequence_noise(model, seeds[number : number + 1]):
                alone = model(input_ids=ids[3 * number : 3 * number + 1]).logits
            torch.testing.assert_close(together[3 * number : 3 * number + 3], alone.expand(3, -1, -1), rtol=1e-4, atol=1e-4)


def test_repeated_calls_of_a_module_in_one_pass_have_noise_of_their_own():
    """ALBERT calls one module for all its layers; what is repeated is the whole pass."""
    shared, other = SimpleNamespace(), SimpleNamespace()
    stream = NoiseStream(torch.tensor([11, 12]), [shared, other])
    passes = []
    for _ in range(2):
        stream.start_forward(0)
        passes.append([stream.row_seeds(layer, 2, 5) for layer in (shared, other, shared, other, shared)])
    for first, again in zip(*passes, strict=True):
        assert torch.equal(first, again)
    assert torch.cat(passes[0]).unique().numel() == 5 * 2 * 5


def test_beams_of_a_sequence_share_its_noise():
    model = bayesianize(build("bart"), CONFIG)
    first, second = (generate(model, prompts(), 3, seed=2, **options("beams")) for _ in range(2))
    assert torch.equal(first.sequences, second.sequences)
    assert bool((first.log_prob < 0).all())


def test_disagreement_counts_pairs():
    from bayesattn.integrations.hf import SampledGenerations

    tokens = torch.tensor([[[1, 2]], [[1, 2]], [[1, 3]], [[4, 9]]])
    valid = torch.ones_like(tokens, dtype=torch.bool)
    valid[2, 0, 1] = valid[3, 0, 1] = True
    zeros = torch.zeros(4, 1, 2)
    # of the six pairs only (0, 1) agrees
    assert float(SampledGenerations(tokens, tokens, valid, zeros, zeros).disagreement) == pytest.approx(5 / 6)


def test_tokens_after_the_end_do_not_count():
    from bayesattn.integrations.hf.generation import _valid

    tokens = torch.tensor([[7, 2, 0, 0], [7, 7, 7, 7]])
    assert _valid(tokens, 2).tolist() == [[True, True, False, False], [True] * 4]
    assert _valid(tokens, [0, 2]).tolist() == [[True, True, False, False], [True] * 4]
    assert _valid(tokens, None).all()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"num_samples": 0}, "num_samples must be an integer of at least 1, got 0"),
        ({"chunk_size": 0}, "chunk_size must be an integer of at least 1, got 0"),
        ({"num_return_sequences": 2}, "num_return_sequences"),
    ],
)
def test_bad_arguments_are_named(arguments, message):
    model = bayesianize(build("llama"), CONFIG)
    with pytest.raises(ValueError, match=message):
        generate(model, prompts(), **{"num_samples": 2, **arguments})


def test_a_plain_model_is_refused():
    with pytest.raises(ValueError, match="model must have stochastic attention, got LlamaForCausalLM"):
        generate(build("llama"), prompts(), 2)
