"""What method synthetic replays is read whole or refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import orjson
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from specrun.engine import Request, SamplingParams
from specrun.engine.drafters.base import DraftBatch
from specrun.jobs.errors import ConfigError, InputError
from specrun.jobs.speculation import SyntheticSpec
from specrun.runner.replay_source import read_recording, synthetic_drafter

VOCAB_SIZE = 97


def write_part(folder: Path, sequence: int, rows: list[tuple[int, list[int] | None]], ids: bool = True) -> Path:
    """A part of these rows; those without tokens have failed."""
    columns: dict[str, Any] = {
        "row_index": pa.array([row for row, _ in rows], pa.int64()),
        "text": pa.array([None if tokens is None else "text" for _, tokens in rows], pa.large_string()),
        "finish_reason": pa.array(["length"] * len(rows), pa.string()),
        "stop_reason": pa.nulls(len(rows), pa.string()),
        "error_code": pa.array(["timeout" if tokens is None else None for _, tokens in rows], pa.string()),
    }
    if ids:
        columns["token_ids"] = pa.array([tokens for _, tokens in rows], pa.list_(pa.int32()))
    counts = orjson.dumps({"num_output_tokens": sum(len(tokens or ()) for _, tokens in rows)})
    path = folder / "data" / f"part-00000-{sequence:06d}.parquet"
    path.parent.mkdir(exist_ok=True)
    pq.write_table(pa.table(columns).replace_schema_metadata({"specrun.counts": counts}), path)
    return path


@pytest.fixture
def output(tmp_path: Path) -> Path:
    write_part(tmp_path, 0, [(0, [5, 6, 7]), (1, None), (2, [8])])
    write_part(tmp_path, 1, [(3, []), (4, [96, 0])])
    return tmp_path


def test_reads_the_token_ids_of_every_row_that_did_not_fail(output):
    recorded = read_recording(str(output), VOCAB_SIZE)
    assert {row: ids.tolist() for row, ids in recorded.items()} == {0: [5, 6, 7], 2: [8], 3: [], 4: [96, 0]}
    assert all(ids.dtype == np.int32 for ids in recorded.values())


def test_keeps_the_rows_of_a_shard_only(output):
    assert set(read_recording(str(output), VOCAB_SIZE, range(2, 4))) == {2, 3}


def test_refuses_a_place_without_output(tmp_path):
    with pytest.raises(ConfigError, match=r"speculation.synthetic.replay: .* holds no output"):
        read_recording(str(tmp_path), VOCAB_SIZE)


def test_refuses_an_output_without_token_ids(tmp_path):
    write_part(tmp_path, 0, [(0, [5])], ids=False)
    with pytest.raises(ConfigError, match=r"run that job with output\.token_ids: true"):
        read_recording(str(tmp_path), VOCAB_SIZE)


def test_refuses_another_vocabulary(output):
    with pytest.raises(ConfigError, match="outside the model's vocabulary of 96"):
        read_recording(str(output), 96)


def test_refuses_a_damaged_part(output):
    part = output / "data" / "part-00000-000001.parquet"
    part.write_bytes(part.read_bytes()[:100])
    with pytest.raises(InputError, match="part-00000-000001"):
        read_recording(str(output), VOCAB_SIZE)


def test_builds_the_drafter_that_the_job_describes(output):
    spec = SyntheticSpec.model_validate(
        {
            "replay": str(output),
            "acceptance_rates": [1.0],
            "groups": {"factors": [0.5, 1.0], "rows_per_group": 2},
            "over_time": [[0, 1.0], [10, 1.0]],
            "confidence": "exact",
        }
    )
    drafter = synthetic_drafter(spec, VOCAB_SIZE)
    requests = [Request(row, [1], SamplingParams()) for row in (0, 2)]
    batch = DraftBatch(requests, np.arange(2, dtype=np.int32), None)  # type: ignore[arg-type]
    drafts = drafter.propose(batch, np.array([2, 2], np.int32))
    assert drafts.survival.tolist() == [[0.5, 0.25], [1.0, 0.0]]
    assert drafts.token_ids[1] == [8]
