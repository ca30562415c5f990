"""The prompt template: what it sees, what it refuses, and where it stops."""

import re

import pytest

from specrun.jobs import template as template_module
from specrun.jobs.errors import ConfigError
from specrun.jobs.template import MAX_TEMPLATE_BYTES, PromptTemplate, RenderError


def test_text_survives_as_written():
    text = "Sum <b>{{ title }}</b>:\n{% for tag in tags %}{{ tag }};{% endfor %}\n\n"
    assert PromptTemplate(text).render({"title": "a & b", "tags": ["x", "y"]}) == "Sum <b>a & b</b>:\nx;y;\n\n"


def test_variables():
    template = PromptTemplate(
        "{% set y = a %}{{ y }}{{ b|default('-') }}{% if c is defined %}{{ c }}{% endif %}"
        "{% for i in range(2) %}{{ loop.index }}{% endfor %}"
    )
    assert {"a", "b", "c"} <= template.variables
    assert template.required == ("a",)
    assert template.render({"a": 1}) == "1-12"


@pytest.mark.parametrize(
    ("text", "line"), [("{{ a", 1), ("x\n{% if %}", 2), ("{{ a|nosuchfilter }}", 1), ("{% x %}", 1)]
)
def test_syntax_errors_name_the_line(text, line):
    with pytest.raises(ConfigError, match=f"prompt.template: line {line}: "):
        PromptTemplate(text)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{{ missing }}", "'missing' is undefined"),
        ("{{ a.b.c }}", "has no attribute"),
        ("{{ null }}", "null value"),
        ("{{ 1 // zero }}", "zero"),
        ("{{ a.__class__.__mro__ }}", "unsafe"),
        ("{{ a['__class__'] }}", "unsafe"),
        ("{{ ''.__class__.__base__.__subclasses__() }}", "unsafe"),
        ("{{ tags.append('z') }}", "unsafe"),
        ("{% include 'other' %}", "no loader"),
        ("{% for i in range(10**9) %}x{% endfor %}", "Range too big"),
        ("{{ lipsum() }}", "'lipsum' is undefined"),
    ],
)
def test_runtime_errors(text, message):
    with pytest.raises(RenderError, match=message):
        PromptTemplate(text).render({"a": "text", "null": None, "zero": 0, "tags": ["x"]})


def test_null_can_be_handled():
    assert PromptTemplate("{{ null or '-' }}{% if null %}x{% endif %}").render({"null": None}) == "-"


def test_size_limits(monkeypatch):
    with pytest.raises(ConfigError, match=str(MAX_TEMPLATE_BYTES)):
        PromptTemplate("ü" * (MAX_TEMPLATE_BYTES // 2 + 1))
    monkeypatch.setattr(template_module, "MAX_PROMPT_CHARS", 1000)
    template = PromptTemplate("{% for i in range(99999) %}{{ a }}{% endfor %}")
    with pytest.raises(RenderError, match="more than 1000 characters"):
        template.render({"a": "xyz"})


def test_a_column_wins_over_a_function():
    template = PromptTemplate("{{ range }}")
    assert "range" in template.variables
    assert template.render({"range": "9 km"}) == "9 km"


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("{{ 'a' * 1000000000 }}", "* makes something longer than"),
        ("{{ 10000 * ('a' * 1000) }}", "* makes something longer than"),
        ("{{ ([0] * 1000) * 100000 }}", "* makes something longer than"),
        ("{{ 9 ** 9 ** 9 }}", "exponent above 64"),
        (
            "{% set n = namespace(x='aaaa') %}{% for i in range(99) %}{% set n.x = n.x + n.x %}{% endfor %}{{ n.x }}",
            "+ makes something longer than",
        ),
    ],
)
def test_operators_that_make_much_of_little_are_stopped_before(text, reason):
    with pytest.raises(RenderError, match=re.escape(reason)):
        PromptTemplate(text).render({})


def test_plain_sums_and_products_still_work():
    assert PromptTemplate("{{ 2 * 3 + 4 }} {{ '=' * 3 }} {{ 2 ** 10 }} {{ a + 'c' }}").render({"a": "ab"}) == (
        "10 === 1024 abc"
    )
