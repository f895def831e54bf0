"""An uncertainty estimator for lm-polygraph: how far attention noise moves the log-probability of a generated text.

In lm-polygraph an estimator has a level, the statistics it depends on, a unique name and a call. This class has these four
and needs no base class, so this module does not import lm-polygraph.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence

from bayesattn.config import AttentionConfig
from bayesattn.doubt import score
from bayesattn.objective import IGNORED_LABEL


class AttentionDoubt:
    """Standard deviation of log p(text | prompt) under attention noise, from one forward and one backward pass.

    No text is generated; the generation that lm-polygraph made is scored. This project has not measured how well it finds
    wrong generations: compare it with `MaximumSequenceProbability` on your own task.

    Args:
        model: The transformers model inside lm-polygraph's wrapper, `whitebox.model`; causal or encoder-decoder.
        pad_token_id: The tokenizer's; the statistics hold padded prompts without their masks. Prompts of causal models are
            padded on the left, so leading padding is dropped; for encoder-decoders, padding on either side is dropped.
        per_token: Divide by the number of generated tokens.
        config: Noise for a plain model; None is Weibull noise with k = 5.

    Example:
        >>> from transformers import GPT2Config, GPT2LMHeadModel
        >>> sizes = {"n_embd": 8, "n_layer": 1, "n_head": 2, "vocab_size": 30, "bos_token_id": 0, "eos_token_id": 0}
        >>> estimator = AttentionDoubt(GPT2LMHeadModel(GPT2Config(**sizes)), pad_token_id=0)
        >>> str(estimator), estimator.level, estimator.stats_dependencies
        ('AttentionDoubt', 'sequence', ['input_tokens', 'greedy_tokens'])
        >>> estimator({"input_tokens": [[0, 7, 8], [4, 5, 6]], "greedy_tokens": [[9, 3], [2]]}).shape
        (2,)
    """

    level = "sequence"

    def __init__(
        self,
        model: nn.Module,
        *,
        pad_token_id: int | None,
        per_token: bool = False,
        config: AttentionConfig | None = None,
    ) -> None:
        self.model, self.pad_token_id, self.per_token, self.config = model, pad_token_id, per_token, config
        self.stats_dependencies = ["input_tokens", "greedy_tokens"]

    def __str__(self) -> str:
        name = "AttentionDoubtPerToken" if self.per_token else "AttentionDoubt"
        return name if self.config is None else f"{name}({self.config.variant})"

    def __call__(self, stats: Mapping[str, Any]) -> np.ndarray:
        """Return one number per generation; higher is less certain.

        Args:
            stats: `input_tokens`, the padded prompts, and `greedy_tokens`, the generations, as lists of token numbers.
        """
        prompts = [self._without_padding(tokens) for tokens in stats["input_tokens"]]
        answers = [torch.as_tensor(tokens, dtype=torch.long) for tokens in stats["greedy_tokens"]]
        if not all(len(answer) for answer in answers):
            raise ValueError("a generation in greedy_tokens has no token; there is nothing to score")
        if getattr(getattr(self.model, "config", None), "is_encoder_decoder", False):
            rows, labels = prompts, answers
        else:
            rows = [torch.cat(pair) for pair in zip(prompts, answers, strict=True)]
            unscored = [torch.full_like(prompt, IGNORED_LABEL) for prompt in prompts]
            labels = [torch.cat(pair) for pair in zip(unscored, answers, strict=True)]
        inputs = {
            "input_ids": self._padded(rows, self.pad_token_id or 0),
            "attention_mask": self._padded([torch.ones_like(row) for row in rows], 0),
        }
        found = score(self.model, inputs, self._padded(labels, IGNORED_LABEL), config=self.config)
        std = found.std / found.num_tokens if self.per_token else found.std
        return std.double().cpu().numpy()

    def _padded(self, rows: Sequence[Tensor], value: int) -> Tensor:
        padded = pad_sequence(list(rows), batch_first=True, padding_value=value)
        return padded.to(next(self.model.parameters()).device)

    def _without_padding(self, tokens: Sequence[int]) -> Tensor:
        row = torch.as_tensor(tokens, dtype=torch.long)
        kept = torch.nonzero(row != self.pad_token_id).flatten() if self.pad_token_id is not None else torch.arange(len(row))
        if len(kept) == 0:
            raise ValueError("a prompt in input_tokens contains only padding")
        is_causal = not getattr(getattr(self.model, "config", None), "is_encoder_decoder", False)
        return row[kept[0] : None if is_causal else kept[-1] + 1]
