"""The part that each column plays."""

from __future__ import annotations

from dataclasses import replace

import pytest

from specrun.jobs.columns import UNSUPPORTED_KEYS, asks_for_nothing, plan_columns
from specrun.jobs.spec import JobSpec
from specrun.jobs.template import PromptTemplate


def plan(found, template=None, keep="all", **columns):
    spec = JobSpec.model_validate(
        {
            "model": {"path": "m"},
            "input": {"path": "i", **({"columns": columns} if columns else {})},
            "prompt": {"template": template},
            "output": {"path": "o", "keep_columns": keep},
        }
    )
    return plan_columns(spec, found, PromptTemplate(template) if template else None, "i")


def test_columns_of_unsupported_parameters_are_looked_into_and_not_carried():
    found = plan(["prompt", "n", "doc", "temperature", "tools"])
    assert found.params == ("n", "temperature", "tools") and found.passthrough == ("doc",)
    assert set(found.values) == {"prompt", "n", "temperature", "tools"}


def test_they_are_data_where_the_job_says_so():
    found = plan(["prompt", "n", "suffix", "doc"], keep=["n", "doc"])
    assert found.params == ("suffix",) and found.passthrough == ("n", "doc")
    assert plan(["prompt", "n"], keep="none").params == ("n",)


def test_they_are_data_where_the_template_or_the_mapping_uses_them():
    found = plan(["n", "suffix"], template="{{ n }}")
    assert found.params == ("suffix",) and found.passthrough == ("n",)
    assert plan(["prompt", "n"], id="n", prompt="prompt").params == ()
    assert plan(["echo"], prompt="echo").params == ()


def test_a_column_of_groups_keeps_its_other_part():
    for group in ("doc", "n", "temperature", "prompt", "key"):
        found, without = (plan(["prompt", "n", "doc", "temperature", "key"], id="key", group=g) for g in (group, None))
        assert found.group == group and found == replace(without, group=group)
        assert found.values == without.values


@pytest.mark.parametrize("name", UNSUPPORTED_KEYS)
def test_neutral_values(name):
    assert asks_for_nothing(name, None)
    assert all(asks_for_nothing(name, value) for value in UNSUPPORTED_KEYS[name])
    assert not any(asks_for_nothing(name, value) for value in (2, "x", {"a": 1}, ["a"], float("nan")))


def test_a_struct_columns_empty_keys_ask_for_nothing():
    assert asks_for_nothing("chat_template_kwargs", {"enable_thinking": None})
    assert not asks_for_nothing("chat_template_kwargs", {"enable_thinking": False})
    assert not asks_for_nothing("guided_grammar", {}) and not asks_for_nothing("n", 0)
