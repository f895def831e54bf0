"""A tokenizer of a few words, a small random text classifier, and texts for it."""

import torch
import transformers as hf
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace
from tokenizers.processors import TemplateProcessing

WORDS = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "good", "bad", "film", "a", "not", "very", "plot", "dull", "bright", "it", "is"]
TEXTS = ["a good film", "not a bad plot", "it is very very dull", "bright", "it is not a good film", "a very bad plot it is"]
LABELS = {0: "worse", 1: "better", 2: "fair"}


def small_tokenizer(model_max_length: int | None = 32) -> hf.PreTrainedTokenizerFast:
    tokenizer = Tokenizer(WordLevel({word: number for number, word in enumerate(WORDS)}, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = Whitespace()
    tokenizer.post_processor = TemplateProcessing(
        single="[CLS] $A [SEP]", pair="[CLS] $A [SEP] $B:1 [SEP]:1", special_tokens=[("[CLS]", 2), ("[SEP]", 3)]
    )
    names = {"pad_token": "[PAD]", "unk_token": "[UNK]", "cls_token": "[CLS]", "sep_token": "[SEP]"}
    return hf.PreTrainedTokenizerFast(tokenizer_object=tokenizer, model_max_length=model_max_length, **names)


def small_classifier(**changes) -> hf.BertForSequenceClassification:
    torch.manual_seed(0)
    sizes = {"hidden_size": 24, "num_hidden_layers": 2, "num_attention_heads": 3, "intermediate_size": 29}
    config = hf.BertConfig(
        **sizes, vocab_size=len(WORDS), pad_token_id=0, max_position_embeddings=16, initializer_range=0.4,
        **{"num_labels": 3, "id2label": LABELS, "label2id": {name: n for n, name in LABELS.items()}, **changes},
    )  # fmt: skip
    return hf.BertForSequenceClassification(config).eval()
