"""An adapter merged into its base, weight by weight: in bf16, or requantized to NVFP4.

    W' = W + s·B·A        (Hu et al. 2021, eq. 3), in fp32, W dequantized from what was trained on

In bf16 W' is rounded once. In NVFP4 plain rounding undoes the training: the adapter moves most
weights by less than half a step, so they fall back to where they were. What helps is to round a
column's error away in the columns after it (GPTQ), under the base's own block scales, on the
inputs the run's own answers give: then W' x is close where W' alone cannot be. Layers for which
even that is not enough stay in bf16 (`keep`), as the checkpoint's `ignore` list allows.

Tensors are read, merged and written one at a time; a shard is in memory, never a model. Names here
are the files' own; where transformers renames as it loads (Gemma 3, Ministral 3), an adapter has
the model's names, and `Merge.module` leads from one to the other.
Shape letters: N outputs, K inputs, R rank.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from qerl.adapter import WEIGHTS_FILE, read_tensors
from qerl.errors import QerlError
from qerl.export import (
    SHARD_BYTES,
    Reader,
    copy_side_files,
    read_json,
    write_shards,
)
from qerl.files import write_json
from qerl.quantize import nvfp4

if TYPE_CHECKING:
    from torch import Tensor

    from qerl.quantize.search import Packed

    Live = Callable[[], Packed]

Progress = Callable[[int, int], None]

PARTS = ("weight_packed", "weight_scale", "weight_global_scale")


class Delta:
    """What an adapter adds to each linear layer it adapts.

    Raises QerlError for an adapter that is damaged, or more than LoRA.
    """

    def __init__(self, folder: Path) -> None:
        from qerl.model.peft_folder import module_names, read_config, refuse_more_than_lora

        self.folder = folder
        self._config = read_config(folder)
        refuse_more_than_lora(self._config, folder)
        self._tensors = read_tensors(folder / WEIGHTS_FILE)
        self.modules = module_names(sorted(self._tensors), folder)

    def is_zero(self) -> bool:
        """Whether every B is zero: an adapter that was never trained."""
        return not any(bool(self._factor(name, "B").any()) for name in self.modules)

    def of(self, module: str) -> Tensor:
        """s·B·A, fp32 [N, K]. Raises QerlError for factors that do not make a pair."""
        a, b = self._factor(module, "A").float(), self._factor(module, "B").float()
        if a.dim() != 2 or b.dim() != 2 or a.shape[0] != b.shape[1]:
            raise QerlError(
                f"merge: {self.folder / WEIGHTS_FILE} is damaged: lora_A {list(a.shape)} and "
                f"lora_B {list(b.shape)} of {module} make no pair; export an intact adapter"
            )
        return (b @ a).mul_(self._scaling(module, a.shape[0]))

    def _factor(self, module: str, side: str) -> Tensor:
        name = f"base_model.model.{module}.lora_{side}.weight"
        if name not in self._tensors:
            raise QerlError(
                f"merge: {self.folder / WEIGHTS_FILE} is damaged: it has no {name}; export an "
                "intact adapter"
            )
        return self._tensors[name]

    def _scaling(self, module: str, rank: int) -> float:
        """alpha/r, or alpha/sqrt(r) for rsLoRA; alpha is the module's own if a pattern names it."""
        from peft.utils.other import get_pattern_key

        patterns = self._config.get("alpha_pattern") or {}
        key = get_pattern_key(list(patterns), module)
        alpha = patterns.get(key, self._config["lora_alpha"])
        return alpha / (math.sqrt(rank) if self._config.get("use_rslora") else rank)


class Merge:
    """A base checkpoint and an adapter, read as the model they make together.

    Read it in a `with` block. live: makers of the layers that were NVFP4 in memory while they were
    trained on, by the model's names; one that the files have in 16 bits is taken from here.
    adapted: the files' names of adapted layers -> the adapter's names.
    Raises QerlError when the checkpoint is incomplete or in a format that cannot be read, or does
    not hold a layer that the adapter adapts (shape named).
    """

    def __init__(self, checkpoint: Path, adapter: Path, live: Mapping[str, Live]) -> None:
        self.checkpoint = checkpoint
        self.delta = Delta(adapter)
        self.config = read_json(checkpoint / "config.json")
        self._reader = Reader(checkpoint)
        self._made: Mapping[str, Live] = live

    def _renamed(self) -> dict[str, str]:
        """The model's names of layers -> the files', where any adapted layer has another there."""
        from qerl.model.towers import file_names
        from qerl.quantize import structure

        there = {name.rpartition(".")[0] for name in self._reader.where}
        if there.issuperset(self.delta.modules):
            return {}
        found = file_names(structure.skeleton(self.checkpoint), self._reader.where)
        return {
            module.rpartition(".")[0]: file.rpartition(".")[0] for module, file in found.items()
        }

    def file(self, module: str) -> str:
        """The files' name of a layer that the model calls `module`."""
        return self._files.get(module, module)

    def module(self, name: str) -> str:
        """The model's name of a layer that the files call `name`."""
        return self._modules.get(name, name)

    def __enter__(self) -> Merge:
        from qerl.model.formats import read_layers

        self._open = self._reader.opened()
        self._open.__enter__()
        where = {name: self.checkpoint / file for name, file in self._reader.where.items()}
        self.layers = read_layers(self.checkpoint, self.config, where)
        self.packed = self.layers.quantized()
        self._files = self._renamed()
        self._modules = {file: module for module, file in self._files.items()}
        self.adapted = {self.file(name): name for name in self.delta.modules}
        made = {self.file(name): make for name, make in self._made.items()}
        # The others are let go of: what makes them holds a model in memory.
        self._live = {n: make for n, make in made.items() if self.layers.kind(n) == "dense"}
        self._made = {}
        self._check_adapter()
        return self

    def __exit__(self, *exception: Any) -> None:
        self._open.__exit__(*exception)

    def _check_adapter(self) -> None:
        """Every adapted layer is there, in the shape of its delta: none is left out silently."""
        for name, module in self.adapted.items():
            if self.layers.kind(name) == "dense" and f"{name}.weight" not in self._reader.where:
                raise QerlError(
                    f"merge: the adapter adapts {module}, which '{self.checkpoint}' does not hold; "
                    "it was trained on another base"
                )
            found, wanted = self.layers.shape(name), tuple(self.delta.of(module).shape)
            if found != wanted:
                raise QerlError(
                    f"merge: {module} is {list(found)} in '{self.checkpoint}' and {list(wanted)} "
                    "in the adapter; it was trained on another base"
                )

    def weight(self, name: str) -> Tensor:
        """The merged weight of a linear layer, fp32 [N, K]."""
        from qerl_kernels.quantize import dequantize

        if name in self._live:
            weight = dequantize(*self._live[name]())
        else:
            weight = self.layers.dequantized(self._reader.tensor, name)
        return weight.add_(self.delta.of(self.adapted[name])) if name in self.adapted else weight

    def is_nvfp4(self, name: str) -> bool:
        """Whether this layer was trained on in NVFP4."""
        return name in self._live or self.layers.kind(name) == "nvfp4"

    def stored(self, name: str) -> Packed | None:
        """The NVFP4 tensors of a layer as it was trained on; None where it was not in NVFP4."""
        from qerl.quantize.search import Packed

        if not self.is_nvfp4(name):
            return None
        if name in self._live:
            return self._live[name]()
        return Packed(*self.layers.nvfp4(self._reader.tensor, name))

    def wide(self) -> list[str]:
        """Linear layers that are not the file's own tensor: adapted, or to be unpacked; sorted."""
        return sorted({*self.packed, *self._live, *self.adapted})

    def others(self) -> list[str]:
        """Names of all other tensors, sorted, which are copied as they are.

        Scales that calibration left for quantized activations or caches are not among them.
        """
        taken = {part for name in self.wide() for part in self.layers.parts(name)}
        left = set(self._reader.where) - taken
        return sorted(name for name in left if not self.layers.understood(name))

    def tensor(self, name: str) -> Tensor:
        """A tensor of the base's files, as it is."""
        return self._reader.tensor(name)

    # --------------------------------------------------------------------------------- writing

    def write_bf16(
        self, folder: Path, *, shard_bytes: int = SHARD_BYTES, progress: Progress | None = None
    ) -> None:
        """Write the merged model into the existing, empty `folder`: a plain bf16 checkpoint.

        progress(done, total) is called for each tensor.
        """
        import torch

        wide, others = self.wide(), self.others()

        def tensors() -> Iterator[tuple[str, Tensor]]:
            for name in others:
                yield name, self.tensor(name)
            for name in wide:
                yield f"{name}.weight", self.weight(name).to(torch.bfloat16)

        total = len(wide) + len(others)
        write_shards(_counted(tensors(), total, progress), folder, shard_bytes)
        self._write_config(folder, None)

    def write_nvfp4(
        self,
        folder: Path,
        encoded: Iterable[tuple[str, Packed]],
        *,
        shard_bytes: int = SHARD_BYTES,
    ) -> None:
        """Write the merged model into the existing, empty `folder`: compressed-tensors NVFP4A16.

        encoded: the layers that are NVFP4 in it, each once, in any order. Others that are adapted,
        or packed in the base, are bf16 and named in the `ignore` list.
        """
        import torch

        done: set[str] = set()
        others = self.others()

        def tensors() -> Iterator[tuple[str, Tensor]]:
            for name, packed in encoded:
                done.add(name)
                for part, tensor in zip(PARTS, packed, strict=True):
                    yield f"{name}.{part}", tensor
            for name in self.wide():
                if name not in done:
                    yield f"{name}.weight", self.weight(name).to(torch.bfloat16)
            for name in others:
                if name.removesuffix(".weight") not in done:
                    yield name, self.tensor(name)

        write_shards(tensors(), folder, shard_bytes)
        self._write_config(folder, self._ignore(done))

    def _ignore(self, done: set[str]) -> list[str]:
        """Layers that the written checkpoint has in 16 bits, for its `ignore` list: the model's
        names, as compressed-tensors matches them with modules."""
        section = self.config.get("quantization_config") or {}
        ours = section.get("quant_method") == "compressed-tensors"
        theirs = list(section.get("ignore") or []) if ours else []
        dense = [
            name.removesuffix(".weight")
            for name in self.others()
            if name.endswith(".weight") and len(self._reader.shape(name)) == 2
        ]
        left = {name for name in [*dense, *self.wide(), "lm_head"] if "embed" not in name} - done
        left = {self.module(name) for name in left}
        return [*theirs, *sorted(left - set(theirs))]

    def _write_config(self, folder: Path, ignore: list[str] | None) -> None:
        config = _plain(self.config) | {"dtype": "bfloat16"}
        if ignore is not None:
            config["quantization_config"] = nvfp4.quantization_config(ignore)
        write_json(folder / "config.json", config)
        copy_side_files(self.checkpoint, folder, skip=("README", "hf_quant_config.json"))


def _plain(config: dict[str, Any]) -> dict[str, Any]:
    """A configuration without its quantization and dtype, also within the text tower's part."""
    dropped = ("quantization_config", "torch_dtype", "dtype")
    return {
        key: _plain(value) if key == "text_config" else value
        for key, value in config.items()
        if key not in dropped
    }


def _counted(
    tensors: Iterator[tuple[str, Tensor]], total: int, progress: Progress | None
) -> Iterator[tuple[str, Tensor]]:
    for done, pair in enumerate(tensors, 1):
        yield pair
        if progress is not None:
            progress(done, total)
