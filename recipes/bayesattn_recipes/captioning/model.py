"""Att2in (Rennie et al., 2017): an LSTM that attends to the image before every word; the result enters its candidates only.

    a_t   = attention(query = h_{t−1}, keys = image regions)
    i,f,o = σ(W_x x_t + W_h h_{t−1} + b)
    g     = max over two halves of (W_x x_t + W_h h_{t−1} + W_a a_t + b)          "maxout" in place of tanh
    c_t   = f ⊙ c_{t−1} + i ⊙ g,    h_t = o ⊙ tanh(c_t)

The attention is an argument, so soft, hard, Gaussian and Bayesian attention are the same code. An image with five captions
is embedded and projected once; each caption then takes its image's rows. If the words are known beforehand and the
attention allows it, the noise of all steps is drawn before the first, and KL and choices are found after the last.

With exact marginal attention (Deng et al., 2018) the region behind a word is a hidden variable: the word's probability is
Σ_j p_j p(y_t | h_t with a_t = v_j), where p_j are the weights of soft attention. States still see the mean of the regions.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from bayesattn.nn import StepAttention
from bayesattn_recipes.baselines import categorical
from bayesattn_recipes.baselines.variational import marginal_log_probs
from bayesattn_recipes.captioning.vocabulary import Vocabulary


@dataclass(frozen=True)
class Image:
    """The inputs that all words of a caption share: embedded regions, which of them exist, and the prepared attention."""

    keys: Float[Tensor, "b n d"]
    mask: Bool[Tensor, "b n"]
    prepared: tuple[Any, ...]

    def select(self, rows: Int[Tensor, " c"]) -> "Image":
        """Return the images of these rows, repeated as they occur; row numbers are not checked on the host."""
        prepared = tuple(None if part is None else part.index_select(0, rows) for part in self.prepared)
        return Image(self.keys.index_select(0, rows), self.mask.index_select(0, rows), prepared)


State = tuple[Float[Tensor, "c d"], Float[Tensor, "c d"]]


class Unrolled(NamedTuple):
    """Every step of captions: states after it, cells before it, weights, and scores Φ if noise was drawn ahead."""

    hidden: Float[Tensor, "c t d"]
    cells: list[Float[Tensor, "c d"]]
    weights: Float[Tensor, "c t n"]
    scores: Float[Tensor, "c t n"] | None = None


class Att2in(nn.Module):
    """Captions from image regions.

    Args:
        attention: Soft, Bayesian or a rival's, from `baselines.build_step_attention`; its queries and keys have
            `width` features.
        vocabulary: The words; kept as a buffer, so that a checkpoint is complete.
        feature_dim: Features of an image region.
        width: Features of words, regions and states.
        dropout: On words, regions and states.
        top_keys: Regions whose likelihood is computed one by one, the rest as their mean: exact marginal attention, which
            needs soft `attention`. None takes all regions; 0 is ordinary attention, a likelihood of the mean alone.
    """

    vocabulary_bytes: Tensor

    def __init__(
        self,
        attention: StepAttention,
        vocabulary: Vocabulary,
        *,
        feature_dim: int,
        width: int = 512,
        dropout: float = 0.5,
        top_keys: int | None = 0,
    ) -> None:
        super().__init__()
        self.vocabulary, self.top_keys = vocabulary, top_keys
        self.register_buffer("vocabulary_bytes", vocabulary.to_tensor())
        self.word_embed = nn.Embedding(len(vocabulary), width)
        self.region_embed = nn.Linear(feature_dim, width)
        self.attention = attention
        self.word_proj = nn.Linear(width, 5 * width)
        self.hidden_proj = nn.Linear(width, 5 * width)
        self.view_proj = nn.Linear(width, 2 * width)
        self.head = nn.Linear(width, len(vocabulary))
        self.dropout = nn.Dropout(dropout)
        # as in the authors' base code
        nn.init.uniform_(self.word_embed.weight, -0.1, 0.1)
        nn.init.uniform_(self.head.weight, -0.1, 0.1)
        nn.init.zeros_(self.head.bias)

    def look(self, regions: Float[Tensor, "b n f"], mask: Bool[Tensor, "b n"] | None = None) -> Image:
        """Embed the regions and project them for the attention, once for all steps and captions."""
        mask = regions.new_ones(regions.shape[:2], dtype=torch.bool) if mask is None else mask
        keys = self.dropout(torch.relu(self.region_embed(regions)))
        return Image(keys, mask, self.attention.prepare(keys, mask))

    def start(self, keys: Float[Tensor, "c n d"]) -> State:
        """Return the state before the first word: zeros, in the dtype of the parameters whatever the autocast dtype."""
        zeros = torch.zeros(len(keys), self.head.in_features, device=keys.device, dtype=self.head.weight.dtype)
        return zeros, zeros

    def read(self, words: Int[Tensor, "c *t"]) -> Float[Tensor, "c *t five_d"]:
        """Return the words' share of the gate sums, for all steps at once if they are known."""
        return self.word_proj(self.dropout(torch.relu(self.word_embed(words))))

    def step(
        self,
        read: Float[Tensor, "c five_d"],
        state: State,
        image: Image,
        mask: Bool[Tensor, "c n"] | None = None,
    ) -> tuple[State, Float[Tensor, "c n"]]:
        """Read one word; return the new state and the attention weights.

        Args:
            read: `read(words)` of this step.
            state: Before the word.
            image: The image.
            mask: Regions to attend to, if not all that exist.
        """
        context, weights = self.attention(
            state[0].unsqueeze(1), image.keys, mask=image.mask if mask is None else mask, prepared=image.prepared
        )
        return self._feel(read, state, context), weights.squeeze(1)

    def planned_step(
        self,
        read: Float[Tensor, "c five_d"],
        state: State,
        keys: Float[Tensor, "c n d"],
        projected: Float[Tensor, "c n a"],
        bias: Float[Tensor, "c 1 n"],
        noise: Float[Tensor, "c 1 d"] | None,
    ) -> tuple[State, Float[Tensor, "c 1 n"], Float[Tensor, "c 1 n"]]:
        """Read one word with the noise of `plan_bias` and `plan_context`; return new state, scores Φ and weights."""
        scores = self.attention.scores(state[0].unsqueeze(1), projected)
        context, weights = self.attention.planned(scores, keys, bias, noise)
        return self._feel(read, state, context), scores, weights

    def _feel(self, read: Float[Tensor, "c five_d"], state: State, context: Float[Tensor, "c 1 d"]) -> State:
        hidden, cell = state
        return maxout_lstm(read + self.hidden_proj(hidden), self.view_proj(context.squeeze(1)), cell)

    def forward(
        self,
        regions: Float[Tensor, "b n f"],
        words: Int[Tensor, "c t"],
        *,
        region_mask: Bool[Tensor, "b n"] | None = None,
        image_rows: Int[Tensor, " c"] | None = None,
        lengths: Int[Tensor, " c"] | None = None,
        positions: Int[Tensor, " p"] | None = None,
        need_weights: bool = False,
    ) -> Any:
        """Return the logits of each next word, and with `need_weights` the attention weights behind them, `c t n`.

        Exact marginal attention returns log-probabilities, which are logits too.

        Args:
            regions: Features of the images' regions.
            words: The word before each step; the first is a boundary.
            region_mask: True for regions that exist; all if None.
            image_rows: Which image each caption is about; the first caption is about the first image if None.
            lengths: Steps of each caption; steps after its end have no KL.
            positions: Steps to return, as positions in the flattened `c t`; the result is then `p v`, else `c t v`.
            need_weights: Whether to return weights.
        """
        image = self.look(regions, region_mask)
        if image_rows is not None:
            image = image.select(image_rows)
        reads, num_steps = self.read(words), words.shape[1]
        goes_on = None if lengths is None else lengths[:, None] > torch.arange(num_steps, device=words.device)
        unroll = self._unroll_planned if self.attention.draws_ahead else self._unroll
        found = unroll(reads, image, goes_on)
        if self.top_keys == 0:
            logits = self.head(self.dropout(_select(found.hidden, positions)))
        else:
            assert found.scores is not None
            before = torch.cat([self.start(image.keys)[0].unsqueeze(1).to(found.hidden), found.hidden[:, :-1]], dim=1)
            mask = image.mask.unsqueeze(1).expand(found.scores.shape)
            parts = categorical.largest(categorical.log_probs(found.scores, mask), self.top_keys)
            views = (parts.weights.to(image.keys.dtype).flatten(1, 2) @ image.keys).unflatten(1, parts.log_probs.shape[1:])
            inputs = (reads, before, torch.stack(found.cells, dim=1), parts.log_probs, views)
            logits = self._marginal(*(_select(x, positions) for x in inputs))
        return (logits, found.weights) if need_weights else logits

    def next_logits(self, words: Int[Tensor, " c"], state: State, image: Image) -> tuple[Float[Tensor, "c v"], State]:
        """Return the logits of the word after `words`, as `forward` does, and the new state."""
        read = self.read(words)
        after, weights = self.step(read, state, image)
        if self.top_keys == 0:
            return self.head(self.dropout(after[0])), after
        parts = categorical.largest(weights.log(), self.top_keys)
        return self._marginal(read, *state, parts.log_probs, parts.weights.to(image.keys.dtype) @ image.keys), after

    def _marginal(
        self,
        read: Float[Tensor, "*c five_d"],
        hidden: Float[Tensor, "*c d"],
        cell: Float[Tensor, "*c d"],
        log_prior: Float[Tensor, "*c m"],
        views: Float[Tensor, "*c m d"],
    ) -> Float[Tensor, "*c v"]:
        """Return ln Σ_m p_m p(y | view m) from the states before a step."""
        sums = (read + self.hidden_proj(hidden)).unsqueeze(-2)
        seen, _ = maxout_lstm(sums, self.view_proj(views), cell.unsqueeze(-2))
        log_probs = categorical.log_probs(self.head(self.dropout(seen)))
        return marginal_log_probs(log_prior, log_probs)

    def _unroll(self, reads: Float[Tensor, "c t five_d"], image: Image, goes_on: Bool[Tensor, "c t"] | None) -> Unrolled:
        """Return all steps; the attention draws and records at each."""
        masks: Sequence[Tensor | None] = [None] * reads.shape[1]
        if goes_on is not None:
            masks = [image.mask & step for step in goes_on.unsqueeze(2).unbind(1)]
        state, states, cells, weights = self.start(image.keys), [], [], []
        # unbind, not index: the gradient of an index is a whole array of zeros at every step
        for read, mask in zip(reads.unbind(1), masks, strict=True):
            cells.append(state[1])
            state, seen = self.step(read, state, image, mask)
            states.append(state[0])
            weights.append(seen)
        return Unrolled(torch.stack(states, dim=1), cells, torch.stack(weights, dim=1))

    def _unroll_planned(
        self, reads: Float[Tensor, "c t five_d"], image: Image, goes_on: Bool[Tensor, "c t"] | None
    ) -> Unrolled:
        """Return the same with all noise drawn first; KL and choices, of steps up to a caption's end, are recorded last."""
        attention, (projected, prior) = self.attention, image.prepared
        bias = attention.plan_bias(image.mask, reads.shape[1])
        noise = attention.plan_context(image.keys, reads.shape[1])
        biases = bias.expand(-1, reads.shape[1], -1).split(1, dim=1)
        noises = [None] * len(biases) if noise is None else noise.split(1, dim=1)
        state, states, cells, scores, weights = self.start(image.keys), [], [], [], []
        for read, add, shift in zip(reads.unbind(1), biases, noises, strict=True):
            cells.append(state[1])
            state, found, seen = self.planned_step(read, state, image.keys, projected, add, shift)
            states.append(state[0])
            scores.append(found)
            weights.append(seen)
        steps = reads.new_ones(reads.shape[:2], dtype=torch.bool) if goes_on is None else goes_on
        all_scores = torch.cat(scores, dim=1)
        hidden = attention.record_steps(
            torch.stack(states, dim=1),
            all_scores,
            image.keys,
            mask=image.mask,
            steps=steps,
            log_prior=prior,
            bias=bias,
        )
        return Unrolled(hidden, cells, torch.cat(weights, dim=1), all_scores)


def maxout_lstm(
    sums: Float[Tensor, "c five_d"], view: Float[Tensor, "c two_d"], cell: Float[Tensor, "c d"]
) -> tuple[Float[Tensor, "c d"], Float[Tensor, "c d"]]:
    """Return hidden state and cell after one step of Att2in's LSTM, whose candidates compete.

    Args:
        sums: W_x x_t + W_h h_{t−1} + b for input, forget and output gate and the two candidates, in this order.
        view: W_a a_t for the two candidates.
        cell: c_{t−1}.
    """
    width = cell.shape[-1]
    gates, candidates = sums.split([3 * width, 2 * width], dim=-1)
    enter, keep, leave = torch.sigmoid(gates).chunk(3, dim=-1)
    cell = keep * cell + enter * torch.maximum(*(candidates + view).chunk(2, dim=-1))
    return leave * torch.tanh(cell), cell


def _select(x: Float[Tensor, "c t *d"], positions: Int[Tensor, " p"] | None) -> Float[Tensor, "..."]:
    return x if positions is None else x.flatten(0, 1).index_select(0, positions)
