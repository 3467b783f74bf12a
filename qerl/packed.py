"""`qerl.load`: a packed model to train with anything, without a recipe or a run."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Literal, overload

from qerl.config import LoraConfig
from qerl.errors import QerlError

if TYPE_CHECKING:
    from peft import PeftModel
    from transformers import PreTrainedModel

Say = Callable[[str], None]
Format = Literal["nvfp4", "nf4", "bf16"]
Rest = Literal["keep", "nvfp4"]
Dtype = Literal["auto", "bfloat16", "float16", "float32"]


@overload
def load(
    model: str | Path,
    *,
    adapter: Literal[True] = True,
    lora: LoraConfig | None = None,
    format: Format = "nvfp4",
    rest: Rest = "keep",
    dtype: Dtype = "auto",
    device: str = "auto",
    trust_remote_code: bool = False,
    seed: int = 0,
    say: Say = lambda text: None,
) -> PeftModel: ...
@overload
def load(
    model: str | Path,
    *,
    adapter: Literal[False],
    lora: None = None,
    format: Format = "nvfp4",
    rest: Rest = "keep",
    dtype: Dtype = "auto",
    device: str = "auto",
    trust_remote_code: bool = False,
    seed: int = 0,
    say: Say = lambda text: None,
) -> PreTrainedModel: ...
def load(
    model: str | Path,
    *,
    adapter: bool = True,
    lora: LoraConfig | None = None,
    format: Format = "nvfp4",
    rest: Rest = "keep",
    dtype: Dtype = "auto",
    device: str = "auto",
    trust_remote_code: bool = False,
    seed: int = 0,
    say: Say = lambda text: None,
) -> PeftModel | PreTrainedModel:
    """A model with its linear layers packed, ready to train.

    model: a directory, a Hub id or the demo model's name, 16-bit or published quantized; of a
    model that also sees, the text tower. adapter: with a LoRA adapter around it, as a
    `peft.PeftModel` in which that alone has gradients (fp32); False: the frozen base, a
    transformers model through whose packed layers gradients flow. lora: rank, targets, … of the
    adapter, or one to start from (null: a recipe's defaults). format, rest, dtype, device,
    trust_remote_code: as a recipe's keys of these names. seed: draws the adapter's A. `say` hears
    of what is left out.
    Raises QerlError for whatever of these does not exist or does not fit the model.
    """
    if lora is not None and not adapter:
        raise QerlError("lora: given together with adapter=False; leave out one of the two")
    from qerl.config import Recipe
    from qerl.device import resolve_device, resolve_dtype
    from qerl.model.load import load_network, resolve_model

    # The recipe's own checks: an unknown name is the same line here and there.
    recipe = Recipe(
        model=str(model),
        format=format,
        rest=rest,
        dtype=dtype,
        device=device,
        trust_remote_code=trust_remote_code,
        seed=seed,
    )
    where = resolve_device(recipe.device)
    code = recipe.trust_remote_code
    source, _ = resolve_model(recipe.model, say, code)
    kind = resolve_dtype(recipe.dtype, where)
    network, _ = load_network(source, recipe.format, recipe.rest, kind, where, say, code)
    if not adapter:
        return network
    from qerl.adapter import load_adapter
    from qerl.model.lora import attach_lora

    lora = lora or LoraConfig()
    wrapped = attach_lora(network, lora, seed=recipe.seed)
    if lora.init is not None:
        load_adapter(wrapped, lora.init)
    return wrapped
