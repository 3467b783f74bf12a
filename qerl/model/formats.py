"""Which layers of a published checkpoint are NVFP4, FP8 or 16-bit, and their tensors in our layout.

A stored layer describes itself: the names, types and shapes of its tensors leave one reading. The
configuration (`formats_config`) must agree with it, and says what tensors do not. Ours is
compressed-tensors' layout whoever published: codes, block scales and a divisor (w = v·s/g), or
E4M3 with a multiplier (w = v·scale). Activations stay in 16 bits whatever the publisher did with
them. Shape letters: N outputs, K inputs.

Not readable, and refused by layer: FP8 in blocks, integers, MXFP4, AWQ's and SVDQuant's extra
factors. A layer is judged when it is asked for, so an unreadable vision tower or MTP head that
nobody loads is in nobody's way.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from qerl.errors import QerlError
from qerl.model.formats_config import BLOCK, READABLE, Kind, Plan, read_plan

if TYPE_CHECKING:
    import torch

    Read = Callable[[str], torch.Tensor]

_FLOATS = ("F64", "F32", "F16", "BF16")
_BYTES = {"U8": 1, "I8": 1, "F8_E4M3": 1, "F8_E5M2": 1}
# The factor of an FP8 weight: everybody's name, and that of transformers' own FP8, which despite
# it is a multiplier as well.
_FP8_SCALES = ("weight_scale", "weight_scale_inv")
_NVFP4 = {"weight_packed", "weight_scale", "weight_global_scale"}
_MODELOPT = {"weight", "weight_scale", "weight_scale_2"}
# Left by calibration for quantized activations and caches; nothing here quantizes those.
_LEFTOVERS = {
    *("input_scale", "input_global_scale", "input_zero_point", "activation_scale", "output_scale"),
    *(f"{which}_scale" for which in ("q", "k", "v", "kv", "prob")),
    *(f"{which}_global_scale" for which in ("q", "k", "v")),
    *(f"{which}_zero_point" for which in ("q", "k", "v")),
}


@dataclass(frozen=True, slots=True)
class Stored:
    """A tensor as its file's header describes it: safetensors' dtype name and the shape."""

    dtype: str
    shape: tuple[int, ...]

    @property
    def size(self) -> int:
        """Number of elements."""
        product = 1
        for length in self.shape:
            product *= length
        return product

    def __str__(self) -> str:
        return f"{self.dtype} {list(self.shape)}"


class Layers:
    """What a checkpoint says of each of its linear layers, by the names its tensors have.

    publisher: "compressed-tensors", "ModelOpt", "fp8" or "16-bit". activations: whether the
    publisher quantizes activations too (W4A4, W8A8), which here stay in 16 bits.
    """

    def __init__(self, directory: Path, plan: Plan, tensors: Mapping[str, Stored]) -> None:
        self.directory = directory
        self.publisher, self.activations = plan.publisher, plan.activations
        self._plan = plan
        self._modules: dict[str, dict[str, Stored]] = {}
        for name, stored in tensors.items():
            module, _, leaf = name.rpartition(".")
            self._modules.setdefault(module, {})[leaf] = stored
        self._kinds: dict[str, Kind] = {}

    def quantized(self) -> list[str]:
        """Modules that are stored quantized, readable or not, in the order of the files."""
        return [name for name, parts in self._modules.items() if not _is_dense(parts)]

    def kind(self, name: str) -> Kind:
        """How a layer is stored; "dense" also for one with no weight in the files (a tied head).

        Raises QerlError, naming the layer, for one that cannot be read or whose tensors are not
        what the configuration says.
        """
        if name not in self._kinds:
            self._kinds[name] = self._judge(name)
        return self._kinds[name]

    def shape(self, name: str) -> tuple[int, int]:
        """(N, K) of a layer with a weight, packed or not; raises QerlError as `kind` does."""
        parts, kind = self._modules[name], self.kind(name)
        stored = parts.get("weight_packed") or parts["weight"]
        n, k = stored.shape
        return n, 2 * k if kind == "nvfp4" else k

    def nvfp4(self, read: Read, name: str) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Codes u8 [N, K/2], block scales E4M3 [N, K/16] and the divisor f32 [1] of an NVFP4 layer.

        read(tensor name) gives a tensor of the files. Codes and scales are the file's own; the
        divisor of a ModelOpt layer is 1 / weight_scale_2, rounded once.
        Raises QerlError, naming the layer, for scales that are negative or not finite.
        """
        import torch

        from qerl_kernels.ops import check_values

        assert self.kind(name) == "nvfp4", name
        parts = self._modules[name]
        if "weight_packed" in parts:
            packed = read(f"{name}.weight_packed")
            divisor = read(f"{name}.weight_global_scale").float().reshape(1)
        else:
            packed = read(f"{name}.weight")
            divisor = 1 / read(f"{name}.weight_scale_2").to(torch.float32).reshape(1)
        scale = read(f"{name}.weight_scale").contiguous()
        with _damaged(self.directory):
            check_values(scale, divisor, name)
        return packed.contiguous(), scale, divisor

    def fp8(self, read: Read, name: str) -> tuple[torch.Tensor, torch.Tensor]:
        """The E4M3 weight [N, K] of an FP8 layer and its multiplier f32, [1] or [N].

        Raises QerlError, naming the layer, for NaN weights and for scales that are negative or not
        finite.
        """
        from qerl_kernels.ops import check_fp8_weight

        assert self.kind(name) == "fp8", name
        parts = self._modules[name]
        leaf = next(leaf for leaf in _FP8_SCALES if leaf in parts)
        weight = read(f"{name}.weight").contiguous()
        scale = read(f"{name}.{leaf}").float().reshape(-1).contiguous()
        with _damaged(self.directory):
            check_fp8_weight(weight, scale, name)
        return weight, scale

    def dequantized(self, read: Read, name: str, dtype: torch.dtype | None = None) -> torch.Tensor:
        """The layer's weight [N, K], computed in fp32 and rounded once to `dtype` (fp32 if None).

        For a layer that has to be 16-bit here, such as an output head, and for merging.
        """
        import torch

        from qerl_kernels.quantize import dequantize

        dtype = dtype or torch.float32
        kind = self.kind(name)
        if kind == "dense":
            return read(f"{name}.weight").to(dtype, copy=True)  # the caller may write into it
        if kind == "nvfp4":
            return dequantize(*self.nvfp4(read, name), dtype)
        weight, scale = self.fp8(read, name)
        return weight.float().mul_(scale.reshape(-1, 1)).to(dtype)

    def parts(self, name: str) -> list[str]:
        """Full names of the tensors that `nvfp4`, `fp8` or `dequantized` reads for a layer."""
        leaves = {
            "nvfp4": _NVFP4 if "weight_packed" in self._modules.get(name, {}) else _MODELOPT,
            "fp8": {"weight", *_FP8_SCALES},
            "dense": {"weight"},
        }[self.kind(name)]
        return [f"{name}.{leaf}" for leaf in self._modules.get(name, {}) if leaf in leaves]

    def understood(self, tensor_name: str) -> bool:
        """Whether a tensor may be left unread: scales of activations or of the cache."""
        return bool(self._plan.rules) and tensor_name.rpartition(".")[2] in _LEFTOVERS

    # --- judging one layer -----------------------------------------------------------------------

    def _judge(self, name: str) -> Kind:
        parts = self._modules.get(name, {})
        if _is_dense(parts):
            return "dense"
        rules = self._plan.covering(name)
        refused = next((rule.reason for rule in rules if rule.kind is None), "")
        kind = _stored_kind(parts)
        agreed = kind is not None and any(rule.kind == kind for rule in rules)
        if refused and not agreed:
            raise self._error(name, f"is quantized as {refused}")
        if kind is None:
            listed = ", ".join(f"{leaf} {stored}" for leaf, stored in sorted(parts.items()))
            raise self._error(name, f"is neither NVFP4 nor FP8 by its tensors ({listed})")
        if not agreed or self._plan.ignores(name):
            raise QerlError(
                f"model: layer '{name}' of '{self.directory}' is stored as {kind.upper()}, and "
                f"the quantization config {_said(self._plan, rules, name)}; download the "
                "checkpoint's configuration and files again"
            )
        self._check_shapes(name, kind, parts)
        self._refuse_extras(name, parts)
        return kind

    def _check_shapes(self, name: str, kind: Kind, parts: dict[str, Stored]) -> None:
        weight = parts.get("weight_packed") or parts["weight"]
        if len(weight.shape) != 2:
            raise self._error(name, f"holds {weight}, and a layer's weight is 2-D")
        n, k = weight.shape
        k = 2 * k if kind == "nvfp4" else k
        if k % BLOCK or not k:
            raise self._error(name, f"has {k} inputs, and {kind.upper()} needs a multiple of 16")
        if kind == "nvfp4":
            self._check_nvfp4(name, n, k, parts)
            return
        scale = next(parts[leaf] for leaf in _FP8_SCALES if leaf in parts)
        if scale.size == 1 or (scale.size == n and scale.shape in ((n,), (n, 1))):
            return
        raise self._error(name, f"has FP8 scales {list(scale.shape)}: FP8 in blocks")

    def _check_nvfp4(self, name: str, n: int, k: int, parts: dict[str, Stored]) -> None:
        scale = parts["weight_scale"]
        if scale.dtype != "F8_E4M3" or scale.shape != (n, k // BLOCK):
            raise self._error(
                name,
                f"has block scales {scale}, and NVFP4 in blocks of {BLOCK} has F8_E4M3 "
                f"{[n, k // BLOCK]}",
            )
        whole = parts.get("weight_global_scale") or parts["weight_scale_2"]
        if whole.size != 1 or whole.dtype not in _FLOATS:
            raise self._error(name, f"has a global scale {whole}, and NVFP4 has one number")

    def _refuse_extras(self, name: str, parts: dict[str, Stored]) -> None:
        """A factor we do not know (AWQ's pre_quant_scale, a zero point) would be left out."""
        known = {"bias", *_FP8_SCALES, *_NVFP4, *_MODELOPT, *_LEFTOVERS}
        extras = sorted(set(parts) - known)
        if extras:
            raise self._error(name, f"also holds {', '.join(extras)}, which is not understood")

    def _error(self, name: str, what: str) -> QerlError:
        return QerlError(f"model: layer '{name}' of '{self.directory}' {what}; {READABLE}")


def read_layers(directory: Path, config: dict[str, Any], tensor_names: Iterable[str]) -> Layers:
    """What the checkpoint in `directory` says of each of its linear layers.

    config: its config.json, whole. tensor_names: those of its safetensors files; a mapping to
    their paths (as `qerl.model.load.tensor_names` gives) says which files to look at, else all of
    the folder's are. Only headers are read.
    Raises QerlError for a method of which nothing is readable (AWQ, GPTQ, integers, blocks of
    another size than 16), for sparse or rotated weights and for a damaged file. One layer that is
    not readable is an error when it is asked for.
    """
    plan = read_plan(directory, config)
    if isinstance(tensor_names, Mapping):
        files = sorted(set(tensor_names.values()))
    else:
        files = sorted(directory.glob("*.safetensors"))
    wanted = set(tensor_names)
    found = {}
    for file in files:
        found |= {n: stored for n, stored in _headers(Path(file)).items() if n in wanted}
    return Layers(directory, plan, found)


def _headers(file: Path) -> dict[str, Stored]:
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(file, framework="np") as handle:
            slices = {name: handle.get_slice(name) for name in handle.keys()}  # noqa: SIM118
            return {n: Stored(s.get_dtype(), tuple(s.get_shape())) for n, s in slices.items()}
    except (SafetensorError, FileNotFoundError) as error:
        raise QerlError(f"model: '{file}' is damaged ({error}); download it again") from error


def _is_dense(parts: Mapping[str, Stored]) -> bool:
    """No weight at all, or one in 16 or more bits that no scale belongs to."""
    leaves = {leaf for leaf in parts if leaf.startswith("weight_")} | {"qweight"} & set(parts)
    return not leaves and ("weight" not in parts or parts["weight"].dtype not in _BYTES)


def _stored_kind(parts: Mapping[str, Stored]) -> Kind | None:
    """What the names and types of a quantized layer's tensors can only be, if it is readable."""
    if set(parts) >= _NVFP4 and parts["weight_packed"].dtype == "U8":
        return "nvfp4"
    if "weight" not in parts or "weight_packed" in parts:
        return None
    if parts["weight"].dtype == "U8" and set(parts) >= _MODELOPT:
        return "nvfp4"
    scales = [leaf for leaf in _FP8_SCALES if leaf in parts]
    numbers = len(scales) == 1 and parts[scales[0]].dtype in _FLOATS
    is_fp8 = parts["weight"].dtype == "F8_E4M3" and numbers and "weight_scale_2" not in parts
    return "fp8" if is_fp8 else None


def _said(plan: Plan, rules: Iterable[Any], name: str) -> str:
    if plan.ignores(name):
        return "leaves it in 16 bits (its ignore list)"
    kinds = sorted({rule.kind.upper() for rule in rules})
    if kinds:
        return f"says {' or '.join(kinds)}"
    return "names no group it is in" if plan.rules else "is missing"


@contextmanager
def _damaged(directory: Path) -> Iterator[None]:
    """Turns an operator's ValueError about a tensor's values into the user's message."""
    try:
        yield
    except ValueError as error:
        raise QerlError(f"model: '{directory}': {error}; download it again") from error
