"""Where qerl keeps what it may make again: `$QERL_HOME`, by default `~/.cache/qerl`."""

from __future__ import annotations

import os
from pathlib import Path


def qerl_home() -> Path:
    """The cache folder (created on first use by whoever writes into it)."""
    return Path(os.environ.get("QERL_HOME") or "~/.cache/qerl").expanduser()
