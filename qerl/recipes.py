"""Recipes on disk: find one, read its YAML, apply overrides, compare two.

YAML is read as version 1.2 means it: only `true` and `false` are booleans (so `schedule: off` is
the word), `1e-4` is a number, and a key written twice is an error.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Any

import yaml

from qerl.aliases import lookup
from qerl.config import Recipe, recipe_keys, section_of
from qerl.errors import QerlError
from qerl.recipe_errors import show, unknown_key

_DATA_SUFFIXES = (".jsonl", ".json", ".csv", ".parquet")
_PATH_KEYS = ("model", "lora.init", "task.dataset", "task.eval_dataset", "task.reward")


@dataclass(frozen=True, slots=True)
class RecipeInfo:
    """A bundled recipe: its name, its one-sentence description and its file."""

    name: str
    description: str
    path: Path


def load_recipe(name_or_path: str | Path, overrides: dict[str, Any] | None = None) -> Recipe:
    """See `Recipe.load`."""
    path = find_recipe(name_or_path)
    values = parse_yaml(_read(path), str(path))
    _refuse_unknown(values)
    _resolve_paths(values, path.parent)
    values.setdefault("name", path.stem)
    changes = _nested(overrides or {})
    _resolve_paths(changes, Path.cwd())
    recipe = Recipe(**_merge(values, changes))
    recipe._source = str(path)
    return recipe


# ------------------------------------------------------------------------------- finding a file


def bundled_folder() -> Path:
    """Where the recipes that come with qerl are: package data, or the checkout's own folder."""
    package = Path(str(resources.files("qerl")))
    installed = package / "recipes"
    return installed if installed.is_dir() else package.parent / "recipes"


def list_recipes() -> list[RecipeInfo]:
    """The bundled recipes by name; one in a subfolder is named `folder/name`."""
    folder = bundled_folder()
    found = []
    for path in sorted(folder.rglob("*.yaml")):
        name = path.relative_to(folder).with_suffix("").as_posix()
        text = parse_yaml(_read(path), str(path)).get("description", "")
        found.append(RecipeInfo(name, text, path))
    return found


def find_recipe(name_or_path: str | Path) -> Path:
    """The file of a bundled name or of a path (`~` is expanded).

    Raises `QerlError` naming the nearest bundled recipe, or the missing file.
    """
    text = str(name_or_path)
    path = Path(text).expanduser()
    looks_like_path = isinstance(name_or_path, Path) or path.suffix in (".yaml", ".yml")
    if not looks_like_path:
        bundled = {info.name: info.path for info in list_recipes()}
        if text in bundled:
            return bundled[text]
        if not path.exists():
            raise QerlError(_unknown_recipe(text, list(bundled)))
    if path.is_dir():
        raise QerlError(f"recipe: {text!r} is a folder; name the .yaml file inside it")
    if not path.is_file():
        raise QerlError(
            f"recipe: there is no file {str(path)!r}; `qerl recipes` lists the bundled names, "
            "`qerl init DIR` writes a recipe of your own"
        )
    return path.absolute()


def _unknown_recipe(name: str, bundled: list[str]) -> str:
    near = difflib.get_close_matches(name, bundled, n=1)
    hint = f"did you mean {near[0]}? " if near else ""
    return (
        f"recipe: unknown {name!r}; {hint}Bundled: {', '.join(bundled)}; or the path of a .yaml, "
        "which `qerl init DIR` writes"
    )


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise QerlError(f"recipe: {str(path)!r} is not UTF-8 text: {error.reason}") from None
    except OSError as error:
        raise QerlError(f"recipe: cannot read {str(path)!r}: {error.strerror}") from None


# ------------------------------------------------------------------------------------------ YAML


class _Loader(yaml.SafeLoader):
    """SafeLoader with YAML 1.2's plain scalars, refusing a key written twice."""

    yaml_implicit_resolvers: dict[str, list[tuple[str, re.Pattern[str]]]] = {}

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen: set[str] = set()
        scalars = (key for key, _ in node.value if isinstance(key, yaml.ScalarNode))
        for key in scalars:
            if key.value in seen:
                raise yaml.constructor.ConstructorError(
                    None, None, f"`{key.value}` is written twice", key.start_mark
                )
            seen.add(key.value)
        return super().construct_mapping(node, deep=deep)


_FLOAT = r"[-+]?(?:(?:\d+\.\d*|\.\d+)(?:e[-+]?\d+)?|\d+e[-+]?\d+|\.inf)|\.nan"
_PLAIN_SCALARS: list[tuple[str, str, list[str]]] = [  # type, its spelling, its first characters
    ("bool", r"true|false", list("tTfF")),
    ("null", r"~|null|", ["~", "n", "N", ""]),
    ("int", r"[-+]?(?:0|[1-9][0-9_]*)", list("-+0123456789")),
    ("float", _FLOAT, list("-+0123456789.")),
]


class _Dumper(yaml.SafeDumper):
    """SafeDumper that also quotes the texts which `_Loader` would read as something else."""


for _type, _spelling, _first in _PLAIN_SCALARS:
    _pattern = re.compile(rf"^(?:{_spelling})$", re.I)
    for _side in (_Loader, _Dumper):
        _side.add_implicit_resolver(f"tag:yaml.org,2002:{_type}", _pattern, _first)


def parse_yaml(text: str, where: str) -> dict[str, Any]:
    """The mapping in a YAML text. Raises `QerlError` with the line of a mistake."""
    try:
        values = yaml.load(text, Loader=_Loader)  # noqa: S506 - a SafeLoader
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        line = f", line {mark.line + 1}" if mark else ""
        raise QerlError(f"{where}{line}: not valid YAML: {error.problem}") from None
    except (yaml.YAMLError, ValueError) as error:  # ValueError: a tag such as `!!int abc`
        raise QerlError(f"{where}: not valid YAML: {' '.join(str(error).split())}") from None
    if values is None:
        return {}
    if not isinstance(values, dict):
        raise QerlError(f"{where}: expected `key: value` lines, found {show(values)}")
    return values


def dump_yaml(values: dict[str, Any]) -> str:
    """YAML that `parse_yaml` reads back to equal values, in the given order."""
    return yaml.dump(values, Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=100)


def parse_overrides(items: Iterable[str]) -> dict[str, Any]:
    """`["train.lr=2e-5"]` as `{"train.lr": 2e-05}`, read as YAML scalars or `[lists]`."""
    changes: dict[str, Any] = {}
    for item in items:
        key, equals, text = item.partition("=")
        if not equals or not key.strip():
            raise QerlError(f"{item!r}: expected key=value, such as train.lr=2e-5")
        changes[key.strip()] = _override_value(key.strip(), text)
    return changes


def _override_value(key: str, text: str) -> Any:
    """A list, mapping or quoted text as YAML; anything else is one plain scalar (`a: b` too)."""
    if text[:1] in ("[", "{", '"', "'"):
        return parse_yaml(f"value: {text}", f"{key}={text}")["value"]
    loader = _Loader("")
    tag = loader.resolve(yaml.ScalarNode, text, (True, False))
    return loader.construct_object(yaml.ScalarNode(tag, text))


# --------------------------------------------------------------------------- keys and their paths


def _refuse_unknown(values: dict[str, Any]) -> None:
    """Raise `QerlError` for the first key, at any depth, that a recipe does not have."""
    for key, value in list(values.items()):
        field = Recipe.model_fields.get(str(key))
        section = section_of(field) if field is not None else None
        if field is None:
            raise QerlError(_unknown_branch(str(key), value))
        if section is None:
            continue
        if value is None:  # a section whose lines are all commented out
            values[key] = value = {}
        if not isinstance(value, dict):
            raise QerlError(f"{key}: expected `key: value` lines, found {show(value)}")
        for inner, branch in value.items():
            if inner not in section.model_fields:
                raise QerlError(_unknown_branch(f"{key}.{inner}", branch))


def _unknown_branch(key: str, value: Any) -> str:
    """The message for an unknown key; inside another tool's section, for its first known alias."""
    for leaf in _leaves(key, value):
        if lookup(leaf) is not None:
            return unknown_key(leaf)
    return unknown_key(key)


def _leaves(key: str, value: Any) -> Iterator[str]:
    if isinstance(value, dict) and value:
        for inner, branch in value.items():
            yield from _leaves(f"{key}.{inner}", branch)
    else:
        yield key


def _nested(overrides: dict[str, Any]) -> dict[str, Any]:
    """Dotted keys as a tree of sections, each key known."""
    tree: dict[str, Any] = {}
    for key, value in overrides.items():
        known, rest = _split_known(key, value)
        for part in reversed(rest):
            value = {part: value}
        for part in reversed(known.split(".")):
            value = {part: value}
        _refuse_unknown(value)
        tree = _merge(tree, value)
    return tree


def _split_known(key: str, value: Any) -> tuple[str, list[str]]:
    """`task.chat_template_kwargs.x` is the known key and `["x"]`; raises for an unknown one."""
    if key in recipe_keys():
        return key, []
    parts = key.split(".")
    for end in range(len(parts) - 1, 0, -1):
        head = ".".join(parts[:end])
        field = recipe_keys().get(head)
        if field is not None and getattr(field.annotation, "__origin__", None) is dict:
            return head, parts[end:]
    raise QerlError(_unknown_branch(key, value))


def _merge(base: dict[str, Any], changes: dict[str, Any]) -> dict[str, Any]:
    merged = dict(base)
    for key, value in changes.items():
        old = merged.get(key)
        if isinstance(old, dict) and isinstance(value, dict):
            value = _merge(old, value)
        merged[key] = value
    return merged


def _resolve_paths(values: dict[str, Any], folder: Path) -> None:
    """Make the local paths of a recipe absolute, in place; Hub ids and names are left alone."""
    for key in _PATH_KEYS:
        *above, last = key.split(".")
        holder = values.get(above[0]) if above else values
        if not isinstance(holder, dict) or holder.get(last) is None:
            continue
        value = holder[last]
        if isinstance(value, list):
            holder[last] = [_resolve(key, item, folder) for item in value]
        else:
            holder[last] = _resolve(key, value, folder)


def _resolve(key: str, value: Any, folder: Path) -> Any:
    if not isinstance(value, str):
        return value
    if value.startswith("~"):
        return str(Path(value).expanduser())
    local = value in (".", "..") or value.startswith(("./", "../"))
    if key == "task.reward":
        local = local or value.rpartition(":")[0].endswith(".py")
    elif key.endswith("dataset"):
        local = local or value.endswith(_DATA_SUFFIXES)
    return str((folder / value).resolve()) if local else value


# ------------------------------------------------------------------------------- whole recipes


def absolute_paths(recipe: Recipe) -> Recipe:
    """The recipe with its local paths, taken from the working directory, made absolute: a run
    folder's recipe.yaml must mean the same wherever it is read."""
    values = recipe.model_dump()
    _resolve_paths(values, Path.cwd())
    for holder, key in ((values, "model"), (values["lora"], "init")):
        if holder[key] is not None and Path(holder[key]).is_dir():
            holder[key] = str(Path(holder[key]).resolve())
    fixed = Recipe(**values)
    fixed._source = recipe._source
    return fixed


def changed_keys(old: Recipe, new: Recipe) -> dict[str, tuple[Any, Any]]:
    """Dotted keys whose values differ, as `{key: (old, new)}`; empty when the recipes are equal."""
    before, after = flatten(old), flatten(new)
    return {key: (before[key], after[key]) for key in before if before[key] != after[key]}


def flatten(recipe: Recipe) -> dict[str, Any]:
    """Every value of a recipe by dotted key, in file order."""
    flat: dict[str, Any] = {}
    for name, value in recipe.model_dump(mode="json").items():
        if section_of(Recipe.model_fields[name]) is None:
            flat[name] = value
        else:
            flat |= {f"{name}.{inner}": item for inner, item in value.items()}
    return flat


def json_schema() -> dict[str, Any]:
    """The recipe's JSON Schema (draft 2020-12), with descriptions, for editors."""
    schema = Recipe.model_json_schema()
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", **schema}
