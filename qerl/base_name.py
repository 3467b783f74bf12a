"""The name an adapter gives its base: a Hub id, so that others can load it.

A run on a local folder knows none. The id that a user then gives is checked as far as that is
possible: an adapter's keys are those of its base's class, and under another class engines find no
module of those names and serve the base without a word.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from qerl.errors import QerlError
from qerl.files import atomic_write
from qerl.model.peft_folder import CONFIG_FILE, is_hub_id, read_config

Say = Callable[[str], None]


def check_base_id(base: str, model: str, say: Say = lambda text: None) -> None:
    """Raise QerlError unless `base` is a Hub id of a model of the same class as `model`.

    model: the recipe's. When the Hub cannot be asked, or has no such model, `say` hears of it.
    """
    from qerl.model.assemble import raw_config
    from qerl.model.load import resolve_model

    if not is_hub_id(base):
        raise QerlError(f"--base-model: {base!r} is no Hub id; write OWNER/NAME, as on the Hub")
    theirs = _hub_config(base, say).get("architectures")
    ours = raw_config(resolve_model(model, say)[0]).get("architectures")
    if theirs and ours and theirs != ours:
        raise QerlError(
            f"--base-model: {base} is a {theirs[0]} and this adapter's keys are those of "
            f"{ours[0]}: servers would apply none of it; name the model that was trained on"
        )


def _hub_config(base: str, say: Say) -> dict[str, Any]:
    """config.json of a Hub model; {} when it cannot be had, which is said."""
    from huggingface_hub import hf_hub_download
    from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError

    try:
        path = hf_hub_download(base, "config.json")
    except (HfHubHTTPError, LocalEntryNotFoundError, OSError) as error:
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
        say(f"{base} was not compared with the base of this run: {reason}")
        return {}
    return json.loads(Path(path).read_text(encoding="utf-8"))


def rename_base(folder: Path, base: str) -> None:
    """Give the adapter in `folder` another name for its base, in its configuration and its card."""
    config = read_config(folder)
    old = str(config["base_model_name_or_path"])
    text = json.dumps(config | {"base_model_name_or_path": base}, indent=2, sort_keys=True)
    atomic_write(folder / CONFIG_FILE, text + "\n")
    card = folder / "README.md"
    if not card.is_file():
        return
    text = card.read_text(encoding="utf-8")
    for quote in ("`", "'", '"'):
        text = text.replace(f"{quote}{old}{quote}", f"{quote}{base}{quote}")
    front, end, body = text.removeprefix("---\n").partition("\n---\n")
    kept = [line for line in front.splitlines() if not line.startswith("base_model: ")]
    atomic_write(card, "\n".join(["---", f"base_model: {base}", *kept]) + end + body)
