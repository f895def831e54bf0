# %% [markdown]
# # A language model that says where it is unsure
#
# `ba.score` gives the log-probability of a text and its standard deviation under small attention noise. It takes one forward and one
# backward pass and generates nothing. It also shows which tokens of the text the doubt comes from.
#
# The model is a small GPT-2, trained here for a few seconds on Python's language reference, which comes with every installation
# (`pydoc_data.topics`). It learns to spell and picks up a few phrases, no more. That is enough to see what the numbers mean.

# %%
import re
from pydoc_data.topics import topics

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import GPT2Config, GPT2LMHeadModel

import bayesattn as ba
from bayesattn import metrics, plots

# %matplotlib inline
text = re.sub(r"[*=~^-]{4,}", " ", " ".join(topics[name] for name in sorted(topics)))  # without underlined headings
text = re.sub(r"\s+", " ", text)
cut = int(0.9 * len(text))
tokenizer = Tokenizer(models.BPE())
tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
tokenizer.decoder = decoders.ByteLevel()
alphabet = pre_tokenizers.ByteLevel.alphabet()
tokenizer.train_from_iterator(
    [text[:cut]], trainers.BpeTrainer(vocab_size=1000, initial_alphabet=alphabet, show_progress=False)
)
ids = torch.tensor(tokenizer.encode(text[:cut]).ids)
held_out = torch.tensor(tokenizer.encode(text[cut:]).ids)
print(f"{len(ids):,} tokens to train, {len(held_out):,} held out; the first: {text[:70]!r}")

# %%
torch.manual_seed(0)
sizes = {"vocab_size": 1000, "n_embd": 96, "n_layer": 2, "n_head": 4, "n_positions": 64, "initializer_range": 0.06}
without_dropout = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0)
model = GPT2LMHeadModel(GPT2Config(bos_token_id=0, eos_token_id=0, **sizes, **without_dropout))
optimizer = torch.optim.AdamW(model.parameters(), lr=6e-3)
rate = torch.optim.lr_scheduler.OneCycleLR(optimizer, 6e-3, total_steps=300, pct_start=0.1)
generator = torch.Generator().manual_seed(0)
model.train()
for step in range(300):
    starts = torch.randint(len(ids) - 64, (12,), generator=generator)
    batch = torch.stack([ids[start : start + 64] for start in starts])
    loss = model(input_ids=batch, labels=batch).loss
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    rate.step()
    if step % 100 == 99:
        print(f"step {step + 1}: {loss.item():.2f} nats per token")
_ = model.eval()

# %% [markdown]
# ## A choice that can be wrong
#
# Each question is 32 tokens of held-out text and four continuations of eight tokens: the true one, and three from elsewhere in the same
# text. The model chooses the continuation with the largest log-probability. How often is it wrong, and can we tell when?

# %%
PROMPT, ANSWER, CHOICES, QUESTIONS = 32, 8, 4, 250
starts = torch.randint(len(held_out) - PROMPT - ANSWER, (QUESTIONS, CHOICES), generator=generator)
rows = []
for choices in starts:
    prompt = held_out[choices[0] : choices[0] + PROMPT]
    rows += [torch.cat([prompt, held_out[at + PROMPT : at + PROMPT + ANSWER]]) for at in choices]
rows = torch.stack(rows)
labels = rows.clone()
labels[:, :PROMPT] = -100  # the prompt is not scored
parts = [ba.score(model, {"input_ids": rows[at : at + 100]}, labels[at : at + 100]) for at in range(0, len(rows), 100)]
log_probability = torch.cat([part.log_probability for part in parts]).view(QUESTIONS, CHOICES)
deviation = torch.cat([part.std for part in parts]).view(QUESTIONS, CHOICES)
best, order = log_probability.topk(2, dim=1)
right = (order[:, 0] == 0).float()
gap = best[:, 0] - best[:, 1]
# the deviation of a difference, as if the two scores were independent
spread = deviation.gather(1, order).square().sum(dim=1).sqrt()
rankings = {"gap of the two best": gap, "gap / deviation": gap / spread}
aurc = {name: float(metrics.aurc(trust, right)) for name, trust in rankings.items()}
print(f"right in {right.mean():.2f} of {QUESTIONS} questions; guessing gives {1 / CHOICES}")
for name, value in aurc.items():
    print(f"{name:20s} AURC {value:.4f}")

# %% alt="Error rate of the answered questions, against the share that is answered, by the gap of the log-probabilities and by gap over deviation"
plots.plot_risk_coverage({name: (trust, right) for name, trust in rankings.items()})

# %% [markdown]
# ## Where the doubt comes from
#
# `by_token` splits the variance of one continuation's log-probability by the tokens that the model attended to. The plot shows a question
# that it got wrong, with the words behind the doubt about the continuation it chose.

# %% alt="A prompt and its continuation with the tokens shaded by their share of the doubt, beside layers and heads"
wrong = (right == 0).nonzero().flatten()
question = int(wrong[(gap / spread)[wrong].argmin()])
row = question * CHOICES + int(order[question, 0])
answer = ba.score(model, {"input_ids": rows[row : row + 1]}, labels[row : row + 1])
words = [tokenizer.decode([int(i)]).strip() or "␣" for i in rows[row]]
words[PROMPT] = "→ " + words[PROMPT]
plots.plot_doubt(
    words,
    answer.by_token[0],
    {name.split(".")[2]: heads[0] for name, heads in answer.by_head.items()},
    log_probability[question].softmax(0),
    class_names=["true", "other 1", "other 2", "other 3"],
    title="the continuation begins at the arrow",
)

# %% [markdown]
# ## Result

# %%
from IPython.display import Markdown

plain, ratio = aurc.values()
Markdown(
    f"The model chose the true continuation in {right.mean():.0%} of {QUESTIONS} questions. Ranking its choices by the gap of the "
    f"log-probabilities gives an AURC of {plain:.4f}, by gap over deviation {ratio:.4f}: dividing by the deviation "
    f"{'helps' if ratio < plain else 'does not help'} here. One small model and {QUESTIONS} questions: a demonstration of the calls, not a result."
)
