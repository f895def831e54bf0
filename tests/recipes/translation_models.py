"""Small translators, and what they are tested on."""

import torch

from bayesattn_recipes.baselines import AttentionChoice, with_score_function
from bayesattn_recipes.translation.batches import make_batch
from bayesattn_recipes.translation.config import TranslationConfig
from bayesattn_recipes.translation.model import Translator
from bayesattn_recipes.translation.vocabulary import END, PAD

SOURCES = [[5, 6, 7, 8, END], [9, END], [10, 11, 12, END]]
TARGETS = [[5, 6, END], [9, 10, 11, 12, 13, END], [4, END]]
SIZES = {"embedding_dim": 5, "encoder_dim": 4, "decoder_dim": 7, "attention_dim": 6}


def translator(attention, **settings):
    return Translator(TranslationConfig(attention=attention, **{**SIZES, "dropout": 0.0, **settings}), 17)


def build(variant="soft", *, dropout=0.0, num_layers=2, **options):
    torch.manual_seed(2)
    choice = AttentionChoice(variant, inference_dim=3, **options)
    return translator(choice, dropout=dropout, num_layers=num_layers)


def losses(model, sources=SOURCES, targets=TARGETS):
    device = next(model.parameters()).device
    batch = {k: v.to(device) if isinstance(v, torch.Tensor) else v for k, v in make_batch(sources, targets).items()}
    return with_score_function(model, lambda: model(**batch), batch["target_out"] != PAD)
