"""The prompt template: sandboxed Jinja over the columns of a row."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from jinja2 import StrictUndefined, TemplateError, TemplateSyntaxError, meta, nodes
from jinja2.sandbox import ImmutableSandboxedEnvironment

from .errors import ConfigError

MAX_TEMPLATE_BYTES = 64 * 1024
MAX_PROMPT_CHARS = 4 * 1024 * 1024
MAX_EXPONENT = 64


class RenderError(Exception):
    """A row that the template cannot be filled with; the text says why."""


class _Sandbox(ImmutableSandboxedEnvironment):
    """Jinja's sandbox, without operators that make much out of little before anyone can look at the size."""

    intercepted_binops = frozenset({"*", "**", "+"})

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        sizes = [len(value) for value in (left, right) if isinstance(value, (str, bytes, list, tuple))]
        counts = [value for value in (left, right) if isinstance(value, int)]
        if operator == "**" and (abs(left) > MAX_PROMPT_CHARS or abs(right) > MAX_EXPONENT):
            raise RenderError(f"** of numbers above {MAX_PROMPT_CHARS} or with an exponent above {MAX_EXPONENT}")
        size = sum(sizes) if operator == "+" else sum(sizes) * max(counts, default=1)
        if operator != "**" and size > MAX_PROMPT_CHARS:
            raise RenderError(f"{operator} makes something longer than {MAX_PROMPT_CHARS}")
        return super().call_binop(context, operator, left, right)


class PromptTemplate:
    """Renders one prompt from the columns of a row.

    Raises ConfigError when the text is too long or not a template, with the line.
    """

    variables: frozenset[str]
    """Names that it reads; columns among them are handed to render()."""
    required: tuple[str, ...]
    """Names that must be columns: those it reads without asking first whether they are defined."""

    def __init__(self, text: str) -> None:
        size = len(text.encode("utf-8", "surrogatepass"))
        if size > MAX_TEMPLATE_BYTES:
            raise ConfigError(f"prompt.template: {size} bytes; at most {MAX_TEMPLATE_BYTES} are allowed, shorten it")
        environment = _Sandbox(undefined=StrictUndefined, keep_trailing_newline=True, finalize=_refuse_null)
        # Of Jinja's own functions only these two; the others (lipsum, ...) would be found in place of a column.
        environment.globals = {name: environment.globals[name] for name in ("range", "namespace")}
        try:
            tree = environment.parse(text)
            self._template = environment.from_string(text)
        except TemplateSyntaxError as exc:
            raise ConfigError(f"prompt.template: line {exc.lineno}: {exc.message}") from exc
        except (TemplateError, RecursionError) as exc:
            raise ConfigError(f"prompt.template: {exc or type(exc).__name__}; simplify it") from exc
        self.variables = frozenset(node.name for node in tree.find_all(nodes.Name) if node.ctx == "load")
        optional = _asked_for(tree)
        self.required = tuple(sorted(meta.find_undeclared_variables(tree) - optional))

    def render(self, values: Mapping[str, Any]) -> str:
        """The prompt of a row. Raises RenderError."""
        pieces: list[str] = []
        size = 0
        try:
            for piece in self._template.generate(values):
                pieces.append(piece)
                size += len(piece)
                if size > MAX_PROMPT_CHARS:
                    raise RenderError(f"the rendered prompt has more than {MAX_PROMPT_CHARS} characters")
        except RenderError:
            raise
        except Exception as exc:  # a template may call anything that the values offer
            raise RenderError(" ".join(str(exc).split()) or type(exc).__name__) from exc
        return "".join(pieces)


def _refuse_null(value: Any) -> Any:
    # Jinja would print the word None into the prompt.
    if value is None:
        raise RenderError("it prints a null value; write {{ column or '' }} where a column may be null")
    return value


def _asked_for(tree: nodes.Template) -> set[str]:
    tests = (test for test in tree.find_all(nodes.Test) if test.name in ("defined", "undefined"))
    filters = (filtered for filtered in tree.find_all(nodes.Filter) if filtered.name in ("default", "d"))
    asked: list[nodes.Test | nodes.Filter] = [*tests, *filters]
    return {found.node.name for found in asked if isinstance(found.node, nodes.Name)}
