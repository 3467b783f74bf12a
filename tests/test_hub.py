"""A result on the Hub: the folder, the push, the failures in between, and the way back."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from hub_server import TOKEN, Blob, FakeHub, Fault, serving
from huggingface_hub import ModelCard
from peft import PeftModel
from safetensors.torch import load_file, save_file
from tiny_run import short, tiny_run_recipe
from transformers import AutoModelForCausalLM, AutoTokenizer

import qerl
from qerl.base_name import rename_base
from qerl.errors import QerlError
from qerl.export import export_adapter
from qerl.hub import licence_of, prepare
from qerl.metrics import read_jsonl

CLIENT = Path(__file__).parent / "hub_client.py"
IDS = [1, 3, 5, 4, 8, 9, 3, 6]
WEIGHTS = "adapter_model.safetensors"
SCORE = {"accuracy": 0.5, "ci95": [0.2, 0.8], "mean_reward": 0.4, "n": 6}


@pytest.fixture(scope="module")
def finished(tiny_dir, tmp_path_factory):
    """A real run of two steps on a 16-bit base: its folder, and the log-probs of IDS."""
    recipe = tiny_run_recipe(
        tiny_dir, tmp_path_factory.mktemp("run"), format="bf16", eval__every=1, train__lr=5e-2
    )
    with qerl.train(recipe, reward=short, report=False) as run:
        ids = torch.tensor([IDS])
        model = run.session.policy.model.eval()
        with torch.no_grad():
            logp = torch.log_softmax(model(input_ids=ids).logits[0, :-1].double(), dim=-1)
            with model.disable_adapter():
                base = torch.log_softmax(model(input_ids=ids).logits[0, :-1].double(), dim=-1)
        pick = ids[0, 1:, None]
        return run.folder.path, logp.gather(1, pick)[:, 0], base.gather(1, pick)[:, 0]


@pytest.fixture(scope="module")
def prepared(finished, tmp_path_factory):
    out = tmp_path_factory.mktemp("prepared") / "tiny-adapter"
    return prepare(finished[0], out, rows={}, repo="me/tiny-adapter", licence={"license": "mit"})


@pytest.fixture(scope="module")
def user(tmp_path_factory):
    """The Hub, and one process that uses it; both serve every test."""
    home = tmp_path_factory.mktemp("hf")
    with serving() as server, open(home / "stderr", "w") as errors:
        command = [sys.executable, str(CLIENT), "serve"]
        process = subprocess.Popen(
            command, env=environment(server, home), text=True, stdin=-1, stdout=-1, stderr=errors
        )
        yield server, process, home
        assert process.stdin is not None
        process.stdin.close()
        assert process.wait(timeout=20) == 0
    assert TOKEN not in (home / "stderr").read_text()


@pytest.fixture
def hub(user):
    """The server as new, with the client in `hub.client`."""
    server, process, home = user
    server.reset()
    server.client, server.home = process, home
    return server


def environment(hub: FakeHub, home: Path) -> dict[str, str]:
    return {
        **{k: v for k, v in os.environ.items() if not k.startswith("HF_")},
        "HF_ENDPOINT": hub.endpoint,
        "HF_HUB_DISABLE_XET": "1",
        "HF_HUB_DISABLE_TELEMETRY": "1",
        "HF_HOME": str(home / "home"),
        "PYTHONPATH": os.pathsep.join(sys.path),
    }


def ask(hub, *request: object) -> dict:
    """One request to the client. Nothing it prints may hold the token."""
    hub.client.stdin.write(json.dumps(request) + "\n")
    hub.client.stdin.flush()
    line = hub.client.stdout.readline()
    assert line, (hub.home / "stderr").read_text()
    assert TOKEN not in line + (hub.home / "stderr").read_text()
    return json.loads(line)


def push(hub, folder, repo="me/x", token: str | None = TOKEN, **options):
    return ask(hub, token, "push", str(folder), repo, options)


def small(folder: Path, seed: int = 0, name: str = WEIGHTS) -> Path:
    """A folder that may be pushed, with an object small enough for one part."""
    folder.mkdir()
    torch.manual_seed(seed)
    save_file({"x": torch.randn(16, 16)}, folder / name)
    (folder / "README.md").write_text("---\nlibrary_name: peft\n---\n# x\n")
    return folder


def stored(hub: FakeHub, repo: str, revision: str = "main") -> dict[str, bytes]:
    files = hub.repos[repo].files(revision)
    return {name: blob.data for name, blob in files.items() if name != ".gitattributes"}


def on_disk(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


# ------------------------------------------------------------------------------------ the folder


def test_the_folder_is_whole_and_tells_nothing_of_the_machine(finished, prepared):
    run = finished[0]
    names = set(on_disk(prepared))
    assert {"README.md", WEIGHTS, "adapter_config.json", "tokenizer.json", "recipe.yaml"} <= names
    assert (prepared / WEIGHTS).read_bytes() == (run / "adapter" / WEIGHTS).read_bytes()
    assert (prepared / "metrics.jsonl").read_text() == (run / "metrics.jsonl").read_text()
    samples = read_jsonl(prepared / "samples.jsonl")[0]
    assert len(samples) == 24 and {row["step"] for row in samples} == {2}
    assert samples[0].keys() >= {"prompt", "completion", "reward", "finish_reason"}
    for path in prepared.iterdir():
        if path.suffix != ".safetensors":
            assert str(run.parent.parent) not in path.read_text(), path.name
            assert "/tiny llama" not in path.read_text(), path.name
    config = json.loads((prepared / "adapter_config.json").read_text())
    assert config["base_model_name_or_path"] == "tiny llama"
    card = ModelCard.load(prepared / "README.md")
    assert (card.data.library_name, card.data.license) == ("peft", "mit")
    summary = json.loads((run / "summary.json").read_text())
    for row in ("before", "after"):
        assert f"| {summary[row]['accuracy']:.1%} |" in card.text


def test_a_local_base_is_said(finished, tmp_path):
    said = []
    prepare(finished[0], tmp_path / "a", rows={}, say=said.append)
    assert any("local folder" in line and "nobody else can load" in line for line in said)
    assert any("licence of" in line and "is not known" in line for line in said)
    card = ModelCard.load(tmp_path / "a" / "README.md")
    assert card.data.base_model is None and card.data.license is None
    assert "Licence: that of the base model" in card.text


def hub_based(run: Path, root: Path) -> Path:
    """The run as if its base were on the Hub."""
    import shutil

    copy = shutil.copytree(run, root / "run")
    path = copy / "adapter" / "adapter_config.json"
    config = json.loads(path.read_text()) | {"base_model_name_or_path": "someone/tiny"}
    path.write_text(json.dumps(config))
    return copy


def test_rows_and_the_base_that_the_card_names(finished, tmp_path):
    run = hub_based(finished[0], tmp_path)
    rows = {"someone/tiny": SCORE, "merged, bf16": None}
    out = prepare(run, tmp_path / "a", rows=rows, licence={})
    card = ModelCard.load(out / "README.md")
    assert (card.data.base_model, card.data.base_model_relation) == ("someone/tiny", "adapter")
    assert (
        "| adapter on `someone/tiny` (16 bits) | 50.0% | 20.0% – 80.0% | 0.400 | 6 |" in card.text
    )
    assert "| merged, bf16 | not measured | | | |" in card.text
    config = json.loads((out / "adapter_config.json").read_text())
    assert config["base_model_name_or_path"] == "someone/tiny"
    without = prepare(run, tmp_path / "b", rows={}, licence={})
    said = "| adapter on `someone/tiny` (16 bits; `qerl eval RUN --base someone/tiny` measures it)"
    assert f"{said} | not measured | | | |" in (without / "README.md").read_text()


def test_the_best_adapter_and_its_own_score(finished, tmp_path):
    run = finished[0]
    out = prepare(run, tmp_path / "a", which="best", rows={}, licence={})
    assert (out / WEIGHTS).read_bytes() == (run / "best" / WEIGHTS).read_bytes()
    evaluated = [r for r in read_jsonl(run / "metrics.jsonl")[0] if "eval/accuracy" in r]
    after = json.loads((run / "summary.json").read_text())["after"]["accuracy"]
    best = max([after, *(row["eval/accuracy"] for row in evaluated)])
    assert evaluated
    assert f"| best adapter on the base in bf16 | {best:.1%} |" in (out / "README.md").read_text()


def test_a_merged_model_is_linked_and_called_what_it_is(finished, tmp_path):
    merged = small(tmp_path / "merged", name="model.safetensors")
    run = hub_based(finished[0], tmp_path)
    (merged / "config.json").write_text("{}")
    (merged / "LICENSE").write_text("the base's own")
    out = prepare(run, tmp_path / "a", merged=merged, rows={}, repo="me/m", licence={})
    assert (out / "model.safetensors").samefile(merged / "model.safetensors")
    assert (out / "LICENSE").read_text() == "the base's own"
    assert not (out / "adapter_config.json").exists()
    card = ModelCard.load(out / "README.md")
    assert (card.data.library_name, card.data.base_model_relation) == ("transformers", "finetune")
    assert "vllm serve me/m" in card.text and "PeftModel" not in card.text
    (merged / "config.json").write_text('{"quantization_config": {"format": "x"}}')
    out = prepare(run, tmp_path / "b", merged=merged, rows={}, licence={})
    assert ModelCard.load(out / "README.md").data.base_model_relation == "quantized"


def test_a_stopped_run_says_what_was_not_measured(finished, tmp_path):
    run = hub_based(finished[0], tmp_path)
    (run / "summary.json").unlink()
    text = (prepare(run, tmp_path / "a", rows={}, licence={}) / "README.md").read_text()
    assert "| last adapter on the base in bf16 | not measured | | | |" in text


def test_held_out_answers_go_before_training_samples(finished, tmp_path):
    run = hub_based(finished[0], tmp_path)
    row = {"index": 0, "prompt": "p", "completion": "c", "reward": 1.0, "columns": {"x": "secret"}}
    (run / "eval-last.jsonl").write_text(json.dumps(row) + "\n")
    out = prepare(run, tmp_path / "a", rows={}, licence={})
    kept = {k: v for k, v in row.items() if k != "columns"}
    assert read_jsonl(out / "samples.jsonl")[0] == [kept]


def test_what_is_not_there_or_in_the_way_is_named(finished, tmp_path):
    run = finished[0]
    (tmp_path / "home").mkdir()
    (tmp_path / "home" / "thesis.tex").write_text("years of work")
    with pytest.raises(QerlError, match="exists and is not empty; name another folder"):
        prepare(run, tmp_path / "home", rows={})
    with pytest.raises(QerlError, match="no merged model at .*config.json is not there"):
        prepare(run, tmp_path / "a", rows={}, merged=tmp_path)
    bare = hub_based(run, tmp_path)
    (bare / "best" / "adapter_config.json").unlink()
    with pytest.raises(QerlError, match="no adapter at .*best.*; export the last one instead"):
        prepare(bare, tmp_path / "a", rows={}, which="best")
    assert not (tmp_path / "a").exists()


def test_licence_of_a_local_base_and_of_the_demo(tmp_path):
    recipe = qerl.Recipe(model=str(tmp_path))
    said = []
    assert licence_of(recipe, str(tmp_path), said.append) == {} and len(said) == 1
    front = "---\nlicense: other\nlicense_name: mine\ntags: [a]\n---\n# x"
    (tmp_path / "README.md").write_text(front)
    found = licence_of(recipe, str(tmp_path), said.append)
    assert found == {"license": "other", "license_name": "mine"} and len(said) == 1
    demo = qerl.Recipe(model="smollm2-135m-instruct-pypi")
    assert licence_of(demo, "HuggingFaceTB/SmolLM2-135M-Instruct") == {"license": "apache-2.0"}


# -------------------------------------------------------------------------------------- the push


def test_push_again_and_back_through_plain_peft(hub, prepared, finished, tiny_dir, tmp_path):
    first = push(hub, prepared, "me/tiny-adapter")
    assert first["url"] == f"{hub.endpoint}/me/tiny-adapter" and first["torch"] is False
    size = sum(path.stat().st_size for path in prepared.iterdir())
    files = len(list(prepared.iterdir()))
    assert first["said"] == [f"pushing {files} files, {size:,} bytes, to me/tiny-adapter"]
    assert stored(hub, "me/tiny-adapter") == on_disk(prepared)
    repo = hub.repos["me/tiny-adapter"]
    blobs = repo.files()
    assert blobs[WEIGHTS].lfs and not blobs["README.md"].lfs and not repo.private
    assert len(blobs[WEIGHTS].data) > 100_000 and hub.count("PUT", "/lfs/") == 2  # in two parts
    assert hub.count("POST", "/complete/") == hub.count("POST", "/verify/") == 1
    assert any(agent.startswith("qerl/") for agent in hub.agents)

    again = push(hub, prepared, "me/tiny-adapter")
    assert again["url"] == first["url"] and len(repo.titles) == 2  # the first is the Hub's own
    assert hub.count("POST", "/commit/") == 1 and hub.count("PUT", "/lfs/") == 2

    folder = Path(ask(hub, TOKEN, "download", "me/tiny-adapter")["folder"])
    back = AutoModelForCausalLM.from_pretrained(tiny_dir, dtype=torch.float32)
    back = PeftModel.from_pretrained(back, str(folder)).eval()
    check_logprobs(back(input_ids=torch.tensor([IDS])).logits, finished)
    applied = [m for m in back.modules() if "default" in getattr(m, "lora_B", {})]
    assert 2 * len(applied) == len(load_file(folder / WEIGHTS)) == 56  # all that was saved
    assert AutoTokenizer.from_pretrained(folder).chat_template is not None
    assert set(on_disk(folder)) == {*on_disk(prepared), ".gitattributes"}
    assert hub.count("GET", "/cdn/") == 1
    assert TOKEN.encode() not in b"".join(stored(hub, "me/tiny-adapter").values())


def check_logprobs(logits: torch.Tensor, finished) -> None:
    """Those of the trained policy, which are not the base's."""
    _, trained, base = finished
    logp = torch.log_softmax(logits[0, :-1].detach().double(), dim=-1)
    found = logp.gather(1, torch.tensor(IDS)[1:, None])[:, 0]
    assert (found - trained).abs().max() < 1e-5 and (trained - base).abs().max() > 1e-2


@pytest.mark.slow
def test_a_process_without_qerl_loads_it_back(hub, prepared, finished, tiny_dir, tmp_path):
    push(hub, prepared, "me/tiny-adapter")
    command = [sys.executable, str(CLIENT), "load", str(tiny_dir), "me/tiny-adapter"]
    done = subprocess.run(
        [*command, json.dumps(IDS)],
        env=environment(hub, tmp_path),
        stdout=subprocess.PIPE,
        check=True,
        text=True,
    )
    back = json.loads(done.stdout.splitlines()[-1])
    found = torch.tensor(back["logprobs"], dtype=torch.float64)
    assert (found - finished[1]).abs().max() < 1e-5 and back["qerl"] == []
    assert back["tokenizer"]


def test_only_what_changed_is_committed(hub, tmp_path):
    folder = small(tmp_path / "x")
    push(hub, folder)
    assert hub.count("PUT", "/lfs/") == 1 and hub.count("POST", "/complete/") == 0  # in one part
    (folder / "README.md").write_text("---\nlibrary_name: peft\n---\n# new\n")
    push(hub, folder)
    assert hub.count("PUT", "/lfs/") == 1 and hub.count("POST", "/commit/") == 2
    assert stored(hub, "me/x") == on_disk(folder)


def test_an_upload_cut_in_the_middle_goes_on(hub, prepared, tmp_path):
    hub.faults = [Fault("PUT", "/lfs/", 403, after=2)]  # the second of two parts
    failed = push(hub, prepared)
    assert failed["error"].startswith("--push: the Hub does not let you write to me/x (403)")
    assert stored(hub, "me/x") == {} and hub.objects == {}
    hub.faults = [Fault("POST", "/commit/", 500)]  # everything has arrived, then the Hub is down
    failed = push(hub, prepared)
    assert "me/x was not pushed whole" in failed["error"] and "\n" not in failed["error"]
    assert failed["error"].endswith("push again: what has arrived is not sent twice")
    assert stored(hub, "me/x") == {} and len(hub.objects) == 1
    sent = hub.count("PUT", "/lfs/")
    assert push(hub, prepared)["url"].endswith("/me/x")
    assert hub.count("PUT", "/lfs/") == sent and stored(hub, "me/x") == on_disk(prepared)


def test_a_connection_that_drops_is_taken_up_again(hub, tmp_path):
    folder = small(tmp_path / "x")
    hub.faults = [Fault("PUT", "/lfs/", None), Fault("POST", "/verify/", 503)]
    assert push(hub, folder)["url"].endswith("/me/x")
    assert hub.count("PUT", "/lfs/") == 2 and hub.count("POST", "/verify/") == 2
    assert stored(hub, "me/x") == on_disk(folder)


def test_bytes_that_change_on_the_way_are_refused(hub, tmp_path):
    folder = small(tmp_path / "x")
    hub.flip_a_bit = True
    failed = push(hub, folder)
    assert "me/x was not pushed whole" in failed["error"] and "push again" in failed["error"]
    assert hub.objects == {} and stored(hub, "me/x") == {}
    hub.flip_a_bit = False
    push(hub, folder)
    assert stored(hub, "me/x") == on_disk(folder)


def test_a_file_that_did_not_arrive_is_named(hub, tmp_path):
    folder = small(tmp_path / "x")
    hub.ignored = {"README.md"}
    failed = push(hub, folder)
    assert failed["error"] == "--push: README.md did not arrive whole in me/x; push again"


def test_private_means_private(hub, tmp_path):
    folder = small(tmp_path / "x")
    push(hub, folder, private=True)
    assert hub.repos["me/x"].private
    push(hub, folder, "me/open")
    commits = hub.count("POST", "/commit/")
    failed = push(hub, folder, "me/open", private=True)
    assert failed["error"].startswith("--private: me/open is there already and is public; make it")
    assert hub.count("POST", "/commit/") == commits


def test_a_branch_is_made_once(hub, tmp_path):
    folder = small(tmp_path / "x")
    for _ in range(2):
        done = push(hub, folder, revision="try/1")
        assert done["url"] == f"{hub.endpoint}/me/x/tree/try/1"
    assert stored(hub, "me/x", "try/1") == on_disk(folder) and stored(hub, "me/x") == {}


def test_old_shards_go_and_nothing_else_does(hub, tmp_path):
    old = small(tmp_path / "old", name="model-00001-of-00002.safetensors")
    (old / "model-00002-of-00002.safetensors").write_bytes(b"second")
    (old / "model.safetensors.index.json").write_text("{}")
    push(hub, old)
    hub.repos["me/x"].files()["notes.md"] = Blob(b"the owner's own", False)
    new = small(tmp_path / "new", seed=1, name="model.safetensors")
    push(hub, new)
    assert stored(hub, "me/x") == on_disk(new) | {"notes.md": b"the owner's own"}


def test_an_adapter_and_a_merged_model_do_not_share_a_repository(hub, tmp_path):
    adapter = small(tmp_path / "a")
    merged = small(tmp_path / "m", name="model.safetensors")
    push(hub, adapter, "me/a")
    push(hub, merged, "me/m")
    words = "holds an adapter (adapter_model.safetensors) and this is a merged model; push to"
    assert words in push(hub, merged, "me/a")["error"]
    words = "holds a merged model (model.safetensors) and this is an adapter; push to another name"
    assert words in push(hub, adapter, "me/m")["error"]


def test_who_may_not_push_is_told_how(hub, tmp_path):
    folder = small(tmp_path / "x")
    failed = push(hub, folder, token=None)
    assert failed["error"] == (
        "--push: you are not logged in; run `hf auth login`, or set HF_TOKEN"
    )
    assert hub.log == []
    failed = push(hub, folder, token="hf_wrong")
    assert "does not let you write to me/x (401); log in" in failed["error"]
    failed = push(hub, folder, "someone/x")
    assert "does not let you write to someone/x (403)" in failed["error"] and hub.repos == {}
    for name in ("x", "a/b/c", "me/x y"):
        failed = push(hub, folder, name)
        assert failed["error"].startswith(f"--push: {name!r} is no repository name; write USER/N")
    hub.faults = [Fault("POST", "/create", None)]
    failed = push(hub, folder)
    assert "me/x was not pushed whole" in failed["error"] and "\n" not in failed["error"]
    (folder / "README.md").unlink()
    assert "holds no weights and card" in push(hub, folder)["error"]


def test_the_licence_is_that_of_the_base_on_the_hub(hub, tmp_path):
    base = small(tmp_path / "base", name="model.safetensors")
    (base / "README.md").write_text("---\nlicense: gemma\n---\n# base\n")
    push(hub, base, "me/base")
    assert ask(hub, None, "licence", "me/base") == {
        "licence": {"license": "gemma"},
        "said": [],
    }
    unknown = ask(hub, None, "licence", "me/nothing")
    assert unknown["licence"] == {} and "was not asked" in unknown["said"][0]
    hub.faults = [Fault("GET", "me/base", None)]
    unreachable = ask(hub, None, "licence", "me/base")
    assert unreachable["licence"] == {} and len(unreachable["said"]) == 2


def test_the_hub_id_of_a_local_base_is_compared_with_it(hub, tiny_dir, tmp_path):
    """Keys of a text-only class name no module of a class that also sees, and the other way."""
    for name, kind in (("same", "LlamaForCausalLM"), ("seeing", "Qwen3_5ForConditionalGeneration")):
        folder = small(tmp_path / name, name="model.safetensors")
        (folder / "config.json").write_text(json.dumps({"architectures": [kind]}))
        push(hub, folder, f"me/{name}")
    assert ask(hub, TOKEN, "base", "me/same", str(tiny_dir)) == {"said": []}
    other = ask(hub, TOKEN, "base", "me/seeing", str(tiny_dir))["error"]
    assert other.startswith(
        "--base-model: me/seeing is a Qwen3_5ForConditionalGeneration and this adapter's keys are "
        "those of LlamaForCausalLM"
    )
    nowhere = ask(hub, TOKEN, "base", "me/nothing", str(tiny_dir))
    assert "error" not in nowhere and "me/nothing was not compared" in nowhere["said"][0]
    assert "write OWNER/NAME" in ask(hub, TOKEN, "base", str(tiny_dir), str(tiny_dir))["error"]


def test_an_exported_adapter_names_the_base_it_is_given(finished, tmp_path):
    out = export_adapter(finished[0], tmp_path / "out", base_model="someone/tiny").path
    assert json.loads((out / "adapter_config.json").read_text()) == json.loads(
        (finished[0] / "adapter" / "adapter_config.json").read_text()
    ) | {"base_model_name_or_path": "someone/tiny"}
    card = ModelCard.load(out / "README.md")
    assert card.data.base_model == "someone/tiny"
    local = json.loads((finished[0] / "adapter" / "adapter_config.json").read_text())
    assert local["base_model_name_or_path"] not in card.content and "'someone/tiny'" in card.text
    again = export_adapter(finished[0], tmp_path / "b", base_model="someone/tiny").path
    rename_base(again, "other/name")
    assert ModelCard.load(again / "README.md").data.base_model == "other/name"
    prepared = prepare(finished[0], tmp_path / "p", rows={}, licence={}, base_model="someone/tiny")
    assert ModelCard.load(prepared / "README.md").data.base_model == "someone/tiny"


# ---------------------------------------------------------------- the server keeps its own rules


def test_the_server_refuses_what_the_hub_would(hub):
    import hashlib
    import urllib.error
    import urllib.request

    def send(method, url, body, **headers):
        request = urllib.request.Request(url, data=body, method=method, headers=headers)
        with pytest.raises(urllib.error.HTTPError) as error:
            urllib.request.urlopen(request)
        return error.value.code, json.loads(error.value.read())["error"]

    auth = {"Authorization": f"Bearer {TOKEN}"}
    oid = hashlib.sha256(b"right").hexdigest()
    status, message = send("PUT", f"{hub.storage}/lfs/{oid}", b"wrong")
    assert status == 400 and "do not have the SHA-256" in message
    hub.create({"name": "x"})
    lines = [
        {"key": "header", "value": {"summary": "s"}},
        {"key": "lfsFile", "value": {"path": "a.bin", "oid": oid, "size": 5}},
    ]
    body = b"\n".join(json.dumps(line).encode() for line in lines)
    url = f"{hub.endpoint}/api/models/me/x/commit/main"
    status, message = send("POST", url, body, **auth)
    assert status == 400 and "was not uploaded" in message and stored(hub, "me/x") == {}
    assert send("POST", url, body)[0] == 401
    verify = json.dumps({"oid": oid, "size": 5}).encode()
    assert send("POST", f"{hub.endpoint}/verify/{oid}", verify, **auth)[0] == 404
