"""Devices and compute types that cannot be had are one-line errors, before any work."""

from __future__ import annotations

import pytest
import torch

from qerl.device import resolve_device, resolve_dtype
from qerl.errors import QerlError


@pytest.fixture
def gpus(monkeypatch: pytest.MonkeyPatch):
    """Pretend to have these GPUs: (name, capability) each."""

    def pretend(*found: tuple[str, tuple[int, int]], cuda: str | None = "13.0", hip=None) -> None:
        monkeypatch.setattr(torch.cuda, "is_available", lambda: bool(found))
        monkeypatch.setattr(torch.cuda, "device_count", lambda: len(found))
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda index: found[index][0])
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda index: found[index][1])
        monkeypatch.setattr(torch.version, "cuda", cuda)
        monkeypatch.setattr(torch.version, "hip", hip)

    return pretend


H100 = ("NVIDIA H100", (9, 0))
T4 = ("Tesla T4", (7, 5))


def error(name: str) -> str:
    with pytest.raises(QerlError) as caught:
        resolve_device(name)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_auto_without_a_gpu_is_the_cpu(gpus):
    gpus()
    assert resolve_device("auto") == torch.device("cpu")


def test_auto_with_a_gpu_is_the_gpu(gpus):
    gpus(H100)
    assert resolve_device("auto").type == "cuda"
    assert resolve_device("cuda:0") == torch.device("cuda:0")


def test_cpu_is_taken_though_there_is_a_gpu(gpus):
    gpus(H100)
    assert resolve_device("cpu").type == "cpu"


def test_absent_gpu(gpus):
    gpus()
    assert error("cuda") == (
        "device: 'cuda' was asked for and 0 CUDA devices found; use device=cpu or auto"
    )


def test_absent_gpu_with_a_cpu_build_of_torch(gpus):
    gpus(cuda=None)
    assert "0 CUDA devices found (this PyTorch is built for CPUs only)" in error("cuda")


def test_index_too_high(gpus):
    gpus(H100)
    assert error("cuda:1") == (
        "device: 'cuda:1' was asked for and 1 CUDA device found; use device=cpu or auto"
    )


def test_the_last_index_is_fine(gpus):
    gpus(T4, H100)
    assert resolve_device("cuda:1") == torch.device("cuda:1")


@pytest.mark.parametrize("name", ["cuda", "cuda:0", "auto"])
def test_too_old(gpus, name: str):
    gpus(T4)
    message = error(name)
    assert message.startswith("device: Tesla T4 (sm_75) has no bf16 tensor cores; ")
    assert "device=cpu" in message


def test_ampere_is_new_enough(gpus):
    gpus(("NVIDIA A100", (8, 0)))
    assert resolve_device("cuda").type == "cuda"


def test_rocm(gpus):
    gpus(("AMD Instinct MI300X", (9, 4)), cuda=None, hip="6.4")
    assert error("cuda") == "device: 'cuda' is a ROCm device, which is not supported; use cpu"


@pytest.mark.parametrize(("name", "said"), [("gpu", "is not a device"), ("mps", "not supported")])
def test_other_names(name: str, said: str):
    message = error(name)
    assert said in message and "use auto, cpu, cuda or cuda:N" in message


@pytest.mark.parametrize("name", ["bfloat16", "float16", "float32"])
def test_a_named_dtype_is_taken(name: str):
    assert resolve_dtype(name, torch.device("cpu")) is getattr(torch, name)


def test_auto_dtype_follows_the_device():
    assert resolve_dtype("auto", torch.device("cpu")) is torch.float32
    assert resolve_dtype("auto", torch.device("cuda")) is torch.bfloat16
