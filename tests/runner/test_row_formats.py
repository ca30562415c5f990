"""Response formats of jobs and rows: each request gets a grammar of its own, or its row says why not."""

import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from specrun.engine.request import InvalidParameter
from specrun.engine.testing import WordTokenizer
from specrun.jobs.errors import ConfigError
from specrun.jobs.prompts import PromptSource
from specrun.jobs.response_format import ResponseFormat
from specrun.jobs.row_errors import INVALID_RESPONSE_FORMAT, RowFailure
from specrun.jobs.spec import JobSpec
from specrun.runner.conversation import PromptText
from specrun.runner.requests import RequestBuilder
from specrun.runner.run import job_sampling, run_job
from specrun.runner.sampling import RowSampling, check_job_format
from specrun.runner.validate import validate_job
from tests.jobs.openai_lines import line
from tests.jobs.prompt_inputs import write_lines, write_parquet
from tests.runner.conftest import Job, StubBuilder

REGEX = {"type": "regex", "regex": "a+"}


class Stub:
    """Stands for the grammar of a format."""

    def __init__(self, form: ResponseFormat) -> None:
        self.form = form


def compile_stub(form: ResponseFormat) -> Any:
    if form.value == "[":
        raise RowFailure(INVALID_RESPONSE_FORMAT, "response_format: '[' opens what nothing closes")
    return Stub(form)


def job(path, form=None, **sampling) -> JobSpec:
    values: dict[str, Any] = {"model": {"path": "org/model"}, "input": {"path": str(path)}, "output": {"path": "o"}}
    values["sampling"] = {"max_tokens": 8, "response_format": form, **sampling}
    if path.name == "batch.jsonl":
        values["input"]["format"] = "openai-batch"
    return JobSpec.model_validate(values)


def run(spec: JobSpec, compile: Any = compile_stub) -> tuple[dict[int, Any], dict[int, tuple[str, str]]]:
    """By row: the format of the request's grammar or None, and code and message of an error."""
    tokenizer = WordTokenizer(has_chat_template=True)
    builder = RequestBuilder(
        tokenizer, PromptText(spec, tokenizer), job_sampling(spec), spec.prompt.overflow, 64, compile=compile
    )
    batches = [builder.build(batch) for batch in PromptSource(spec).batches()]
    requests = [request for batch in batches for request in batch.requests]
    grammars: list[Any] = [request.grammar for request in requests if request.grammar is not None]
    assert len(set(map(id, grammars))) == len(grammars), "a request needs a grammar of its own"
    found = {r.request_id: r.grammar and getattr(r.grammar, "form", None) for r in requests}
    errors = {e.row_index: (e.error_code or "", e.error_message or "") for batch in batches for e in batch.errors}
    return found, errors


A, B = ResponseFormat("regex", "a+"), ResponseFormat("json_object")


@pytest.mark.parametrize("kind", ["structs", "text", "jsonl", "openai"])
def test_a_rows_own_format_wins_and_null_is_the_jobs_own(tmp_path, kind):
    values: list[Any] = [None, {"type": "json_object"}, {"type": "text"}, REGEX, {"type": "regex", "regex": "["}]
    texts = [None if value is None else json.dumps(value) for value in values]
    if kind == "structs":
        path = write_parquet(tmp_path / "a.parquet", {"prompt": ["p"] * 5, "response_format": values})
    elif kind == "text":
        path = write_parquet(tmp_path / "a.parquet", {"prompt": ["p"] * 5, "response_format": pa.array(texts)})
    elif kind == "jsonl":
        path = write_lines(tmp_path / "a.jsonl", *({"prompt": "p", "response_format": value} for value in values))
    else:
        lines = [line(response_format=value) | {"custom_id": str(i)} for i, value in enumerate(values)]
        path = write_lines(tmp_path / "batch.jsonl", *lines)
    broken = {4: ("invalid_response_format", "response_format: '[' opens what nothing closes")}
    assert run(job(path)) == ({0: None, 1: B, 2: None, 3: A}, broken)
    assert run(job(path, {"type": "choice", "choice": ["x"]})) == (
        {0: ResponseFormat("choice", '["x"]'), 1: B, 2: None, 3: A},
        broken,
    )


def test_vllms_columns_and_a_second_format(tmp_path):
    rows: list[dict[str, Any]] = [
        {"guided_regex": "a+"},
        {"structured_outputs": {"json_object": True}},
        {"guided_regex": "a+", "response_format": {"type": "json_object"}},
        {"guided_json": "{"},
        {"guided_grammar": "root ::= x"},
        {"structured_outputs": {"grammar": "root ::= x"}},
        {"max_tokens": 4},
    ]
    path = write_lines(tmp_path / "a.jsonl", *({"prompt": "p", **row} for row in rows))
    found, errors = run(job(path))
    assert found == {0: A, 1: B, 6: None}
    assert {row: code for row, (code, _) in errors.items()} == {
        2: "invalid_response_format",
        3: "invalid_response_format",
        4: "unsupported_parameter",
        5: "unsupported_parameter",
    }
    assert errors[2][1] == "guided_regex: a second format beside response_format; give one of them"
    assert "use guided_json or guided_regex" in errors[4][1]


def test_nothing_is_compiled_for_a_row_that_fails_anyway(tmp_path):
    path = write_lines(tmp_path / "a.jsonl", {"prompt": "p " * 60}, {"prompt": "p", "max_tokens": -1})
    compiled: list[ResponseFormat] = []
    assert set(run(job(path, REGEX), compiled.append)[1]) == {0, 1} and not compiled


def test_without_a_compiler_no_form_is_passed_over(tmp_path):
    path = write_lines(tmp_path / "a.jsonl", {"prompt": "p"}, {"prompt": "p", "response_format": {"type": "text"}})
    found, errors = run(job(path, REGEX), None)
    assert found == {1: None} and errors[0][0] == "unsupported_parameter"
    assert run(job(path), None) == ({0: None, 1: None}, {})


def test_a_form_ends_with_end_of_sequence(tmp_path):
    rows: list[dict[str, Any]] = [{"ignore_eos": True}, {"ignore_eos": True, "response_format": {"type": "text"}}, {}]
    path = write_lines(tmp_path / "a.jsonl", *({"prompt": "p", **row} for row in rows))
    found, errors = run(job(path, REGEX))
    assert found == {1: None, 2: A} and errors[0][0] == "invalid_params"
    assert errors[0][1].startswith("ignore_eos: does not go with a response format")
    with pytest.raises(ConfigError, match=r"^sampling\.ignore_eos: does not go with a response format"):
        job_sampling(job(path, REGEX, ignore_eos=True))
    with pytest.raises(InvalidParameter):
        RowSampling({"response_format": REGEX, "ignore_eos": True})


def test_the_jobs_own_format_is_tried_before_any_row(tmp_path, monkeypatch):
    path = tmp_path / "a.jsonl"
    check_job_format(job(path), compile_stub)
    check_job_format(job(path, REGEX), compile_stub)
    with pytest.raises(ConfigError, match=r"^sampling\.response_format: '\[' opens what nothing closes$"):
        check_job_format(job(path, {"type": "regex", "regex": "["}), compile_stub)


class FormatBuilder(StubBuilder):
    """Knows grammars before there is an engine."""

    def grammars(self, tokenizer: Any, engine: Any = None) -> Any:
        return compile_stub


def test_validate_tries_every_format(job: Job):
    forms = [REGEX, {"type": "regex"}, {"type": "json_object"}, {"type": "regex", "regex": "["}]
    job.jsonl([{"prompt": "p", "response_format": form} for form in forms])
    found = validate_job(job.set(sampling__response_format={"type": "json_object"}).spec, FormatBuilder())
    assert found.num_ok == 2 and found.error_codes == {"invalid_response_format": 2}
    assert found.first_errors["invalid_response_format"].startswith("row 1: response_format.regex: must be a regular")


def test_a_format_that_nothing_follows_leaves_the_output_alone(job: Job, tmp_path):
    """Or the name of a job that never ran would stand in the way of the mended one."""
    spec = job.jsonl([{"prompt": "p"}]).set(sampling__response_format={"type": "regex", "regex": "["}).spec
    with pytest.raises(ConfigError, match="opens what nothing closes"):
        run_job(spec, builder=FormatBuilder())
    assert not Path(spec.output.path).exists()
    with pytest.raises(ConfigError, match="opens what nothing closes"):
        validate_job(spec, FormatBuilder())
