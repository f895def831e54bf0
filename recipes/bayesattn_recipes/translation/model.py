"""The translation model: bidirectional LSTM encoder, attentive LSTM decoder, any attention (Sec. 4.4 and App. D.4)."""

from collections.abc import Iterator, Sequence

import numpy as np
import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from bayesattn_recipes.baselines import InferenceNetwork, LatentAlignment, categorical, dirichlet
from bayesattn_recipes.baselines.latent import run_packed, to_device
from bayesattn_recipes.baselines.variational import marginal_log_probs
from bayesattn_recipes.translation.config import TranslationConfig
from bayesattn_recipes.translation.decoder import Decoder, Memory, Readout, State, Unrolled, at_least_float32, token_nll
from bayesattn_recipes.translation.graphs import unroller
from bayesattn_recipes.translation.vocabulary import PAD

# logits held at once if every source position is scored by itself: 2²⁷ floats are 0.5 GiB
LARGEST_LOGITS = 2**27


class Translator(nn.Module):
    """Encode the source, decode the target; `forward` returns the loss of every target token.

    Args:
        config: The run.
        vocabulary_size: Tokens, shared by both languages; the embeddings are not shared.
    """

    def __init__(self, config: TranslationConfig, vocabulary_size: int) -> None:
        super().__init__()
        attention, embedding_dim, num_layers = config.attention, config.embedding_dim, config.num_layers
        self.source_embedding = nn.Embedding(vocabulary_size, embedding_dim, padding_idx=PAD)
        self.target_embedding = nn.Embedding(vocabulary_size, embedding_dim, padding_idx=PAD)
        self.dropout = nn.Dropout(config.dropout)
        between = config.dropout if num_layers > 1 else 0.0
        self.encoder = nn.LSTM(
            embedding_dim, config.encoder_dim, num_layers, bidirectional=True, batch_first=True, dropout=between
        )
        self.decoder = Decoder(config)
        self.readout = Readout(config.decoder_dim, 2 * config.encoder_dim, vocabulary_size, config.dropout)
        self.latent: LatentAlignment | None = None
        if attention.is_variational:
            network = None
            if attention.variant != "variational-exact":
                network = InferenceNetwork(
                    embedding_dim, embedding_dim, attention.inference_dim, num_layers=num_layers, dropout=between
                )
            self.latent = LatentAlignment(attention, network)
        self._unroll = unroller(self.decoder, config.decoder_mode)
        for name, parameter in self.named_parameters():
            # Deng et al. (2018); the priors of Bayesian attention and the Gaussian's deviation have their own starts
            if "bayes_prior" not in name and "context_noise" not in name and "log_sigma" not in name:
                nn.init.uniform_(parameter, -0.1, 0.1)
        for embedding in (self.source_embedding, self.target_embedding):
            with torch.no_grad():
                embedding.weight[PAD].zero_()

    def encode(self, source: Int[Tensor, "b n"], lengths: Sequence[int]) -> Memory:
        """Return the memory of source sentences."""
        embedded = self.dropout(self.source_embedding(source))
        return self.decoder.remember(run_packed(self.encoder, embedded, lengths), source != PAD)

    def unroll(self, memory: Memory, target_in: Int[Tensor, "b t"], steps: Bool[Tensor, "b t"] | None = None) -> Unrolled:
        """Run the decoder over given targets; `steps` marks those whose KL counts, None leaves the KL out."""
        embedded = self.dropout(self.target_embedding(target_in))
        gates = self.decoder.input_gates(embedded)
        planned = self.decoder.plan_noise(memory, target_in.shape[1])
        run = self._unroll if self.training else self.decoder.unroll
        unrolled = run(gates, *memory, *planned, self.decoder.plan_dropout(gates), steps)
        if steps is None or not self.decoder.attention.draws_ahead:
            return unrolled
        states = self.decoder.attention.record_steps(
            unrolled.states,
            unrolled.scores,
            memory.values,
            mask=memory.mask,
            steps=steps,
            bias=planned[0],
            kl=unrolled.kl,
        )
        return unrolled._replace(states=states)

    def forward(
        self,
        source: Int[Tensor, "b n"],
        source_lengths: Sequence[int],
        target_in: Int[Tensor, "b t"],
        target_out: Int[Tensor, "b t"],
        target_lengths: Sequence[int],
    ) -> Float[Tensor, "b t"]:
        """Return −ln p of every target token, 0 at padding; KL terms are recorded."""
        memory, steps = self.encode(source, source_lengths), target_out != PAD
        unrolled = self.unroll(memory, target_in, steps)
        if self.latent is None:
            nll = token_nll(self.readout(unrolled.states, unrolled.contexts), target_out)
        else:
            inputs = ()
            if self.training:
                embedded = [self.dropout(self.source_embedding(source)), self.dropout(self.target_embedding(target_out))]
                inputs = (embedded[0], source_lengths, embedded[1], target_lengths)
            nll = self.latent(
                unrolled.scores,
                *inputs,
                mask=memory.mask,
                steps=steps,
                each_key=lambda: -self._nll_of_each_key(unrolled, memory, target_out, source_lengths, target_lengths),
                mixed=lambda weights: -self._nll_of_mixtures(unrolled, memory, target_out, weights, target_lengths),
            )
        return nll * steps

    def _nll_of_each_key(
        self,
        unrolled: Unrolled,
        memory: Memory,
        targets: Int[Tensor, "b t"],
        source_lengths: Sequence[int],
        target_lengths: Sequence[int],
    ) -> Float[Tensor, "b t n"]:
        """Return −ln p(y_t | z = j) for all steps and keys, 0 at padding; logits exist for a few pairs (t, j) at a time.

        Padding is not scored; in a batch of padded pairs it would be two fifths of the work.
        """
        (b, t), n = targets.shape, memory.mask.shape[1]
        # computed on the host, which has the lengths, so nothing waits for the device
        is_step, is_key = np.arange(t) < np.c_[list(target_lengths)], np.arange(n) < np.c_[list(source_lengths)]
        pairs = to_device(np.flatnonzero(is_step[:, :, None] & is_key[:, None, :]), targets.device)
        contexts = self.readout.from_context(memory.values).flatten(0, 1)
        nll = self._nll_of_pairs(unrolled, contexts, targets, pairs // n, pairs // (t * n) * n + pairs % n)
        return nll.new_zeros(b * t * n).index_copy(0, pairs, nll).view(b, t, n)

    def _nll_of_mixtures(
        self,
        unrolled: Unrolled,
        memory: Memory,
        targets: Int[Tensor, "b t"],
        weights: Float[Tensor, "b t m n"],
        target_lengths: Sequence[int],
    ) -> Float[Tensor, "b t m"]:
        """Return −ln p(y_t | Σ_j weights_j v_j) for all steps and the m mixtures of keys of each, 0 at padding."""
        b, t, m, _ = weights.shape
        is_step = np.arange(t) < np.c_[list(target_lengths)]
        pairs = to_device(np.flatnonzero(np.broadcast_to(is_step[:, :, None], (b, t, m))), targets.device)
        # the projection is linear: for n keys it costs less than for t m contexts
        keys = self.readout.from_context(memory.values)
        contexts = (weights.to(keys.dtype).flatten(1, 2) @ keys).flatten(0, 1)
        nll = self._nll_of_pairs(unrolled, contexts, targets, pairs // m, pairs)
        return nll.new_zeros(b * t * m).index_copy(0, pairs, nll).view(b, t, m)

    def _nll_of_pairs(
        self,
        unrolled: Unrolled,
        contexts: Float[Tensor, "c h"],
        targets: Int[Tensor, "b t"],
        step: Int[Tensor, " p"],
        context: Int[Tensor, " p"],
    ) -> Float[Tensor, " p"]:
        """Return −ln p(y_t | context) of pairs of a step and a projected context."""
        # float32 or better: the gradient of a step is the sum of those of all its contexts
        of_state = at_least_float32(self.readout.from_state(unrolled.states)).flatten(0, 1)
        of_context = at_least_float32(contexts)

        def score(step: Tensor, context: Tensor) -> Tensor:
            logits = self.readout.finish(of_state.index_select(0, step) + of_context.index_select(0, context))
            return token_nll(logits, targets.flatten().index_select(0, step))

        at_once = max(1, LARGEST_LOGITS // self.readout.logits.out_features)
        # recomputed in the backward pass unless one part is everything: the logits would fill the memory
        keeps = at_once >= len(step) or not torch.is_grad_enabled()
        parts = [
            score(*part) if keeps else checkpoint(score, *part, use_reentrant=False)
            for part in zip(step.split(at_once), context.split(at_once), strict=True)
        ]
        return torch.cat(parts)

    def log_probs(
        self, memory: Memory, target_in: Int[Tensor, "b t"], num_parts: int = 1
    ) -> Iterator[Float[Tensor, "part t v"]]:
        """Yield ln p of every token at every step of given targets; the loop runs once, the vocabulary in parts."""
        unrolled, size = self.unroll(memory, target_in), len(target_in) // num_parts
        for part in range(num_parts):
            rows = slice(part * size, (part + 1) * size)
            yield self._predict(unrolled.states[rows], unrolled.contexts[rows], unrolled.scores[rows], memory.take(rows))

    def next_log_probs(
        self, tokens: Int[Tensor, "b k"], state: State, memory: Memory
    ) -> tuple[Float[Tensor, "b k v"], State]:
        """Return ln p of every next token after `tokens`, for k hypotheses of each sentence, and the new state."""
        gates = self.decoder.input_gates(self.dropout(self.target_embedding(tokens)))
        planned = self.decoder.plan_noise(memory, tokens.shape[1])
        drop = self.decoder.plan_dropout(gates)
        # k hypotheses are k independent "steps" to the dropout masks: their axis moves
        state, scores = self.decoder.step(
            gates, state, memory, *planned, None if drop is None else drop.squeeze(3).permute(1, 2, 0, 3)
        )
        return self._predict(state.hidden[-1], state.context, scores, memory), state

    def _predict(
        self,
        top: Float[Tensor, "b k h"],
        context: Float[Tensor, "b k d"],
        scores: Float[Tensor, "b k n"],
        memory: Memory,
    ) -> Float[Tensor, "b k v"]:
        """Return ln p of every token, from the context or from the latent alignment under its prior."""
        valid = memory.mask.unsqueeze(1).expand(scores.shape)
        if self.latent is not None and self.latent.config.variant != "variational-dirichlet":
            log_prior, top_keys = categorical.log_probs(scores, valid), self.latent.config.top_keys
            return self._marginal(log_prior, top, memory, top_keys)
        if self.latent is not None:
            context = dirichlet.mean(dirichlet.concentration(scores), valid).to(memory.values.dtype) @ memory.values
        return torch.log_softmax(at_least_float32(self.readout(top, context)), dim=-1)

    def _marginal(
        self, log_prior: Float[Tensor, "b k n"], top: Float[Tensor, "b k h"], memory: Memory, top_keys: int | None
    ) -> Float[Tensor, "b k v"]:
        """Return ln Σ_j p_j p(y | z = j), a few keys at a time; with `top_keys` the rest counts as their mean."""
        of_state, of_key = self.readout.from_state(top).unsqueeze(2), self.readout.from_context(memory.values).unsqueeze(1)
        if top_keys is not None:
            log_prior, weights = categorical.largest(log_prior, top_keys)
            of_key = weights.to(of_key.dtype) @ of_key
        b, k, n = log_prior.shape
        at_once = max(1, LARGEST_LOGITS // (b * k * self.readout.logits.out_features))
        total = None
        for keys in range(0, n, at_once):
            here = slice(keys, keys + at_once)
            logits = at_least_float32(self.readout.finish(of_state + of_key[:, :, here]))
            part = marginal_log_probs(log_prior[..., here], torch.log_softmax(logits, dim=-1))
            total = part if total is None else torch.logaddexp(total, part)
        assert total is not None
        return total


def evaluation_tokens(model: Translator) -> int:
    """Return the tokens of a batch outside training: many on a GPU, which waits for launches, few on a CPU."""
    return 16384 if next(model.parameters()).is_cuda else 1024
