"""Column names and types of what a job writes."""

from dataclasses import fields

import pyarrow as pa
import pytest

from specrun.engine.trace import StepRecord
from specrun.jobs.errors import ConfigError
from specrun.jobs.metrics import JobMetrics
from specrun.jobs.schema import JOB_SCHEMA, OUTPUT_COLUMNS, STEP_SCHEMA, OutputRow, output_schema


def test_output_columns_are_those_of_an_output_row():
    schema = output_schema(pa.schema([]), token_ids=True, logprobs=True)
    assert schema.names == [field.name for field in fields(OutputRow)]
    assert set(schema.names) == OUTPUT_COLUMNS


def test_passthrough_stands_after_the_id_with_its_own_types():
    passthrough = pa.schema([("n", pa.int16()), ("tags", pa.list_(pa.string())), ("when", pa.timestamp("ms"))])
    schema = output_schema(passthrough, token_ids=False, logprobs=False)
    assert schema.names == [
        *["row_index", "id", "n", "tags", "when", "text", "finish_reason", "stop_reason", "prompt_tokens"],
        *["output_tokens", "error_code", "error_message"],
    ]
    assert [schema.field(name).type for name in passthrough.names] == passthrough.types
    assert schema.field("text").type == pa.large_string()
    assert schema.field("prompt_tokens").type == pa.int32()
    assert not any(pa.types.is_null(field.type) for field in schema)


def test_optional_columns_are_narrow():
    schema = output_schema(pa.schema([]), token_ids=True, logprobs=True)
    assert schema.field("token_ids").type == pa.list_(pa.int32())
    assert schema.field("logprobs").type == pa.list_(pa.float32())


def test_metadata_of_the_input_is_not_copied():
    field = pa.field("n", pa.int8(), nullable=False, metadata={"PARQUET:field_id": "7"})
    passthrough = pa.schema([field], metadata={"pandas": "{}", "huggingface": "{}"})
    schema = output_schema(passthrough, token_ids=False, logprobs=False)
    assert schema.metadata is None
    assert schema.field("n").metadata is None
    assert schema.field("n").nullable


@pytest.mark.parametrize("names", [["text"], ["token_ids"], ["a", "a"]])
def test_a_name_that_is_taken_is_an_error(names):
    with pytest.raises(ConfigError, match=f"keep_columns: '{names[0]}'"):
        output_schema(pa.schema([(name, pa.string()) for name in names]), token_ids=False, logprobs=False)


def test_step_columns_are_the_fields_of_a_step_record():
    assert STEP_SCHEMA.names == ["shard", "attempt", *(field.name for field in fields(StepRecord))]
    kinds = {"int": pa.types.is_integer, "float": pa.types.is_float64, "str": pa.types.is_string}
    for field in fields(StepRecord):
        assert kinds[str(field.type).split(" | ")[0]](STEP_SCHEMA.field(field.name).type), field.name


def test_job_columns_are_the_fields_of_job_metrics_and_its_rates():
    row = JobMetrics().to_row()
    assert list(row) == JOB_SCHEMA.names
    assert {field.name for field in fields(JobMetrics)} - {"rows"} <= set(JOB_SCHEMA.names)
