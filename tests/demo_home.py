"""The cache folder that slow tests share, so that the demo model is made once a machine.

`QERL_TEST_HOME` names it; otherwise it is the user's own cache, as in a real run.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def shared_home() -> Iterator[Path]:
    """Within: QERL_HOME is the shared cache. After: what it was."""
    home = Path(os.environ.get("QERL_TEST_HOME") or "~/.cache/qerl").expanduser()
    before = os.environ.get("QERL_HOME")
    os.environ["QERL_HOME"] = str(home)
    try:
        yield home
    finally:
        if before is None:
            del os.environ["QERL_HOME"]
        else:
            os.environ["QERL_HOME"] = before
