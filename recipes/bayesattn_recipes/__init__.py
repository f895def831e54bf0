"""The paper's applications, complete: data, model, training, evaluation. `bayesattn list` shows them.

They use the library as any user would. Each is a folder of its own; `common` is what they share, and `baselines` holds the
methods that the paper compares with.
"""

from bayesattn.cli.registry import Recipe

__version__ = "0.1.0"

DIGITS = Recipe(
    "digits",
    "8 x 8 handwritten digits (in scikit-learn), 200 labels, shifted and scrambled test images",
    "bayesattn_recipes.digits",
    needs_files=False,
)
GRAPH = Recipe(
    "graph",
    "node classification with a graph attention network: Cora, Citeseer, PubMed, heterophilous, generated",
    "bayesattn_recipes.graph",
    generated=("dataset", "generated"),
)
LANGUAGE = Recipe(
    "language",
    "pretrained encoders fine-tuned on GLUE, SQuAD or texts of your own",
    "bayesattn_recipes.language",
)
TRANSLATION = Recipe(
    "translation",
    "German to English with LSTMs: Multi30k, Tatoeba, IWSLT14; Bayesian, hard, variational attention",
    "bayesattn_recipes.translation",
)
CAPTIONING = Recipe(
    "captioning",
    "image captions with Att2in: generated shapes, Flickr8k, COCO",
    "bayesattn_recipes.captioning",
    generated=("dataset", "shapes"),
)
VQA = Recipe(
    "vqa",
    "visual question answering with MCAN: VQA-v2, DAQUAR, a generated world of shapes",
    "bayesattn_recipes.vqa",
    generated=("data.dataset", "shapes"),
)
DOUBT = Recipe(
    "doubt",
    "a study: does doubt in closed form find the errors of fine-tuned encoders? (reproduce only)",
    "bayesattn_recipes.doubt",
)
BENCH = Recipe(
    "bench",
    "what Bayesian attention costs: `bayesattn bench SUITE` times kernels, layers and training steps",
    "bayesattn_recipes.bench",
    needs_files=False,
)

RECIPES = {recipe.name: recipe for recipe in (DIGITS, GRAPH, LANGUAGE, TRANSLATION, CAPTIONING, VQA)}
