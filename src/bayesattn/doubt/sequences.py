"""`ba.score`: the log-probability of a given text under a language model, and how far attention noise would move it."""

from collections.abc import Callable, Mapping
from typing import Any

import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor, nn

from bayesattn.config import AttentionConfig
from bayesattn.doubt.closed_form import (
    CallVariance,
    by_token,
    measuring,
    most_keys,
    parts,
    require_meaning,
    variances,
)
from bayesattn.doubt.result import SequenceScore
from bayesattn.objective import IGNORED_LABEL
from bayesattn.precision import upcast
from bayesattn.prediction import find_logits

# names in transformers' decoders of the attention that reads the encoder
CROSS_ATTENTION = frozenset(("encoder_attn", "EncDecAttention", "crossattention", "cross_attn", "cross_attention"))


def score(
    model: nn.Module,
    inputs: Mapping[str, Any],
    labels: Int[Tensor, "b t"],
    *,
    config: AttentionConfig | None = None,
    output: Callable[[Any], Tensor] | None = None,
) -> SequenceScore:
    """Score a given text with one forward and one backward pass; nothing is generated.

    Args:
        model: A causal or encoder-decoder language model, plain or with Bayesian attention. It is left unchanged.
        inputs: Keyword arguments of the model, `input_ids` among them.
        labels: The tokens to score, in transformers' convention: a causal model's are aligned with its `input_ids` (token t
            is predicted from those before it), an encoder-decoder's are the target text. −100 marks tokens that are not
            scored: the prompt of a causal model, and padding.
        config: Noise for a plain model; None is Weibull noise with k = 5.
        output: Extracts the logits from the model's output, as in `predict`.

    Raises:
        ValueError: Labels do not fit, or a row has none; the model is unchanged.

    Example:
        >>> import torch
        >>> from transformers import GPT2Config, GPT2LMHeadModel
        >>> sizes = {"n_embd": 8, "n_layer": 1, "n_head": 2, "vocab_size": 20, "bos_token_id": 0, "eos_token_id": 0}
        >>> model = GPT2LMHeadModel(GPT2Config(**sizes))
        >>> ids = torch.arange(12).view(2, 6)
        >>> labels = ids.clone()
        >>> labels[:, :3] = -100  # the prompt is not scored
        >>> answer = score(model, {"input_ids": ids}, labels)
        >>> answer.log_probability.shape, answer.num_tokens.tolist()
        (torch.Size([2]), [3, 3])
    """
    if not isinstance(inputs, Mapping) or not isinstance(inputs.get("input_ids"), Tensor):
        raise ValueError("inputs has no tensor `input_ids`. Give the keyword arguments of the model as a mapping")
    if not isinstance(labels, Tensor) or labels.ndim != 2 or labels.is_floating_point():
        raise ValueError("labels must be a tensor of token numbers with the axes (batch, tokens)")
    can_generate = getattr(model, "can_generate", None)
    if callable(can_generate) and not can_generate():
        raise ValueError(
            f"{type(model).__name__}.can_generate() is False, as for a model that does not predict every token from those "
            "before it and so gives a text no probability. Use a causal or encoder-decoder language model"
        )
    is_encoder_decoder = bool(getattr(getattr(model, "config", None), "is_encoder_decoder", False))
    arguments = {name: value for name, value in inputs.items() if name != "labels"}
    if is_encoder_decoder:
        if "decoder_input_ids" not in arguments:
            arguments["decoder_input_ids"] = model.prepare_decoder_input_ids_from_labels(labels)  # type: ignore[operator]
        scored = labels
    else:
        if labels.shape != inputs["input_ids"].shape:
            raise ValueError(
                f"labels have shape {tuple(labels.shape)} and input_ids {tuple(inputs['input_ids'].shape)}; a causal "
                "model's labels are aligned with its input, with -100 for tokens that are not scored"
            )
        # nothing predicts the first token
        scored = F.pad(labels[:, 1:], (0, 1), value=IGNORED_LABEL)
    counts = (scored != IGNORED_LABEL).sum(dim=1)
    if scored.shape[0] == 0 or bool((counts == 0).any()):
        raise ValueError("a row of labels has no token to score; every row needs one that is not -100")
    find = output or find_logits

    def token_log_probabilities(outputs: Any) -> Float[Tensor, "b t"]:
        logits = find(outputs)
        if logits.ndim != 3 or logits.shape[:2] != scored.shape:
            raise ValueError(f"the logits must have shape (batch, tokens, vocabulary), got {tuple(logits.shape)}")
        return -F.cross_entropy(upcast(logits).transpose(1, 2), scored, ignore_index=IGNORED_LABEL, reduction="none")

    tokens: list[Tensor] = []

    def numbers(outputs: Any) -> list:
        tokens.append(token_log_probabilities(outputs).detach())
        return [lambda result: token_log_probabilities(result).sum(dim=1)]

    with measuring(model, arguments, config) as measured:
        (value,), (found,) = variances(measured, numbers)
    doubt = parts(found)
    require_meaning("the log-probabilities contain", [value], doubt["std"], num_keys=most_keys(found))
    if is_encoder_decoder:
        lengths = (inputs["input_ids"].shape[1], scored.shape[1])
        doubt["by_token"] = by_token([call for call in found if _reads_prompt(call, *lengths)] or found)
    aligned = tokens[0] if is_encoder_decoder else F.pad(tokens[0][:, :-1], (1, 0))
    return SequenceScore(value=value, token_log_probabilities=aligned, num_tokens=counts, **doubt)


def _reads_prompt(call: CallVariance, prompt: int, answer: int) -> bool:
    """Whether the keys of a call are the encoder's; by name where the two lengths are equal."""
    if call.variance.shape[-1] != prompt:
        return False
    path = call.name.split(".")
    return prompt != answer or "encoder" in path or bool(CROSS_ATTENTION & set(path))
