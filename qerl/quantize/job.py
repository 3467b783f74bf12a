"""One quantization: which tensors the result has, and where each of them comes from."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from qerl.quantize import nvfp4, output
from qerl.quantize.methods import CALIBRATED, encode
from qerl.quantize.shards import DTYPES, Tensors
from qerl.quantize.writer import Spec, Writer

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedModel

    from qerl.quantize.search import Packed

Progress = Callable[[int, int, str], None]


@dataclass(slots=True)
class Job:
    """names: the model's tensor names -> the files'. layers: what becomes NVFP4, with [N, K].

    head: the output head's module. ignore: linear layers left in 16 bits. dropped: tensors of the
    files that are not written (a tied head).
    """

    source: Tensors
    names: dict[str, str]
    layers: dict[str, tuple[int, int]]
    head: str | None
    lm_head: str
    method: str
    format: Any
    ignore: list[str]
    dropped: set[str | None]

    def _file_name(self, module: str | None) -> str | None:
        return self.names.get(f"{module}.weight")

    def _stem(self, module: str) -> str:
        """What a module is called in the files."""
        return self.names[f"{module}.weight"].removesuffix(".weight")

    def _head_file(self) -> str | None:
        """The head's weight in the files, if it is to be quantized."""
        return None if self.lm_head == "keep" else self._file_name(self.head)

    def specs(self) -> list[Spec]:
        """Every tensor of the result, in the order of the source."""
        packed = {self._file_name(name) for name in self.layers}
        if self.lm_head == "nvfp4":
            packed.add(self._head_file())
        specs: list[Spec] = []
        for name in self.source.names():
            shape = self.source.shape(name)
            assert shape is not None, "a name that is listed"
            stem = name.removesuffix(".weight")
            if name in packed:
                specs += output.packed_specs(stem, (shape[0], shape[1]), self.format)
            elif name == self._head_file():
                specs += output.fp8_specs(stem, (shape[0], shape[1]))
            elif name not in self.dropped:
                specs.append(Spec(name, self.source.stored(name), shape))
        return specs

    def write_layers(
        self,
        writer: Writer,
        model: PreTrainedModel,
        calibration: Sequence[Sequence[int]] | None,
        progress: Progress | None,
        device: str,
    ) -> None:
        """Quantize what the writer does not have yet."""
        finished = sum(self._is_done(writer, name) for name in self.layers)
        for _, weights in encode(
            self.method,
            _ModelNames(self.source, self.names),
            model,
            nvfp4.scale_groups(self.layers),
            calibration=calibration,
            done=lambda name: self._earlier(writer, name),
            device=device,
        ):
            for name, weight in weights.items():
                if self._is_done(writer, name):
                    continue
                self._write_packed(writer, self._stem(name), weight)
                finished += 1
                if progress is not None:
                    progress(finished, len(self.layers), name)

    def _write_packed(self, writer: Writer, stem: str, weight: Packed) -> None:
        for part, tensor in output.packed_tensors(stem, weight, self.format).items():
            writer.write(part, [tensor])

    def _is_done(self, writer: Writer, name: str) -> bool:
        return writer.done.issuperset(output.part_names(self._stem(name), self.format))

    def _earlier(self, writer: Writer, name: str) -> Packed | None:
        """A layer that was written before an interruption."""
        if not self._is_done(writer, name):
            return None
        codes, scale, last = map(writer.read, output.part_names(self._stem(name), self.format))
        return output.from_parts(codes, scale, last, self.format)

    def write_rest(self, writer: Writer) -> None:
        """The head if it is quantized, and every tensor that stays as it is."""
        quantized = {self._file_name(name) for name in self.layers} | {self._head_file()}
        if self._head_file() is not None:
            assert self.head is not None
            self._write_head(writer, self._stem(self.head))
        for name in self.source.names():
            if name not in quantized | self.dropped | writer.done:
                writer.write(name, _as_stored(self.source, name))

    def _write_head(self, writer: Writer, stem: str) -> None:
        """A run of rows at a time: the head of a large vocabulary is the largest tensor of all."""
        weight = f"{stem}.weight"
        parts = [f"{weight}", f"{weight}_scale"]
        if self.lm_head == "nvfp4":
            parts = output.part_names(stem, self.format)
        if writer.done.issuperset(parts):
            return
        if self.lm_head == "nvfp4":
            search = "sweep" if self.method in CALIBRATED else self.method
            self._write_packed(writer, stem, _search_rows(self.source, weight, search))
            return
        for name, pieces in output.fp8_tensors(stem, self.source.pieces(weight)).items():
            writer.write(name, pieces)


class _ModelNames:
    """A source under the model's names."""

    def __init__(self, source: Tensors, names: dict[str, str]):
        self.source, self.names = source, names

    def get(self, name: str) -> torch.Tensor:
        return self.source.get(self.names[name])

    def shape(self, name: str) -> tuple[int, ...] | None:
        return self.source.shape(self.names[name]) if name in self.names else None


def _as_stored(source: Tensors, name: str) -> Iterator[torch.Tensor]:
    import torch

    dtype = getattr(torch, DTYPES[source.stored(name)][0])
    return (piece.to(dtype) for piece in source.pieces(name))


def _search_rows(source: Tensors, name: str, search: Any) -> Packed:
    """`quantize_weight` of a weight that is read twice, in runs of rows, and never held."""
    import torch

    from qerl.quantize.search import Packed, quantize_weight
    from qerl_kernels.quantize import global_scale_for

    peaks = [torch.stack(rows.aminmax()).abs().amax().float() for rows in source.pieces(name)]
    g = global_scale_for(torch.stack(peaks).amax())
    parts = [quantize_weight(rows, search, g) for rows in source.pieces(name)]
    return Packed(torch.cat([p.packed for p in parts]), torch.cat([p.scale for p in parts]), g)
