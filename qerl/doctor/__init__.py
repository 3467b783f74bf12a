"""What would waste a night, found in a minute, before a run.

`run_checks` tries a recipe out: machine, model, prompts, reward, then the loaded policy. A check is
a function under `@check(name, needs)` in one of the modules here, or anything with the same three
attributes handed to `register`. What could not be checked is never called ok.
"""

from __future__ import annotations

from qerl.doctor import machine, policy, prompts, rewards  # noqa: F401 - they register checks
from qerl.doctor.context import Context
from qerl.doctor.frame import Check, Finding, NotChecked, Report, check, register, run_checks

__all__ = [
    "Check",
    "Context",
    "Finding",
    "NotChecked",
    "Report",
    "check",
    "register",
    "run_checks",
]
