"""Our decode against four libraries nobody here wrote.

Bit for bit on v, s and v·s, and after a global scale that is a power of two. Otherwise as near as
their roundings allow: some divide by the global scale, some multiply with its reciprocal. vLLM
and torchao run in processes of their own, from wheels that are fetched once a machine.
"""

from __future__ import annotations

import functools
import shutil
import subprocess
import sys
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
import torch
from compressed_tensors.compressors.nvfp4.helpers import unpack_fp4_from_uint8
from compressed_tensors.quantization.lifecycle.forward import dequantize as their_dequantize
from oracle_site import oracle_site, vllm_site
from safetensors.torch import load_file, save_file

from qerl_kernels import layout, quantize, reference, repack
from qerl_kernels.launch import interpreting
from qerl_kernels.unpack import unpack

K = 512
# Divisors: what a layer of small weights has, that of all ones, large, small, a power of two.
DIVISORS = (1234.5, 448.0, 3.0e5, 0.7, 2.0**11)


def every_pair() -> tuple[torch.Tensor, torch.Tensor]:
    """Packed [127, 256] and scales [127, 32]: every byte under every scale, a scale a row."""
    packed = torch.arange(256, dtype=torch.uint8).repeat(127, 1)
    scale = torch.arange(127, dtype=torch.uint8)[:, None].repeat(1, K // 16)
    return packed, scale.view(torch.float8_e4m3fn)


@functools.cache
def ours() -> dict[str, torch.Tensor]:
    """v·s float64 [127, 512] by each of our own ways."""
    packed, scale = every_pair()
    one = torch.ones(1)
    ways = {
        "unscaled": quantize.unscaled(packed, scale, torch.float32),
        "unscaled in bf16": quantize.unscaled(packed, scale, torch.bfloat16),
        "dequantize": quantize.dequantize(packed, scale, one),
        "reference": reference.dequantize(packed, scale, one),
    }
    for order in repack.ORDERS:
        again = repack.unrepack(*repack.repack(packed, scale, order=order), K, order=order)
        ways[f"repacked {order} and back"] = quantize.unscaled(*again, torch.float32)
    with interpreting():  # which pretends to be a card whose order is "paired"
        for dtype in (torch.bfloat16, torch.float16):
            ways[f"repacked {dtype} kernel"] = unpack(*repack.repack(packed, scale), K, dtype) * 256
    return {name: found.double() for name, found in ways.items()}


def bits(x: torch.Tensor) -> torch.Tensor:
    """Equal where two float64 tensors are, −0 being another number than +0."""
    return x.double().contiguous().view(torch.int64)


def agree(v: torch.Tensor, s: torch.Tensor, v_s: torch.Tensor) -> None:
    """An oracle's values [127, 512], scales [127, 32] and products are ours, bit for bit."""
    packed, scale = every_pair()
    mine = torch.tensor(layout.E2M1_VALUES)[layout.unpack(packed).long()]
    assert torch.equal(bits(v), bits(mine))
    one = torch.full_like(packed, 0x22)  # 1.0 twice: v·s is s
    for found in (scale, quantize.unscaled(one, scale, torch.float32)[:, ::16]):
        assert torch.equal(bits(s), bits(found))
    for name, found in ours().items():
        # Repacking makes the products with scale 0, row 0, +0 whatever the sign of the code.
        first = int(name.startswith("repacked"))
        assert torch.equal(bits(found[first:]), bits(v_s[first:])), name
        assert (found[0] == 0).all(), name


def apart(found: torch.Tensor, mine: torch.Tensor) -> int:
    """The largest distance of two float32 tensors in units in the last place."""
    a, b = (t.contiguous().view(torch.int32).long() for t in (found, mine))
    assert torch.equal(a >> 31, b >> 31)  # signs, those of zeros too
    return int((a - b).abs().max())


def near(found: torch.Tensor, divisor: float, roundings: int) -> None:
    """float32 [127, 512] is v·s/g after that many roundings to float32, and ours after one.

    A rounding's error is at most 2⁻²⁴ of its result (nothing here is near float32's subnormals).
    """
    packed, scale = every_pair()
    g = torch.tensor([divisor])
    truth = reference.dequantize(packed, scale, g)
    mine = quantize.dequantize(packed, scale, g)
    for result, count in ((found, roundings), (mine, 1)):
        bound = ((1 + 2.0**-24) ** count - 1) * truth.abs()
        assert ((result.double() - truth).abs() <= bound).all()
    # The bounds alone would allow more than one unit; with these divisors it is one.
    assert apart(found, mine) <= (0 if divisor == 2.0**11 else 1)


def test_ml_dtypes():
    packed, scale = every_pair()
    v = layout.unpack(packed).numpy().view(ml_dtypes.float4_e2m1fn).astype(np.float64)
    s = scale.view(torch.uint8).numpy().view(ml_dtypes.float8_e4m3fn).astype(np.float64)
    agree(*(torch.from_numpy(x) for x in (v, s, v * s.repeat(16, axis=1))))


def test_compressed_tensors():
    packed, scale = every_pair()
    v = unpack_fp4_from_uint8(packed, 127, K, dtype=torch.float32)
    agree(v, scale.double(), their_dequantize(v, scale.float()))
    for divisor in DIVISORS:  # s/g, then times v
        g = torch.tensor([divisor])
        near(their_dequantize(v, scale.float(), global_scale=g), divisor, 2)


TORCHAO = """
import sys, torch
from safetensors.torch import load_file, save_file
from torchao.prototype.mx_formats.kernels import f4_unpacked_to_f32, unpack_uint4
from torchao.prototype.mx_formats.nvfp4_tensor import NVFP4Tensor
given = load_file(sys.argv[1])
def tensor(multiplier):
    return NVFP4Tensor(given["packed"], given["scale"], 16, torch.float32,
                       per_tensor_scale=multiplier)
plain = tensor(None)
out = {"v": f4_unpacked_to_f32(unpack_uint4(given["packed"])), "s": plain.get_hp_scales(),
       "v_s": plain.dequantize(torch.float32),
       "divided": torch.stack([tensor(m).dequantize(torch.float32) for m in given["multipliers"]])}
made = NVFP4Tensor.to_nvfp4(given["weight"], per_tensor_scale=given["weight"].abs().max() / 2688)
out |= {"packed": made.qdata, "scale": made.scale, "multiplier": made.per_tensor_scale,
        "made": made.dequantize(torch.float32)}
save_file({name: t.contiguous() for name, t in out.items()}, sys.argv[2])
"""

# The one file of vLLM that emulates NVFP4, with stand-ins for what else it imports: the package
# itself needs all it depends on at import.
VLLM = """
import sys, types, torch
from safetensors.torch import load_file, save_file
given = load_file(sys.argv[1])
class Anything:
    def __getattr__(self, name): return lambda *a, **k: None
for name, parts in {
    "vllm": {}, "vllm.platforms": {"current_platform": Anything()},
    "vllm.scalar_type": {"scalar_types": types.SimpleNamespace(
        float4_e2m1f=types.SimpleNamespace(max=lambda: 6.0))},
    "vllm.triton_utils": {"tl": types.SimpleNamespace(constexpr=int), "triton":
        types.SimpleNamespace(jit=lambda f: f)},
    "vllm.utils": {}, "vllm.utils.torch_utils": {"direct_register_custom_op": lambda **k: None},
}.items():
    sys.modules[name] = module = types.ModuleType(name)
    module.__dict__.update(parts)
sys.path.insert(0, sys.argv[3])
import nvfp4_emulation_utils as emulation
def dequantize(packed, multiplier):
    return emulation.dequantize_to_dtype(packed, given["scale"], multiplier, torch.float32,
                                         swizzle=False)
ones = torch.full_like(given["packed"], 0x22)
out = {"v": emulation.break_fp4_bytes(given["packed"], torch.float32),
            "s": dequantize(ones, torch.ones(1))[:, ::16],
            "v_s": dequantize(given["packed"], torch.ones(1)),
            "divided": torch.stack([dequantize(given["packed"], m) for m in given["multipliers"]])}
save_file({name: t.contiguous() for name, t in out.items()}, sys.argv[2])
"""


def run(code: str, folder: Path, *arguments: str, path: Path | None = None) -> dict:
    """`code` in a process of its own on every (byte, scale) pair and a random weight."""
    packed, scale = every_pair()
    weight = torch.randn(32, 64, generator=torch.Generator().manual_seed(0))
    given, made = folder / "given.safetensors", folder / "made.safetensors"
    multipliers = 1 / torch.tensor(DIVISORS)
    save_file(
        {"packed": packed, "scale": scale, "multipliers": multipliers, "weight": weight}, given
    )
    prefix = "" if path is None else f"import sys; sys.path.insert(0, {str(path)!r})\n"
    command = [sys.executable, "-P", "-c", prefix + code, str(given), str(made), *arguments]
    subprocess.run(command, check=True)
    return load_file(made)


@pytest.mark.slow
def test_torchao(tmp_path):
    found = run(TORCHAO, tmp_path, path=oracle_site("torchao==0.18.0"))
    agree(found["v"], found["s"], found["v_s"])
    for divisor, divided in zip(DIVISORS, found["divided"], strict=True):  # (1/g · s) · v
        near(divided, divisor, 3)
    mine = quantize.dequantize(found["packed"], found["scale"], 1 / found["multiplier"].reshape(1))
    assert apart(found["made"], mine) <= 1


@pytest.mark.slow
def test_vllm_emulation(tmp_path):
    name = "vllm/model_executor/layers/quantization/utils/nvfp4_emulation_utils.py"
    shutil.copy(vllm_site() / name, tmp_path)  # alone: the package around it is not imported
    found = run(VLLM, tmp_path, str(tmp_path))
    agree(found["v"], found["s"], found["v_s"])
    for divisor, divided in zip(DIVISORS, found["divided"], strict=True):  # (1/g · s) · v
        near(divided, divisor, 3)
