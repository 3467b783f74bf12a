"""What a recipe key means: its type, default, allowed values and description, as plain text."""

from __future__ import annotations

import annotated_types
from pydantic.fields import FieldInfo

from qerl.aliases import lookup, targets
from qerl.config import Section, recipe_keys, section_of
from qerl.errors import QerlError
from qerl.recipe_errors import expected, show, unknown_key

_BOUNDS = {
    annotated_types.Gt: ("gt", "> "),
    annotated_types.Ge: ("ge", "≥ "),
    annotated_types.Lt: ("lt", "< "),
    annotated_types.Le: ("le", "≤ "),
}


def explain(key: str = "") -> str:
    """Explain one dotted key, every key of a section, or every key ("").

    A name from TRL, Unsloth or verl is answered with what it is called here, and that key's help.
    Raises `QerlError` with the nearest key for an unknown one.
    """
    keys = recipe_keys()
    if not key:
        return "\n\n".join(_section(name) for name in keys if "." not in name)
    if key in keys:
        return _section(key)
    note = lookup(key)
    if note is None:
        raise QerlError(unknown_key(key))
    target = targets().get(key)
    return f"{key}: {note}" + (f"\n\n{_section(target)}" if target else "")


def _section(name: str) -> str:
    field = recipe_keys()[name]
    section = section_of(field)
    if section is None:
        return _entry(name, field)
    inner = [_entry(f"{name}.{key}", info) for key, info in section.model_fields.items()]
    return "\n\n".join([f"{name}: {field.description}", *inner])


def _entry(name: str, field: FieldInfo) -> str:
    """Three lines: the key and its type, its default, its description."""
    limits = _limits(field)
    kind = expected(field.annotation) + (f", {limits}" if limits else "")
    return f"{name}: {kind}\n    default: {_default(field)}\n    {field.description}"


def _default(field: FieldInfo) -> str:
    if field.is_required():
        return "none, must be given"
    value = field.get_default(call_default_factory=True)
    assert not isinstance(value, Section), "a section is explained by its keys"
    return value if isinstance(value, str) and value else show(value)


def _limits(field: FieldInfo) -> str:
    """The numeric bounds in signs, such as "≥ 0, < 1"."""
    found = []
    for rule in field.metadata:
        if type(rule) in _BOUNDS:
            name, sign = _BOUNDS[type(rule)]
            found.append(f"{sign}{getattr(rule, name):g}")
    return ", ".join(found)
