"""Small random models of several architectures, in float64, with inputs that have padding."""

import torch
import torch.nn.functional as F
import transformers as hf
from torch import nn

B, N, VOCABULARY, CLASSES = 3, 7, 61, 3
SMALL = {
    "hidden_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 3,
    "intermediate_size": 29,
    "vocab_size": VOCABULARY,
    "max_position_embeddings": 32,
    "num_labels": CLASSES,
    "pad_token_id": 0,
    "initializer_range": 0.4,
}


class OwnAttention(nn.Module):
    """Hand-written attention around torch's function."""

    def __init__(self) -> None:
        super().__init__()
        self.head_dim = 8
        self.project = nn.Linear(24, 72)

    def forward(self, x):
        q, k, v = self.project(x).unflatten(-1, (3, 3, 8)).permute(2, 0, 3, 1, 4)
        return F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)


class OwnModel(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.head = OwnAttention(), OwnAttention(), nn.Linear(24, CLASSES)

    def forward(self, x):
        x = x + self.first(x)
        return self.head((x + self.second(x)).mean(dim=1))


class Encoder(nn.Module):
    """torch's encoder, whose layers have a fused path in eval mode."""

    def __init__(self) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(24, 3, 29, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Linear(24, CLASSES)

    def forward(self, x, padding):
        return self.head(self.encoder(x, src_key_padding_mask=padding)[:, 0])


def _bert(implementation):
    return hf.BertForSequenceClassification(hf.BertConfig(**SMALL, attn_implementation=implementation))


def _albert():
    return hf.AlbertForSequenceClassification(hf.AlbertConfig(**{**SMALL, "num_hidden_layers": 3}, embedding_size=12))


def _deberta():
    options = {
        "relative_attention": True,
        "pos_att_type": ["p2c", "c2p"],
        "position_buckets": 8,
        "max_relative_positions": 16,
    }
    return hf.DebertaV2ForSequenceClassification(hf.DebertaV2Config(**SMALL, **options))


def _llama():
    # two key heads for four query heads
    options = {**SMALL, "hidden_size": 32, "num_attention_heads": 4, "num_key_value_heads": 2}
    return hf.LlamaForSequenceClassification(hf.LlamaConfig(**options))


def _gemma():
    # soft cap (eager) and sliding window
    options = {**SMALL, "num_key_value_heads": 1, "head_dim": 8, "sliding_window": 3, "attn_logit_softcapping": 2.0}
    return hf.Gemma2ForSequenceClassification(hf.Gemma2Config(**options, attn_implementation="eager"))


def _bart():
    options = {"encoder_layers": 1, "decoder_layers": 1, "encoder_attention_heads": 3, "decoder_attention_heads": 3}
    options |= {"encoder_ffn_dim": 29, "decoder_ffn_dim": 29, "d_model": 24, "init_std": 0.4, "num_labels": CLASSES}
    options |= {"vocab_size": VOCABULARY, "max_position_embeddings": 32, "pad_token_id": 0, "eos_token_id": 2}
    return hf.BartForSequenceClassification(hf.BartConfig(**options))


BUILD = {
    "bert-sdpa": lambda: _bert("sdpa"),
    "bert-eager": lambda: _bert("eager"),
    "albert": _albert,
    "deberta-v2": _deberta,
    "llama-grouped": _llama,
    "gemma-window": _gemma,
    "bart": _bart,
    "own-sdpa": OwnModel,
    "torch-encoder": Encoder,
}


def tokens():
    """Return ids and mask of a batch whose second text is shorter; every text ends with token 2."""
    ids = torch.randint(3, VOCABULARY, (B, N))
    mask = torch.ones(B, N, dtype=torch.long)
    ids[:, -1] = 2
    ids[1, 4], ids[1, 5:], mask[1, 5:] = 2, 0, 0
    return {"input_ids": ids, "attention_mask": mask}


def build(name):
    """Return a model in eval mode and one batch."""
    torch.manual_seed(3)
    model = BUILD[name]().double().eval()
    if name == "own-sdpa":
        return model, [torch.randn(B, N, 24, dtype=torch.float64)]
    if name == "torch-encoder":
        padding = torch.zeros(B, N, dtype=torch.bool)
        padding[1, 5:] = True
        return model, [torch.randn(B, N, 24, dtype=torch.float64), padding]
    return model, tokens()


def logits_of(model, inputs):
    outputs = model(**inputs) if isinstance(inputs, dict) else model(*inputs)
    return outputs if isinstance(outputs, torch.Tensor) else outputs.logits
