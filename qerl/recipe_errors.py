"""One line for every way a recipe can be wrong: the key, the value found, and the fix."""

from __future__ import annotations

import difflib
import types
from typing import Any, Literal, Union, get_args, get_origin

from pydantic import ValidationError

from qerl.aliases import lookup
from qerl.config import Recipe, Section, recipe_keys, section_of

_NOUNS: dict[Any, str] = {
    int: "a whole number",
    float: "a number",
    bool: "true or false",
    str: "text",
    type(None): "null",
}
_PLURALS: dict[Any, str] = {str: "texts", float: "numbers"}
_BOUNDS = {
    "greater_than": ("gt", "must be greater than"),
    "greater_than_equal": ("ge", "must be at least"),
    "less_than": ("lt", "must be less than"),
    "less_than_equal": ("le", "must be at most"),
}


def expected(annotation: Any) -> str:
    """A type in words: `int | None` is "a whole number or null"."""
    origin, args = get_origin(annotation), get_args(annotation)
    if origin is Literal:
        return "one of " + ", ".join(str(value) for value in args)
    if origin in (Union, types.UnionType):
        return " or ".join(expected(arg) for arg in args)
    if origin is list:
        return f"a list of {_PLURALS[args[0]]}"
    if origin is dict or (isinstance(annotation, type) and issubclass(annotation, Section)):
        return "`key: value` lines"
    return _NOUNS[annotation]


def accepts_bool(annotation: Any) -> bool:
    """Whether true and false are values of this type."""
    return annotation is bool or bool in get_args(annotation)


def show(value: Any) -> str:
    """A value as the user wrote it, shortened."""
    text = str(value).lower() if isinstance(value, bool) else repr(value)
    text = "null" if value is None else text
    return text if len(text) <= 80 else text[:77] + "..."


def one_line(error: ValidationError, section: type[Section]) -> str:
    """Pydantic's report on one section as one line about its first problem."""
    problem = error.errors(include_url=False)[0]
    return _say(_dotted(problem["loc"], section), dict(problem))


def _say(key: str, problem: dict[str, Any]) -> str:
    kind, value = problem["type"], problem.get("input")
    if kind in ("extra_forbidden", "no_such_attribute"):
        return unknown_key(key)
    if kind == "missing":
        return f"{key}: missing; add `{key}: …` ({_description(key)})"
    if kind == "value_error":
        message = str(problem["ctx"]["error"])
        names_its_key = message.partition(":")[0] in recipe_keys()
        return message if names_its_key else f"{key}: {message}"
    if kind in _BOUNDS:
        name, words = _BOUNDS[kind]
        return f"{key}: {words} {problem['ctx'][name]:g}, found {show(value)}"
    if kind == "finite_number":
        return f"{key}: expected a finite number, found {show(value)}"
    if kind == "string_pattern_mismatch":
        return f"{key}: expected {_description(key).rstrip('.')}, found {show(value)}"
    return _wrong_type(key, value)


def _description(key: str) -> str:
    return recipe_keys()[key].description or ""


def _wrong_type(key: str, value: Any) -> str:
    annotation = recipe_keys()[key].annotation
    line = f"{key}: expected {expected(annotation)}, found {show(value)}"
    if get_origin(annotation) is Literal and isinstance(value, str):
        near = difflib.get_close_matches(value, [str(v) for v in get_args(annotation)], n=1)
        line += f"; did you mean {near[0]}?" if near else ""
    return line


def _dotted(location: tuple[int | str, ...], section: type[Section]) -> str:
    """The longest known key along pydantic's location (which also names union members)."""
    prefix = "" if section is Recipe else _section_name(section)
    parts = [part for part in (prefix, *map(str, location)) if part]
    for end in range(len(parts), 0, -1):
        if ".".join(parts[:end]) in recipe_keys():
            inside = end < len(parts) and section_of(recipe_keys()[".".join(parts[:end])])
            return ".".join(parts[: end + 1]) if inside else ".".join(parts[:end])
    return ".".join(parts[:1])


def _section_name(section: type[Section]) -> str:
    for name, field in Recipe.model_fields.items():
        if field.annotation is section:
            return name
    raise AssertionError(f"{section.__name__} is not a section of Recipe")


def unknown_key(key: str) -> str:
    """What to write instead of a key that a recipe does not have."""
    note = lookup(key)
    if note is not None:
        return f"`{key}`: {note}"
    names = [known for known in nearest_keys(key) if known != key]
    if not names:
        return f"`{key}`: unknown key; `qerl explain` lists them all"
    return f"`{key}`: unknown key; did you mean {' or '.join(f'`{name}`' for name in names)}?"


def nearest_keys(key: str) -> list[str]:
    """Known keys like `key`: those that end the same way, else the closest by spelling."""
    known = list(recipe_keys())
    last = key.rsplit(".", 1)[-1]
    same_end = [name for name in known if name.rsplit(".", 1)[-1] == last]
    if same_end:
        return same_end
    close = difflib.get_close_matches(key, known, n=1, cutoff=0.7)
    if close:
        return close
    ends = {name.rsplit(".", 1)[-1]: name for name in reversed(known)}
    return [ends[end] for end in difflib.get_close_matches(last, list(ends), n=1, cutoff=0.6)]
