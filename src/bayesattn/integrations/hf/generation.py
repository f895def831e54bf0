"""Sampled generations: each sequence is written under one draw of the attention noise, so the draws can be compared.

    result = generate(model, tokenizer(prompts, return_tensors="pt"), num_samples=8, seed=0, max_new_tokens=20)
    result.sequences, result.mean_token_entropy, result.disagreement, result.log_prob_variance

The noise of a sequence is a function of (its seed, layer, position), so it is the same with a dynamic cache, a static
one or none, and beams of one sequence share it.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from typing import Any, cast

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn
from transformers import PreTrainedModel

from bayesattn.convert.adapters import converted_modules
from bayesattn.convert.hosted import HostedAttention
from bayesattn.modes import evaluating, one_thread
from bayesattn.noise.specification import draw_seed
from bayesattn.noise.streams import NoiseStream
from bayesattn.prediction import sampling, seeded
from bayesattn.scalars import check_count


@dataclass(frozen=True)
class SampledGenerations:
    """Continuations of a batch of prompts under several draws of the attention noise; draws come first.

    Attributes:
        sequences: Token ids as `model.generate` returns them, prompts included, padded to one length.
        tokens: Only the generated part.
        valid: Which of `tokens` belong to the continuation (up to and including the end token).
        token_log_prob: Log-probability of each token under its own draw; 0 where not valid.
        token_entropy: Entropy in nats of the distribution it was chosen from; 0 where not valid.

    Example:
        >>> tokens = torch.tensor([[[4, 7]], [[4, 9]], [[4, 9]]])  # three draws for one prompt
        >>> zeros, valid = torch.zeros(3, 1, 2), torch.ones(3, 1, 2, dtype=torch.bool)
        >>> SampledGenerations(tokens, tokens, valid, token_log_prob=zeros - 0.5, token_entropy=zeros).disagreement
        tensor([0.6667])
    """

    sequences: Int[Tensor, "s b l"]
    tokens: Int[Tensor, "s b t"]
    valid: Bool[Tensor, "s b t"]
    token_log_prob: Float[Tensor, "s b t"]
    token_entropy: Float[Tensor, "s b t"]

    @cached_property
    def log_prob(self) -> Float[Tensor, "s b"]:
        """Log-probability of each continuation under the draw that wrote it."""
        return self.token_log_prob.sum(dim=-1)

    @cached_property
    def log_prob_variance(self) -> Float[Tensor, " b"]:
        """Variance of that log-probability over the draws."""
        return self.log_prob.var(dim=0)

    @cached_property
    def mean_token_entropy(self) -> Float[Tensor, " b"]:
        """Entropy per token, averaged over the tokens of a continuation and then over the draws."""
        return (self.token_entropy.sum(dim=-1) / self.valid.sum(dim=-1).clamp(min=1)).mean(dim=0)

    @cached_property
    def disagreement(self) -> Float[Tensor, " b"]:
        """Fraction of pairs of draws that wrote different continuations: 0 all equal, 1 all different."""
        draws = self.tokens.shape[0]
        written = torch.where(self.valid, self.tokens, -1)
        differs = (written[:, None] != written[None, :]).any(dim=-1)
        return differs.sum(dim=(0, 1)) / max(draws * (draws - 1), 1)


@torch.no_grad()
def generate(
    model: PreTrainedModel,
    inputs: Mapping[str, Tensor] | Tensor,
    num_samples: int = 10,
    *,
    seed: int | None = None,
    chunk_size: int | None = None,
    **generate_kwargs: Any,
) -> SampledGenerations:
    """Let the model continue each prompt `num_samples` times, each time under a new draw of the attention noise.

    Args:
        model: A converted transformers model that can generate.
        inputs: What the tokenizer returned, or a tensor, the model's main input (token ids in a language model); the first
            tensor's first axis is the batch.
        num_samples: Draws per prompt.
        seed: Same seed, same draws; torch's generators are left unchanged. None draws a seed from them.
        chunk_size: Draws per call of `model.generate`; greedy results do not depend on it.
        **generate_kwargs: For `model.generate`: `max_new_tokens`, `num_beams`, `do_sample`, `cache_implementation`, …

    Raises:
        ValueError: The model is not converted, or an argument is out of range.

    Example:
        >>> import bayesattn as ba
        >>> from transformers import GPT2Config, GPT2LMHeadModel
        >>> sizes = {"n_embd": 8, "n_layer": 1, "n_head": 2, "vocab_size": 30, "bos_token_id": 0, "eos_token_id": 0}
        >>> model = ba.bayesianize(GPT2LMHeadModel(GPT2Config(**sizes)), ba.AttentionConfig("BAM-NOKL"))
        >>> prompts = {"input_ids": torch.tensor([[5, 6], [7, 8]]), "attention_mask": torch.ones(2, 2, dtype=torch.long)}
        >>> result = generate(model, prompts, num_samples=3, seed=0, min_new_tokens=4, max_new_tokens=4, pad_token_id=0)
        >>> result.tokens.shape, result.disagreement.shape
        (torch.Size([3, 2, 4]), torch.Size([2]))
    """
    check_count("num_samples", num_samples)
    check_count("chunk_size", num_samples if chunk_size is None else chunk_size)
    taken = {"num_return_sequences", "return_dict_in_generate", "output_logits"} & set(generate_kwargs)
    if taken:
        raise ValueError(
            f"{', '.join(sorted(taken))} cannot be set here. Use num_samples, and read the attributes of the result"
        )
    if isinstance(inputs, Tensor):
        inputs = {model.main_input_name: inputs}
    if not isinstance(inputs, Mapping):
        raise ValueError(f"inputs must be the output of a tokenizer, or a tensor of token ids, got {type(inputs).__name__}")
    first = next(iter(inputs.values()))
    batch, device = first.shape[0], first.device
    # static caches make generate() compile the forward pass, which skips the hook that sets the position
    options = {"disable_compile": True, **generate_kwargs, "return_dict_in_generate": True, "output_logits": True}
    chunks = []
    with one_thread(model), seeded(seed, [device]), evaluating(model):
        seeds = torch.randint(0, 2**63 - 1, (num_samples, batch), generator=_generator(draw_seed()))
        for rows in seeds.split(chunk_size or num_samples):
            repeated = {name: _repeat(value, batch, rows.shape[0]) for name, value in inputs.items()}
            with sampling(model), sequence_noise(model, rows.flatten().to(device)):
                output = cast(Any, model).generate(**repeated, **options)
            chunks.append(_read(model, output, rows.shape[0], batch))
    return _concatenate(chunks, _pad_id(model))


@contextmanager
def sequence_noise(model: nn.Module, seeds: Int[Tensor, " s"]) -> Iterator[NoiseStream]:
    """Bind the noise to the sequences of the batch: that of entry i depends only on `seeds[i]`, layer and position.

    Use with `sampling(model)` around calls of `model` or `model.generate`. Entries beyond the seeds are beams.

    Example:
        >>> import bayesattn as ba
        >>> from transformers import GPT2Config, GPT2LMHeadModel
        >>> sizes = {"n_embd": 8, "n_layer": 1, "n_head": 2, "vocab_size": 30, "bos_token_id": 0, "eos_token_id": 0}
        >>> model = ba.bayesianize(GPT2LMHeadModel(GPT2Config(**sizes)).eval(), ba.AttentionConfig("BAM-NOKL"))
        >>> tokens = torch.tensor([[5, 6, 7], [5, 6, 7], [5, 6, 7]])
        >>> with sampling(model), sequence_noise(model, torch.tensor([1, 1, 2])), torch.no_grad():
        ...     logits = model(tokens).logits
        >>> torch.allclose(logits[0], logits[1]), torch.allclose(logits[0], logits[2])
        (True, False)
    """
    layers = [part for _, _, part in converted_modules(model) if isinstance(part, HostedAttention)]
    if not layers:
        raise ValueError(
            f"model is a {type(model).__name__} without converted transformers attention. Call bayesianize first"
        )
    stream = NoiseStream(seeds, layers)
    host: Any = model
    host = host.get_base_model() if hasattr(model, "get_base_model") else model

    def start_forward(_: nn.Module, args: tuple, kwargs: dict[str, Any]) -> None:
        past = kwargs.get("past_key_values")
        stream.start_forward(0 if past is None else int(past.get_seq_length()))

    handle = host.register_forward_pre_hook(start_forward, with_kwargs=True)
    try:
        for layer in layers:
            layer.stream = stream
        yield stream
    finally:
        handle.remove()
        for layer in layers:
            layer.stream = None


def _generator(seed: Tensor) -> torch.Generator:
    return torch.Generator().manual_seed(int(seed))


def _repeat(value: Any, batch: int, count: int) -> Any:
    is_batched = isinstance(value, Tensor) and value.ndim > 0 and value.shape[0] == batch
    return value.repeat(count, *([1] * (value.ndim - 1))) if is_batched else value


def _read(model: PreTrainedModel, output: Any, draws: int, batch: int) -> SampledGenerations:
    sequences, logits = output.sequences, output.logits
    steps = min(len(logits), sequences.shape[1])
    beams = getattr(output, "beam_indices", None)
    if beams is not None:
        # a finished beam may be shorter than the search
        steps = min(steps, int((beams >= 0).sum(dim=1).max()))
    # what precedes is the prompt, or a decoder's first tokens: one, two in Whisper, more if given
    tokens = sequences[:, sequences.shape[1] - steps :]
    if beams is not None and logits[0].shape[0] == sequences.shape[0]:
        # Whisper's own generate keeps one row per sequence, which is not that of the chosen beam
        raise ValueError(f"{type(model).__name__} returns no logits for its beams. Use num_beams=1")
    if beams is None:
        chosen = torch.stack(logits[:steps], dim=1)
    else:
        rows = beams[:, :steps].clamp(min=0)
        chosen = torch.stack([step[rows[:, t]] for t, step in enumerate(logits[:steps])], dim=1)
    log_probs = torch.log_softmax(chosen.float(), dim=-1)
    valid = _valid(tokens, model.generation_config.eos_token_id)
    log_prob = log_probs.gather(-1, tokens.unsqueeze(-1)).squeeze(-1)
    entropy = torch.special.entr(log_probs.exp()).sum(dim=-1)
    fields = (sequences, tokens, valid, log_prob.masked_fill(~valid, 0.0), entropy.masked_fill(~valid, 0.0))
    return SampledGenerations(*(field.view(draws, batch, -1) for field in fields))


def _valid(tokens: Int[Tensor, "r t"], end: int | list[int] | None) -> Bool[Tensor, "r t"]:
    """Mark tokens up to and including the first end token."""
    ends = [] if end is None else end if isinstance(end, list) else [end]
    is_end = torch.isin(tokens, torch.tensor(ends, dtype=tokens.dtype, device=tokens.device))
    return (is_end.cumsum(dim=-1) - is_end.long()) == 0


def _pad_id(model: PreTrainedModel) -> int:
    config = model.generation_config
    end = config.eos_token_id[0] if isinstance(config.eos_token_id, list) else config.eos_token_id
    return next((i for i in (config.pad_token_id, end) if i is not None), 0)


def _concatenate(chunks: list[SampledGenerations], pad_id: int) -> SampledGenerations:
    """Concatenate chunks of different lengths."""
    fills = {"sequences": pad_id, "tokens": pad_id, "valid": False, "token_log_prob": 0.0, "token_entropy": 0.0}
    fields = {}
    for name, fill in fills.items():
        parts = [getattr(chunk, name) for chunk in chunks]
        length = max(part.shape[-1] for part in parts)
        fields[name] = torch.cat([nn.functional.pad(part, (0, length - part.shape[-1]), value=fill) for part in parts])
    return SampledGenerations(**fields)
