"""Tiny random models of every architecture that the conversion promises to support, from their config classes alone."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import transformers as hf
from torch import Tensor

VOCABULARY = 61
BATCH, LENGTH, IMAGE = 2, 7, 12
TEXT = {"vocab_size": VOCABULARY, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
SIZES = {"hidden_size": 24, "num_hidden_layers": 2, "num_attention_heads": 3, "intermediate_size": 20}
GQA = {
    "hidden_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 20,
}
EAGER = ("eager",)
FALCON = {"hidden_size": 24, "num_hidden_layers": 2, "num_attention_heads": 4, "ffn_hidden_size": 20}
VISION = {**SIZES, "image_size": IMAGE, "patch_size": 4}
ENCODER_DECODER = {
    "d_model": 24, "encoder_layers": 2, "decoder_layers": 2, "encoder_attention_heads": 3, "decoder_attention_heads": 3,
    "encoder_ffn_dim": 20, "decoder_ffn_dim": 20,
}  # fmt: skip


def _ids(seed: int = 0) -> Tensor:
    return torch.randint(3, VOCABULARY, (BATCH, LENGTH), generator=torch.Generator().manual_seed(seed))


def _floats(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(1))


def _text(padded: bool, left: bool = False) -> dict[str, Tensor]:
    if not padded:
        return {"input_ids": _ids()}
    mask = torch.ones(BATCH, LENGTH, dtype=torch.long)
    if left:
        mask[0, :3] = 0
    else:
        mask[0, -3:] = 0
    return {"input_ids": _ids(), "attention_mask": mask}


def _seq2seq(padded: bool) -> dict[str, Tensor]:
    return {**_text(padded), "decoder_input_ids": _ids(1)[:, :5]}


def _image(padded: bool) -> dict[str, Tensor]:
    return {"pixel_values": _floats(BATCH, 3, IMAGE, IMAGE)}


def _image_and_text(padded: bool) -> dict[str, Tensor]:
    return {**_text(padded), **_image(padded)}


def _audio(padded: bool) -> dict[str, Tensor]:
    mask = torch.ones(BATCH, 320, dtype=torch.long)
    if padded:
        mask[0, 200:] = 0
    return {"input_values": _floats(BATCH, 320), "attention_mask": mask}


def _whisper(padded: bool) -> dict[str, Tensor]:
    return {"input_features": _floats(BATCH, 8, 20), "decoder_input_ids": _ids(1)[:, :5]}


def _series(padded: bool) -> dict[str, Tensor]:
    return {"past_values": _floats(BATCH, 16, 3)}


@dataclass(frozen=True)
class Architecture:
    """How to build a tiny model and what to feed it.

    Attributes:
        build: Makes the model.
        inputs: Its keyword arguments, with padding or without.
        calls: Attention calls of one forward pass.
        modules: Attention modules; fewer than calls where layers are shared.
        generates: Whether it is tested with `generate`.
        can_pad: Whether padded inputs exist for it.
        static_cache: Whether the library can generate with one.
        implementations: What the library allows for it, its default first.
    """

    build: Callable[[], hf.PreTrainedModel]
    inputs: Callable[[bool], dict[str, Tensor]]
    calls: int
    modules: int
    generates: bool = False
    can_pad: bool = True
    static_cache: bool = True
    implementations: tuple[str, ...] = ("sdpa", "eager")


def _encoder(kind: str, **extra: Any) -> Callable[[], hf.PreTrainedModel]:
    config = getattr(hf, f"{kind}Config")
    return lambda: getattr(hf, f"{kind}ForSequenceClassification")(config(**{**TEXT, **SIZES, **extra}))


def _decoder(kind: str, **options: Any) -> Callable[[], hf.PreTrainedModel]:
    return lambda: hf.AutoModelForCausalLM.from_config(getattr(hf, f"{kind}Config")(**{**TEXT, **options}))


def _clip() -> hf.PreTrainedModel:
    text = {**TEXT, **SIZES, "max_position_embeddings": 16}
    return hf.CLIPModel(hf.CLIPConfig(text_config=text, vision_config=VISION, projection_dim=10))


def _swin() -> hf.PreTrainedModel:
    config = hf.SwinConfig(
        image_size=16, patch_size=2, embed_dim=12, depths=[2], num_heads=[3], window_size=4, mlp_ratio=2.0
    )
    return hf.SwinForImageClassification(config)


def _wav2vec2() -> hf.PreTrainedModel:
    config = hf.Wav2Vec2Config(
        **SIZES, vocab_size=VOCABULARY, conv_dim=(8, 8), conv_stride=(4, 4), conv_kernel=(8, 4), feat_extract_norm="layer",
        num_feat_extract_layers=2, num_conv_pos_embeddings=8, num_conv_pos_embedding_groups=2, apply_spec_augment=False,
        layerdrop=0.0,
    )  # fmt: skip
    return hf.Wav2Vec2Model(config)


def _t5() -> hf.PreTrainedModel:
    config = hf.T5Config(
        vocab_size=VOCABULARY, d_model=24, d_kv=8, d_ff=20, num_layers=2, num_heads=3, decoder_start_token_id=0
    )
    return hf.T5ForConditionalGeneration(config)


def _bart() -> hf.PreTrainedModel:
    options = {"max_position_embeddings": 32, "decoder_start_token_id": 2, "forced_eos_token_id": None}
    return hf.BartForConditionalGeneration(hf.BartConfig(**TEXT, **ENCODER_DECODER, **options))


def _whisper_model() -> hf.PreTrainedModel:
    options = {"num_mel_bins": 8, "max_source_positions": 10, "max_target_positions": 12, "decoder_start_token_id": 1}
    model = hf.WhisperForConditionalGeneration(hf.WhisperConfig(**TEXT, **ENCODER_DECODER, **options))
    # what the generation config of a real checkpoint tells its own `generate`
    model.generation_config.is_multilingual, model.generation_config.no_timestamps_token_id = False, VOCABULARY - 1
    return model


def _patchtst() -> hf.PreTrainedModel:
    config = hf.PatchTSTConfig(
        num_input_channels=3, context_length=16, patch_length=4, patch_stride=4, num_hidden_layers=2, d_model=24,
        num_attention_heads=3, ffn_dim=20, prediction_length=2,
    )  # fmt: skip
    return hf.PatchTSTModel(config)


def _swin_image(padded: bool) -> dict[str, Tensor]:
    return {"pixel_values": _floats(BATCH, 3, 16, 16)}


ARCHITECTURES: dict[str, Architecture] = {
    "albert": Architecture(_encoder("Albert", embedding_size=10, num_hidden_layers=3), _text, 3, 1),
    "bert": Architecture(_encoder("Bert"), _text, 2, 2),
    "roberta": Architecture(_encoder("Roberta"), _text, 2, 2),
    "distilbert": Architecture(_encoder("DistilBert", dim=24, n_layers=2, n_heads=3, hidden_dim=20), _text, 2, 2),
    "electra": Architecture(_encoder("Electra", embedding_size=10), _text, 2, 2),
    "modernbert": Architecture(
        _encoder("ModernBert", global_attn_every_n_layers=2, local_attention=4, cls_token_id=1, sep_token_id=2), _text, 2, 2
    ),
    "deberta_v2": Architecture(
        _encoder(
            "DebertaV2",
            relative_attention=True,
            pos_att_type=["p2c", "c2p"],
            position_buckets=5,
            share_att_key=True,
            norm_rel_ebd="layer_norm",
            conv_kernel_size=3,
        ),
        _text,
        2,
        2,
        implementations=EAGER,
    ),
    "mpnet": Architecture(_encoder("MPNet"), _text, 2, 2, implementations=EAGER),
    "vit": Architecture(lambda: hf.ViTForImageClassification(hf.ViTConfig(**VISION)), _image, 2, 2, can_pad=False),
    "dinov2": Architecture(lambda: hf.Dinov2ForImageClassification(hf.Dinov2Config(**VISION)), _image, 2, 2, can_pad=False),
    "clip": Architecture(_clip, _image_and_text, 4, 4),
    "swin": Architecture(_swin, _swin_image, 2, 2, can_pad=False),
    "gpt2": Architecture(_decoder("GPT2", n_embd=24, n_layer=2, n_head=3, n_positions=32), _text, 2, 2, generates=True),
    "opt": Architecture(
        _decoder("OPT", hidden_size=24, word_embed_proj_dim=24, ffn_dim=20, num_hidden_layers=2, num_attention_heads=3),
        _text,
        2,
        2,
        generates=True,
    ),
    "llama": Architecture(_decoder("Llama", **GQA), _text, 2, 2, generates=True),
    "mistral": Architecture(_decoder("Mistral", **GQA, sliding_window=4), _text, 2, 2, generates=True),
    "qwen3": Architecture(_decoder("Qwen3", **GQA, head_dim=6), _text, 2, 2, generates=True),
    "gemma2": Architecture(
        _decoder("Gemma2", **GQA, head_dim=6, sliding_window=4, attn_logit_softcapping=2.0), _text, 2, 2, generates=True
    ),
    "gptj": Architecture(
        _decoder("GPTJ", n_embd=24, n_layer=2, n_head=3, n_positions=32, n_inner=20, rotary_dim=4),
        _text,
        2,
        2,
        generates=True,
        implementations=EAGER,
    ),
    "bloom": Architecture(
        _decoder("Bloom", hidden_size=24, n_layer=2, n_head=3), _text, 2, 2, generates=True, implementations=EAGER
    ),
    "falcon": Architecture(_decoder("Falcon", **FALCON, multi_query=True), _text, 2, 2, generates=True),
    "falcon, new architecture": Architecture(
        _decoder("Falcon", **FALCON, new_decoder_architecture=True, num_kv_heads=2), _text, 2, 2, generates=True
    ),
    "falcon, ALiBi": Architecture(
        _decoder("Falcon", **FALCON, alibi=True, multi_query=False, bias=True),
        _text,
        2,
        2,
        generates=True,
        static_cache=False,
    ),
    "t5": Architecture(_t5, _seq2seq, 6, 6, generates=True),
    "bart": Architecture(_bart, _seq2seq, 6, 6, generates=True),
    "whisper": Architecture(_whisper_model, _whisper, 6, 6, generates=True, can_pad=False),
    "wav2vec2": Architecture(_wav2vec2, _audio, 2, 2),
    "patchtst": Architecture(_patchtst, _series, 2, 2, can_pad=False),
}


def build(name: str, implementation: str | None = None, spread: float = 0.3) -> hf.PreTrainedModel:
    """Return a tiny model with fixed weights, larger than the usual initialization so that attention is not uniform."""
    torch.manual_seed(7)
    model = ARCHITECTURES[name].build()
    implementation = implementation or ARCHITECTURES[name].implementations[0]
    model.set_attn_implementation(implementation)
    # T5's two stacks hold copies of the config that the call above does not reach
    for module in model.modules():
        if hasattr(module, "config"):
            module.config._attn_implementation_internal = implementation
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.copy_(spread * torch.randn(parameter.shape, generator=generator))
    return model.eval()


def run(model: hf.PreTrainedModel, inputs: dict[str, Tensor]) -> Tensor:
    """Return the main output of a forward pass, as one float tensor."""
    return main_output(model(**inputs))


def main_output(output: Any) -> Tensor:
    """Return logits, or what a model without logits has instead."""
    for name in ("logits", "logits_per_image", "last_hidden_state"):
        if name in output and isinstance(output[name], Tensor):
            return output[name]
    raise AssertionError(f"no known output among {list(output)}")
