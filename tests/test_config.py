"""Recipes: loading, overrides, every one-line error, round trips and schema."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from qerl import aliases, recipes
from qerl.config import NoiseConfig, Recipe, recipe_keys
from qerl.errors import QerlError
from qerl.recipes import changed_keys, parse_overrides, parse_yaml

DEMO = "demo-smollm2"


def write(folder: Path, text: str, name: str = "mine.yaml") -> Path:
    path = folder / name
    path.write_text(text, encoding="utf-8")
    return path


def fails(text: str, folder: Path) -> str:
    """The one-line message that loading this YAML gives."""
    with pytest.raises(QerlError) as caught:
        Recipe.load(write(folder, text))
    message = str(caught.value)
    assert "\n" not in message
    return message


def override_fails(**overrides: object) -> str:
    with pytest.raises(QerlError) as caught:
        Recipe.load(DEMO, {key.replace("__", "."): value for key, value in overrides.items()})
    message = str(caught.value)
    assert "\n" not in message
    return message


# ------------------------------------------------------------------------------------- loading


def test_bundled_recipe_by_name_with_overrides():
    recipe = Recipe.load(DEMO, {"train.steps": 5, "noise": {"stages": 3}})
    assert (recipe.name, recipe.train.steps, recipe.noise.stages) == (DEMO, 5, 3)
    assert recipe.noise.sigma_start == 0.01  # the rest of an overridden section is kept
    assert recipe.source is not None and recipe.source.endswith("demo-smollm2.yaml")


def test_bundled_recipe_works_from_any_directory(tmp_path: Path):
    code = "from qerl.config import Recipe; print(Recipe.load('demo-smollm2').model)"
    out = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, check=True
    )
    assert out.stdout.strip() == "smollm2-135m-instruct-pypi"


def test_package_data_is_preferred_to_the_checkout(tmp_path: Path, monkeypatch):
    data = tmp_path / "qerl" / "recipes"
    data.mkdir(parents=True)
    write(data, "model: m\ndescription: shipped\n", "shipped.yaml")
    (data / "paper").mkdir()
    write(data / "paper", "model: m\ndescription: nested\n", "table.yaml")
    monkeypatch.setattr(recipes.resources, "files", lambda package: tmp_path / package)
    found = {info.name: info.description for info in recipes.list_recipes()}
    assert found == {"paper/table": "nested", "shipped": "shipped"}
    assert Recipe.load("paper/table").model == "m"


def test_every_bundled_recipe_is_valid_and_described():
    listed = recipes.list_recipes()
    assert DEMO in [info.name for info in listed]
    for info in listed:
        assert info.description, info.name
        assert Recipe.load(info.name).name == info.name.rsplit("/", 1)[-1]


def test_path_with_tilde_and_spaces(tmp_path: Path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    write(tmp_path, "model: some/model\n", "my recipe.yaml")
    recipe = Recipe.load("~/my recipe.yaml")
    assert recipe.model == "some/model"
    assert recipe.name == "my recipe"  # the file's name where the file gives none


def test_relative_paths_are_the_recipe_files_own(tmp_path: Path):
    path = write(
        tmp_path,
        "model: ../base\nlora: {init: ./a}\n"
        "task: {name: rows, dataset: data.jsonl, eval_dataset: org/set,\n"
        '       reward: ["./r.py:f", "s.py:g"]}\n',
    )
    recipe = Recipe.load(path)
    assert recipe.model == str(tmp_path.parent / "base")
    assert recipe.lora.init == str(tmp_path / "a")
    assert recipe.task.dataset == str(tmp_path / "data.jsonl")
    assert recipe.task.eval_dataset == "org/set"  # a Hub id is left alone
    assert recipe.task.reward == [str(tmp_path / "r.py") + ":f", str(tmp_path / "s.py") + ":g"]


def test_relative_paths_in_overrides_start_at_the_working_directory(tmp_path: Path, monkeypatch):
    folder = tmp_path / "recipes"
    folder.mkdir()
    path = write(folder, "model: m\n")
    monkeypatch.chdir(tmp_path)
    recipe = Recipe.load(path, {"model": "./here", "lora.init": "~/adapter"})
    assert recipe.model == str(tmp_path / "here")
    assert recipe.lora.init == str(Path("~/adapter").expanduser())


def test_empty_section_and_yaml_1_2_words(tmp_path: Path):
    text = "model: no\ntrain:\nnoise: {schedule: off}\nalgorithm: {clip_high: 1e-1}\n"
    recipe = Recipe.load(write(tmp_path, text))
    assert (recipe.model, recipe.train.steps) == ("no", 100)
    assert recipe.noise.schedule == "off"  # YAML 1.1 would make this False
    assert recipe.algorithm.clip_high == 0.1  # PyYAML alone would make this the text "1e-1"


# ------------------------------------------------------------------------------ files that fail


def test_unknown_recipe_names_the_nearest():
    with pytest.raises(QerlError, match="unknown 'demo-smolm2'; did you mean demo-smollm2"):
        Recipe.load("demo-smolm2")
    with pytest.raises(QerlError, match=r"unknown 'zz'; Bundled: .*demo-smollm2.*`qerl init DIR`"):
        Recipe.load("zz")


def test_missing_file_and_folder(tmp_path: Path):
    with pytest.raises(QerlError, match="no file '.*/no such.yaml'; `qerl recipes` .*`qerl init"):
        Recipe.load(tmp_path / "no such.yaml")
    with pytest.raises(QerlError, match="is a folder; name the .yaml file"):
        Recipe.load(str(tmp_path))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("model: m\ntrain: [1\n", "line 3: not valid YAML"),
        ("- a\n- b\n", "expected `key: value` lines, found ['a', 'b']"),
        (
            "model: m\ntrain: {lr: 1}\ntrain: {lr: 2}\n",
            "line 3: not valid YAML: `train` is written",
        ),
        ("model: !!int abc\n", "not valid YAML"),
        ("model: !!python/object:os.x {}\n", "line 1: not valid YAML"),
        ("? [a]\n: b\n", "not valid YAML"),
        ("train: 5\n", "train: expected `key: value` lines, found 5"),
        ("{}\n", "model: missing; add `model: …`"),
        ("1: 2\n", "`1`: unknown key"),
    ],
)
def test_broken_files(text: str, message: str, tmp_path: Path):
    assert message in fails(text, tmp_path)


def test_file_that_is_not_text(tmp_path: Path):
    path = tmp_path / "x.yaml"
    path.write_bytes(b"model: \xff\xfe")
    with pytest.raises(QerlError, match="is not UTF-8 text"):
        Recipe.load(path)


# ------------------------------------------------------------------------------- keys that fail


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("train: {lrr: 1}", "`train.lrr`: unknown key; did you mean `train.lr`?"),
        ("trian: {lr: 1}", "`trian`: unknown key; did you mean `train`?"),
        ("group_size: 4", "`group_size`: unknown key; did you mean `rollout.group_size`?"),
        ("every: 4", "`every`: unknown key; did you mean `eval.every` or `save.every`?"),
        ("train: {rank: 4}", "`train.rank`: unknown key; did you mean `lora.rank`?"),
        ("qqqqqq: 4", "`qqqqqq`: unknown key; `qerl explain` lists them all"),
        ("num_generations: 4", "`num_generations`: in qerl it is `rollout.group_size`"),
        ("rollout: {num_generations: 4}", "`rollout.num_generations`: in qerl it is"),
        ("training: {args: {learning_rate: 1}}", "`training.args.learning_rate`: in qerl it is"),
        (
            "actor_rollout_ref: {rollout: {n: 5}}",
            "`actor_rollout_ref.rollout.n`: in qerl it is `rollout.group_size`",
        ),
        ("beta: 0.04", "`beta`: qerl has no KL penalty"),
    ],
)
def test_unknown_keys(text: str, message: str, tmp_path: Path):
    assert message in fails(f"model: m\n{text}\n", tmp_path)


def test_unknown_keys_in_overrides_and_in_python():
    assert override_fails(num_generations=3).startswith("`num_generations`: in qerl it is")
    assert "did you mean `train.lr`" in override_fails(train__lr__x=3)
    nested = override_fails(actor_rollout_ref={"rollout": {"n": 5}})
    assert nested.startswith("`actor_rollout_ref.rollout.n`: in qerl it is `rollout.group_size`")
    with pytest.raises(QerlError, match="`trian`: unknown key; did you mean `train`"):
        Recipe(model="m", trian=3)  # pyright: ignore[reportCallIssue]
    recipe = Recipe.load(DEMO)
    with pytest.raises(QerlError, match="`train.step`: unknown key; did you mean `train.steps`"):
        recipe.train.step = 3  # pyright: ignore[reportAttributeAccessIssue]


def test_every_alias_points_at_a_real_key():
    table = aliases.targets()
    assert len(table) >= 40
    known = recipe_keys()
    assert [name for name, key in table.items() if key not in known] == []
    # An alias that is also a key of ours could never be reached.
    assert [name for name in table if name in known] == []


# ----------------------------------------------------------------------------- values that fail


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("train.steps", "abc", "train.steps: expected a whole number, found 'abc'"),
        ("train.steps", 2.5, "train.steps: expected a whole number, found 2.5"),
        ("train.steps", True, "train.steps: expected a whole number, found true"),
        ("train.lr", None, "train.lr: expected a number, found null"),
        ("train.lr", -1, "train.lr: must be greater than 0, found -1"),
        ("train.lr", float("inf"), "train.lr: expected a finite number, found inf"),
        ("lora.rank", 0, "lora.rank: must be at least 1, found 0"),
        ("lora.dropout", 1, "lora.dropout: must be less than 1, found 1"),
        ("train.lr_end", 2, "train.lr_end: must be at most 1, found 2"),
        ("save.best", 3, "save.best: expected true or false, found 3"),
        ("task.system", [1], "task.system: expected text or null, found [1]"),
        (
            "task.reward",
            {"a": 1},
            "task.reward: expected text or a list of texts or null, found {'a': 1}",
        ),
        ("task.reward_weights", ["x"], "task.reward_weights: expected a list of numbers or null"),
        ("task.chat_template_kwargs", {"a": [1]}, "task.chat_template_kwargs: expected `key:"),
        (
            "noise.credit",
            "corected",
            "noise.credit: expected one of shared, corrected, uncorrected, found 'corected'; "
            "did you mean corrected?",
        ),
        ("format", "fp8", "format: expected one of nvfp4, nf4, bf16, found 'fp8'"),
        ("device", "gpu", 'device: expected "auto", "cpu", "cuda" or "cuda:N", found \'gpu\''),
        ("seed", 2**31, "seed: must be less than"),
        ("lora.targets", "q,v", "lora.targets: expected all-linear or a list: write [q, v]"),
        ("lora.targets", [], "lora.targets: the list is empty"),
    ],
)
def test_wrong_values(key: str, value: object, message: str):
    assert override_fails(**{key: value}).startswith(message)


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ({"noise.sigma_end": 1}, "noise.sigma_end: 1 is above noise.sigma_start (0.01)"),
        ({"noise.sigma_start": 0}, "noise.sigma_start: an exponential schedule cannot"),
        ({"noise.sigma_end": 0}, "noise.sigma_end: an exponential schedule cannot"),
        ({"rollout.group_size": 1}, "rollout.group_size: 1 gives every group zero variance"),
        ({"task.name": "rows"}, "task.dataset: missing; the task `rows` needs"),
        ({"task.dataset": "org/set"}, "task.dataset: 'org/set' is not read by the task `numbers`"),
        (
            {"task.reward": "./a.py:f", "task.reward_weights": [1, 2]},
            "task.reward_weights: 2 weights for 1 reward functions",
        ),
        ({"task.reward": []}, "task.reward: the list is empty"),
        (
            {"noise.credit": "corrected", "algorithm.correction": "none"},
            "algorithm.correction: none contradicts noise.credit: corrected",
        ),
    ],
)
def test_values_that_contradict_each_other(overrides: dict, message: str):
    assert override_fails(**overrides).startswith(message)


def test_every_completion_is_logged_unless_a_recipe_says_otherwise():
    assert Recipe(model="m").output.log_completions is None
    assert Recipe(model="m", output={"log_completions": 0}).output.log_completions == 0


def test_noise_off_allows_any_sigma():
    assert Recipe.load(DEMO, {"noise.schedule": "off", "noise.sigma_start": 0}).noise.stages == 6


def test_a_refused_assignment_changes_nothing():
    recipe = Recipe.load(DEMO)
    with pytest.raises(QerlError, match="train.steps: expected a whole number, found 'abc'"):
        recipe.train.steps = "abc"  # pyright: ignore[reportAttributeAccessIssue]
    with pytest.raises(QerlError, match="noise.sigma_end: 5 is above"):
        recipe.noise.sigma_end = 5.0
    with pytest.raises(QerlError, match="algorithm.correction: none contradicts"):
        recipe.noise.credit = "corrected"
        recipe.algorithm = recipe.algorithm.model_copy(update={"correction": "none"})
    assert recipe.train == Recipe.load(DEMO).train
    assert recipe.noise.sigma_end == Recipe.load(DEMO).noise.sigma_end
    assert recipe.algorithm.correction == "truncate"


def test_check_finds_what_single_assignments_cannot():
    recipe = Recipe.load(DEMO)
    recipe.rollout.group_size = 1
    with pytest.raises(QerlError, match="rollout.group_size: 1 gives"):
        recipe.check()


def test_a_section_made_alone_names_its_full_key():
    with pytest.raises(QerlError, match="noise.stages: must be at least 2, found 1"):
        NoiseConfig(stages=1)


# ------------------------------------------------------------------------------------ overrides


def test_parse_overrides():
    given = ["a=1e-4", "b=off", "c=true", "d=x: y", "e=[q, 1e-5]", "f=", "g=# z", "h='5'", "i=-3"]
    assert parse_overrides(given) == {
        "a": 0.0001,
        "b": "off",
        "c": True,
        "d": "x: y",
        "e": ["q", 1e-05],
        "f": None,
        "g": "# z",
        "h": "5",
        "i": -3,
    }
    assert type(parse_overrides(["x=1e-4"])["x"]) is float
    assert parse_overrides(["x=a=b"]) == {"x": "a=b"}


@pytest.mark.parametrize("item", ["train.lr", "=3"])
def test_override_without_key_or_value(item: str):
    with pytest.raises(QerlError, match=f"'{item}': expected key=value"):
        parse_overrides([item])


def test_override_with_broken_list():
    with pytest.raises(QerlError, match="a=\\[1.*not valid YAML"):
        parse_overrides(["a=[1"])


def test_override_inside_a_free_mapping():
    recipe = Recipe.load(DEMO, parse_overrides(["task.chat_template_kwargs.enable_thinking=false"]))
    assert recipe.task.chat_template_kwargs == {"enable_thinking": False}


# --------------------------------------------------------------------- round trip, diff, schema


def test_yaml_round_trip_is_exact(tmp_path: Path):
    recipe = Recipe.load(
        DEMO,
        {
            "noise.schedule": "off",
            "train.lr": 1.2345678901234567e-5,
            "task.system": "yes: # 'quoted'\nπ",
            "lora.targets": ["q_proj", "v_proj"],
            "task.chat_template_kwargs.x": "1e-4",
            "output.name": "2026-01-01",
        },
    )
    again = Recipe.load(recipe.write(tmp_path / "new" / "recipe.yaml"))
    assert again == recipe
    assert again.to_yaml() == recipe.to_yaml()
    assert set(parse_yaml(recipe.to_yaml(), "x")) == set(Recipe.model_fields)


def test_changed_keys():
    old = Recipe.load(DEMO)
    new = Recipe.load(DEMO, {"train.steps": 30, "seed": 4, "lora.targets": ["q_proj"]})
    assert changed_keys(old, old) == {}
    assert changed_keys(old, new) == {
        "seed": (0, 4),
        "lora.targets": ("all-linear", ["q_proj"]),
        "train.steps": (old.train.steps, 30),
    }


def test_json_schema_has_every_key_described():
    schema = recipes.json_schema()
    assert schema["$schema"] == "https://json-schema.org/draft/2020-12/schema"
    assert schema["required"] == ["model"] and schema["additionalProperties"] is False
    for name, field in recipe_keys().items():
        section, _, key = name.rpartition(".")
        holder = schema
        if section:
            holder = schema["$defs"][schema["properties"][section]["$ref"].rsplit("/", 1)[-1]]
        assert holder["properties"][key]["description"] == field.description
