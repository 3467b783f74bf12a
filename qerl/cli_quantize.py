"""The `quantize` command, and the text it calibrates on.

As in `qerl.cli_train`, every import that brings torch is inside the command, under `quiet`.
"""

from __future__ import annotations

import codecs
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from qerl.cli_options import Json
from qerl.cli_output import Output, quiet
from qerl.errors import QerlError
from qerl.files import check_writable

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

TEXT_COLUMNS = ("text", "content", "prompt")
ANSWER_COLUMNS = ("completion", "answer", "response")
TEXT_BYTES = 20_000_000  # more of a text file is not read: calibration wants a thousandth of it


class Method(StrEnum):
    absmax = "absmax"
    four_over_six = "four-over-six"
    sweep = "sweep"
    imatrix = "imatrix"
    gptq = "gptq"


class Head(StrEnum):
    keep = "keep"
    nvfp4 = "nvfp4"
    fp8 = "fp8"


class Format(StrEnum):
    compressed_tensors = "compressed-tensors"
    modelopt = "modelopt"


def quantize(
    model: Annotated[
        str,
        typer.Argument(
            metavar="MODEL", help="Directory, Hub id or .gguf file of a 16-bit checkpoint."
        ),
    ],
    output: Annotated[Path, typer.Option("-o", "--output", metavar="DIR", help="New folder.")],
    method: Annotated[
        Method | None,
        typer.Option(help="How to round. Default: sweep; imatrix with calibration text."),
    ] = None,
    calibration: Annotated[
        str | None,
        typer.Option(
            metavar="DATA", help="Text file, .jsonl/.json/.csv/.parquet, or Hub dataset id."
        ),
    ] = None,
    texts: Annotated[int, typer.Option(min=1, help="How many pieces of the text to use.")] = 128,
    length: Annotated[int, typer.Option(min=16, help="Tokens of a piece at most.")] = 512,
    keep: Annotated[
        list[str] | None,
        typer.Option(
            metavar="PATTERN", help="Layers left in 16 bits: '*.layers.0.*', 're:down_proj$'."
        ),
    ] = None,
    lm_head: Annotated[Head, typer.Option(help="How to store the output head.")] = Head.keep,
    format: Annotated[
        Format, typer.Option(help="Layout of the files.")
    ] = Format.compressed_tensors,
    overwrite: Annotated[
        bool, typer.Option("--overwrite", help="Replace a quantized checkpoint already there.")
    ] = False,
    trust_remote_code: Annotated[
        bool,
        typer.Option("--trust-remote-code", help="Run the Python code that comes with MODEL."),
    ] = False,
    json: Json = None,
) -> None:
    """Write a model as an NVFP4 checkpoint, 4.5 bits a weight.

    In the layout of compressed-tensors, which vLLM and transformers read. Training does this by
    itself, once, into the cache; this is for serving or sharing the result. Stopped, the same
    command goes on from where it was.

    \b
    qerl quantize smollm2-135m-instruct-pypi -o smollm2-nvfp4
    qerl quantize Qwen/Qwen3-0.6B -o qwen3-nvfp4 --calibration my-texts.jsonl
    qerl quantize model-Q8_0.gguf -o model-nvfp4
    """
    output = output.expanduser()
    with Output(json) as out:
        check_writable("--output", output)
        with quiet():
            from qerl.quantize.checkpoint import quantize_checkpoint

            source = _source(model, out.say, trust_remote_code)
            if overwrite:
                check_replaceable(output, source)
            ids = None
            if calibration is not None:
                ids = token_lists(calibration, _tokenizer(source, trust_remote_code), texts, length)
            with _bar() as heard:
                made = quantize_checkpoint(
                    source,
                    output,
                    method=method.value if method else None,
                    calibration=ids,
                    keep=keep or (),
                    lm_head=lm_head.value,
                    format=format.value,
                    device=_device() if ids else "cpu",
                    overwrite=overwrite,
                    trust_remote_code=trust_remote_code,
                    progress=heard,
                    say=out.note,
                )
        out.say(_quantized(made))
        out.report(made)


def _source(model: str, say: Callable[[str], None], code: bool) -> Path:
    """A GGUF file as it is; everything else as a directory."""
    if model.lower().endswith(".gguf"):
        return Path(model).expanduser()
    from qerl.model.load import resolve_model

    return resolve_model(model, say, code)[0]


def _device() -> str:
    import torch

    return "cuda" if torch.cuda.is_available() else "cpu"


def _tokenizer(source: Path, code: bool) -> PreTrainedTokenizerBase:
    from qerl.model.load import load_tokenizer

    if source.is_dir():
        return load_tokenizer(source, code)
    from qerl.quantize.gguf import load_tokenizer as from_gguf

    return from_gguf(source)


def token_lists(
    data: str, tokenizer: PreTrainedTokenizerBase, texts: int, length: int
) -> list[list[int]]:
    """Calibration text as token ids: at most `texts` lists of at most `length`.

    data: a UTF-8 text file, cut into pieces taken evenly from it; or rows (as `task.dataset`): a
    column `messages` goes through the chat template, else `text`, `content`, or `prompt` followed
    by `completion`, `answer` or `response`.
    Raises QerlError for a file or dataset that cannot be read, lacks such a column or has no text.
    """
    from qerl.tasks.rows import SUFFIXES, read

    path = Path(data).expanduser()
    if path.is_file() and path.suffix.lower() not in SUFFIXES:
        pieces = _pieces(_text(path), tokenizer, length)
        step = max(1, len(pieces) // texts)
        found = pieces[::step][:texts]
    else:
        rows = read("--calibration", data, "train")
        step = max(1, len(rows) // texts)
        chosen = (rows[i] for i in range(0, step * min(texts, len(rows)), step))
        found = [_row_ids(row, tokenizer, data)[:length] for row in chosen]
    found = [ids for ids in found if ids]
    if not found:
        raise QerlError(f"--calibration {data!r}: holds no text; name another file")
    return found


def _text(path: Path) -> str:
    with path.open("rb") as file:
        raw = file.read(TEXT_BYTES)
    # Where we cut the file, its last character may be cut in two.
    whole = len(raw) < TEXT_BYTES
    try:
        return codecs.getincrementaldecoder("utf-8")().decode(raw, final=whole)
    except UnicodeDecodeError as error:
        raise QerlError(f"--calibration {str(path)!r}: is not UTF-8 text; convert it") from error


def _pieces(text: str, tokenizer: PreTrainedTokenizerBase, length: int) -> list[list[int]]:
    ids = tokenizer(text, add_special_tokens=False)["input_ids"]
    return [ids[i : i + length] for i in range(0, len(ids), length)]


def _row_ids(row: dict[str, Any], tokenizer: PreTrainedTokenizerBase, data: str) -> list[int]:
    if "messages" in row:
        text = str(tokenizer.apply_chat_template(row["messages"], tokenize=False))
        return tokenizer(text, add_special_tokens=False)["input_ids"]
    column = next((name for name in TEXT_COLUMNS if isinstance(row.get(name), str)), None)
    if column is None:
        raise QerlError(
            f"--calibration {data!r}: no column messages, {', '.join(TEXT_COLUMNS)} with text; "
            f"its columns are {', '.join(row)}: rename one"
        )
    answer = next((row[n] for n in ANSWER_COLUMNS if isinstance(row.get(n), str)), "")
    return tokenizer(row[column] + ("\n" + answer if answer and column == "prompt" else ""))[
        "input_ids"
    ]


def check_replaceable(folder: Path, source: Path) -> None:
    """Overwriting deletes the folder: only a checkpoint of this kind may be lost by it."""
    from qerl.model.load import quantization_of

    if not folder.exists():
        return
    if folder.resolve() in (source.resolve(), *source.resolve().parents):
        raise QerlError(f"--output '{folder}': the model itself is there; name another folder")
    if folder.is_dir() and not any(folder.iterdir()):
        return
    found = quantization_of(folder) if (folder / "config.json").is_file() else {}
    ours = ("nvfp4-pack-quantized", "mixed-precision")
    if found.get("format") not in ours and found.get("quant_algo") != "W4A16_NVFP4":
        raise QerlError(
            f"--output '{folder}': not an NVFP4 checkpoint, so it is not overwritten; "
            "name another folder"
        )


@contextmanager
def _bar() -> Iterator[Callable[[int, int, str], None]]:
    """A progress bar on a terminal; elsewhere nothing, the result line says it all."""
    from rich.console import Console
    from rich.progress import Progress

    console = Console()
    with Progress(
        console=console, transient=True, redirect_stderr=False, disable=not console.is_terminal
    ) as progress:
        task = progress.add_task("quantizing", total=None)
        yield lambda done, total, layer: progress.update(task, completed=done, total=total)


def _quantized(made: dict[str, Any]) -> str:
    from qerl.console import human_bytes, human_seconds

    before, after = human_bytes(made["source_bytes"]), human_bytes(made["bytes"])
    return (
        f"{made['path']}: {made['layers']} layers, {made['parameters']:,} weights in NVFP4 "
        f"({made['method']}), {before} became {after} in {human_seconds(made['seconds'])}"
    )
