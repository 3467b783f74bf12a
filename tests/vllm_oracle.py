"""Run in a process of its own with vLLM on the path: prompts scored by vLLM, in float32 on the CPU.

    python tests/vllm_oracle.py SPEC.json RESULT.json

SPEC: {"model", "adapter" (null: the base alone), "prompts": [[token ids]], "qwen3_5": whether it is
one, "more": options of LLM}.
RESULT: {"base", "adapter": log-probs of each prompt's tokens after its first, "applied": {vLLM's
module name: how many of its slices the adapter changes}}.

vLLM has no NVFP4 kernel for a CPU and forces Marlin, which needs a GPU, for checkpoints without
quantized activations. Its class of kernels is given one that calls its own unpacking.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"  # in this process, where it can be looked into
os.environ["VLLM_CPU_KVCACHE_SPACE"] = "1"
os.environ["OMP_NUM_THREADS"] = "1"
os.environ["VLLM_DO_NOT_TRACK"] = "1"

import torch
from vllm import LLM, ModelRegistry, SamplingParams
from vllm.lora.request import LoRARequest
from vllm.model_executor.kernels.linear.nvfp4.base import (
    NvFp4LinearKernel,
    NvFp4LinearLayerConfig,
)
from vllm.model_executor.layers.quantization import modelopt
from vllm.model_executor.layers.quantization.compressed_tensors.schemes import (
    compressed_tensors_w4a4_nvfp4 as compressed_tensors,
)
from vllm.model_executor.layers.quantization.utils.nvfp4_emulation_utils import (
    dequantize_to_dtype,
)


class Unpacking(NvFp4LinearKernel):
    """vLLM's interface; a weight is unpacked once, by vLLM's own code."""

    @classmethod
    def is_supported(cls, compute_capability=None):
        return True, None

    @classmethod
    def can_implement(cls, config):
        return True, None

    def process_weights_after_loading(self, layer):
        parts = layer.weight.data, layer.weight_scale.data, layer.weight_global_scale
        wide = dequantize_to_dtype(*parts, torch.float32, 16, swizzle=False)
        layer.weight = torch.nn.Parameter(wide, requires_grad=False)

    def apply_weights(self, layer, x, bias=None):
        return torch.nn.functional.linear(x, layer.weight.to(x.dtype), bias)


def applied(llm: LLM) -> dict[str, int]:
    """Slices of each of vLLM's modules (q, k and v are one module) that hold an adapter's B."""
    runner = llm.llm_engine.model_executor.driver_worker.worker.model_runner
    modules = runner.lora_manager._adapter_manager.modules
    counts = {
        name: sum(bool(b[0].any()) for b in getattr(module, "lora_b_stacked", ()))
        for name, module in modules.items()
    }
    return {name: count for name, count in counts.items() if count}


def score(llm: LLM, prompts: list[list[int]], request: LoRARequest | None) -> list[list[float]]:
    found = llm.generate(
        [{"prompt_token_ids": prompt} for prompt in prompts],
        SamplingParams(max_tokens=1, prompt_logprobs=0, detokenize=False),
        lora_request=request,
    )
    return [
        [at[token].logprob for at, token in zip(out.prompt_logprobs[1:], prompt[1:], strict=True)]
        for out, prompt in zip(found, prompts, strict=True)
    ]


def allow_qwen3_5() -> None:
    """vLLM's class imports an image processor that needs torchvision; this is the one that does
    not, and no image is ever processed."""
    import transformers.models.qwen2_vl.image_processing_pil_qwen2_vl as pillow

    sys.modules["transformers.models.qwen2_vl.image_processing_qwen2_vl"] = pillow
    pillow.Qwen2VLImageProcessor = pillow.Qwen2VLImageProcessorPil
    pillow.Qwen2VLImageProcessorFast = pillow.Qwen2VLImageProcessorPil
    from vllm.model_executor.models.qwen3_5 import Qwen3_5ForConditionalGeneration

    ModelRegistry.register_model("Qwen3_5ForConditionalGeneration", Qwen3_5ForConditionalGeneration)


def main(spec_file: str, result_file: str) -> None:
    for scheme in (compressed_tensors, modelopt):
        scheme.init_nvfp4_linear_kernel = lambda use_a16=False: Unpacking(NvFp4LinearLayerConfig())
    dtypes = [torch.float32, torch.bfloat16, torch.float16]  # of a kernel that unpacks
    modelopt.ModelOptNvFp4Config.get_supported_act_dtypes = lambda self: dtypes
    spec = json.loads(Path(spec_file).read_text())
    if spec["qwen3_5"]:
        allow_qwen3_5()
    options = dict(dtype="float32", enforce_eager=True, max_model_len=128, max_num_seqs=4)
    if spec["adapter"]:
        # Else the head is wrapped too, and scoring prompts fails in it.
        config = json.loads((Path(spec["adapter"]) / "adapter_config.json").read_text())
        leaves = sorted({name.rpartition(".")[2] for name in config["target_modules"]})
        options |= dict(enable_lora=True, max_lora_rank=16, lora_target_modules=leaves)
    llm = LLM(spec["model"], **{**options, **spec["more"]})
    result = {"base": score(llm, spec["prompts"], None)}
    if spec["adapter"]:
        request = LoRARequest("adapter", 1, spec["adapter"])
        result |= {"adapter": score(llm, spec["prompts"], request), "applied": applied(llm)}
    Path(result_file).write_text(json.dumps(result))


if __name__ == "__main__":
    main(*sys.argv[1:])
