"""transformers' own `from_pretrained(directory, quantization_config=qerl.NVFP4Config())`.

Quantizes a 16-bit checkpoint while transformers reads it, on the device its `device_map` names.
The model is transformers' own in everything but its decoder's linear layers, whose base stays
frozen and packed; on a GPU they are arranged for its kernels. transformers' own `NVFP4Config` is
another thing: for inference, on Blackwell GPUs.

Left out: reading checkpoints that are quantized already and leaving vision towers off; both are
`qerl.load`'s. Saving: the adapter is what is saved; `qerl quantize` writes packed checkpoints.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel
from transformers.core_model_loading import ConversionOps
from transformers.quantizers.auto import register_quantization_config, register_quantizer
from transformers.quantizers.base import HfQuantizer
from transformers.utils.quantization_config import QuantizationConfigMixin

from qerl.errors import QerlError
from qerl.model.linear import NVFP4Linear
from qerl.quantize.nvfp4 import BLOCK, kept_layers, linear_shapes
from qerl.quantize.search import SEARCHES, Search, quantize_weight

METHOD = "qerl-nvfp4"


class NVFP4Config(QuantizationConfigMixin):
    """For transformers' `quantization_config`: the decoder's linear layers in NVFP4.

    search: how block scales are chosen: absmax, four-over-six or sweep (`qerl quantize --method`).
    keep: layers that stay in 16 bits, as `qerl quantize --keep`: shell patterns or `re:` regexes.
    Output head, embeddings, vision and audio towers and layers whose K is no multiple of 16 always
    stay. Raises QerlError for an unknown search.
    """

    def __init__(self, search: Search = "sweep", keep: list[str] | None = None, **_: Any) -> None:
        if search not in SEARCHES:
            raise QerlError(f"search: '{search}' is unknown; choose {', '.join(SEARCHES)}")
        self.quant_method = METHOD  # pyright: ignore[reportAttributeAccessIssue]  (an enum there)
        self.search: Search = search
        self.keep = list(keep or [])


class _Quantizer(HfQuantizer):
    """What transformers calls before, while and after it reads the files."""

    @property
    def _config(self) -> NVFP4Config:
        assert isinstance(self.quantization_config, NVFP4Config)
        return self.quantization_config

    def validate_environment(self, *args: Any, **kwargs: Any) -> None:
        if self.pre_quantized:
            raise QerlError(
                "quantization_config: the checkpoint is quantized already; load it with qerl.load"
            )

    def param_needs_quantization(
        self, model: PreTrainedModel, param_name: str, **kwargs: Any
    ) -> bool:
        name, _, leaf = param_name.rpartition(".")
        return leaf == "weight" and isinstance(model.get_submodule(name), NVFP4Linear)

    def param_element_size(
        self, model: PreTrainedModel, param_name: str, param: torch.Tensor
    ) -> float:
        """Bytes an element, with its share of a block scale, for automatic device maps."""
        if self.param_needs_quantization(model, param_name):
            return 0.5 + 1 / BLOCK
        return super().param_element_size(model, param_name, param)

    def _process_model_before_weight_loading(
        self, model: PreTrainedModel, **kwargs: Any
    ) -> PreTrainedModel:
        shapes = linear_shapes(model)
        kept = kept_layers(shapes, self._config.keep)
        for name, (_, k) in shapes.items():
            if name not in kept and k % BLOCK == 0:
                parent, _, leaf = name.rpartition(".")
                linear = model.get_submodule(name)
                setattr(model.get_submodule(parent), leaf, placeholder(linear))
        return model

    def get_quantize_ops(self) -> ConversionOps:
        return _Quantize(self._config.search)

    def _process_model_after_weight_loading(
        self, model: PreTrainedModel, **kwargs: Any
    ) -> PreTrainedModel:
        for name, module in model.named_modules():
            if isinstance(module, NVFP4Linear) and module.weight.device.type == "cuda":
                module.repack(name)
        return model

    def is_serializable(self, *args: Any, **kwargs: Any) -> bool:
        return False

    @property
    def is_trainable(self) -> bool:
        return True


class _Quantize(ConversionOps):
    """A weight from the files -> the three tensors of an `NVFP4Linear`."""

    def __init__(self, search: Search) -> None:
        self.search: Search = search

    def convert(  # pyright: ignore[reportIncompatibleMethodOverride]  (theirs lists every keyword)
        self, input_dict: dict[str, Any], **kwargs: Any
    ) -> dict[str, torch.Tensor]:
        found: dict[str, torch.Tensor] = {}
        for name, value in input_dict.items():
            weight = value[0] if isinstance(value, list) else value
            packed = quantize_weight(weight, self.search)
            found[name] = packed.packed
            found[f"{name}_scale"] = packed.scale
            found[f"{name}_global_scale"] = packed.global_scale
        return found


def placeholder(linear: nn.Module) -> NVFP4Linear:
    """An `NVFP4Linear` on the meta device that still has the linear's own weight [N, K] and bias:
    transformers compares names and shapes with the files'."""
    weight = linear.get_parameter("weight")
    n, k = weight.shape
    empty: dict[str, Any] = {"device": "meta"}
    packed = NVFP4Linear(
        torch.empty(n, k // 2, dtype=torch.uint8, **empty),
        torch.empty(n, k // BLOCK, dtype=torch.float8_e4m3fn, **empty),
        torch.empty(1, dtype=torch.float32, **empty),
    )
    packed.weight = nn.Parameter(weight, requires_grad=False)
    packed.bias = linear.bias  # pyright: ignore[reportAttributeAccessIssue]
    return packed


register_quantization_config(METHOD)(NVFP4Config)
register_quantizer(METHOD)(_Quantizer)
