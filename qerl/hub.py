"""A run's result on the Hugging Face Hub: the folder that is pushed, and the push.

Everything goes through `huggingface_hub`, with its own login: no token is read, kept or printed
here. A push may be repeated: files the repository has are not sent again, an upload that was cut
short goes on where it was, and a push that changes nothing makes no commit.

Tested over HTTP and Git LFS (`HF_HUB_DISABLE_XET=1`); Xet, the default transfer, is untested here.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from qerl import card, demo_model
from qerl.adapter import CONFIG_FILE, WEIGHTS_FILE
from qerl.config import Recipe
from qerl.environment import versions
from qerl.errors import QerlError
from qerl.files import atomic_dir, atomic_write, check_writable
from qerl.metrics import read_jsonl
from qerl.model.peft_folder import is_hub_id
from qerl.run_folder import RunFolder
from qerl.stats import wilson

if TYPE_CHECKING:
    from huggingface_hub import HfApi

Say = Callable[[str], None]

SAMPLE_ROWS = 24  # completions in samples.jsonl
_SAMPLE_KEYS = ("step", "index", "prompt", "completion", "reward", "rewards", "finish_reason")
_MERGED = ("model.safetensors", "model.safetensors.index.json")
_SHARDS = "model-?????-of-?????.safetensors"
_NOT_PUBLISHED = {"README.md", "recipe.yaml"}


def prepare(
    run_dir: str | Path,
    out: str | Path,
    *,
    which: Literal["best", "last"] = "last",
    merged: Path | None = None,
    rows: Mapping[str, card.Result | None],
    repo: str | None = None,
    base_model: str | None = None,
    licence: Mapping[str, str] | None = None,
    say: Say = lambda text: None,
) -> Path:
    """Write the folder that `push` would push to `out`, all or nothing; returns `out`.

    It holds the weights (the run's adapter, or the checkpoint in `merged`), README.md, the recipe
    without local paths, metrics.jsonl and samples.jsonl. A merged checkpoint's safetensors are
    hard links where the file system allows.

    which: the last adapter or the best. rows: further measurements for the card, label to a result
    with accuracy, ci95, mean_reward and n (null: not measured); a label equal to the Hub id of the
    base stands for the adapter on that 16-bit model. repo: "USER/NAME" for the card's examples.
    base_model: Hub id of the base (null: what the run calls it). licence: front matter entries
    (null: `licence_of` the base).
    Raises QerlError when the run has no such adapter, `merged` is no checkpoint, or `out` exists
    and is not empty, or cannot be written.
    """
    run, out = RunFolder.open(run_dir), Path(out).expanduser()
    source = run.best if which == "best" else run.adapter
    adapter = _adapter_config(source, which)
    recipe = Recipe.load(run.recipe)
    check_writable("output", out)
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise QerlError(f"output '{out}': it exists and is not empty; name another folder")
    relation = "adapter" if merged is None else _merged_relation(merged)
    named = base_model or str(adapter["base_model_name_or_path"])
    on_hub = is_hub_id(named)
    if not on_hub and merged is None:
        say(
            f"the base model is the local folder '{named}': the card and the adapter name it "
            f"'{Path(named).name}', which nobody else can load; give its Hub id as --base-model"
        )
    base = named if on_hub else Path(named).name
    if licence is None:
        licence = licence_of(recipe, named, say)
    summary = _json(run.summary) if run.summary.is_file() else {}
    samples = _samples(run, which)
    facts = card.Facts(
        repo=repo or out.name,
        relation=relation,
        base=base,
        base_on_hub=on_hub,
        recipe=recipe,
        adapter=adapter,
        summary=summary,
        environment=_json(run.env),
        results=_results(run, which, recipe, summary, base if on_hub else None, rows),
        samples=samples,
        licence=licence,
    )
    with atomic_dir(out) as folder:
        _copy_payload(source if merged is None else merged, folder)
        if merged is None:
            config = dict(adapter, base_model_name_or_path=base)
            (folder / CONFIG_FILE).write_text(json.dumps(config, indent=2, sort_keys=True) + "\n")
        if run.metrics.is_file():
            _write_rows(folder / "metrics.jsonl", read_jsonl(run.metrics)[0])
        _write_rows(folder / "samples.jsonl", samples)
        (folder / "recipe.yaml").write_text(card.public_recipe(recipe), encoding="utf-8")
        (folder / "README.md").write_text(card.build(facts), encoding="utf-8")
    return out


def push(
    folder: Path,
    repo: str,
    *,
    private: bool = False,
    revision: str | None = None,
    say: Say = lambda text: None,
) -> str:
    """Upload a prepared folder to the model repository `repo` ("USER/NAME"); returns its URL.

    The repository is made if it is not there; private: as a private one (otherwise as the account
    has it by default). revision: a branch, made if it is not there. Shards of an earlier push that
    the folder does not have are deleted in the same commit; no other file ever is.
    Raises QerlError without a login or the right to write, when the Hub cannot be reached or
    refuses, when a public repository is to be private, or the repository holds the other kind of
    result (an adapter, a merged model).
    """
    _check_folder(folder)
    check_repo(repo, login=False)  # the client below asks for it
    with _hub_errors(repo):
        api = _api()
        api.create_repo(repo, private=private or None, exist_ok=True)
        if private and not api.repo_info(repo).private:
            raise QerlError(
                f"--private: {repo} is there already and is public; make it private in its "
                "settings, or push to another name"
            )
        if revision is not None:
            api.create_branch(repo, branch=revision, exist_ok=True)
        _check_kind(api, folder, repo, revision)
        size = sum(path.stat().st_size for path in _files(folder))
        say(f"pushing {len(_files(folder))} files, {size:,} bytes, to {repo}")
        commit = api.upload_folder(
            repo_id=repo,
            folder_path=folder,
            revision=revision,
            commit_message=f"Upload with qerl {versions()['qerl']}",
            delete_patterns=[*_MERGED, _SHARDS],
        )
        _check_pushed(api, folder, repo, commit.oid)
    return f"{api.endpoint}/{repo}" + ("" if revision is None else f"/tree/{revision}")


def licence_of(recipe: Recipe, base: str, say: Say = lambda text: None) -> dict[str, str]:
    """The base's licence as front matter entries; {} (and a word to `say`) where it is unknown.

    base: the name in adapter_config.json. Asked are the README beside a local base, or the Hub.
    """
    if recipe.model == demo_model.MODEL_ID:
        return {"license": "apache-2.0"}
    found: Mapping[str, Any] = {}
    if is_hub_id(base):
        found = _hub_card(base, say)
    elif (readme := Path(base).expanduser() / "README.md").is_file():
        found = _front_matter(readme)
    entries = {
        key: str(found[key])
        for key in ("license", "license_name", "license_link")
        if found.get(key)
    }
    if not entries:
        say(f"the licence of {base} is not known: add `license:` to the card's front matter")
    return entries


def _hub_card(base: str, say: Say) -> Mapping[str, Any]:
    """Front matter of a Hub model's card; {} when the Hub does not answer, which is said."""
    from huggingface_hub import HfApi

    try:
        data = HfApi().model_info(base).card_data
    except _network_errors() as error:
        say(f"the Hub was not asked for the licence of {base}: {_reason(error)}")
        return {}
    return data.to_dict() if data is not None else {}


def _front_matter(readme: Path) -> Mapping[str, Any]:
    import yaml

    text = readme.read_text(encoding="utf-8", errors="replace")
    if not text.startswith("---\n"):
        return {}
    try:
        front = yaml.safe_load(text[4:].partition("\n---")[0])
    except yaml.YAMLError as error:
        raise QerlError(f"{readme}: its front matter is not YAML; correct or delete it") from error
    return front if isinstance(front, dict) else {}


# ------------------------------------------------------------------------------------ the folder


def _adapter_config(source: Path, which: str) -> dict[str, Any]:
    if not (source / CONFIG_FILE).is_file():
        how = "export the last one instead" if which == "best" else "finish or resume the run"
        raise QerlError(f"no adapter at {source}: {CONFIG_FILE} is not there; {how}")
    return _json(source / CONFIG_FILE)


def _merged_relation(merged: Path) -> Literal["finetune", "quantized"]:
    if not (merged / "config.json").is_file():
        raise QerlError(f"no merged model at {merged}: config.json is not there; export it again")
    return "quantized" if _json(merged / "config.json").get("quantization_config") else "finetune"


def _copy_payload(source: Path, folder: Path) -> None:
    """All files of a result but its card; large weights by a hard link where that is possible."""
    for path in sorted(source.iterdir()):
        if not path.is_file() or path.name in _NOT_PUBLISHED:
            continue
        if path.suffix == ".safetensors" and path.name != WEIGHTS_FILE:
            _link_or_copy(path, folder / path.name)
        else:
            shutil.copy2(path, folder / path.name)


def _link_or_copy(source: Path, target: Path) -> None:
    try:
        os.link(source.resolve(), target)
    except OSError:  # another file system, or one without hard links
        shutil.copy2(source, target)


def _results(
    run: RunFolder,
    which: str,
    recipe: Recipe,
    summary: Mapping[str, Any],
    base: str | None,
    rows: Mapping[str, card.Result | None],
) -> list[tuple[str, card.Result | None]]:
    """The card's table: before and after on the base in training, then what the caller measured."""
    stored = "the NVFP4 base" if recipe.format == "nvfp4" else f"the base in {recipe.format}"
    after = summary.get("after")
    table: list[tuple[str, card.Result | None]] = [
        (f"{stored}, before training", summary.get("before")),
        (f"{which} adapter on {stored}", after if which == "last" else _best(run, after)),
    ]
    for label, result in rows.items():
        table.append((f"adapter on `{base}` (16 bits)" if label == base else label, result))
    if base is not None and base not in rows:
        how = f"`qerl eval RUN --base {base}` measures it"
        table.append((f"adapter on `{base}` (16 bits; {how})", None))
    return table


def _best(run: RunFolder, after: card.Result | None) -> card.Result | None:
    """The first highest of the evaluations during training and the last one, as the run kept it."""
    found = []
    for row in read_jsonl(run.metrics)[0]:
        if "eval/accuracy" in row:
            accuracy, n = row["eval/accuracy"], int(row["eval/n"])
            interval = wilson(round(accuracy * n), n)
            reward = row["eval/mean_reward"]
            found.append({"accuracy": accuracy, "ci95": interval, "mean_reward": reward, "n": n})
    return max([*found, *([after] if after else [])], key=lambda r: r["accuracy"], default=None)


def _samples(run: RunFolder, which: str) -> list[dict[str, Any]]:
    """Held-out answers if `qerl eval` wrote them, else the last step's completions; by position."""
    measured = run.path / f"eval-{which}.jsonl"
    if measured.is_file():
        rows = read_jsonl(measured)[0]
    elif run.completions.is_file():
        everything = read_jsonl(run.completions)[0]
        newest = everything[-1]["step"] if everything else 0
        rows = [row for row in everything if row["step"] == newest]
    else:
        rows = []
    n = min(SAMPLE_ROWS, len(rows))
    chosen = [rows[i * len(rows) // n] for i in range(n)]
    return [{key: row[key] for key in _SAMPLE_KEYS if key in row} for row in chosen]


def _write_rows(path: Path, rows: Sequence[Mapping[str, Any]]) -> None:
    atomic_write(path, "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows))


def _json(path: Path) -> dict[str, Any]:
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise QerlError(f"{path} is not valid JSON: {error}") from error


# -------------------------------------------------------------------------------------- the push


def _files(folder: Path) -> list[Path]:
    return sorted(path for path in folder.rglob("*") if path.is_file())


def _check_folder(folder: Path) -> None:
    weights = (folder / WEIGHTS_FILE).is_file() or any(folder.glob("model*.safetensors"))
    if not weights or not (folder / "README.md").is_file():
        raise QerlError(f"push: {folder} holds no weights and card; make it with `qerl export`")


def check_repo(repo: str, *, login: bool) -> None:
    """QerlError for what is no repository name, or (login) when nobody is logged in."""
    from huggingface_hub.errors import HFValidationError
    from huggingface_hub.utils import validate_repo_id

    try:
        validate_repo_id(repo)
        fits = repo.count("/") == 1
    except HFValidationError:
        fits = False
    if not fits:
        raise QerlError(f"--push: {repo!r} is no repository name; write USER/NAME, as on the Hub")
    if login:
        _api()


def _api() -> HfApi:
    """huggingface_hub's client with its own login; QerlError when there is none."""
    from huggingface_hub import HfApi, get_token

    if get_token() is None:
        raise QerlError("--push: you are not logged in; run `hf auth login`, or set HF_TOKEN")
    return HfApi(library_name="qerl", library_version=versions()["qerl"])


def _check_kind(api: HfApi, folder: Path, repo: str, revision: str | None) -> None:
    """An adapter beside a merged model in one repository is loaded as either, by chance."""
    there = set(api.list_repo_files(repo, revision=revision))
    adapter = (folder / WEIGHTS_FILE).is_file()
    other = {*_MERGED} & there if adapter else {WEIGHTS_FILE} & there
    if other:
        kinds = ("an adapter", "a merged model")
        mine, theirs = kinds if adapter else kinds[::-1]
        raise QerlError(
            f"--push: {repo} holds {theirs} ({min(other)}) and this is {mine}; push to another name"
        )


def _check_pushed(api: HfApi, folder: Path, repo: str, oid: str) -> None:
    """Every file is there with its size: a .gitignore on the Hub may have kept one out."""
    from huggingface_hub.hf_api import RepoFile

    tree = api.list_repo_tree(repo, recursive=True, revision=oid)
    there = {entry.path: entry.size for entry in tree if isinstance(entry, RepoFile)}
    for path in _files(folder):
        name = path.relative_to(folder).as_posix()
        if there.get(name) != path.stat().st_size:
            raise QerlError(f"--push: {name} did not arrive whole in {repo}; push again")


@contextmanager
def _hub_errors(repo: str) -> Iterator[None]:
    """What the Hub or the network refuses, as one line; a repeated push goes on from there."""
    try:
        yield
    except RuntimeError as error:  # the upload's threads wrap what went wrong
        cause = error.__cause__
        if not isinstance(cause, _network_errors()):
            raise
        raise QerlError(_explain(repo, cause)) from error
    except _network_errors() as error:
        raise QerlError(_explain(repo, error)) from error


def _network_errors() -> tuple[type[Exception], ...]:
    """What a request may raise: httpx's or httpx2's own, connection errors included, and files'."""
    from huggingface_hub.errors import HfHubHTTPError

    http = HfHubHTTPError.__mro__[1]
    assert issubclass(http, Exception) and http.__name__ == "HTTPError", http
    return http, OSError


def _explain(repo: str, error: BaseException) -> str:
    status = getattr(getattr(error, "response", None), "status_code", None)
    if status in (401, 403):
        return (
            f"--push: the Hub does not let you write to {repo} ({status}); log in with a token "
            "that may (`hf auth login`), or name a repository of yours"
        )
    again = "push again: what has arrived is not sent twice"
    return f"--push: {repo} was not pushed whole ({_reason(error)}); {again}"


def _reason(error: BaseException) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[0] if lines else type(error).__name__
