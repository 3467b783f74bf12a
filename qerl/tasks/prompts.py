"""From rows to `Prompt`s: chat template, ids, length check; and the order they are taken in.

This is the only place where a prompt is tokenized; from here it travels as ids.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import lru_cache
from typing import TYPE_CHECKING, Any, Generic, TypeVar, cast, overload

import numpy as np

from qerl.config import Recipe, TaskConfig
from qerl.errors import QerlError
from qerl.tasks.base import Row, Task
from qerl.types import Prompt

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Message = dict[str, str]
T = TypeVar("T")


def make_prompts(
    task_rows: Iterable[Row],
    tokenizer: PreTrainedTokenizerBase,
    recipe: Recipe,
    max_context: int | None,
    *,
    indices: Sequence[int] | None = None,
) -> tuple[list[Prompt], int]:
    """Render rows; return the prompts and how many rows were dropped for their length.

    max_context: the model's context in tokens (None: no limit known). indices: each row's
    position in the task (default 0, 1, …). Raises QerlError for a malformed row, a template
    that refuses it, and a prompt that leaves no room for the completion, unless
    `task.max_prompt_tokens` says to drop long prompts.
    """
    rows = list(task_rows)
    renderer = Renderer(tokenizer, recipe, max_context)
    positions = range(len(rows)) if indices is None else indices
    made = [renderer(i, row) for i, row in zip(positions, rows, strict=True)]
    kept = [prompt for prompt in made if prompt is not None]
    if rows and not kept:
        raise QerlError(
            f"task.max_prompt_tokens: all {len(rows)} prompts are longer than {renderer.limit} "
            "tokens; raise it or shorten the prompts"
        )
    return kept, len(rows) - len(kept)


def train_prompts(
    task: Task, tokenizer: PreTrainedTokenizerBase, recipe: Recipe, max_context: int | None
) -> tuple[Sequence[Prompt], int]:
    """All training prompts, ready for `PromptStream`, and how many rows were dropped.

    Every row is rendered now, so that a bad one is found before work starts; prompts of a
    uniform task are rendered when taken.
    """
    rows = task.train_rows()
    if not (task.uniform and len(rows)):
        return make_prompts((rows[i] for i in range(len(rows))), tokenizer, recipe, max_context)
    make_prompts([rows[0]], tokenizer, recipe, max_context)  # if one fits, they all do
    return LazyPrompts(rows, Renderer(tokenizer, recipe, max_context)), 0


def make_question(
    prompt: str | list[Message],
    task: Task,
    tokenizer: PreTrainedTokenizerBase,
    recipe: Recipe,
    max_context: int,
    max_tokens: int | None = None,
) -> Prompt:
    """A prompt of the user's own, outside any dataset.

    prompt: text is put as the task's rows put theirs; a list of messages is taken as it is.
    max_tokens: longest answer, null for the recipe's. Raises QerlError naming the prompt or
    max_tokens where there is no text, no valid message, or no room in the context (in tokens).
    """
    bare = not isinstance(prompt, str)
    if not bare and not prompt.strip():
        raise QerlError("prompt: it is empty; give it some text")
    row = {"prompt": prompt if bare else task.ask(prompt)}
    made = Renderer(tokenizer, recipe, None, bare=bare, where="prompt").rendered(0, row)
    length = len(made.token_ids)
    if length >= max_context:
        raise QerlError(
            f"prompt: it has {length} tokens, and the model's context of {max_context} leaves no "
            "room for an answer; shorten it"
        )
    room = max_context - length
    if max_tokens is not None and max_tokens > room:
        raise QerlError(
            f"max_tokens (--max-tokens): {max_tokens} is more than the model's context of "
            f"{max_context} leaves beside a prompt of {length} tokens; at most {room} fit"
        )
    if (reserve := recipe.rollout.max_completion_tokens) > room and max_tokens is None:
        raise QerlError(
            f"prompt: it has {length} tokens, and the model's context of {max_context} does not "
            f"hold an answer of {reserve} besides; shorten it, or allow a shorter answer: "
            f"max_tokens (--max-tokens) up to {room}"
        )
    return made


class Renderer:
    """Turns a row into a Prompt, or into None when it is to be dropped for its length.

    bare: the row's messages are taken as they are, without task.system, prefix and suffix.
    where: what messages call the prompt (null: "task row <index>").
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        recipe: Recipe,
        max_context: int | None,
        *,
        bare: bool = False,
        where: str | None = None,
    ):
        self.tokenizer = tokenizer
        self.task = recipe.task
        self.bare, self.where = bare, where
        self.max_context = max_context
        self.reserve = max(
            recipe.rollout.max_completion_tokens, recipe.eval.max_completion_tokens or 0
        )
        self.limit = self._limit()
        self.bos = added_bos(tokenizer)

    def __call__(self, index: int, row: Row) -> Prompt | None:
        made = self.rendered(index, row)
        length = len(made.token_ids)
        if self.limit is not None and length > self.limit:
            if self.task.max_prompt_tokens is not None:
                return None
            raise self._too_long(index, length)
        return made

    def rendered(self, index: int, row: Row) -> Prompt:
        """The row as a Prompt, of whatever length."""
        where = self.where or f"task row {index}"
        messages = row_messages(where, row["prompt"])
        if not self.bare:
            messages = with_task_text(messages, self.task)
        text = self.render(where, messages)
        ids = encode(self.tokenizer, text, self.bos)
        if not ids:
            raise QerlError(f"{where}: the prompt is empty; give it some text")
        columns = {key: value for key, value in row.items() if key != "prompt"}
        return Prompt(index, tuple(messages), text, tuple(ids), columns)

    def render(self, where: str, messages: list[Message]) -> str:
        """The text the model reads: the chat template's, or the bare text where there is none."""
        if not self.tokenizer.chat_template:
            return plain_text(where, messages)
        from jinja2.exceptions import TemplateError

        extra: dict[str, Any] = dict(self.task.chat_template_kwargs)
        try:
            text = self.tokenizer.apply_chat_template(
                messages,
                tokenize=False,
                add_generation_prompt=True,
                **extra,
            )
        except TemplateError as error:
            raise QerlError(
                f"{where}: the model's chat template refuses it: {error}; "
                "check the roles of its messages and task.system"
            ) from error
        assert isinstance(text, str)
        return text

    def _limit(self) -> int | None:
        """Longest prompt allowed, in tokens."""
        limits = [] if self.task.max_prompt_tokens is None else [self.task.max_prompt_tokens]
        if self.max_context is not None:
            if self.reserve >= self.max_context:
                raise QerlError(
                    f"rollout.max_completion_tokens: {self.reserve} leaves no room for a prompt in "
                    f"the model's context of {self.max_context} tokens; lower it"
                )
            limits.append(self.max_context - self.reserve)
        return min(limits, default=None)

    def _too_long(self, index: int, length: int) -> QerlError:
        return QerlError(
            f"task row {index}: the prompt has {length} tokens, and the context of "
            f"{self.max_context} leaves {self.limit} beside a completion of {self.reserve}; "
            "shorten it, lower rollout.max_completion_tokens, or let task.max_prompt_tokens drop it"
        )


def row_messages(where: str, prompt: Any) -> list[Message]:
    """A row's prompt as messages. Text becomes one user message. where: for error messages."""
    if isinstance(prompt, str):
        return [{"role": "user", "content": prompt}]
    shape = isinstance(prompt, list | tuple) and len(prompt) > 0
    if not shape or not all(is_message(message) for message in prompt):
        raise QerlError(
            f"{where}: the prompt is {shorten(prompt)}; it must be text or a list of "
            '{"role": …, "content": …} messages with text contents'
        )
    return [{"role": message["role"], "content": message["content"]} for message in prompt]


def is_message(value: Any) -> bool:
    return isinstance(value, dict) and all(
        isinstance(value.get(key), str) for key in ("role", "content")
    )


def with_task_text(messages: list[Message], task: TaskConfig) -> list[Message]:
    """Add task.system (a row's own system message wins), and task.prefix and task.suffix
    around the last message."""
    messages = [dict(message) for message in messages]
    messages[-1]["content"] = task.prefix + messages[-1]["content"] + task.suffix
    if task.system is not None and messages[0]["role"] != "system":
        messages.insert(0, {"role": "system", "content": task.system})
    return messages


def plain_text(where: str, messages: list[Message]) -> str:
    """Text for a model without a chat template: an optional system text, then the prompt."""
    roles = [message["role"] for message in messages if message["role"] != "system"]
    if roles != ["user"]:
        raise QerlError(
            f"{where}: a conversation ({', '.join(roles)}), but the model has no chat "
            "template; give the prompt as text, or use an instruct model"
        )
    return "\n\n".join(message["content"] for message in messages)


def added_bos(tokenizer: PreTrainedTokenizerBase) -> int | None:
    """The BOS id if this tokenizer puts one before plain text, else None.

    Found by trying, because `add_bos_token` is not set by every tokenizer that adds one.
    """
    bos = cast("int | None", tokenizer.bos_token_id)
    ids = list(tokenizer("a").input_ids)
    bare = list(tokenizer("a", add_special_tokens=False).input_ids)
    return bos if bos is not None and ids[:1] == [bos] and bare[:1] != [bos] else None


def encode(tokenizer: PreTrainedTokenizerBase, text: str, bos: int | None) -> list[int]:
    """Ids of a rendered prompt with one BOS at most: templates often write it themselves.

    Never a trailing EOS, which some tokenizers add to plain text: the model is to go on.
    """
    ids = list(tokenizer(text, add_special_tokens=False).input_ids)
    return [bos, *ids] if bos is not None and ids[:1] != [bos] else ids


def shorten(value: Any, length: int = 60) -> str:
    text = repr(value)
    return text if len(text) <= length else text[: length - 1] + "…"


class LazyPrompts(Sequence[Prompt]):
    """Prompts of a uniform task, rendered when asked for."""

    def __init__(self, rows: Sequence[Row], renderer: Renderer):
        self.rows, self.renderer = rows, renderer

    def __len__(self) -> int:
        return len(self.rows)

    @overload
    def __getitem__(self, index: int) -> Prompt: ...
    @overload
    def __getitem__(self, index: slice) -> list[Prompt]: ...
    def __getitem__(self, index: int | slice) -> Prompt | list[Prompt]:
        if isinstance(index, slice):
            return [self[i] for i in range(*index.indices(len(self)))]
        prompt = self.renderer(index, self.rows[index])
        if prompt is None:
            raise QerlError(
                f"task.max_prompt_tokens: row {index} is longer than {self.renderer.limit} tokens "
                "though the first is not; raise it"
            )
        return prompt


class PromptStream(Generic[T]):
    """An endless, shuffled pass over rows or prompts. Its whole state is one integer, the cursor.

    source: a Task (its training rows) or any sequence. Each epoch has its own order, a function
    of (seed, epoch).
    """

    def __init__(self, source: Task | Sequence[T], seed: int):
        self.items = cast(
            "Sequence[T]", source.train_rows() if isinstance(source, Task) else source
        )
        if not len(self.items):
            raise QerlError("task: there are no rows to train on; check task.dataset")
        self.seed = seed
        self._order = lru_cache(maxsize=2)(self._shuffle)

    def take(self, cursor: int, n: int) -> tuple[list[T], int]:
        """The n items at `cursor`, and the cursor after them. May cross into the next epoch."""
        return [self.items[i] for i in self.indices(cursor, n)], cursor + n

    def indices(self, cursor: int, n: int) -> list[int]:
        """Positions in `items` that `take` would return."""
        size = len(self.items)
        return [int(self._order(c // size)[c % size]) for c in range(cursor, cursor + n)]

    def _shuffle(self, epoch: int) -> np.ndarray:
        # Sorting raw Philox bits: NumPy keeps those the same across versions, not its shuffles.
        bits = np.random.Philox(key=np.array([self.seed, epoch], dtype=np.uint64))
        return np.argsort(bits.random_raw(len(self.items)), kind="stable")
