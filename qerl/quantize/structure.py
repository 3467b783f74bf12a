"""What a checkpoint is made of, before any weight is read: configuration, skeleton, names.

The skeleton is the checkpoint's own class (`architectures` in config.json), on the meta device, so
that names are those of the files; a vision tower is part of it and stays as it is.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from qerl.errors import QerlError
from qerl.quantize import nvfp4

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedModel

    from qerl.quantize.shards import Tensors


FAMILIES = "Llama, Qwen, Gemma, Mistral, Phi"


def read_config(src: Path) -> dict[str, Any]:
    """config.json; QerlError if it is missing, no JSON, or of a quantized model."""
    path = src / "config.json"
    if not path.is_file():
        raise QerlError(
            f"model: '{src}' has no config.json; name a transformers model folder or a .gguf file"
        )
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise QerlError(f"model: '{path}' is not JSON ({error}); download it again") from error
    quantization = config.get("quantization_config")
    if quantization or (src / "hf_quant_config.json").is_file():
        kind = (quantization or {}).get("quant_method", "an unnamed method")
        raise QerlError(
            f"model: '{src}' is quantized already ({kind}); start from the 16-bit checkpoint"
        )
    return config


def skeleton(src: Path, code: bool = False, **where: str) -> PreTrainedModel:
    """The model without its weights: structure alone says what is a linear layer.

    code: run the Python code that comes with it. where: `gguf_file` for a GGUF file in `src`.
    Raises QerlError for a model that transformers does not know, one that needs code of its own
    among them, one that does not write text with a decoder alone, and for experts stored as 3-D
    tensors.
    """
    import torch
    from transformers import AutoConfig

    try:
        config = AutoConfig.from_pretrained(src, trust_remote_code=code, **where)
        with torch.device("meta"):
            model = architecture(config)(config)
    except (OSError, ValueError, KeyError) as error:
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
        if "custom code" in reason or "trust_remote_code" in str(error):
            raise QerlError(
                f"model: '{src}' needs Python code that comes with it, which is not run unless you "
                "ask for it: add --trust-remote-code (trust_remote_code: true in a recipe) if you "
                "trust its authors"
            ) from error
        raise QerlError(
            f"model: transformers cannot build '{src}' ({reason}); name a causal language model"
        ) from error
    for name, tensor in model.named_parameters():
        if tensor.dim() == 3 and "expert" in name:
            raise QerlError(
                f"model: {type(model).__name__} holds all experts in one tensor ('{name}'), which "
                "cannot be quantized yet; name a dense model"
            )
    return model


def architecture(config: PretrainedConfig) -> type[PreTrainedModel]:
    """The checkpoint's own class, as its config.json names it, where that writes text.

    Raises QerlError naming the architecture for an encoder-decoder, for a class that scores or
    embeds text instead of writing it, and for one that transformers does not have.
    """
    import transformers
    from transformers import PreTrainedModel

    if is_foreign(config):
        return foreign_class(config)
    named = list(config.architectures or [])
    if not named:
        named = [_usual(config)]
    shown = ", ".join(named)
    if getattr(config, "is_encoder_decoder", False):
        raise QerlError(
            f"model: {shown} is an encoder-decoder, and prompts are packed with their completions "
            f"through one decoder; name a decoder-only model ({FAMILIES})"
        )
    found = [getattr(transformers, name, None) for name in named]
    known = [kind for kind in found if kind is not None]
    if not known:
        raise QerlError(
            f"model: transformers {transformers.__version__} has no {shown}; name a model of a "
            f"class that it has ({FAMILIES}), or install a newer transformers"
        )
    for kind in known:
        if isinstance(kind, type) and issubclass(kind, PreTrainedModel) and kind.can_generate():
            return kind
    raise QerlError(
        f"model: {shown} does not write text; name a causal language model, such as the one it "
        "was made from"
    )


def _usual(config: PretrainedConfig) -> str:
    """transformers' choice for a config.json that names no architecture."""
    from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING

    mappings: tuple[Any, ...] = (
        MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING,
        MODEL_FOR_CAUSAL_LM_MAPPING,
    )
    for mapping in mappings:
        if type(config) in mapping:
            return mapping[type(config)].__name__
    raise QerlError(
        f"model: transformers has no causal language model for '{config.model_type}'; name one "
        f"that writes text ({FAMILIES})"
    )


def is_foreign(config: PretrainedConfig) -> bool:
    """Whether a configuration's class is code that came with the model, not transformers' own."""
    return type(config).__module__.startswith("transformers_modules.")


def foreign_class(config: PretrainedConfig) -> Any:
    """The causal language model that comes with such a configuration; QerlError without one."""
    from transformers.dynamic_module_utils import get_class_from_dynamic_module

    where = str(config.name_or_path)
    found = (getattr(config, "auto_map", None) or {}).get("AutoModelForCausalLM")
    if found is None:
        raise QerlError(
            f"model: the code that comes with '{where}' names no AutoModelForCausalLM in its "
            "config.json's auto_map; name another model"
        )
    return get_class_from_dynamic_module(found, where)


def file_names(
    model: PreTrainedModel, names: Iterable[str], *, strict: bool = False
) -> dict[str, str]:
    """The model's tensor names -> those in the files; call it while the model has all its towers.

    They differ where transformers renames as it loads, such as Gemma 3's
    `language_model.model.layers` in the files for `model.language_model.layers`. Tensors that it
    would split or join are left out, or (strict) a QerlError that names the first.
    """
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import WeightConverter, WeightRenaming, rename_source_key

    wanted = dict(model.state_dict())
    stored = sorted(names)
    found = {name: name for name in stored if name in wanted}
    transforms = get_model_conversion_mapping(model)
    renamings = [t for t in transforms if isinstance(t, WeightRenaming)]
    converters = [t for t in transforms if isinstance(t, WeightConverter)]
    prefix = model.base_model_prefix
    for name in (name for name in stored if name not in found):
        renamed, converter = rename_source_key(name, renamings, converters, prefix, wanted)
        if renamed not in wanted or renamed in found:
            continue
        if converter is None:
            found[renamed] = name
        elif strict:
            raise QerlError(
                f"model: '{name}' has to be split or joined for {type(model).__name__}, which is "
                "not supported; load it once with transformers and save it again"
            )
    return found


def check_layers(
    shapes: dict[str, tuple[int, int]], names: dict[str, str], source: Tensors
) -> None:
    """Refuse before any work what would fail halfway.

    shapes: weights [N, K] to be quantized, by module. Raises QerlError naming the first that NVFP4
    cannot hold, or whose weight the files lack or hold in another shape.
    """
    if not shapes:
        raise QerlError(f"model: '{source.path}' has no linear layer to quantize")
    for name, (n, k) in shapes.items():
        if k % nvfp4.BLOCK:
            raise QerlError(
                f"model: layer '{name}' has {k} input features, NVFP4 needs a multiple of "
                f"{nvfp4.BLOCK}; keep it in 16 bits (--keep '{name}'), or train with format: bf16"
            )
        found = source.shape(names.get(f"{name}.weight", ""))
        if found != (n, k):
            raise QerlError(
                f"model: '{source.path}' should hold '{name}.weight' of shape ({n}, {k}), "
                f"found {found or 'no such tensor'}; the files do not fit config.json"
            )


def head_name(model: PreTrainedModel) -> str | None:
    """The output head's module name; None for a model without one."""
    names = {id(module): name for name, module in model.named_modules()}
    return names.get(id(model.get_output_embeddings()))


def is_tied(model: PreTrainedModel, names: dict[str, str]) -> bool:
    """Whether the head is the embedding: config.json says so and the embedding is in the files."""
    modules = {id(module): name for name, module in model.named_modules()}
    embeddings = modules.get(id(model.get_input_embeddings()))
    config = model.config
    text = config.get_text_config()
    tied = getattr(config, "tie_word_embeddings", getattr(text, "tie_word_embeddings", False))
    return bool(tied) and head_name(model) is not None and f"{embeddings}.weight" in names
