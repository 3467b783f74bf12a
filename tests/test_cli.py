"""The command line: every command on a tiny model, in this process and as a program."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from tiny_run import step_rows, tiny_run_recipe
from typer.testing import CliRunner

from qerl import cli, cli_output
from qerl.cli import app
from qerl.errors import QerlError
from qerl.run_folder import RunFolder

REWARD = """
def short(prompts, completions, completion_ids, **columns):
    print("the reward talks")
    return [-float(len(ids)) for ids in completion_ids]
"""

NAMES = [
    "demo", "train", "resume", "quantize", "eval", "generate", "chat", "tail", "export", "recipes",
    "explain", "init", "plan",
]  # fmt: skip


def qerl(*arguments: object, stdin: str = "", code: int = 0) -> SimpleNamespace:
    """One command in this process: standard output, stderr; checks the exit status."""
    result = CliRunner().invoke(app, [str(a) for a in arguments], input=stdin)
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    assert result.exit_code == code, result.output
    return SimpleNamespace(out=result.stdout, err=result.stderr)


def program(*arguments: object, **options) -> subprocess.Popen[str]:
    """`qerl …` as a program of its own."""
    command = [sys.executable, "-c", "from qerl.cli import main; main()", *map(str, arguments)]
    env = os.environ | {"OMP_NUM_THREADS": "1"}
    pipes = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.PIPE)
    return subprocess.Popen(command, env=env, text=True, **pipes, **options)


@pytest.fixture(scope="module")
def recipe(tiny_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("cli")
    (root / "reward.py").write_text(REWARD)
    made = tiny_run_recipe(tiny_dir, root, task__reward=f"{root}/reward.py:short")
    return made.write(root / "recipe.yaml")


@pytest.fixture(scope="module")
def trained(recipe: Path) -> SimpleNamespace:
    """Two steps by `qerl train --json -`, as a program."""
    process = program("train", recipe, "train.steps=2", "--json", "-")
    out, err = process.communicate(timeout=120)
    assert process.returncode == 0, err
    report = json.loads(out)
    return SimpleNamespace(report=report, run=Path(report["run"]), err=err)


@pytest.fixture(scope="module")
def untrained(recipe: Path) -> Path:
    """A run whose groups never differ in reward, so that no step moves the adapter."""
    (recipe.parent / "zero.py").write_text(
        "def zero(completions, **_):\n    return [0.0] * len(completions)"
    )
    changes = [f"task.reward={recipe.parent}/zero.py:zero", "train.steps=1", "eval.at_start=false"]
    target = recipe.parent / "zero.json"
    qerl("train", recipe, *changes, "--json", target)
    return Path(json.loads(target.read_text())["run"])


# ------------------------------------------------------------------------------------ the frame


def test_help_names_every_command_and_cuts_no_sentence():
    text = qerl("--help").out
    for name in NAMES:
        (line,) = [row for row in text.splitlines() if row.startswith(f"  {name} ")]
        assert line.endswith("."), line
        assert not line.endswith("..."), line


@pytest.mark.parametrize("name", NAMES)
def test_help_of_every_command_shows_an_example(name: str):
    text = qerl(name, "--help").out
    assert f"\n  qerl {name}" in text
    assert (name == "chat") != ("--json PATH" in text)


def test_no_command_is_help_and_a_wrong_one_names_the_nearest():
    assert "Commands:" in qerl(code=2).err
    assert qerl("trian", code=2).err == "error: no such command 'trian'. Did you mean 'train'?\n"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("zzz", "no such command 'zzz'; see `qerl --help`"),
        ("--foo", "no such option: --foo; see `qerl --help`"),
        ("train", "train: missing argument 'RECIPE'; see `qerl train --help`"),
        ("quantize m", "quantize: missing option '-o' / '--output'; see `qerl quantize --help`"),
        ("explain a b", "explain: got unexpected extra argument"),
        ("eval r --bset", "eval: no such option: --bset (Possible options: --base, --best)"),
        ("tail r -n 0", "tail: invalid value for '-n': "),
    ],
)
def test_a_command_line_that_does_not_parse_is_one_line(arguments: str, message: str):
    result = qerl(*arguments.split(), code=2)
    assert result.out == ""
    assert result.err.startswith(f"error: {message}")
    assert result.err.count("\n") == 1


def test_version():
    import qerl as package

    assert qerl("--version").out == f"qerl {package.__version__}\n"


def test_a_mistake_is_one_line_on_stderr():
    result = qerl("train", "demo-smollm2", "train.stps=3", code=2)
    assert result.out == ""
    assert result.err == "error: `train.stps`: unknown key; did you mean `train.steps`?\n"


def test_our_own_errors_keep_their_traceback(monkeypatch: pytest.MonkeyPatch):
    def broken() -> list:
        raise RuntimeError("ours")

    monkeypatch.setattr("qerl.recipes.list_recipes", broken)
    with pytest.raises(RuntimeError, match="ours"):
        qerl("recipes")


@pytest.mark.parametrize(("kind", "code"), [(KeyboardInterrupt, 130), (cli.Terminated, 143)])
def test_interrupts_have_the_shells_status(monkeypatch, kind: type, code: int):
    def stopped() -> list:
        raise kind

    monkeypatch.setattr("qerl.recipes.list_recipes", stopped)
    assert qerl("recipes", code=code).err == ""


def test_main_sets_what_the_user_has_not(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("OMP_WAIT_POLICY", "active")
    monkeypatch.setenv("TOKENIZERS_PARALLELISM", "")
    monkeypatch.delenv("TOKENIZERS_PARALLELISM")
    monkeypatch.setattr(sys, "argv", ["qerl", "--version"])
    with pytest.raises(SystemExit):
        cli.main()
    assert os.environ["OMP_WAIT_POLICY"] == "active"
    assert os.environ["TOKENIZERS_PARALLELISM"] == "false"


# ----------------------------------------------------------------------------------- the output


@pytest.mark.parametrize("where", ["no/such/report.json", ".", "file/report.json"])
def test_a_report_that_cannot_be_written_is_refused_before_work(where, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("file").write_text("")
    with pytest.raises(QerlError, match=r"^--json '.*': .*; name a file, or - for standard output"):
        cli_output.Output(where)


def test_json_to_a_file_leaves_the_text(tmp_path: Path):
    result = qerl("explain", "train.lr", "--json", tmp_path / "a.json")
    assert json.loads((tmp_path / "a.json").read_text()) == {
        "key": "train.lr",
        "text": result.out.rstrip("\n"),
    }


def test_json_to_standard_output_moves_the_text():
    result = qerl("recipes", "--json", "-")
    names = [info["name"] for info in json.loads(result.out)]
    assert "demo-smollm2" in names
    assert result.err.startswith("demo-smollm2  ")


def test_schema_is_json_and_nothing_else():
    assert json.loads(qerl("recipes", "--schema").out)["properties"]["lora"]


def test_a_model_does_not_move_the_cursor():
    assert cli_output.printable("a\x1b[2Jb\r\n\tc é") == "a\ufffd[2Jb\ufffd\n\tc é"


def test_a_cache_that_cannot_be_written_is_a_mistake(tmp_path: Path, monkeypatch):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("QERL_HOME", str(tmp_path / "file" / "home"))
    with pytest.raises(QerlError, match="QERL_HOME .*cannot be written"), cli_output.quiet():
        pass


def test_the_log_is_begun_anew_when_long(tmp_path: Path, monkeypatch):
    monkeypatch.setenv("QERL_HOME", str(tmp_path))
    (tmp_path / "log.txt").write_text("x" * (cli_output.LOG_LIMIT + 1))
    with cli_output.quiet():
        print("a warning", file=sys.stderr)
    assert (tmp_path / "log.txt").read_text() == "a warning\n"


def test_what_cannot_be_written_is_refused_before_the_work(
    trained: SimpleNamespace, tmp_path: Path, monkeypatch
):
    def loading(*arguments: object) -> None:
        raise AssertionError("the work has begun")

    (tmp_path / "file").write_text("")
    below, reason = tmp_path / "file" / "x", f"'{tmp_path}/file' is not a folder; name another"
    monkeypatch.setattr("qerl.model.load.resolve_model", loading)
    monkeypatch.setattr("qerl.export.export_adapter", loading)
    monkeypatch.setattr("qerl.run.open_run", loading)
    for option, *command in (
        ("init:", "init", below),
        ("--output", "quantize", "some/model", "-o", below),
        ("--output", "export", trained.run, "-o", below),
        ("--out", "eval", trained.run, "--out", below),
    ):
        assert qerl(*command, code=2).err.startswith(f"error: {option} '{below}': {reason} f")


def test_init_writes_and_names_the_next_command(tmp_path: Path):
    result = qerl("init", tmp_path / "my task")
    assert (tmp_path / "my task" / "recipe.yaml").is_file()
    assert f"qerl train '{tmp_path}/my task/recipe.yaml'" in result.out
    assert "exists" in qerl("init", tmp_path / "my task", code=2).err


# ------------------------------------------------------------------------- the plan, the quantizer


def test_plan_reads_the_configuration_alone(tiny_dir: Path, recipe: Path, tmp_path: Path):
    bare = tmp_path / "no weights"
    bare.mkdir()
    (bare / "config.json").write_bytes((tiny_dir / "config.json").read_bytes())
    result = qerl("plan", recipe, f"model={bare}", "device=cuda", "--json", "-")
    planned = json.loads(result.out)
    assert planned["device"] == "cuda"
    assert planned["total"] == sum(part["bytes"] for part in planned["parts"].values()) > 0
    assert "linear weights" in result.err


def test_quantize_and_what_it_refuses_to_overwrite(tiny_dir: Path, tmp_path: Path):
    target = tmp_path / "nvfp4"
    made = json.loads(qerl("quantize", tiny_dir, "-o", target, "--json", "-").out)
    config = json.loads((target / "config.json").read_text())
    assert config["quantization_config"]["format"] == "nvfp4-pack-quantized"
    assert made["layers"] == 4 * 7
    assert "exists" in qerl("quantize", tiny_dir, "-o", target, code=2).err
    assert "28 layers" in qerl("quantize", tiny_dir, "-o", target, "--overwrite").out
    other = tmp_path / "thesis"
    other.mkdir()
    (other / "chapter.txt").write_text("years of work")
    for precious in (other, tmp_path, tiny_dir, tiny_dir.parent):
        qerl("quantize", tiny_dir, "-o", precious, "--overwrite", code=2)
    assert (other / "chapter.txt").is_file()
    assert (tiny_dir / "config.json").is_file()


# ---------------------------------------------------------------------------------------- a run


def test_train_reports_json_alone(trained: SimpleNamespace):
    """The reward prints too; all text for people is on stderr, and no library's talk is there."""
    assert trained.report["steps"] == 2
    assert trained.report == {"run": str(trained.run)} | json.loads(
        (trained.run / "summary.json").read_text()
    )
    assert f"run folder: {trained.run}\n" in trained.err
    assert "step 2/2 · reward" in trained.err
    assert "the reward talks" in trained.err
    assert (
        f"qerl generate '{trained.run}'" in trained.err
        or f"qerl generate {trained.run}" in trained.err
    )
    assert "Warning" not in trained.err


def test_eval_agrees_with_the_run_and_writes_every_completion(trained: SimpleNamespace):
    result = qerl("eval", trained.run, "--json", "-")
    report = json.loads(result.out)
    after = trained.report["after"]
    assert report["adapter"] == "last"
    assert {key: report[key] for key in after} == after
    rows = [json.loads(line) for line in Path(report["completions"]).read_text().splitlines()]
    assert len(rows) == report["n"] == 6
    assert [row["columns"]["answer"] for row in rows] == ["c"] * 6
    assert sum(row["reward"] for row in rows) / 6 == pytest.approx(report["mean_reward"])
    assert report["completions"] == str(trained.run / "eval-last.jsonl")
    assert "before training: " in result.err


def test_eval_of_the_base_and_of_the_best(trained: SimpleNamespace, tmp_path: Path):
    base = tmp_path / "base.json"
    out = qerl(
        "eval", trained.run, "--base-only", "--out", tmp_path / "b.jsonl", "--json", base
    ).out
    assert "\nbase model: " in out
    report = json.loads(base.read_text())
    before = trained.report["before"]
    assert report["adapter"] == "base"
    assert {key: report[key] for key in before} == before
    assert qerl("eval", trained.run, "--best").out.count("best adapter: ") == 1
    assert "choose one" in qerl("eval", trained.run, "--best", "--base-only", code=2).err
    bad = qerl("eval", trained.run, "--out", tmp_path / "no" / "b.jsonl", code=2).err
    assert "there is no folder" in bad


@pytest.mark.parametrize("text", ["{", "[]", "{}", '{"before": {"accuracy": "x", "ci95": [0, 1]}}'])
def test_eval_says_that_the_summary_is_damaged_and_goes_on(trained, monkeypatch, text: str):
    summary = trained.run / "summary.json"
    whole = summary.read_bytes()
    summary.write_text(text)
    try:
        result = qerl("eval", trained.run)
    finally:
        summary.write_bytes(whole)
    assert result.err == f"'{summary}' is damaged: the accuracy before training is not shown\n"
    assert "before training" not in result.out
    assert "last adapter: " in result.out


def test_an_adapter_that_learnt_nothing_is_called_untrained(untrained: Path):
    result = qerl("eval", untrained, "--json", "-")
    assert json.loads(result.out)["adapter"] == "untrained"
    assert "untrained adapter (all B are zero" in result.err


def test_reading_a_run_leaves_its_files_to_the_trainer(trained: SimpleNamespace):
    """A half-written line may be one that another process is writing: it is not cut off."""
    metrics = trained.run / "metrics.jsonl"
    whole = metrics.read_bytes()
    metrics.write_bytes(whole + b'{"step": 3')
    qerl("generate", trained.run, "abc")
    assert metrics.read_bytes() == whole + b'{"step": 3'
    metrics.write_bytes(whole)


def test_generate_prints_the_answer_alone(trained: SimpleNamespace):
    first = qerl("generate", trained.run, "abc", "--max-tokens", "3")
    assert first.out == qerl("generate", trained.run, "-", "--max-tokens", 3, stdin="abc\n").out
    report = json.loads(qerl("generate", trained.run, "abc", "--max-tokens", 3, "--json", "-").out)
    assert report["completion"] + "\n" == first.out
    assert report["logprob"] < 0
    if report["finish_reason"] == "length":
        assert first.err == "[cut at 3 tokens; --max-tokens N allows more]\n"
    hot = ["generate", trained.run, "abc", "--temperature", "1"]
    seeds = {qerl(*hot, "--seed", seed).out for seed in range(6)}
    assert len(seeds) > 1
    assert qerl(*hot, "--seed", 1).out == qerl(*hot, "--seed", 1).out


def test_chat_sees_the_conversation(trained: SimpleNamespace):
    """Two turns from a pipe, as a program; the second answer depends on the first turn."""
    import qerl as package

    process = program("chat", trained.run, "--max-tokens", 4)
    out, err = process.communicate("abc\nde\n/new\nde\n\n/exit\nabc\n", timeout=120)
    assert process.returncode == 0, err
    with package.open_run(trained.run) as run:
        first = run.generate("abc", max_tokens=4)
        history = [("user", "abc"), ("assistant", first), ("user", "de")]
        messages = [{"role": role, "content": text} for role, text in history]
        second = run.generate(messages, max_tokens=4)
        fresh = run.generate("de", max_tokens=4)
    assert out == f"{first}\n{second}\n{fresh}\n"
    assert "Warning" not in err


def test_chat_goes_on_after_a_question_that_is_too_long(trained: SimpleNamespace):
    result = qerl("chat", trained.run, "--max-tokens", 2, stdin="a" * 300 + "\nabc\n")
    assert "error: prompt: it has 300 tokens" in result.err
    assert len(result.out.splitlines()) == 1


def test_chat_begins_with_the_system_message_and_adds_nothing_to_a_turn(
    trained: SimpleNamespace, monkeypatch
):
    from qerl.run import Run

    seen = []

    def complete(run: Run, messages: list, **options: object):
        seen.append([message["content"] for message in messages])
        return real(run, messages, **options)

    recipe = trained.run / "recipe.yaml"
    whole, real = recipe.read_text(), Run.complete
    monkeypatch.setattr(Run, "complete", complete)
    recipe.write_text(whole.replace("  system: null", "  system: ij", 1))
    try:
        answers = qerl("chat", trained.run, "--max-tokens", 2, stdin="a\nb\n/new\nc\n").out
    finally:
        recipe.write_text(whole)
    first = answers.splitlines()[0]
    assert seen == [["ij", "a"], ["ij", "a", first, "b"], ["ij", "c"]]


def test_generate_names_what_is_wrong(trained: SimpleNamespace):
    assert qerl("generate", trained.run, "", code=2).err.startswith("error: PROMPT: it is empty")
    error = qerl("generate", trained.run, "abc", "--max-tokens", 100000, code=2).err
    assert error.startswith("error: max_tokens (--max-tokens): 100000 is more than")
    error = qerl("generate", trained.run, "a" * 300, code=2).err
    assert error.startswith("error: prompt: it has 300 tokens, and the model's context of 256")


def test_tail_shows_the_newest_step(trained: SimpleNamespace):
    assert "Step 2, 32 completions logged" in qerl("tail", trained.run, "-n", 1).out
    report = json.loads(qerl("tail", trained.run, "-n", 2, "--json", "-").out)
    assert (report["step"], len(report["best"]), len(report["worst"])) == (2, 2, 2)
    assert report["best"][0]["reward"] >= report["worst"][0]["reward"]


def test_export_checks_and_never_overwrites(trained: SimpleNamespace, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    result = qerl("export", trained.run)
    target = Path(f"{trained.run.name}-adapter")
    assert (target / "adapter_model.safetensors").is_file()
    assert "--max-lora-rank 8" in result.out
    assert f"={target}" in result.out
    assert "name another folder" in qerl("export", trained.run, code=2).err
    report = json.loads(qerl("export", trained.run, "-o", "x", "--best", "--json", "-").out)
    assert (report["path"], report["modules"]) == ("x", 28)


def test_latest_and_names_below_runs(trained: SimpleNamespace, monkeypatch):
    monkeypatch.chdir(trained.run.parent.parent)
    assert "completions logged" in qerl("tail", "latest").out
    assert "completions logged" in qerl("tail", trained.run.name).out
    nearest = qerl("tail", trained.run.name[:-1], code=2).err
    assert nearest.startswith("error: run ")
    assert trained.run.name in nearest


def test_resume_refuses_what_would_make_it_another_run(trained: SimpleNamespace):
    error = qerl("resume", trained.run, "train.lr=1", code=2).err
    assert error.startswith("error: train.lr: a resumed run cannot change it")


def test_resume_goes_on_for_more_steps(recipe: Path, tmp_path: Path):
    common = ["eval.at_start=false", "eval.at_end=false", f"output.dir={tmp_path}"]
    qerl("train", recipe, "train.steps=1", *common, "--json", tmp_path / "a.json")
    run = json.loads((tmp_path / "a.json").read_text())["run"]
    result = qerl("resume", run, "train.steps=3", "--json", "-")
    assert json.loads(result.out)["steps"] == 3
    assert "step 3/3" in result.err
    assert [row["step"] for row in step_rows(RunFolder(Path(run)))] == [1, 2, 3]


def test_an_interrupt_saves_and_says_how_to_go_on(recipe: Path, tmp_path: Path):
    process = program("train", recipe, "train.steps=5000", f"output.dir={tmp_path}")
    assert process.stdout is not None
    said = ""
    while "step 1/" not in said:
        line = process.stdout.readline()
        assert line, process.communicate()
        said += line
    process.send_signal(signal.SIGINT)
    rest, err = process.communicate(timeout=60)
    assert process.returncode == 130, err
    assert err == ""
    (run,) = tmp_path.iterdir()
    assert rest.rstrip().endswith(f"qerl resume {run}")
    assert (run / "adapter" / "adapter_model.safetensors").is_file()
