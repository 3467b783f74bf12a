"""Tasks: rows, prompts, the order they are taken in, and every mistake a user can make."""

import json

import pytest
from tokenizers import Regex, Tokenizer, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

from qerl.config import Recipe
from qerl.errors import QerlError
from qerl.reward import score_groups
from qerl.tasks import PromptStream, load_task, make_prompts, make_question, train_prompts
from qerl.tasks import numbers as numbers_task
from qerl.types import Completion, Group

BOS, EOS = "<s>", "</s>"
CHARACTERS = [chr(i) for i in range(32, 127)] + ["\n"]
TEMPLATE = (
    "{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}"
    "{% if add_generation_prompt %}[assistant]{% endif %}{% if thinking %}<think>{% endif %}"
)


def make_tokenizer(adds_bos=False, template=TEMPLATE):
    """A character tokenizer; one that adds BOS adds EOS too, as some do."""
    vocab = {token: i for i, token in enumerate([BOS, EOS, "<unk>", *CHARACTERS])}
    inner = Tokenizer(models.WordLevel(vocab, unk_token="<unk>"))
    inner.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    if adds_bos:
        inner.post_processor = processors.TemplateProcessing(
            single=f"{BOS} $A {EOS}", special_tokens=[(BOS, 0), (EOS, 1)]
        )
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=inner, bos_token=BOS, eos_token=EOS, unk_token="<unk>"
    )
    tokenizer.chat_template = template
    return tokenizer


def make_recipe(max_completion_tokens=6, **sections):
    rollout = {"max_completion_tokens": max_completion_tokens}
    return Recipe(model="m", rollout=rollout, **sections)


def rows_recipe(dataset, eval_prompts=1, **task):
    task = {"name": "rows", "dataset": str(dataset), **task}
    return make_recipe(task=task, eval={"prompts": eval_prompts})


def one_prompt(row, tokenizer, max_context=None, **sections):
    prompts, dropped = make_prompts([row], tokenizer, make_recipe(**sections), max_context)
    assert dropped == 0
    return prompts[0]


def error_of(function, *arguments, **options):
    with pytest.raises(QerlError) as caught:
        function(*arguments, **options)
    message = str(caught.value)
    assert "\n" not in message
    return message


# --- numbers


def listed(row):
    question = row["prompt"][-1]["content"]
    return [int(n) for n in question.rsplit(": ", 1)[1].removesuffix("?").split(", ")]


def test_numbers_rows_are_right():
    rows = load_task(make_recipe()).train_rows()
    for row in (rows[i] for i in range(0, len(rows), 97)):
        numbers = listed(row)
        assert len(set(numbers)) == 4 and all(10 <= n <= 99 for n in numbers)
        assert row["answer"] == str(max(numbers))


def test_numbers_rows_depend_on_seed_and_index_only():
    first, again = (load_task(make_recipe(seed=4)).train_rows() for _ in range(2))
    other = load_task(make_recipe(seed=5)).train_rows()
    assert first[7] == again[7] and first[7] != first[8] and first[7] != other[7]
    assert first[5:8] == [first[5], first[6], first[7]]
    # Pinned: the rows must not change with a new NumPy.
    assert listed(load_task(make_recipe(seed=0)).train_rows()[0]) == PINNED
    with pytest.raises(IndexError):
        first[len(first)]


PINNED = [69, 39, 61, 97]


def test_numbers_held_out_is_disjoint_from_training_and_the_same_for_all_seeds():
    held_out = [frozenset(listed(row)) for row in load_task(make_recipe()).eval_rows(500)]
    assert len(set(held_out)) == 500
    for seed in range(2):
        task = load_task(make_recipe(seed=seed))
        train = {frozenset(listed(row)) for row in task.train_rows()}
        assert len(train) > 9900 and not train & set(held_out)
        assert [frozenset(listed(row)) for row in task.eval_rows(500)] == held_out
    assert load_task(make_recipe()).eval_rows(3) == load_task(make_recipe()).eval_rows(500)[:3]


def test_numbers_largest_is_at_any_place():
    rows = load_task(make_recipe()).eval_rows(400)
    places = [listed(row).index(int(row["answer"])) for row in rows]
    # 100 expected at each; four standard deviations are 35.
    assert all(65 <= places.count(place) <= 135 for place in range(4))


def test_numbers_reward():
    texts = ["71", " 71\n", "71", "36", "36", "710", "The 71", "", "7", "71."]
    reasons = ["stop", "stop", "length", "stop", "length"] + ["stop"] * 5
    n = len(texts)
    values = numbers_task.reward(["p"] * n, texts, answer=["71"] * n, finish_reasons=reasons)
    assert values == [1.0, 1.0, 0.1, 0.1, 0.1, 0.0, 0.0, 0.0, 0.0, 0.0]


def test_numbers_end_to_end_scoring():
    task = load_task(make_recipe())
    prompts, _ = make_prompts(task.eval_rows(2), make_tokenizer(), make_recipe(), 512)
    groups = [
        Group(p, [Completion([9, 1], [], [], [], "stop", p.columns["answer"])]) for p in prompts
    ]
    groups[1].completions[0].text = "10"
    score_groups(groups, task.rewards)
    assert [g.completions[0].reward for g in groups] == [1.0, 0.1]
    assert groups[0].completions[0].rewards == {"largest": 1.0}
    assert task.solved_at == 1.0


# --- choosing a task


def test_unknown_task_and_weights_without_rewards():
    assert error_of(load_task, make_recipe(task={"name": "nubmers"})) == (
        "task.name: there is no task 'nubmers'; the tasks are numbers, rows (a dataset of yours)"
    )
    recipe = make_recipe(task={"reward_weights": [1.0]})
    assert "no task.reward" in error_of(load_task, recipe)


def test_rewards_of_the_user_replace_the_tasks(tmp_path):
    (tmp_path / "r.py").write_text("def f(completions):\n    return [2.0 for _ in completions]\n")
    recipe = make_recipe(task={"reward": f"{tmp_path}/r.py:f", "reward_weights": [0.5]})
    task = load_task(recipe)
    assert [(r.name, r.weight) for r in task.rewards] == [("f", 0.5)] and task.solved_at == 0.5
    assert task.rewards[0].function(completions=["a"]) == [2.0]

    recipe = make_recipe(task={"reward": f"{tmp_path}/r.py:f", "solved_at": 2})
    assert load_task(recipe).solved_at == 2.0

    def mine(prompts, completions):
        return [0.0 for _ in completions]

    assert [r.name for r in load_task(make_recipe(), reward=mine).rewards] == ["mine"]
    assert [r.name for r in load_task(make_recipe(), reward=[mine, mine]).rewards] == [
        "mine",
        "mine_2",
    ]


# --- rows


def write_jsonl(path, rows):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


FIVE = [{"prompt": f"q{i}", "answer": i, "topic": "t"} for i in range(5)]


def test_jsonl_rows_and_held_out_split(tmp_path):
    task = load_task(rows_recipe(write_jsonl(tmp_path / "d.jsonl", FIVE), eval_prompts=2))
    train = task.train_rows()
    assert [train[i] for i in range(len(train))] == FIVE[:3]
    assert task.eval_rows(2) == FIVE[3:] and task.eval_rows(1) == FIVE[3:4]
    assert task.eval_rows(9) == FIVE[3:]


def test_path_with_spaces_and_tilde(tmp_path, monkeypatch):
    write_jsonl(tmp_path / "my data" / "five rows.jsonl", FIVE)
    monkeypatch.setenv("HOME", str(tmp_path))
    assert len(load_task(rows_recipe("~/my data/five rows.jsonl")).train_rows()) == 4


def test_json_list_and_blank_lines(tmp_path):
    path = tmp_path / "d.json"
    path.write_text(json.dumps(FIVE, indent=1))
    assert load_task(rows_recipe(path)).train_rows()[0] == FIVE[0]
    path = tmp_path / "d.jsonl"
    path.write_text("\ufeff" + json.dumps(FIVE[0]) + "\n\n" + json.dumps(FIVE[1]) + "\n")
    assert load_task(rows_recipe(path)).train_rows()[0] == FIVE[0]


def test_csv_and_parquet(tmp_path, monkeypatch):
    import datasets

    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    (tmp_path / "my d.csv").write_text("question,answer\nq0,0\nq1,1\nq2,2\n")
    table = datasets.Dataset.from_list([{"question": f"q{i}", "answer": i} for i in range(3)])
    table.to_parquet(str(tmp_path / "d.parquet"))
    for name in ("my d.csv", "d.parquet"):
        recipe = rows_recipe(tmp_path / name, prompt_column="question")
        task = load_task(recipe)
        train, _ = train_prompts(task, make_tokenizer(), recipe, 64)
        assert [(p.index, p.text) for p in train] == [
            (0, "[user]q0[assistant]"),
            (1, "[user]q1[assistant]"),
        ]
        assert train[0].columns == {"answer": 0}
        assert task.eval_rows(5) == [{"prompt": "q2", "answer": 2}]


def test_eval_dataset(tmp_path):
    train = write_jsonl(tmp_path / "train.jsonl", FIVE[:3])
    held_out = write_jsonl(tmp_path / "eval.jsonl", FIVE[3:])
    task = load_task(rows_recipe(train, eval_dataset=str(held_out)))
    assert len(task.train_rows()) == 3 and task.eval_rows(10) == FIVE[3:]


def test_default_reward_is_exact_match(tmp_path):
    recipe = rows_recipe(write_jsonl(tmp_path / "d.jsonl", FIVE))
    task = load_task(recipe)
    prompts, _ = make_prompts([FIVE[3], FIVE[4]], make_tokenizer(), recipe, None)
    groups = [Group(p, [Completion([5], [], [], [], "stop", " 3\n")]) for p in prompts]
    score_groups(groups, task.rewards)
    assert [g.completions[0].rewards for g in groups] == [
        {"exact_match": 1.0},
        {"exact_match": 0.0},
    ]


def test_dataset_mistakes(tmp_path):
    data = write_jsonl(tmp_path / "d.jsonl", FIVE)
    missing = tmp_path / "not here.jsonl"
    cases = [
        (rows_recipe(missing), f"task.dataset: '{missing}' does not exist; name a .jsonl, .json"),
        (rows_recipe("~/nowhere at all.csv"), "/nowhere at all.csv' does not exist"),
        (rows_recipe("./gone"), "/gone' does not exist"),
        (rows_recipe(tmp_path), "is a folder"),
        (rows_recipe("what is this"), "neither a file that exists nor a Hub dataset id"),
        (
            rows_recipe(data, prompt_column="question"),
            f"task.prompt_column: '{data}' has no column 'question'; its columns are: prompt, "
            "answer, topic",
        ),
        (rows_recipe(data, answer_column="solution"), "task.answer_column: "),
        (rows_recipe(data, answer_column=None), "task.answer_column: null, and there is no task"),
        (rows_recipe(data, eval_prompts=5), "eval.prompts: 5 rows are to be held out and "),
        (rows_recipe(data, eval_dataset=str(missing)), "task.eval_dataset: "),
    ]
    for recipe, message in cases:
        assert message in error_of(load_task, recipe)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('{"prompt": "q", "answer": 1}\n{"prompt": "q"\n', "'d.jsonl', line 2, is not JSON"),
        ('{"prompt": "q", "answer": 1}\n["q"]\n', "line 2 of 'd.jsonl' is no object"),
        ('[\n{"prompt": "q",\n]', "line 3, is not JSON"),
        ('[{"prompt": "q", "answer": 1}, 3]', "item 2 of 'd.jsonl' is no object"),
        ('{"prompt": "q", "answer": 1}\n{"prompt": "q"}\n', "row 1 of "),
        ('{"prompt": "q", "answer": 1, "completions": 2}\n' * 2, "a name that rewards use"),
        ("", "has no rows"),
    ],
)
def test_bad_json(tmp_path, text, message):
    (tmp_path / "d.jsonl").write_text(text)
    assert message in error_of(load_task, rows_recipe(tmp_path / "d.jsonl"))


def test_file_of_another_kind_and_encoding(tmp_path):
    (tmp_path / "d.txt").write_text("q")
    assert "none of .jsonl, .json" in error_of(load_task, rows_recipe(tmp_path / "d.txt"))
    (tmp_path / "d.jsonl").write_bytes(b"\xff\xfe{")
    assert "is not UTF-8" in error_of(load_task, rows_recipe(tmp_path / "d.jsonl"))


def test_hub_dataset_out_of_reach(monkeypatch):
    import datasets
    import huggingface_hub.constants

    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    message = error_of(load_task, rows_recipe("some-owner/no-such-data:main"))
    assert message.startswith("task.dataset: cannot read 'some-owner/no-such-data:main': ")
    assert message.endswith("; is the Hub reachable? A local file works offline")


# --- prompts


def test_prompt_goes_through_the_chat_template():
    tokenizer = make_tokenizer()
    prompt = one_prompt({"prompt": "hi", "answer": "x"}, tokenizer)
    assert prompt.text == "[user]hi[assistant]"
    assert list(prompt.token_ids) == tokenizer(prompt.text, add_special_tokens=False).input_ids
    assert prompt.messages == ({"role": "user", "content": "hi"},)
    assert prompt.columns == {"answer": "x"}


def test_task_texts_and_template_arguments():
    task = {
        "system": "S",
        "prefix": "<",
        "suffix": ">",
        "chat_template_kwargs": {"thinking": True},
    }
    prompt = one_prompt({"prompt": "hi"}, make_tokenizer(), task=task)
    assert prompt.text == "[system]S[user]<hi>[assistant]<think>"
    messages = [
        {"role": "system", "content": "own"},
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": "b"},
        {"role": "user", "content": "c"},
    ]
    prompt = one_prompt({"prompt": messages}, make_tokenizer(), task=task)
    assert prompt.text == "[system]own[user]a[assistant]b[user]<c>[assistant]<think>"
    assert messages[-1]["content"] == "c"  # the caller's row is untouched


@pytest.mark.parametrize("adds_bos", [False, True])
@pytest.mark.parametrize("template", [TEMPLATE, "{{ bos_token }}" + TEMPLATE, None])
def test_bos_is_there_once_or_not_at_all(adds_bos, template):
    tokenizer = make_tokenizer(adds_bos, template)
    ids = one_prompt({"prompt": "hi"}, tokenizer).token_ids
    writes_bos = template is not None and template.startswith("{{ bos")
    assert ids.count(0) == (1 if adds_bos or writes_bos else 0)
    assert ids[0] == 0 or not (adds_bos or writes_bos)
    assert ids.count(1) == 0  # no EOS after the prompt, even from a tokenizer that adds one


def test_without_a_chat_template():
    tokenizer = make_tokenizer(template=None)
    assert one_prompt({"prompt": "hi"}, tokenizer).text == "hi"
    assert one_prompt({"prompt": "hi"}, tokenizer, task={"system": "S"}).text == "S\n\nhi"
    messages = [{"role": r, "content": "a"} for r in ("user", "assistant", "user")]
    message = error_of(make_prompts, [{"prompt": messages}], tokenizer, make_recipe(), None)
    assert "the model has no chat template" in message


def test_template_that_refuses():
    tokenizer = make_tokenizer(template="{{ raise_exception('System role not supported') }}")
    message = error_of(make_prompts, [{"prompt": "q"}], tokenizer, make_recipe(), None)
    assert message.startswith("task row 0: the model's chat template refuses it: System role not")


@pytest.mark.parametrize(
    "prompt", [None, 3, [], [{"role": "user"}], ["hi"], [{"role": "user", "content": [{}]}]]
)
def test_malformed_prompt(prompt):
    rows = [{"prompt": "fine"}, {"prompt": prompt}]
    message = error_of(make_prompts, rows, make_tokenizer(), make_recipe(), None)
    assert message.startswith("task row 1: the prompt is ") and "must be text or a list" in message


def test_empty_prompt_without_template():
    message = error_of(
        make_prompts, [{"prompt": ""}], make_tokenizer(template=None), make_recipe(), None
    )
    assert message == "task row 0: the prompt is empty; give it some text"


def test_prompt_longer_than_the_context():
    tokenizer = make_tokenizer(template=None)
    rows = [{"prompt": "x" * 10}, {"prompt": "x" * 11}]
    assert len(make_prompts(rows[:1], tokenizer, make_recipe(), 16)[0]) == 1
    assert error_of(make_prompts, rows, tokenizer, make_recipe(), 16) == (
        "task row 1: the prompt has 11 tokens, and the context of 16 leaves 10 beside a completion "
        "of 6; shorten it, lower rollout.max_completion_tokens, or let task.max_prompt_tokens "
        "drop it"
    )
    assert error_of(make_prompts, rows, tokenizer, make_recipe(), 6) == (
        "rollout.max_completion_tokens: 6 leaves no room for a prompt in the model's context of "
        "6 tokens; lower it"
    )
    longer = make_recipe(eval={"max_completion_tokens": 7})
    assert "completion of 7" in error_of(make_prompts, rows, tokenizer, longer, 16)


def test_long_prompts_are_dropped_and_counted():
    tokenizer = make_tokenizer(template=None)
    rows = [{"prompt": "x" * n} for n in (3, 9, 4, 30)]
    recipe = make_recipe(task={"max_prompt_tokens": 4})
    prompts, dropped = make_prompts(rows, tokenizer, recipe, 100)
    assert [(p.index, len(p.token_ids)) for p in prompts] == [(0, 3), (2, 4)] and dropped == 2
    recipe = make_recipe(task={"max_prompt_tokens": 50})  # the context still counts
    assert make_prompts(rows, tokenizer, recipe, 16)[1] == 1
    recipe = make_recipe(task={"max_prompt_tokens": 2})
    message = error_of(make_prompts, rows, tokenizer, recipe, 100)
    assert message.startswith("task.max_prompt_tokens: all 4 prompts are longer than 2 tokens")


# --- a question of the user's own


def ask(prompt, max_context=999, max_tokens=None, tokenizer=None, **task):
    recipe = make_recipe(task=task)
    tokenizer = tokenizer or make_tokenizer()
    return make_question(prompt, load_task(recipe), tokenizer, recipe, max_context, max_tokens)


def test_a_text_is_put_as_the_tasks_and_messages_are_left_alone(tmp_path):
    around = {"prefix": "<", "suffix": ">", "system": "S"}
    rows = {"name": "rows", "dataset": str(write_jsonl(tmp_path / "d.jsonl", FIVE * 50))}
    assert ask("q", **rows, **around).text == "[system]S[user]<q>[assistant]"
    assert "[assistant]71[user]<q>[assistant]" in ask("q", **around).text  # the worked example
    messages = [{"role": r, "content": c} for r, c in (("user", "a"), ("assistant", "b"))]
    messages.append({"role": "user", "content": "c"})
    made = ask(messages, **around)
    assert made.text == "[user]a[assistant]b[user]c[assistant]"
    assert list(made.messages) == messages


def test_a_question_is_not_a_row_of_the_dataset(tmp_path):
    """The dataset's filter and words do not apply: what is wrong is the prompt, or max_tokens."""
    messages = [{"role": "user", "content": "x" * 10}]
    bare = make_tokenizer(template="{% for m in messages %}{{ m.content }}{% endfor %}")
    assert len(ask(messages, tokenizer=bare, max_prompt_tokens=3).token_ids) == 10

    def refused(prompt, *limits):
        return error_of(ask, prompt, *limits, tokenizer=bare)

    assert refused(" \n") == "prompt: it is empty; give it some text"
    assert refused([{"role": "user", "content": ""}]).startswith("prompt: the prompt is empty")
    assert refused([{"role": "user"}]).startswith("prompt: the prompt is [{'role': 'user'}]; it")
    assert refused(messages, 10) == (
        "prompt: it has 10 tokens, and the model's context of 10 leaves no room for an answer; "
        "shorten it"
    )
    assert refused(messages, 15) == (
        "prompt: it has 10 tokens, and the model's context of 15 does not hold an answer of 6 "
        "besides; shorten it, or allow a shorter answer: max_tokens (--max-tokens) up to 5"
    )
    assert refused(messages, 15, 6) == (
        "max_tokens (--max-tokens): 6 is more than the model's context of 15 leaves beside a "
        "prompt of 10 tokens; at most 5 fit"
    )
    assert len(ask(messages, 15, 5, tokenizer=bare).token_ids) == 10
    assert len(ask(messages, 16, tokenizer=bare).token_ids) == 10


def test_train_prompts_finds_a_bad_row_before_work_starts(tmp_path):
    rows = [*FIVE[:3], {"prompt": "x" * 99, "answer": 1}, FIVE[4]]
    recipe = rows_recipe(write_jsonl(tmp_path / "d.jsonl", rows))
    message = error_of(train_prompts, load_task(recipe), make_tokenizer(), recipe, 64)
    assert message.startswith("task row 3: the prompt has 116 tokens")


def test_train_prompts_of_numbers_are_made_when_taken():
    recipe = make_recipe()
    task = load_task(recipe)
    prompts, dropped = train_prompts(task, make_tokenizer(), recipe, 256)
    assert (len(prompts), dropped) == (numbers_task.TRAIN_ROWS, 0)
    assert (
        prompts[42].index == 42 and prompts[42].columns["answer"] == task.train_rows()[42]["answer"]
    )
    message = error_of(train_prompts, task, make_tokenizer(), recipe, 64)
    assert message.startswith("task row 0: the prompt has ")


# --- the order


def test_stream_is_a_shuffle_of_each_epoch():
    stream = PromptStream(list("abcdefghij"), seed=1)
    first, cursor = stream.take(0, 10)
    second, cursor = stream.take(cursor, 10)
    assert cursor == 20
    assert sorted(first) == sorted(second) == list("abcdefghij")
    assert first != second and first != list("abcdefghij")
    assert PromptStream(list("abcdefghij"), seed=2).take(0, 10)[0] != first


def test_stream_continues_from_its_cursor():
    whole = PromptStream(list(range(7)), seed=3).take(0, 40)[0]
    stream, cursor, parts = PromptStream(list(range(7)), seed=3), 0, []
    while cursor < 40:
        part, cursor = stream.take(cursor, 5)
        parts += part
    assert parts == whole
    assert PromptStream(list(range(7)), seed=3).take(23, 9) == (whole[23:32], 32)


def test_stream_is_pinned_across_numpy_versions():
    assert PromptStream(list(range(8)), seed=0).take(0, 8)[0] == PINNED_ORDER


PINNED_ORDER = [0, 2, 1, 5, 4, 3, 6, 7]


def test_stream_of_a_task_and_of_nothing():
    task = load_task(make_recipe())
    stream = PromptStream(task, seed=0)
    rows, cursor = stream.take(0, 3)
    assert cursor == 3 and rows == [task.train_rows()[i] for i in stream.indices(0, 3)]
    prompts, _ = make_prompts(
        rows, make_tokenizer(), make_recipe(), 256, indices=stream.indices(0, 3)
    )
    assert [p.index for p in prompts] == stream.indices(0, 3)
    assert "no rows to train on" in error_of(PromptStream, [], 0)


def test_a_question_of_the_users_is_put_as_the_task_puts_its_own():
    task = numbers_task.NumbersTask(seed=0)
    (row,) = task.eval_rows(1)
    question = row["prompt"][-1]["content"]
    assert task.ask(question) == row["prompt"]
    assert task.ask("Hello?")[-1] == {"role": "user", "content": "Hello?"}
