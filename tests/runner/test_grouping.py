"""Groups tell rows apart and change nothing else."""

from __future__ import annotations

import random
from datetime import date

import numpy as np
import pyarrow as pa
import pytest

from specrun.engine import Request, SamplingParams
from specrun.jobs.errors import ConfigError
from specrun.jobs.input_files import InputFile
from specrun.runner.grouping import MAX_GROUPS, MIN_ROWS, NO_TEMPLATE, PromptTemplates, RequestGroups, shared_tokens
from specrun.runner.ordering import prompt_key


def make(prompts, start=0):
    return [Request(i, list(prompt), SamplingParams()) for i, prompt in enumerate(prompts, start)]


def assigned(groups, prompts, values=None, start=0):
    requests = make(prompts, start)
    groups.assign(requests, values or {})
    return [request.group for request in requests]


def texts(head, count, seed=0, length=20):
    rng = random.Random(seed)
    return [[*head, *(rng.randrange(1000, 30_000) for _ in range(length))] for _ in range(count)]


HEADER = [1, 2, 3, 4, 5, 6]
TASK_A, TASK_B = [*HEADER, 20, 21, 22, 23, 24], [*HEADER, 30, 31, 32, 33, 34]


def test_values_of_a_column_are_numbered_as_they_appear():
    groups = RequestGroups(has_column=True)
    values = ["b", "a", None, "b", 3, 3.5, True, date(2026, 1, 2), float("nan"), float("nan"), [1], {"x": 1}, "a"]
    found = assigned(groups, [[1]] * len(values), dict(enumerate(values)))
    assert found == [0, 1, 2, 0, 3, 4, 5, 6, 7, 7, 8, 9, 1]
    assert assigned(groups, [[1]] * 2, {100: "a"}, start=100) == [1, 2]


def test_more_values_than_groups_share_them():
    groups = RequestGroups(has_column=True)
    count = 10 * MAX_GROUPS
    found = assigned(groups, [[1]] * count, {i: f"user {i}" for i in range(count)})
    assert found[:MAX_GROUPS] == list(range(MAX_GROUPS)) and set(found) == set(range(MAX_GROUPS))
    assert assigned(groups, [[1]] * count, {i: f"user {i}" for i in range(count)}) == found
    assert len(groups._numbers) == MAX_GROUPS


def test_templates_are_told_apart_behind_a_common_header():
    """Rows with the header alone are a group, too, and so are those without."""
    kinds = [0] * 40 + [1] * 40 + [2] * 3 + [3] * 3
    prompts = [*texts(TASK_A, 40), *texts(TASK_B, 40, seed=1), *texts(HEADER, 3, seed=2), *texts([9], 3, seed=3)]
    order = random.Random(0).sample(range(86), 86)
    found = assigned(RequestGroups(), [prompts[i] for i in order])
    assert len(set(zip(found, [kinds[i] for i in order], strict=True))) == len(set(found)) == 4


def test_a_template_that_comes_later_is_found_and_earlier_ones_are_known_again():
    templates = PromptTemplates()
    first = templates.find(texts(TASK_A, 40))
    assert set(first) == {0}
    assert set(templates.find(texts(TASK_B, 40, seed=1))) == {1}
    assert templates.find([*texts(TASK_B, 2, seed=2), *texts(TASK_A, 2, seed=3), [7, 7]]) == [1, 1, 0, 0, NO_TEMPLATE]


def test_free_texts_and_short_beginnings_are_one_group():
    assert set(assigned(RequestGroups(), texts([], 200))) == {0}
    the, a = texts([50, 51], 100), texts([60], 100, seed=1)
    assert set(assigned(RequestGroups(), [*the, *a])) == {0}
    assert set(assigned(RequestGroups(), texts(TASK_A, MIN_ROWS - 1))) == {0}
    assert assigned(RequestGroups(), []) == []


def test_templates_are_bounded():
    templates = PromptTemplates()
    for task in range(200):
        assert len(templates.find(texts([task] * 8, 20, seed=task))) == 20
    assert len(templates._known) == 63


def test_shared_tokens_by_brute_force():
    rng = random.Random(4)
    for _ in range(30):
        prompts = sorted([rng.randrange(3) for _ in range(rng.randrange(1, 9))] for _ in range(25))
        best = []
        for one in prompts:
            depths = sorted((common(one, other) for other in prompts if other is not one), reverse=True)
            best.append(depths[3])
        assert shared_tokens([prompt_key(prompt) for prompt in prompts], 5).tolist() == best


def common(one, other):
    return next((i for i, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))


def files(*paths, num_rows=10):
    return [InputFile(path, 1, 1, num_rows) for path in paths]


def test_files_of_unlike_names_are_groups():
    groups = RequestGroups(files("in/chat-00.jsonl", "in/chat-01.jsonl", "in/code-00.jsonl", "in/chat-0a7f.jsonl"))
    found = assigned(groups, texts([], 40))
    assert found == [0] * 20 + [1] * 10 + [0] * 10


def test_very_many_kinds_of_files_are_pieces_of_one():
    names = [f"in/{'abcdefghijklmnopqrstuvwxyz'[i]}zz.jsonl" for i in range(20)]
    assert set(assigned(RequestGroups(files(*names)), texts([], 200))) == {0}


def test_templates_and_files_go_together():
    groups = RequestGroups(files("a/x.parquet", "b/x.parquet", num_rows=40))
    prompts = [*texts(TASK_A, 20), *texts(TASK_B, 20, seed=1)] * 2
    found = np.array(assigned(groups, prompts)).reshape(4, 20)
    assert found[:, 0].tolist() == [0, 1, 2, 3] and (found == found[:, :1]).all()


@pytest.mark.parametrize("kind", ["jsonl", "parquet"])
def test_a_job_groups_by_its_column_and_writes_the_same(job, kind):
    rows = [{"prompt": f"word {i}", "task": ["x", "y"][i % 2], "n": i % 3 or None} for i in range(60)]
    written = {}
    for group in (None, "task", "n"):
        job.jsonl(rows) if kind == "jsonl" else job.parquet(pa.Table.from_pylist(rows))
        job.config["input"]["columns"] = {"prompt": "prompt", "group": group}
        job.set(output__path=str(job.folder / f"out-{group}"), output__keep_columns=["task", "n"])
        job.out = job.folder / f"out-{group}"
        assert job.run().exit_code == 0
        written[group] = job.rows()
        assert job.builder.groups == {None: {0}, "task": {0, 1}, "n": {0, 1, 2}}[group]
    assert written[None] == written["task"] == written["n"]


def test_another_group_is_the_same_job(job):
    job.prompts(5).run()
    job.config["input"]["columns"] = {"prompt": "prompt", "group": "prompt"}
    assert job.run().was_done


def test_values_that_cannot_be_read_fail_no_row(job):
    table = pa.table({"prompt": ["a", "b"], "kind": pa.array([b"\xff", b"ok"])})
    job.parquet(table).set(output__keep_columns="none")
    job.config["input"]["columns"] = {"prompt": "prompt", "group": "kind"}
    assert job.run().exit_code == 0 and [row["error_code"] for row in job.rows()] == [None, None]


def test_a_missing_column_is_an_error(job):
    job.prompts(2)
    job.config["input"]["columns"] = {"prompt": "prompt", "group": "promt"}
    with pytest.raises(ConfigError, match=r"input\.columns\.group: .*no column 'promt'.*did you mean prompt"):
        job.run()
