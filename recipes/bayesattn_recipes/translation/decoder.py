"""The decoder: LSTM layers with additive attention and input feeding, one step at a time or over a whole sequence.

`unroll` is a pure function of tensors. Random values (attention noise, dropout) are drawn before it and passed in. What is
the same at every step (projected keys, the embeddings' share of the gates) is computed before it, the KL once after the
last step, and the output layer outside, over all steps. So the loop consists of two matrix products per layer and the
attention, never waits for the device, and can be compiled or recorded (`graphs.py`).
"""

from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from bayesattn.config import AttentionConfig
from bayesattn.kernels import HAS_TRITON, INTERPRETED
from bayesattn_recipes.baselines import build_step_attention
from bayesattn_recipes.translation.config import TranslationConfig


class State(NamedTuple):
    """The state between steps, for `k` hypotheses of each sentence; hidden and cell state of every layer."""

    hidden: tuple[Float[Tensor, "b k h"], ...]
    cell: tuple[Float[Tensor, "b k h"], ...]
    context: Float[Tensor, "b k d"]


class Memory(NamedTuple):
    """The encoded source, and its keys projected once for all steps."""

    values: Float[Tensor, "b n d"]
    keys: Float[Tensor, "b n a"]
    mask: Bool[Tensor, "b n"]

    def take(self, rows: slice | Int[Tensor, " rows"]) -> "Memory":
        """Return the memory of some of the sentences."""
        return Memory(*(value[rows] for value in self))


class Unrolled(NamedTuple):
    """Every step of a sequence, and the KL of all of them if it is needed."""

    states: Float[Tensor, "b t h"]
    contexts: Float[Tensor, "b t d"]
    scores: Float[Tensor, "b t n"]
    kl: Float[Tensor, " b"] | None = None


class Decoder(nn.Module):
    """Layers of LSTM cells; the first reads the previous token and context, the last gives the query of the attention.

    The latent alignments run on soft attention, their prior.
    """

    def __init__(self, config: TranslationConfig) -> None:
        super().__init__()
        memory_dim, hidden_dim, num_layers = 2 * config.encoder_dim, config.decoder_dim, config.num_layers
        self.hidden_dim, self.num_layers = hidden_dim, num_layers
        self.input_gates = nn.Linear(config.embedding_dim, 4 * hidden_dim)
        below = [memory_dim, *[hidden_dim] * (num_layers - 1)]
        self.gates = nn.ModuleList(
            nn.Linear(size + hidden_dim, 4 * hidden_dim, bias=layer > 0) for layer, size in enumerate(below)
        )
        self.dropout = nn.Dropout(config.dropout)
        self.config = AttentionConfig("soft") if config.attention.is_variational else config.attention
        self.attention = build_step_attention(self.config, hidden_dim, memory_dim, config.attention_dim, bias=False)

    def remember(self, values: Float[Tensor, "b n d"], mask: Bool[Tensor, "b n"]) -> Memory:
        """Return the memory of encoded sources."""
        return Memory(values, self.attention.key_proj(values), mask)

    def start(self, memory: Memory, num_hypotheses: int = 1) -> State:
        """Return the state before the first step: all zeros."""
        values, (b, _, d) = memory.values, memory.values.shape
        shape = (b, num_hypotheses, self.hidden_dim)
        # the cell accumulates over all steps, so it stays in float32 even if the rest is bfloat16
        cell = values.new_zeros(shape, dtype=torch.promote_types(values.dtype, torch.float32))
        hidden, layers = values.new_zeros(shape), self.num_layers
        return State((hidden,) * layers, (cell,) * layers, values.new_zeros(b, num_hypotheses, d))

    def step(
        self,
        input_gates: Float[Tensor, "b k g"],
        state: State,
        memory: Memory,
        bias: Float[Tensor, "b #k n"] | None,
        noise: Float[Tensor, "b #k d"] | None,
        drop: Float[Tensor, "#layers b k h"] | None,
    ) -> tuple[State, Float[Tensor, "b k n"]]:
        """Make one step.

        Args:
            input_gates: `self.input_gates` of the embedded token.
            state: From `start` or the step before.
            memory: The source.
            bias: From `plan_bias` for this step; None if the attention module draws by itself.
            noise: From `plan_context` for this step.
            drop: Dropout masks between the layers.

        Returns:
            The new state, whose top layer and context the output layer reads; and the scores Φ.
        """
        hidden, cell = [], []
        below = state.context
        for layer, gates in enumerate(self.gates):
            total = gates(torch.cat([below, state.hidden[layer]], dim=-1))
            h, c = lstm_cell(total, state.cell[layer], input_gates if layer == 0 else None)
            hidden.append(h)
            cell.append(c)
            below = h if drop is None or layer + 1 == self.num_layers else h * drop[layer]
        scores = self.attention.scores(hidden[-1], memory.keys)
        if bias is not None:
            context, _ = self.attention.planned(scores, memory.values, bias, noise)
        else:
            context, _ = self.attention.attend(scores, memory.values, mask=memory.mask)
        return State(tuple(hidden), tuple(cell), context), scores

    def plan_noise(
        self, memory: Memory, num_steps: int
    ) -> tuple[Float[Tensor, "b #t n"] | None, Float[Tensor, "b t d"] | None]:
        """Return the noise of all steps' weights and contexts: `bias` and `noise` of `unroll`, None if there is none."""
        attention = self.attention
        if not attention.draws_ahead:
            return None, None
        return attention.plan_bias(memory.mask, num_steps), attention.plan_context(memory.values, num_steps)

    def plan_dropout(self, like: Float[Tensor, "b t g"]) -> Float[Tensor, "t layers b 1 h"] | None:
        """Return the dropout masks of all steps in one draw; None if dropout is off."""
        b, t, _ = like.shape
        if not self.dropout.training or self.dropout.p == 0.0 or self.num_layers == 1:
            return None
        return self.dropout(like.new_ones(t, self.num_layers - 1, b, 1, self.hidden_dim))

    def unroll(
        self,
        input_gates: Float[Tensor, "b t g"],
        values: Float[Tensor, "b n d"],
        keys: Float[Tensor, "b n a"],
        mask: Bool[Tensor, "b n"],
        bias: Float[Tensor, "b #t n"] | None,
        noise: Float[Tensor, "b t d"] | None,
        drop: Float[Tensor, "t layers b 1 h"] | None,
        steps: Bool[Tensor, "b t"] | None = None,
        step: Callable[..., tuple[State, Tensor]] | None = None,
    ) -> Unrolled:
        """Run all steps with the given inputs (teacher forcing); tensors in, tensors out.

        Args:
            input_gates: `self.input_gates` of the embedded tokens.
            values: From the memory, like the next two.
            keys: The projected keys.
            mask: True for keys that exist.
            bias: From `plan_noise`; None for attention that draws by itself.
            noise: From `plan_noise`.
            drop: From `plan_dropout`.
            steps: True for steps whose KL counts; None leaves the KL out.
            step: A compiled `self.step`.
        """
        memory = Memory(values, keys, mask)
        state = self.start(memory)
        states, contexts, scores = [], [], []
        for t, now in enumerate(input_gates.split(1, dim=1)):
            here = None if bias is None else bias[:, min(t, bias.shape[1] - 1)].unsqueeze(1)
            shift = None if noise is None else noise[:, t].unsqueeze(1)
            state, found = (step or self.step)(now, state, memory, here, shift, None if drop is None else drop[t])
            states.append(state.hidden[-1])
            contexts.append(state.context)
            scores.append(found)
        unrolled = Unrolled(*(torch.cat(parts, dim=1) for parts in (states, contexts, scores)))
        if steps is None or not self.attention.draws_ahead:
            return unrolled
        return unrolled._replace(kl=self.attention.steps_kl(unrolled.scores, values, mask=mask, steps=steps, bias=bias))


def lstm_cell(
    gates: Float[Tensor, "b k g"], cell: Float[Tensor, "b k h"], given: Float[Tensor, "b k g"] | None = None
) -> tuple[Float[Tensor, "b k h"], Float[Tensor, "b k h"]]:
    """Return hidden and cell state of an LSTM from its gates i, f, o, g: c' = σ(f) c + σ(i) tanh(g), h = σ(o) tanh(c').

    Args:
        gates: Values before the nonlinearities.
        cell: The previous cell state, float32 or better.
        given: Values added to the gates.
    """
    if _runs_fused(gates, cell):
        # imported late: a machine without a GPU need not have triton
        from bayesattn_recipes.translation.lstm import triton

        return triton.lstm_cell(gates, cell, given)
    gates = gates if given is None else gates + given
    size = cell.shape[-1]
    opened, candidate = torch.sigmoid(gates[..., : 3 * size]), torch.tanh(gates[..., 3 * size :])
    i, f, o = opened.chunk(3, dim=-1)
    cell = f * cell + i * candidate
    return (o * torch.tanh(cell)).to(gates.dtype), cell


def _runs_fused(gates: Tensor, cell: Tensor) -> bool:
    # the compiler fuses this by itself
    return (
        (gates.is_cuda or INTERPRETED)
        and HAS_TRITON
        and cell.dtype == torch.float32
        and gates.dtype in (torch.float32, torch.bfloat16, torch.float16)
        and not torch.compiler.is_compiling()
    )


class Readout(nn.Module):
    """The output layer: tanh(W_h h + W_c c), then logits over the vocabulary.

    Args:
        hidden_dim: Features of the decoder's top layer.
        memory_dim: Features of a context.
        vocabulary_size: Tokens.
        dropout: Dropout rate before the last layer.
    """

    def __init__(self, hidden_dim: int, memory_dim: int, vocabulary_size: int, dropout: float) -> None:
        super().__init__()
        self.from_state = nn.Linear(hidden_dim, hidden_dim, bias=False)
        self.from_context = nn.Linear(memory_dim, hidden_dim, bias=False)
        self.dropout = nn.Dropout(dropout)
        self.logits = nn.Linear(hidden_dim, vocabulary_size)

    def forward(self, states: Float[Tensor, "*b h"], contexts: Float[Tensor, "*b d"]) -> Float[Tensor, "*b v"]:
        """Return logits."""
        return self.finish(self.from_state(states) + self.from_context(contexts))

    def finish(self, projected: Float[Tensor, "*b h"]) -> Float[Tensor, "*b v"]:
        """Return logits from the sum of both projections."""
        return self.logits(self.dropout(torch.tanh(projected)))


def token_nll(logits: Float[Tensor, "*b v"], targets: Int[Tensor, "*b"]) -> Float[Tensor, "*b"]:
    """Return −ln p of the targets in float32 or better."""
    flat = F.cross_entropy(at_least_float32(logits).flatten(0, -2), targets.flatten(), reduction="none")
    return flat.view(targets.shape)


def at_least_float32(x: Float[Tensor, "*b"]) -> Float[Tensor, "*b"]:
    """Return half-precision numbers as float32, others as they are: softmax, losses and KL need the precision."""
    return x.to(torch.promote_types(x.dtype, torch.float32))
