"""A GGUF file as a checkpoint: its tensors under transformers' names, a tensor at a time.

llama.cpp stores some weights in another order and some norms with another offset; transformers'
own conversions (one for each architecture) undo that, so what it cannot read is refused here.
16-bit and Q8_0 files are meant; a lower one is converted too, with a warning: its weights were
rounded to a few bits before, and NVFP4 rounds them once more.

Left out: mixtures of experts (refused before this is reached) and files in several parts.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from qerl.errors import QerlError
from qerl.quantize.shards import check_finite, count, read_into, rows_a_piece, stamp

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

Convert = Callable[["torch.Tensor"], "torch.Tensor"]
_FINE = ("F32", "F16", "BF16", "F64", "Q8_0")


def check_gguf(path: Path) -> None:
    """QerlError unless `path` is a whole GGUF file, as far as its header tells."""
    if not path.is_file():
        raise QerlError(f"model: there is no file '{path}'; name a .gguf file that exists")
    reader = _reader(path)
    end = max((int(t.data_offset) + int(t.n_bytes) for t in reader.tensors), default=0)
    if path.stat().st_size < end:
        raise QerlError(f"model: '{path}' ends before its last tensor; download it again")
    if "split.count" in reader.fields and int(reader.fields["split.count"].parts[-1][0]) > 1:
        raise QerlError(
            f"model: '{path}' is one part of several; join them with llama.cpp's gguf-split --merge"
        )


def _reader(path: Path) -> Any:
    from gguf import GGUFReader

    try:
        return GGUFReader(path)
    except (ValueError, KeyError, IndexError, OverflowError) as error:
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise QerlError(
            f"model: '{path}' is not a whole GGUF file ({reason}); download it again"
        ) from error


class GgufSource:
    """The tensors of a GGUF file under the names of `model`, a skeleton of its architecture.

    say: hears of weights that were quantized below 8 bits. Raises QerlError for a tensor type that
    cannot be unpacked and for an architecture transformers has no names for.
    """

    def __init__(self, path: Path, model: PreTrainedModel, say: Callable[[str], None]):
        self.path = path
        reader = _reader(path)
        mapping = _conversions(reader, model)
        self._tensors = {mapping[t.name][0]: t for t in reader.tensors if t.name in mapping}
        self._convert = {name: convert for name, convert in mapping.values()}
        self._shapes = {
            name: tuple(tensor.shape)
            for name, tensor in model.state_dict().items()
            if name in self._tensors
        }
        for name, tensor in self._tensors.items():
            if int(tensor.n_elements) != count(self._shapes[name]):
                raise QerlError(
                    f"model: '{path}' holds {int(tensor.n_elements)} numbers for '{name}', its "
                    f"shape is {self._shapes[name]} by the file's own configuration as "
                    "transformers reads it; start from the safetensors checkpoint"
                )
        self._file = path.open("rb", buffering=0)
        types = [t.tensor_type.name for t in self._tensors.values() if len(t.shape) > 1]
        self.half = "F16" if types.count("F16") * 2 > len(types) else "BF16"
        coarse = sorted({kind for kind in types if kind not in _FINE})
        if coarse:
            say(
                f"'{path.name}' was quantized once already ({', '.join(coarse)}): the result is "
                "worse than one from the 16-bit checkpoint"
            )

    def names(self) -> list[str]:
        return list(self._tensors)

    def shape(self, name: str) -> tuple[int, ...] | None:
        return self._shapes.get(name)

    def stored(self, name: str) -> str:
        return self.half

    def get(self, name: str) -> torch.Tensor:
        """As the file means it: 16-bit types as they are, all others in float32."""
        raw = self._rows(name, 0, self._rows_of(name))
        tensor = (self._convert[name] or (lambda t: t))(raw).reshape(self._shapes[name])
        check_finite(name, tensor)
        return tensor

    def pieces(self, name: str) -> Iterator[torch.Tensor]:
        if self._convert[name] is not None:  # rows change places: no piece is whole by itself
            yield self.get(name)
            return
        rows = self._rows_of(name)
        step = rows_a_piece(4 * count(self._shapes[name]) // rows)
        for first in range(0, rows, step):
            piece = self._rows(name, first, min(step, rows - first))
            check_finite(name, piece)
            yield piece

    def total_bytes(self) -> int:
        return self.path.stat().st_size

    def fingerprint(self) -> str:
        return stamp([self.path])

    def _rows_of(self, name: str) -> int:
        shape = self._tensors[name].data.shape
        return int(shape[0]) if len(shape) > 1 else 1

    def _rows(self, name: str, first: int, many: int) -> torch.Tensor:
        """`many` rows from the `first` on, in the file's order: [many, …], or the whole vector."""
        import numpy as np
        import torch
        from gguf import dequantize

        tensor = self._tensors[name]
        rows = self._rows_of(name)
        width = int(tensor.n_bytes) // rows
        raw = torch.empty(many * width, dtype=torch.uint8)
        read_into(self._file, int(tensor.data_offset) + first * width, raw, self.path)
        shape = tensor.data.shape if rows == 1 else (many, *tensor.data.shape[1:])
        kind = tensor.tensor_type.name
        if kind in ("F16", "BF16"):
            half = raw.view(torch.float16 if kind == "F16" else torch.bfloat16)
            return half.view(many, -1) if rows > 1 else half
        data = raw.numpy().view(tensor.data.dtype).reshape(shape)
        values = dequantize(data, tensor.tensor_type)
        return torch.from_numpy(np.ascontiguousarray(values, dtype=np.float32))


def _conversions(reader: Any, model: PreTrainedModel) -> dict[str, tuple[str, Convert | None]]:
    """GGUF's tensor names -> (the model's name, what undoes llama.cpp's change, if anything)."""
    from transformers.integrations.gguf.utils import is_gguf_arch_supported

    architecture = reader.fields["general.architecture"].contents()
    if is_gguf_arch_supported(architecture):
        return _by_transforms(reader, model, architecture)
    return _by_processor(reader, model, architecture)


def _by_processor(
    reader: Any, model: PreTrainedModel, architecture: str
) -> dict[str, tuple[str, Convert | None]]:
    """transformers' older loader: a table of names, a processor an architecture."""
    import torch
    from transformers.modeling_gguf_pytorch_utils import (
        TENSOR_PROCESSORS,
        TensorProcessor,
        get_gguf_hf_weights_map,
    )

    processor = TENSOR_PROCESSORS.get(architecture, TensorProcessor)(model.config.to_dict())
    try:
        names = get_gguf_hf_weights_map(model, processor)
    except NotImplementedError as error:
        raise QerlError(
            f"model: no names are known for the GGUF architecture '{architecture}'; start from "
            "the safetensors checkpoint"
        ) from error
    changes = type(processor).process is not TensorProcessor.process

    def converter(name: str) -> Convert | None:
        if not changes or name in ("token_embd.weight", "output.weight"):
            return None

        def convert(tensor: torch.Tensor) -> torch.Tensor:
            values = processor.process(tensor.float().numpy(), name)
            return torch.from_numpy(values.weights.copy())

        return convert

    return {t.name: (names[t.name], converter(t.name)) for t in reader.tensors if t.name in names}


def _by_transforms(
    reader: Any, model: PreTrainedModel, architecture: str
) -> dict[str, tuple[str, Convert | None]]:
    """transformers' newer loader: renamings, then at most one chain of operations a tensor."""
    from transformers.core_model_loading import WeightConverter, WeightRenaming, rename_source_key
    from transformers.integrations.gguf.utils import get_gguf_conversion_mapping

    transforms = get_gguf_conversion_mapping(architecture, model.config)
    renamings = [t for t in transforms if isinstance(t, WeightRenaming)]
    converters = [t for t in transforms if isinstance(t, WeightConverter)]
    known = model.state_dict()

    def converter(pattern: str | None) -> Convert | None:
        if pattern is None:
            return None
        operations = next(c.operations for c in converters if pattern in c.source_patterns)

        def convert(tensor: torch.Tensor) -> torch.Tensor:
            for operation in operations:
                out: Any = operation.convert({"x": tensor}, ["x"], ["x"])
                tensor = out["x"]
            return tensor

        return convert

    found = {}
    for tensor in reader.tensors:
        name, pattern = rename_source_key(tensor.name, renamings, converters)
        if name in known:
            found[tensor.name] = (name, converter(pattern))
    return found


def write_tokenizer(path: Path, folder: Path) -> None:
    """The tokenizer, chat template and generation settings that the file carries, as a folder's."""
    from transformers import AutoConfig, GenerationConfig

    load_tokenizer(path).save_pretrained(folder)
    config = AutoConfig.from_pretrained(path.parent, gguf_file=path.name)
    GenerationConfig.from_model_config(config).save_pretrained(folder)


def load_tokenizer(path: Path) -> PreTrainedTokenizerBase:
    """The tokenizer in the file; QerlError if there is none that transformers can make."""
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name)
    except (OSError, ValueError, KeyError) as error:
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise QerlError(
            f"model: no tokenizer could be made from '{path}' ({reason}); start from the "
            "safetensors checkpoint"
        ) from error
