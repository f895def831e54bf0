# %% [markdown]
# # Attention on a graph
#
# A graph attention network gives each neighbor of a node a weight. Here these weights are drawn, which shows which nodes and edges the
# network is unsure about. The graph is generated (1,000 nodes in five classes, 100 of them labeled). A third of the edges lead to other
# classes, so some nodes cannot be classified with certainty.

# %%
import torch
import torch.nn.functional as F
from torch_geometric.nn import GAT

import bayesattn as ba
from bayesattn import metrics, plots
from bayesattn_recipes.graph.generated import generate_graph

# %matplotlib inline
graph = generate_graph(seed=0)
train, test = graph.splits["train"], graph.splits["test"]
print(graph.num_nodes, "nodes,", graph.edge_index.shape[1], "directed edges,", len(train), "labels")

# %% [markdown]
# ## Convert PyTorch Geometric's GAT and train it
#
# A graph is one example: its labels share one KL, so pass their number as `labels_per_example`. The training loop stays the same.


# %%
def fit(model, epochs=100):
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01, weight_decay=5e-4)
    schedule = ba.KLSchedule("sigmoid", anneal_rate=0.1)
    for epoch in range(epochs):
        model.train()
        optimizer.zero_grad()
        with ba.record_kl() as kl:
            nll = F.cross_entropy(model(graph.features, graph.edge_index)[train], graph.labels[train])
        # soft attention records nothing, and then there is nothing to add
        loss = ba.elbo(nll, kl.total(), kl_weight=schedule(epoch), labels_per_example=len(train)).loss if len(kl) else nll
        loss.backward()
        optimizer.step()
    return model.eval()


def build():
    torch.manual_seed(0)
    return GAT(graph.features.shape[1], 32, num_layers=2, out_channels=graph.num_classes, heads=4, dropout=0.4)


soft = fit(build())
bayesian = fit(ba.bayesianize(build(), ba.AttentionConfig("BAM-WC", weibull_k=5)))
print(ba.conversion_report(bayesian))

# %% [markdown]
# ## Which nodes is it unsure about?
#
# `ba.predict` runs the whole graph once per sample. Nodes share their neighbors, so this tutorial uses draws rather than the closed form.

# %%
prediction = ba.predict(bayesian, [graph.features, graph.edge_index], num_samples=20, seed=0)
with torch.no_grad():
    plain = soft(graph.features, graph.edge_index).softmax(-1)
truth = graph.labels[test]
rows = {"soft": plain[test], "BAM-WC, 20 draws": prediction.mean[test]}
summary = {}
for name, probabilities in rows.items():
    right = metrics.correct(probabilities, truth)
    summary[name] = (float(right.mean()), float(metrics.aurc(probabilities.max(-1).values, right)))
    nll = float(metrics.negative_log_likelihood(probabilities, truth).mean())
    print(f"{name:18s} accuracy {summary[name][0]:.3f}  NLL {nll:.3f}  AURC {summary[name][1]:.3f}")

# %% alt="Error rate of the nodes that are kept, against the share that is kept, for soft attention and for 20 draws of BAM-WC"
plots.plot_risk_coverage({name: (p.max(-1).values, metrics.correct(p, truth)) for name, p in rows.items()})

# %% [markdown]
# ## Which edges?
#
# The weights themselves are random. The plot shows the neighborhood of a misclassified test node. The width of an edge is its mean
# weight; its color is the standard deviation over draws.

# %% alt="The neighborhood of a wrongly classified node: mean and standard deviation of the weight of every edge into it"
first_layer = bayesian.convs[0]
draws = []
with torch.no_grad(), ba.sampling(bayesian):
    for seed in range(20):
        torch.manual_seed(seed)
        _, (edges, weights) = first_layer(graph.features, graph.edge_index, return_attention_weights=True)
        draws.append(weights[:, 0])
degree = torch.bincount(edges[1], minlength=graph.num_nodes)
wrong = [int(node) for node in test if prediction.mean[node].argmax() != graph.labels[node] and 5 <= degree[node] <= 8]
node = max(wrong, key=lambda n: float(prediction.entropy[n]))
names = [f"{i} ({graph.class_names[int(c)]})" for i, c in enumerate(graph.labels)]
said = graph.class_names[int(prediction.mean[node].argmax())]
title = f"node {node}: said {said}, is {graph.class_names[int(graph.labels[node])]}"
plots.plot_edge_uncertainty(edges, torch.stack(draws), node, labels=names, title=title)

# %% [markdown]
# ## Result

# %%
from IPython.display import Markdown

(soft_accuracy, soft_aurc), (accuracy, aurc) = summary["soft"], summary["BAM-WC, 20 draws"]
Markdown(
    f"On {len(test)} test nodes of one generated graph, one seed: soft attention is right in {soft_accuracy:.1%} (AURC {soft_aurc:.3f}), "
    f"BAM-WC with 20 draws in {accuracy:.1%} (AURC {aurc:.3f}). The Bayesian network ranks its errors "
    f"{'better' if aurc < soft_aurc else 'no better'} here. On the paper's graphs there is "
    "[no difference in accuracy](../results/graph.md)."
)
