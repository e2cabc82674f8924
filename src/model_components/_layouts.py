"""Convert rows (conversations, prompts and completions, instructions) to texts with answers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

_ROLES = {  # role names in data sets, and the same roles in chat templates
    "system": "system",
    "developer": "developer",
    "user": "user",
    "human": "user",
    "assistant": "assistant",
    "gpt": "assistant",
    "tool": "tool",
}

Messages = list[dict[str, Any]]
"""Messages: each has ``role`` and ``content``, and may have ``tool_calls``."""


class Layout(NamedTuple):
    """The text of a row, and the positions of its supervised parts.

    Attributes:
        text: The text.
        spans: Start and end, in characters, of each supervised part of the text.
        has_special_tokens: Whether the text already has special tokens, because a chat template
            wrote it.
    """

    text: str
    spans: list[tuple[int, int]]
    has_special_tokens: bool


class BadRowError(ValueError):
    """An error for a row that cannot be used; its message is the reason."""


def layouts_of(row: object, tokenizer: Any) -> list[Layout]:
    """Return a row as one text, or as one text for each answer of a conversation."""
    if isinstance(row, ValueError):  # a line that could not be read
        raise BadRowError(str(row))
    if not isinstance(row, Mapping):
        raise BadRowError(f"a value of type {type(row).__name__}")
    kind = kind_of_row(row)
    if kind == "messages":
        messages = _messages(row["messages"], "role", "content")
        return _conversation(tokenizer, messages, row.get("tools"))
    if kind == "conversations":
        messages = _messages(row["conversations"], "from", "value")
        return _conversation(tokenizer, messages, row.get("tools"))
    if kind == "completion":
        return _completion(tokenizer, row)
    if kind == "instruction":
        return _instruction(tokenizer, row)
    fields = [str(name) for name, value in row.items() if value is not None]
    for question, answer in (("prompt", "completion"), ("instruction", "output")):
        if question in fields:
            raise BadRowError(f"{question} without {answer}")
    raise BadRowError(f"the fields {', '.join(fields)}" if fields else "no fields")


def kind_of_row(row: Mapping[str, Any]) -> str:
    """Return the name of the layout that matches the fields of a row, or an empty string."""
    # a table of rows of several kinds has None where a row lacks a column
    fields = {name for name, value in row.items() if value is not None}
    if "messages" in fields:
        return "messages"
    if "conversations" in fields:
        return "conversations"
    if {"prompt", "completion"} <= fields:
        return "completion"
    if {"instruction", "output"} <= fields:
        return "instruction"
    return "text" if isinstance(row.get("text"), str) else ""


def _completion(tokenizer: Any, row: Mapping[str, Any]) -> list[Layout]:
    prompt = row["prompt"]
    completion = row["completion"]
    if isinstance(prompt, str) and isinstance(completion, str):
        return [_prompt_and_answer(tokenizer, prompt, completion)]
    if isinstance(prompt, str) or isinstance(completion, str):
        raise BadRowError("prompt and completion that are not both texts or both messages")
    before = _messages(prompt, "role", "content", of_prompt=True)
    messages = before + _messages(completion, "role", "content")
    return _conversation(tokenizer, messages, row.get("tools"), first=len(before))


def _instruction(tokenizer: Any, row: Mapping[str, Any]) -> list[Layout]:
    for name in ("instruction", "input", "output"):
        if not isinstance(row.get(name, ""), str | None):
            raise BadRowError(f"{name} that is not text")
    instruction = row["instruction"]
    more = row.get("input") or ""
    if not tokenizer.chat_template:
        return [_prompt_and_answer(tokenizer, _alpaca_prompt(instruction, more), row["output"])]
    question = f"{instruction}\n\n{more}" if more else instruction
    return _conversation(
        tokenizer,
        [
            {"role": "user", "content": question},
            {"role": "assistant", "content": row["output"]},
        ],
    )


def _alpaca_prompt(instruction: str, more: str) -> str:
    """Return a prompt in the format of Stanford Alpaca.

    Source: https://github.com/tatsu-lab/stanford_alpaca.
    """
    task = "an instruction that describes a task"
    if more:
        task += ", paired with an input that provides further context"
    parts = [
        f"Below is {task}. Write a response that appropriately completes the request.",
        f"### Instruction:\n{instruction}",
    ]
    if more:
        parts.append(f"### Input:\n{more}")
    parts.append("### Response:\n")
    return "\n\n".join(parts)


def _prompt_and_answer(tokenizer: Any, prompt: str, answer: str) -> Layout:
    """Return the layout of a prompt and a supervised answer, with the end-of-text token."""
    if not answer.strip():
        # without spans, `TextExamples` counts the row as a row without an answer
        return Layout(check_unicode(prompt), [], has_special_tokens=False)
    # the end-of-text token is supervised, too: otherwise a model would not learn to stop
    text = check_unicode(prompt + answer) + (tokenizer.eos_token or "")
    return Layout(text, [(len(prompt), len(text))], has_special_tokens=False)


def _messages(given: object, role: str, content: str, *, of_prompt: bool = False) -> Messages:
    """Return messages with the roles and fields of chat templates.

    Args:
        given: The messages as they are in the row.
        role: The name of the field that holds the role.
        content: The name of the field that holds the text.
        of_prompt: Whether these messages are a prompt, which needs no answer.
    """
    if hasattr(
        given, "tolist"
    ):  # a NumPy array, as in the data frames that pandas reads from parquet
        given = given.tolist()
    if not isinstance(given, Sequence) or isinstance(given, str):
        raise BadRowError("messages that are not a list")
    messages = []
    for message in given:
        if not isinstance(message, Mapping):
            raise BadRowError(f"a {type(message).__name__} as a message")
        name = message.get(role)
        if not isinstance(name, str) or name not in _ROLES:
            shown = repr(name) if isinstance(name, str) else f"of type {type(name).__name__}"
            raise BadRowError(f"the role {shown} (expected one of {', '.join(_ROLES)})")
        text = message.get(content)
        if not isinstance(text, str) and not (text is None and message.get("tool_calls")):
            raise BadRowError(f"a message whose {content} is not text")
        # a message with `from` and `value` may also have `role` or `content`, which are dropped
        named = (role, content, "role", "content")
        others = {k: v for k, v in message.items() if k not in named}
        messages.append({"role": _ROLES[name], "content": text, **others})
    if not of_prompt and not any(one["role"] == "assistant" for one in messages):
        raise BadRowError("no message from the assistant")
    return messages


def _conversation(
    tokenizer: Any, messages: Messages, tools: object = None, *, first: int = 0
) -> list[Layout]:
    """Return the layouts of a conversation: one for all answers, or one for each answer.

    The text that ends an answer belongs to the answer. Text after the last answer is left out.

    Args:
        tokenizer: The tokenizer whose chat template lays out the messages.
        messages: The messages.
        tools: Tools that the chat template describes.
        first: The number of the first message that may be supervised.
    """
    answers = [
        number
        for number, message in enumerate(messages)
        if number >= first and message["role"] == "assistant" and _has_answer(message)
    ]
    has_special_tokens = bool(tokenizer.chat_template)
    layouts = []
    for number in answers:
        # render the text up to each answer's end, because a template does not return positions
        text = _render(tokenizer, messages[: number + 1], tools)
        if number:
            before = _render(tokenizer, messages[:number], tools, is_prompt=True)
            start = len(before) if text.startswith(before) else -1
        else:  # the template's text before a first message is not part of the answer
            start = _beginning_of(tokenizer, messages[0], text, tools)
        if start < 0:
            raise BadRowError("an answer that the chat template does not put after its prompt")
        layouts.append(Layout(text, [(start, len(text))], has_special_tokens))
    if not layouts:
        return [Layout(_render(tokenizer, messages, tools), [], has_special_tokens)]
    last = layouts[-1]
    # if all shorter texts are prefixes of the last one, the last one holds all answers
    if not all(last.text.startswith(layout.text) for layout in layouts):
        return layouts
    spans = [span for layout in layouts for span in layout.spans]
    return [last._replace(spans=spans)]


def _beginning_of(tokenizer: Any, message: Mapping[str, Any], text: str, tools: object) -> int:
    """Return where a first message's content begins in a text, or -1 if the text lacks it."""
    content = message["content"] or ""
    # a short answer may also occur in the text that the template writes before it
    other = _render(tokenizer, [{**message, "content": f"\ue000{content}"}], tools)
    start = other.find("\ue000")
    if start < 0 or not text.startswith(content, start):
        return text.find(content)
    return start


def _has_answer(message: Mapping[str, Any]) -> bool:
    return bool(message.get("tool_calls") or (message["content"] or "").strip())


def _render(tokenizer: Any, messages: Messages, tools: object, *, is_prompt: bool = False) -> str:
    """Return messages as text; a prompt ends with the chat template's generation prompt, if any."""
    if not tokenizer.chat_template:
        end = tokenizer.eos_token or "\n"
        return check_unicode(
            "".join(
                (one["content"] or "") + (end if one["role"] == "assistant" else "\n")
                for one in messages
            )
        )
    try:
        text = tokenizer.apply_chat_template(
            messages, tools=tools, tokenize=False, add_generation_prompt=is_prompt
        )
    except Exception as error:  # a template may raise errors of any kind
        raise BadRowError(f"messages that the chat template refuses ({error})") from error
    return check_unicode(text)


def check_unicode(text: str) -> str:
    """Return a text; raise an error for unpaired surrogates, which tokenizers cannot read."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise BadRowError("an unpaired surrogate") from error
    return text
