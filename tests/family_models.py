"""A tiny random checkpoint of each model family, of its real class, as transformers saves it."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import transformers
from published import meaning
from safetensors.torch import load_file, save_file
from tiny import tiny_tokenizer

LAYERS = 4
COMMON = dict(
    vocab_size=16,
    hidden_size=64,
    intermediate_size=128,
    num_hidden_layers=LAYERS,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=16,
    max_position_embeddings=256,
    pad_token_id=0,
    bos_token_id=1,
    eos_token_id=2,
)
DELTA = dict(
    linear_key_head_dim=16,
    linear_value_head_dim=16,
    linear_num_key_heads=2,
    linear_num_value_heads=4,
)
SIGLIP = dict(
    hidden_size=32, intermediate_size=48, num_attention_heads=2, num_hidden_layers=1,
    image_size=28, patch_size=14,
)  # fmt: skip
GEMMA4 = dict(
    sliding_window=4,
    final_logit_softcapping=3.0,
    global_head_dim=16,
    hidden_size_per_layer_input=16,
    vocab_size_per_layer_input=16,
    num_kv_shared_layers=2,
    layer_types=["sliding_attention", "full_attention"] * 2,
)


def _text(kind: Any, **changes: Any) -> Any:
    return transformers.AutoModelForCausalLM.from_config(kind(**{**COMMON, **changes}))


def _qwen3_5() -> Any:
    text = transformers.Qwen3_5TextConfig(**COMMON, **DELTA).to_dict()
    vision = dict(depth=1, hidden_size=32, intermediate_size=48, num_heads=2, out_hidden_size=64)
    config = transformers.Qwen3_5Config(
        text_config=text, vision_config=vision, tie_word_embeddings=False
    )
    return transformers.Qwen3_5ForConditionalGeneration(config)


def _gemma3() -> Any:
    text = dict(COMMON, sliding_window=4)
    config = transformers.Gemma3Config(
        text_config=text, vision_config=dict(SIGLIP), mm_tokens_per_image=4
    )
    return transformers.Gemma3ForConditionalGeneration(config)


def _gemma4() -> Any:
    vision = dict(
        hidden_size=32, intermediate_size=48, num_hidden_layers=1, num_attention_heads=2,
        num_key_value_heads=2, head_dim=16, patch_size=4,
    )  # fmt: skip
    config = transformers.Gemma4Config(text_config=dict(COMMON, **GEMMA4), vision_config=vision)
    return transformers.Gemma4ForConditionalGeneration(config)


def _ministral3() -> Any:
    text = transformers.Ministral3Config(**COMMON).to_dict()
    vision = dict(
        hidden_size=32, intermediate_size=48, num_hidden_layers=1, num_attention_heads=2,
        head_dim=16, image_size=28, patch_size=14, model_type="pixtral",
    )  # fmt: skip
    config = transformers.Mistral3Config(
        text_config=text, vision_config=vision, tie_word_embeddings=False
    )
    return transformers.Mistral3ForConditionalGeneration(config)


# First class: what people train. The later ones are here for what is odd about them.
FAMILIES: dict[str, Callable[[], Any]] = {
    "llama": lambda: _text(transformers.LlamaConfig, rope_parameters=LLAMA3_ROPE),
    "qwen2": lambda: _text(transformers.Qwen2Config, tie_word_embeddings=True),
    "qwen3": lambda: _text(transformers.Qwen3Config),
    "qwen3_5": _qwen3_5,
    "qwen3_5_text": lambda: _text(transformers.Qwen3_5TextConfig, **DELTA),
    "gemma3": _gemma3,
    "gemma3_text": lambda: _text(transformers.Gemma3TextConfig, sliding_window=4),
    "gemma4": _gemma4,
    "gemma4_text": lambda: _text(transformers.Gemma4TextConfig, **GEMMA4),
    "mistral": lambda: _text(transformers.MistralConfig, sliding_window=4),
    "ministral3": _ministral3,
    "phi3": lambda: _text(transformers.Phi3Config),
    "gemma2": lambda: _text(
        transformers.Gemma2Config,
        sliding_window=4,
        attn_logit_softcapping=2.0,
        final_logit_softcapping=3.0,
    ),
    "granite": lambda: _text(transformers.GraniteConfig, logits_scaling=4.0),
}
TOWERS = ("qwen3_5", "gemma3", "gemma4", "ministral3")
LLAMA3_ROPE = dict(
    rope_type="llama3", rope_theta=500000.0, factor=8.0, low_freq_factor=1.0,
    high_freq_factor=4.0, original_max_position_embeddings=64,
)  # fmt: skip


def write_family(name: str, folder: Path, dtype: torch.dtype = torch.float32) -> Path:
    """A checkpoint of the family with its tokenizer; Qwen3.5's with an MTP head, as on the Hub."""
    torch.manual_seed(1)
    model = FAMILIES[name]()
    fill(model)
    model.to(dtype).save_pretrained(folder)
    tiny_tokenizer().save_pretrained(folder)
    if name == "qwen3_5":
        add(folder, {"mtp.fc.weight": torch.ones(64, 128), "mtp.norm.weight": torch.ones(64)})
    return folder


def unpacked(folder: Path, out: Path) -> Path:
    """The NVFP4 checkpoint in fp32, by compressed-tensors' unpacking: what others' code loads."""
    tensors = load_file(folder / "model.safetensors")
    for name in [n.removesuffix(".weight_packed") for n in tensors if n.endswith("_packed")]:
        leaves = ("weight_packed", "weight_scale", "weight_global_scale")
        tensors[f"{name}.weight"] = meaning(
            {leaf: tensors.pop(f"{name}.{leaf}") for leaf in leaves}
        )
    out.mkdir()
    save_file(tensors, out / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    del config["quantization_config"]
    (out / "config.json").write_text(json.dumps(config))
    return out


def add(folder: Path, tensors: dict[str, torch.Tensor]) -> None:
    file = folder / "model.safetensors"
    save_file({**load_file(file), **tensors}, file, metadata={"format": "pt"})


def fill(model: Any) -> None:
    """Weights larger than the default, so that attention is not uniform, norms that differ, and
    recurrences that decay slowly enough for the past to matter."""
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            if name.endswith("A_log"):
                parameter.copy_(torch.linspace(-4, 0, parameter.numel()))
            elif parameter.ndim > 1:
                parameter.copy_(0.15 * noise)
            else:
                parameter.add_(0.1 * noise)
