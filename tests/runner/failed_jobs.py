"""A job of which rows fail, for the tests of retry."""

NUM_ROWS = 500
BOOM = list(range(7, NUM_ROWS, 20))
"""Rows that an engine with fail_on="BOOM" fails, and others do not."""
NULL = [3, 250]
"""Rows that fail however often they run."""


def fill(job):
    """The job with its input; it has to be run first."""
    rows = [{"prompt": f"BOOM {i}" if i in BOOM else None if i in NULL else f"word {i}"} for i in range(NUM_ROWS)]
    return job.jsonl(rows).set(output__rows_per_part=60, errors__max_failed_fraction=0.01)


def assert_merged(job, num_failed=2):
    """Every row once, with its own text, and reports that agree; after a good retry only the NULL rows failed."""
    rows = job.rows()
    assert [row["row_index"] for row in rows] == list(range(NUM_ROWS))
    for row in rows:
        i = row["row_index"]
        assert row["text"] == (None if row["error_code"] else f"BOOM {i}" if i in BOOM else f"word {i}")
    assert [row["row_index"] for row in rows if row["error_code"]] == [line["row_index"] for line in job.error_lines()]
    assert job.report()["num_failed"] == len(job.error_lines()) == num_failed
    assert job.report()["num_ok"] == NUM_ROWS - num_failed
    assert not [*job.out.rglob("spill/*"), *job.out.rglob("retry.json")]
