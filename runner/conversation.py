"""From a row to the text that is tokenised: chat messages through the model's template, or the plain prompt."""

from __future__ import annotations

from typing import Any

from jinja2 import TemplateSyntaxError

from ..jobs.errors import ConfigError
from ..jobs.prompts import PromptRow
from ..jobs.row_errors import TEMPLATE_ERROR, RowFailure
from ..jobs.spec import JobSpec
from .tokenizer import TextTokenizer


class PromptText:
    """Renders rows as the job's prompt section says.

    With a chat template a prompt becomes a user message, after the system prompt where there is one.
    `chat_template: default` on a model that has none means plain prompts. Of OpenAI batch lines, chat completions go
    through the template and completions do not. Text that spells a special token
    (`<|im_end|>`) is read as that token. A conversation that ends with the assistant is refused or continued, as
    prompt.continue_final_message says; without it a template would open a second answer after the first.
    Raises ConfigError where messages or a system prompt need a template and there is none, and for a template file
    that is none.
    """

    def __init__(self, spec: JobSpec, tokenizer: TextTokenizer) -> None:
        self._tokenizer = tokenizer
        self._system = spec.prompt.system
        self._template = spec.chat_template_text()
        self._continues = spec.prompt.continue_final_message
        has_default = spec.prompt.chat_template == "default" and tokenizer.has_chat_template
        self._is_chat = has_default or self._template is not None
        self._is_batch_api = spec.input.format == "openai-batch"
        needs_chat = (
            "prompt.system" if self._system else "input.columns.messages" if spec.input.columns.messages else ""
        )
        if needs_chat and not self._is_chat:
            raise ConfigError(
                f"{needs_chat} needs a chat template and {spec.model.path!r} brings none; "
                "set prompt.chat_template to the path of a Jinja file"
            )
        if self._template is not None:
            self._check_syntax(spec.prompt.chat_template)

    def _check_syntax(self, path: str) -> None:
        """Once, by a trial: what every row would trip over is the job's fault."""
        try:
            self._tokenizer.render(self._messages(""), self._template)
        except TemplateSyntaxError as exc:
            raise ConfigError(f"prompt.chat_template: {path}, line {exc.lineno}: {exc.message}") from exc
        except Exception:  # it may refuse this conversation and take those of the job
            return

    def is_chat(self, row: PromptRow) -> bool:
        """Whether a row goes through the chat template, which writes BOS and the like itself."""
        return row.messages is not None if self._is_batch_api else self._is_chat

    def render(self, row: PromptRow) -> str:
        """The text of a row; raises RowFailure, and what the chat template raises."""
        if not self.is_chat(row):
            return row.prompt or ""
        if not self._is_chat:
            raise RowFailure(
                TEMPLATE_ERROR,
                "a conversation needs a chat template and the model brings none, or prompt.chat_template is none; "
                "set it to the path of a Jinja file",
            )
        messages = row.messages or self._messages(row.prompt or "")
        if messages[-1].get("role") != "assistant":
            return self._tokenizer.render(messages, self._template)
        if not self._continues:
            raise RowFailure(
                TEMPLATE_ERROR,
                "the last message is the assistant's; remove it, or set prompt.continue_final_message: true "
                "to let the model go on with it",
            )
        return self._tokenizer.render(messages, self._template, continue_final_message=True)

    def _messages(self, prompt: str) -> list[dict[str, Any]]:
        user = {"role": "user", "content": prompt}
        return [user] if self._system is None else [{"role": "system", "content": self._system}, user]
