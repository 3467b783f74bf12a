"""Quantize a checkpoint to NVFP4, a layer in memory at a time.

Reads safetensors (one file or sharded) or a GGUF file, writes what compressed-tensors calls
`nvfp4-pack-quantized` (or ModelOpt's layout): three tensors for each linear layer of the decoder,
everything else as it was. The output head and the embeddings stay in 16 bits unless asked; tied
ones stay tied, fused ones fused, a vision tower and multi-token heads as they are.

Left out: mixture-of-experts checkpoints that store their experts as one 3-D tensor (those are not
`nn.Linear` and are refused). Code that comes with a model is run only if that is asked for.
"""

from __future__ import annotations

import hashlib
import shutil
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from qerl.errors import QerlError
from qerl.files import FULL, atomic_dir, check_writable, write_json
from qerl.quantize import nvfp4, output, structure
from qerl.quantize.gguf import GgufSource, check_gguf, write_tokenizer
from qerl.quantize.job import Job, Progress
from qerl.quantize.methods import CALIBRATED, METHODS
from qerl.quantize.shards import PICKLE_FIX, SHARD_BYTES, Source, Tensors
from qerl.quantize.writer import Say, Writer, unfinished

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedModel

# What a tokenizer, a processor and a licence are made of. No code is copied, no weights of others.
_COMPANIONS = ("*.json", "*.jinja", "*.txt", "*.model", "*.tiktoken", "LICENSE*", "NOTICE*")


def quantize_checkpoint(
    src: Path,
    dst: Path,
    *,
    method: str | None = None,
    calibration: Sequence[Sequence[int]] | None = None,
    keep: Sequence[str] = (),
    lm_head: str = "keep",
    format: str = "compressed-tensors",
    device: str = "cpu",
    overwrite: bool = False,
    trust_remote_code: bool = False,
    progress: Progress | None = None,
    say: Say = lambda text: None,
    shard_bytes: int = SHARD_BYTES,
) -> dict[str, Any]:
    """Write `src`, a transformers causal-LM folder or a .gguf file, to the new folder `dst`.

    method: absmax, four-over-six, sweep (the default: the best block scale of all), imatrix (the
    same, columns weighted by the calibration text's E[x²]; the default with `calibration`), gptq.
    calibration: token ids, a list a text. keep: linear layers that stay in 16 bits, as shell
    patterns or `re:` regexes on module names. lm_head: keep, nvfp4 or fp8 (searched without
    calibration). format: compressed-tensors or modelopt. device: where calibrated methods compute.
    trust_remote_code: run the Python code that comes with the model, and copy it.
    progress(done, total, layer) is called once a layer; `say` hears of what is worth knowing, such
    as going on after an interruption.

    The folder appears under its name only when complete; an interruption leaves what is done beside
    it, and the same call goes on from there. Memory: about a layer in 32 bits for absmax,
    four-over-six and sweep; a decoder block and its statistics for the others.
    Returns {"path", "method", "layers", "parameters", "bytes", "source_bytes", "seconds"}:
    parameters counts quantized weights, bytes everything written as tensors.
    Raises QerlError: no checkpoint in `src`, a damaged, unknown or already quantized one, a weight
    that is not finite, a layer whose K is not a multiple of 16 or that the files lack, a setting
    that does not fit, `dst` exists or cannot be written, a full disk.
    """
    src, dst = Path(src), Path(dst)
    began = time.monotonic()
    method = _check_settings(method, calibration, lm_head, format)
    config, model, source = _open(src, say, trust_remote_code)
    check_writable("output:", dst)
    if dst.exists() and not overwrite:
        raise QerlError(f"output: '{dst}' exists already; name another folder or overwrite it")
    job = _plan(model, source, method, keep, lm_head, format)
    settings = {
        "method": method, "keep": sorted(keep), "lm_head": lm_head, "format": format,
        "calibration": _calibration_hash(calibration), "source": source.fingerprint(),
    }  # fmt: skip
    work = unfinished(dst)
    with _disk_full(work, dst), Writer(work, job.specs(), shard_bytes, settings, say) as writer:
        with _kept_if_stopped(work, say):
            job.write_layers(writer, model, calibration, progress, device)
            job.write_rest(writer)
            with atomic_dir(dst) as folder:
                _write_companions(folder, src, config, model.config, job, source)
                writer.move_to(folder)
        shutil.rmtree(work)
    return {
        "path": str(dst),
        "method": method,
        "layers": len(job.layers),
        "parameters": sum(n * k for n, k in job.layers.values()),
        "bytes": writer.total,
        "source_bytes": source.total_bytes(),
        "seconds": time.monotonic() - began,
    }


def _check_settings(
    method: str | None, calibration: Sequence[Sequence[int]] | None, lm_head: str, format: str
) -> str:
    method = method or ("sweep" if calibration is None else "imatrix")
    for key, value, allowed in (
        ("method", method, METHODS),
        ("lm_head", lm_head, output.HEADS),
        ("format", format, output.FORMATS),
    ):
        if value not in allowed:
            raise QerlError(f"{key}: '{value}' is unknown; choose {', '.join(allowed)}")
    if method in CALIBRATED and not calibration:
        raise QerlError(f"method: {method} needs calibration text; name some, or choose sweep")
    if method not in CALIBRATED and calibration is not None:
        raise QerlError(f"method: {method} uses no calibration text; drop it, or choose imatrix")
    if lm_head == "fp8" and format == "modelopt":
        raise QerlError(
            "lm_head: fp8 is not for format modelopt, whose FP8 layers need scales of activations; "
            "choose nvfp4 or keep"
        )
    return method


def _open(src: Path, say: Say, code: bool) -> tuple[dict[str, Any], PreTrainedModel, Tensors]:
    """config.json's content, the skeleton, the tensors."""
    if src.suffix == ".gguf":
        check_gguf(src)
        model = structure.skeleton(src.parent, gguf_file=src.name)
        config = model.config.to_diff_dict() | {"architectures": [type(model).__name__]}
        return config, model, GgufSource(src, model, say)
    if src.is_file():
        kind = f"a pickle, {PICKLE_FIX}" if src.suffix in (".bin", ".pt", ".pth") else "a file"
        raise QerlError(f"model: '{src}' is {kind}; name the folder that holds config.json")
    config = structure.read_config(src)
    source = Source(src)
    return config, structure.skeleton(src, code), source


def _plan(
    model: PreTrainedModel,
    source: Tensors,
    method: str,
    keep: Sequence[str],
    lm_head: str,
    format: str,
) -> Job:
    names = structure.file_names(model, source.names())
    shapes = nvfp4.linear_shapes(model)
    kept = nvfp4.kept_layers(shapes, keep)
    layers = {name: shape for name, shape in shapes.items() if name not in kept}
    structure.check_layers(layers, names, source)
    head, tied = structure.head_name(model), structure.is_tied(model, names)
    if lm_head != "keep":
        if head is None or tied:
            why = "is the embedding, which stays in 16 bits" if tied else "does not exist"
            raise QerlError(f"lm_head: the model's head {why}; leave it (lm_head: keep)")
        shape = source.shape(names.get(f"{head}.weight", "")) or ()
        n, k = shape if len(shape) == 2 else (0, 0)
        structure.check_layers({head: (n, k)}, names, source)
    left = [name for name in nvfp4.other_linears(model) if name not in layers] + sorted(kept)
    ignore = ([head] if head is not None and lm_head == "keep" else []) + left
    ignore += _strangers(names, source)
    dropped = {f"{head}.weight", names.get(f"{head}.weight")} if tied else set()
    return Job(source, names, layers, head, lm_head, method, format, ignore, dropped)


def _strangers(names: dict[str, str], source: Tensors) -> list[str]:
    """Modules with a 2-D weight that the model has no place for, such as `mtp.*`: kept as is."""
    known = set(names.values())
    return [
        name.removesuffix(".weight")
        for name in source.names()
        if name not in known and name.endswith(".weight") and len(source.shape(name) or ()) == 2
    ]


def _calibration_hash(calibration: Sequence[Sequence[int]] | None) -> str | None:
    if calibration is None:
        return None
    text = ";".join(",".join(map(str, ids)) for ids in calibration)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


@contextmanager
def _disk_full(work: Path, dst: Path) -> Iterator[None]:
    """A full disk as one line, with nothing of the work left on it."""
    try:
        yield
    except OSError as error:
        if error.errno not in FULL:
            raise
        shutil.rmtree(work, ignore_errors=True)
        raise QerlError(
            f"output: no space for '{dst}' ({error.strerror}); free some, or name another folder"
        ) from error


@contextmanager
def _kept_if_stopped(work: Path, say: Say) -> Iterator[None]:
    """What is done survives an interruption; a source found damaged leaves nothing."""
    try:
        yield
    except KeyboardInterrupt:
        say(f"stopped; what is done is kept in '{work}', the same command goes on from there")
        raise
    except QerlError:
        shutil.rmtree(work)
        raise


def _write_companions(
    folder: Path,
    src: Path,
    config: dict[str, Any],
    model_config: PretrainedConfig,
    job: Job,
    source: Tensors,
) -> None:
    """config.json and everything beside the weights."""
    fp8 = [job.head] if job.head is not None and job.lm_head == "fp8" else []
    section = output.config_section(job.format, job.ignore, fp8)
    out = {k: v for k, v in config.items() if k not in ("torch_dtype", "dtype")}
    out["dtype"] = "float16" if source.half == "F16" else "bfloat16"
    out["quantization_config"] = section
    write_json(folder / "config.json", out)
    if job.format == "modelopt":
        write_json(folder / "hf_quant_config.json", output.modelopt_file(job.ignore))
    if src.is_file():
        write_tokenizer(src, folder)
        return
    # Code that was run to make this is needed to load it; other code is nobody's business.
    code = ("*.py",) if structure.is_foreign(model_config) else ()
    for pattern in _COMPANIONS + code:
        for file in sorted(src.glob(pattern)):
            if file.name != "config.json" and not file.name.endswith(".index.json"):
                shutil.copyfile(file, folder / file.name)
    extra = src / "additional_chat_templates"
    if extra.is_dir():
        shutil.copytree(extra, folder / extra.name)
