"""Tiny random models of transformers' whole registry, built from default configs with every size made small.

Sizes are known by their names (`hidden_size`, `d_model`, …) wherever they stand in a config, and inputs by the names of
`forward`'s arguments; only a few types need more. What cannot be built or run this way is reported with the reason.
"""

import importlib
import inspect
from typing import Any

import torch
import transformers as hf
from torch import Tensor
from transformers.models.auto.configuration_auto import CONFIG_MAPPING, CONFIG_MAPPING_NAMES
from transformers.models.auto.modeling_auto import MODEL_MAPPING_NAMES

BATCH, LENGTH, WIDTH, LAYERS, HEADS, IMAGE, PATCH, VOCABULARY = 2, 7, 32, 2, 4, 32, 8, 61
MOST_PARAMETERS = 30_000_000

_NAMES: tuple[tuple[int, str], ...] = (
    (WIDTH, """
        hidden_size d_model n_embd embed_dim dim emb_dim hidden_dim encoder_hidden_dim decoder_hidden_size
        word_embed_proj_dim projection_dim embedding_size output_dim text_hidden_size backbone_hidden_size decoder_dim
        lru_width attention_hidden_size cross_attention_hidden_size intermediate_size ffn_dim d_ff n_inner d_inner
        ffn_hidden_size encoder_ffn_dim decoder_ffn_dim mlp_dim dim_feedforward moe_intermediate_size
        shared_expert_intermediate_size intermediate_size_mlp out_hidden_size decoder_intermediate_size
        encoder_hidden_size projector_hidden_size expert_ffn_hidden_size moe_shared_expert_intermediate_size
        dense_intermediate_size feature_size embedding_dim output_hidden_size entity_emb_size encoder_feedforward_dim
        mask_feature_size
    """),
    (LAYERS, """
        num_hidden_layers n_layer n_layers num_layers encoder_layers decoder_layers num_encoder_layers
        num_decoder_layers encoder_num_hidden_layers decoder_num_hidden_layers num_blocks depth decoder_num_layers
        num_attention_layers num_dense_layers num_global_layers decoder_depth num_hidden_groups speech_encoder_layers
        t2u_encoder_layers t2u_decoder_layers l_layers r_layers x_layers
    """),
    (HEADS, """
        num_attention_heads n_head n_heads num_heads encoder_attention_heads decoder_attention_heads
        encoder_num_attention_heads decoder_num_attention_heads attention_heads speech_encoder_attention_heads
        t2u_encoder_attention_heads t2u_decoder_attention_heads resampler_n_heads num_cross_attention_heads
        num_self_attention_heads linear_num_value_heads linear_num_key_heads num_experts num_local_experts
        n_routed_experts moe_num_experts num_codebooks
    """),
    (2, """
        num_key_value_heads num_kv_heads encoder_num_key_value_heads decoder_num_key_value_heads num_experts_per_tok
        num_experts_per_token moe_topk moe_k n_shared_experts num_shared_experts n_group topk_group
    """),
    (8, """
        head_dim kv_channels d_kv attention_head_size qk_nope_head_dim qk_rope_head_dim v_head_dim kv_lora_rank
        q_lora_rank dim_head d_head attention_head_dim num_mel_bins linear_key_head_dim linear_value_head_dim
        num_latents num_query_tokens num_queries d_latents rotary_dim index_head_dim
    """),
    (PATCH, "patch_size"),
    (IMAGE, "image_size img_size input_size"),
    (VOCABULARY, """
        vocab_size text_vocab_size vocab_size_per_layer_input src_vocab_size tgt_vocab_size entity_vocab_size
        pronunciation_vocab_size shape_vocab_size
    """),
    (64, """
        max_position_embeddings n_positions max_seq_len n_ctx max_length max_source_positions max_target_positions
        max_2d_position_embeddings
    """),
    (4, "window_size sliding_window num_frames attention_window"),
)  # fmt: skip
SMALL = {name: size for size, names in _NAMES for name in names.split()}


# what a size alone cannot say: layers of both kinds, sizes that must add up, defaults that are missing
_MIXED = {"layer_types": ["linear_attention", "full_attention"]}
_THREE_AXES = {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 1, 1]}}
SPECIAL: dict[str, dict[str, Any]] = {
    "deepseek_v2": {"num_experts_per_tok": 2},
    "gpt_neo": {"attention_types": [[["global", "local"], 1]]},
    "jamba": {"attn_layer_period": 2, "attn_layer_offset": 1},
    "layoutlmv3": {"coordinate_size": 6, "shape_size": 4},
    "lilt": {"hidden_size": 24},
    "nemotron": {"num_key_value_heads": 2, "head_dim": 8},
    "recurrent_gemma": {"block_types": ["recurrent", "attention"]},
    "segformer": {"image_size": 64},
    "swin": {"image_size": 64, "depths": [2, 2], "num_heads": [4, 4]},
    "xmod": {"languages": ["en_XX"], "default_language": "en_XX"},
    **dict.fromkeys(("qwen3_next", "qwen3_5_text", "qwen3_5_moe_text", "qwen4_exp_text"), _MIXED),
    **dict.fromkeys(
        ("qwen2_vl_text", "qwen2_5_vl_text", "qwen2_5_omni_text", "glm4v_text", "glm_image_text", "glm_ocr_text"),
        _THREE_AXES,
    ),
}


def tiny_config(config_class: type) -> Any:
    """Return a config whose sizes are small, sub-configs included."""
    default = config_class()
    options: dict[str, Any] = {}
    heads = getattr(default, "num_attention_heads", None)
    for name, value in vars(default).items():
        if isinstance(value, hf.PreTrainedConfig):
            options[name] = tiny_config(type(value))
        elif "_heads" in name and "k" in name and heads is not None and value == heads:
            # whose default has no groups of heads may not allow them
            options[name] = HEADS
        elif name in SMALL and isinstance(value, int) and not isinstance(value, bool):
            options[name] = min(value, SMALL[name]) if value > 0 else value
        elif name in SMALL and isinstance(value, list | tuple) and value and all(isinstance(v, int) for v in value):
            options[name] = type(value)(SMALL[name] for _ in value)
        elif name == "rope_parameters" and isinstance(value, dict) and "mrope_section" in value:
            half = int(8 * value.get("partial_rotary_factor", 1.0)) // 2
            options[name] = {**value, "mrope_section": [half - 2 * (half // 3), half // 3, half // 3]}
        elif name == "vocab_size" and value is None:
            options[name] = VOCABULARY
        elif name.endswith("_token_id") and isinstance(value, int) and value >= VOCABULARY:
            # images and sounds are marked by ids beyond the words; every mark gets one of its own
            options[name] = 3 + sum(map(ord, name)) % 50
    if "vocab_size" in vars(default):
        options |= {
            name: i for i, name in enumerate(("pad_token_id", "bos_token_id", "eos_token_id")) if hasattr(default, name)
        }
    return config_class(**{**options, **SPECIAL.get(default.model_type, {})})


MODEL_TYPES = sorted(CONFIG_MAPPING_NAMES)


def model_class(model_type: str) -> type[hf.PreTrainedModel] | None:
    """Return the barest model of a type: the one of `AutoModel`, or the first of its file that takes its config."""
    config_class = CONFIG_MAPPING[model_type]
    file = importlib.import_module(config_class.__module__.replace(".configuration_", ".modeling_"))
    names = MODEL_MAPPING_NAMES.get(model_type, ())
    for name in (names,) if isinstance(names, str) else names:
        if hasattr(hf, name):
            return getattr(hf, name)
    found = [
        value
        for name, value in vars(file).items()
        if inspect.isclass(value)
        and issubclass(value, hf.PreTrainedModel)
        and value.__module__ == file.__name__
        and value.config_class is config_class
        and not name.endswith("PreTrainedModel")
    ]
    return min(found, key=lambda value: (not value.__name__.endswith("Model"), len(value.__name__)), default=None)


def build(model_type: str, implementation: str) -> hf.PreTrainedModel:
    """Return a tiny random model of a type, with weights larger than usual so that attention is not uniform."""
    kind = model_class(model_type)
    if kind is None:
        raise LookupError("no model class takes its config")
    config = tiny_config(CONFIG_MAPPING[model_type])
    with torch.device("meta"):
        size = sum(p.numel() for p in kind._from_config(config, attn_implementation=implementation).parameters())
    if size > MOST_PARAMETERS:
        raise LookupError(f"it has {size:,} parameters with small sizes")
    config = tiny_config(CONFIG_MAPPING[model_type])
    torch.manual_seed(7)
    model = kind._from_config(config, attn_implementation=implementation)
    with torch.no_grad():
        for parameter in model.parameters():
            # zeros as well: a factor of the keys would make them all alike (Zaya)
            if parameter.is_floating_point() and (parameter.ndim > 1 or not parameter.any()):
                parameter.normal_(std=0.2)
    return model.eval()


def inputs(model: hf.PreTrainedModel) -> dict[str, Tensor]:
    """Return tensors for the arguments of `forward` that a model needs, chosen by their names."""
    generator = torch.Generator().manual_seed(1)
    names = inspect.signature(model.forward).parameters
    ids = torch.randint(3, VOCABULARY, (BATCH, LENGTH), generator=generator)
    config = model.config
    vision = getattr(config, "vision_config", None) or config
    channels = getattr(vision, "num_channels", getattr(vision, "in_channels", 3))
    side = getattr(vision, "image_size", IMAGE)
    side = (side, side) if isinstance(side, int) else tuple(side)[-2:]
    found: dict[str, Tensor] = {}
    if "grid_thw" in names:
        grid = torch.tensor([[1, 4, 4]] * BATCH)
        patch = vision.patch_size if isinstance(vision.patch_size, int) else vision.patch_size[0]
        features = channels * getattr(vision, "temporal_patch_size", 1) * patch**2
        first = next(name for name in names if name != "grid_thw")
        return {first: torch.randn(BATCH * 16, features, generator=generator), "grid_thw": grid}
    if "past_values" in names:
        shape = (BATCH, getattr(config, "context_length", 16), getattr(config, "num_input_channels", 1))
        return {"past_values": torch.randn(*shape, generator=generator)}
    if "input_ids" in names and model.main_input_name != "pixel_values":
        found["input_ids"] = ids
    if "pixel_values" in names and (
        model.main_input_name == "pixel_values" or "return_loss" in names or "pixel_mask" in names or not found
    ):
        frames = (vision.num_frames,) if hasattr(vision, "num_frames") else ()
        found["pixel_values"] = torch.randn(BATCH, *frames, channels, *side, generator=generator)
        if "input_ids" in names:
            found["input_ids"] = ids
    if "decoder_input_ids" in names:
        found["decoder_input_ids"] = ids[:, :5]
    if "bbox" in names:
        found["bbox"] = torch.zeros(BATCH, LENGTH, 4, dtype=torch.long)
    if "input_features" in names and not found.get("input_ids", torch.empty(0)).numel():
        bins = getattr(config, "num_mel_bins", getattr(config, "feature_size", 8))
        length = 2 * getattr(config, "max_source_positions", 32)
        last = getattr(config, "input_feat_per_channel", getattr(config, "feature_projection_input_dim", None))
        shape = (BATCH, bins, length) if last is None else (BATCH, IMAGE, last)
        found["input_features"] = torch.randn(*shape, generator=generator)
    if "input_values" in names and not found:
        shape = (config.max_length, config.num_mel_bins) if hasattr(config, "num_mel_bins") else (2000,)
        found["input_values"] = torch.randn(BATCH, *shape, generator=generator)
    if not found and "hidden_states" in names:
        found["hidden_states"] = torch.randn(BATCH, LENGTH, WIDTH, generator=generator)
    return found
