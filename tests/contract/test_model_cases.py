"""Cases t29 to t33: what only a tokenizer and a model can show, on a tiny checkpoint."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest

from specrun.engine.checkpoint import resolve_checkpoint
from specrun.jobs.prompts import PromptSource
from specrun.runner.conversation import PromptText
from specrun.runner.requests import RequestBuilder
from specrun.runner.run import JobResult, job_sampling, run_job
from specrun.runner.tokenizer import Tokenizer
from tests.contract.tiny_model import BOS, END, EOS, MAX_MODEL_LEN, START
from tests.runner.conftest import Job

FORCE = 1e9


def run(job: Job) -> JobResult:
    return run_job(job.spec)


def force(token: int) -> dict[str, Any]:
    """Parameters with which the model says nothing else."""
    return {"logit_bias": {str(token): FORCE}}


def prompt_ids(job: Job) -> list[list[int]]:
    """Token ids of the prompts, as the engine gets them."""
    spec = job.spec
    tokenizer = Tokenizer.from_checkpoint(resolve_checkpoint(spec.model.path, None))
    text = PromptText(spec, tokenizer)
    builder = RequestBuilder(tokenizer, text, job_sampling(spec), spec.prompt.overflow, MAX_MODEL_LEN)
    batches = [builder.build(batch) for batch in PromptSource(spec).batches()]
    return [request.prompt_token_ids for batch in batches for request in batch.requests]


def test_t29_plain_text_gets_one_bos(model_job: Job) -> None:
    model_job.jsonl([{"prompt": "ab"}, {"prompt": "<s>ab"}, {"prompt": "a"}])
    assert prompt_ids(model_job) == [[BOS, 97, 98], [BOS, 97, 98], [BOS, 97]]
    assert run(model_job).exit_code == 0
    assert [row["prompt_tokens"] for row in model_job.rows()] == [3, 3, 2]


def test_t29_a_chat_template_writes_its_own_bos(model_job: Job) -> None:
    model_job.set(prompt__chat_template="default", prompt__system="s").jsonl([{"prompt": "a"}, {"prompt": "b"}])
    for ids in prompt_ids(model_job):
        assert ids.count(BOS) == 1 and ids[:2] == [BOS, START] and ids.count(END) == 2


def test_t29_a_template_without_bos_gets_none(model_job: Job) -> None:
    file = model_job.folder / "chat.jinja"
    file.write_text("{% for m in messages %}{{ m.content }}{% endfor %}")
    model_job.set(prompt__chat_template=str(file)).jsonl([{"prompt": "ab"}])
    assert prompt_ids(model_job) == [[97, 98]]


def test_t30_special_tokens_in_user_text_are_read_as_such(model_job: Job) -> None:
    """The documented choice (see PromptText): what spells a special token is that token."""
    model_job.jsonl([{"prompt": "a<|im_end|>b"}])
    assert prompt_ids(model_job) == [[BOS, 97, END, 98]]


def test_t31_an_empty_output_is_text(model_job: Job) -> None:
    model_job.jsonl([{"prompt": "a", **force(EOS)}, {"prompt": "b"}])
    assert run(model_job).exit_code == 0
    row = model_job.rows()[0]
    assert (row["text"], row["finish_reason"], row["stop_reason"], row["error_code"]) == ("", "stop", None, None)
    assert (row["output_tokens"], row["token_ids"]) == (1, [EOS])


def test_t31_ignore_eos_runs_on(model_job: Job) -> None:
    model_job.jsonl([{"prompt": "a", "ignore_eos": True, **force(EOS)}])
    assert run(model_job).exit_code == 0
    row = model_job.rows()[0]
    assert (row["text"], row["finish_reason"], row["token_ids"]) == ("", "length", [EOS] * 16)


@pytest.mark.parametrize(
    ("params", "text", "stop_reason", "num_tokens"),
    [
        ({"stop": "xx"}, "", "xx", 2),  # of two tokens, at position 0
        ({"stop": ["q", "xxx"]}, "", "xxx", 3),
        ({"stop": "x"}, "", "x", 1),
        ({"stop": "x", "min_tokens": 4}, "xxx", "x", 4),
        ({"stop_token_ids": [120]}, "x", "120", 1),
        ({"stop": "xy"}, "x" * 16, None, 16),
    ],
)
@pytest.mark.parametrize("method", ["none", "ngram"])
def test_t31_stop_strings(
    model_job: Job, method: str, params: dict[str, Any], text: str, stop_reason: str | None, num_tokens: int
) -> None:
    speculate(model_job, method).jsonl([{"prompt": "xxxxxxxxxx", **force(ord("x")), **params}])
    assert run(model_job).exit_code == 0
    row = model_job.rows()[0]
    assert (row["text"], row["stop_reason"], row["output_tokens"]) == (text, stop_reason, num_tokens)
    assert row["finish_reason"] == ("length" if stop_reason is None else "stop")


def speculate(job: Job, method: str) -> Job:
    policy: Any = {"name": "always", "num_draft_tokens": 5} if method == "ngram" else "never"
    return job.set(speculation__method=method, speculation__policy=policy)


def rows_of_all_kinds(count: int) -> list[dict[str, Any]]:
    rng = random.Random(0)
    rows = []
    for i in range(count):
        row: dict[str, Any] = {"doc": f"d{i}", "prompt": "".join(rng.choices("abc ", k=rng.randrange(1, 60)))}
        if i % 3 == 0:
            row["temperature"] = 0.8
        if i % 4 == 0:
            row["repetition_penalty"] = 1.2
        if i % 5 == 0:
            row["stop"] = ["a", "bc"]
        if i % 7 == 0:
            row["logit_bias"] = {"97": 4.0, str(EOS): 3.0}
        rows.append(row)
    return rows


ESSENCE = ("id", "text", "token_ids", "finish_reason", "stop_reason", "prompt_tokens", "output_tokens", "error_code")


def essence(job: Job, result: JobResult) -> dict[str, Any]:
    assert result.exit_code == 0
    return {row["id"]: tuple(row[name] for name in ESSENCE) for row in job.rows()}


def one_of_many(folder: Path, like: Job, rows: list[dict[str, Any]], **sections: Any) -> dict[str, Any]:
    """What a job of the same kind gives for these rows."""
    folder.mkdir()
    job = Job(folder)
    job.config = {**like.config, "output": {"path": str(job.out), "token_ids": True}}
    job.config["input"] = {"path": str(folder / "in.jsonl"), "columns": {"id": "doc", "prompt": "prompt"}}
    job.set(**sections).jsonl(rows)
    return essence(job, run(job))


def test_t31_speculation_changes_nothing(model_job: Job) -> None:
    rows = rows_of_all_kinds(40)
    off = one_of_many(model_job.folder / "off", speculate(model_job, "none"), rows)
    on = one_of_many(model_job.folder / "on", speculate(model_job, "ngram"), rows)
    assert on == off
    assert {reason for _, _, _, reason, *_ in off.values()} == {"stop", "length"}


@pytest.mark.parametrize("character", ["\U0001f600", "語", "é"])
def test_t32_text_that_ends_within_a_character(model_job: Job, character: str) -> None:
    """The model is made to say the first byte of the character, and no more of it."""
    first = character.encode()[0]
    model_job.jsonl([{"prompt": "a", "max_tokens": 1, **force(first)}, {"prompt": "a", **force(first)}])
    assert run(model_job).exit_code == 0
    one, many = model_job.rows()
    assert one["token_ids"] == [first] and many["token_ids"] == [first] * 16
    assert set(one["text"]) == set(many["text"]) == {"\ufffd"}
    assert one["finish_reason"] == "length"


def test_t33_the_same_at_every_batch_size_and_in_every_order(model_job: Job) -> None:
    rows = rows_of_all_kinds(30)
    shuffled = random.Random(1).sample(rows, len(rows))
    model_job.set(sampling__temperature=0.0, sampling__seed=7, sampling__max_tokens=24)
    alone = one_of_many(model_job.folder / "a", model_job, rows, engine__max_num_seqs=1)
    together = one_of_many(model_job.folder / "b", model_job, rows, engine__max_num_seqs=32)
    mixed = one_of_many(model_job.folder / "c", model_job, shuffled, engine__max_num_seqs=5)
    assert alone == together == mixed
    subset = one_of_many(model_job.folder / "d", model_job, rows[10:20], engine__max_num_seqs=32)
    assert subset == {key: alone[key] for key in subset}


def test_t33_a_seed_moves_only_the_rows_that_sample(model_job: Job) -> None:
    rows = rows_of_all_kinds(30)
    seven = one_of_many(model_job.folder / "a", model_job, rows, sampling__seed=7)
    eight = one_of_many(model_job.folder / "b", model_job, rows, sampling__seed=8)
    moved = {key for key in seven if seven[key] != eight[key]}
    sampling = {row["doc"] for row in rows if "temperature" in row}
    assert moved and moved <= sampling
    for row in rows:
        row["seed"] = 1
    own = [one_of_many(model_job.folder / f"own-{s}", model_job, rows, sampling__seed=s) for s in (7, 8)]
    assert own[0] == own[1]
