"""The only door to this package: PyTorch operators `qerl::…` and thin functions in front of them.

Registered with `torch.library` (schema, shapes for meta tensors, autograd), so `torch.compile`
and `opcheck` see them whole. A weight is three tensors (see `layout`): packed uint8 [N, K/2],
scale float8_e4m3fn [N, K/16] and global_scale float32 [1], a divisor: w = v·s/g.
"""

from qerl_kernels.cpu import cache_bytes, clear_cache, verify_cache
from qerl_kernels.launch import batch_invariant, interpreting, is_batch_invariant
from qerl_kernels.ops.attention import decode_attention
from qerl_kernels.ops.fp8 import check_fp8_weight, fp8_matmul, fp8_matmul_t
from qerl_kernels.ops.linear import nvfp4_lora_matmul, nvfp4_matmul, nvfp4_matmul_t, repack
from qerl_kernels.ops.logprob import linear_logprob, linear_logprob_topk
from qerl_kernels.ops.norm import rms_norm, runs_kernel
from qerl_kernels.repack import check_values

__all__ = [
    "batch_invariant", "cache_bytes", "check_fp8_weight", "check_values", "clear_cache",
    "decode_attention", "fp8_matmul", "fp8_matmul_t", "interpreting", "is_batch_invariant",
    "linear_logprob", "linear_logprob_topk", "nvfp4_lora_matmul", "nvfp4_matmul",
    "nvfp4_matmul_t", "repack", "rms_norm", "runs_kernel", "verify_cache",
]  # fmt: skip
