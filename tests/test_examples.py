"""What the examples and the README promise a newcomer."""

import json
import re
from pathlib import Path

import pyarrow.parquet as pq
import pytest

from specrun.jobs.row_errors import ROW_ERRORS
from specrun.jobs.spec import JobSpec
from specrun.runner.cli import cli

ROOT = Path(__file__).parent.parent
QUICKSTART = ROOT / "examples" / "quickstart"


def test_the_two_files_of_prompts_hold_the_same_rows() -> None:
    lines = (QUICKSTART / "prompts.jsonl").read_text().splitlines()
    rows = [json.loads(line) for line in lines]
    assert pq.read_table(QUICKSTART / "prompts.parquet").to_pylist() == rows
    assert len({row["id"] for row in rows}) == len(rows) >= 96


def test_the_table_of_error_codes_is_the_one_in_the_code() -> None:
    text = (ROOT / "jobs" / "README.md").read_text()
    table = re.findall(r"^\| `(\w+)` \| (.+) \|$", text, re.MULTILINE)
    assert dict(table) == ROW_ERRORS


@pytest.mark.parametrize("job", sorted(ROOT.glob("examples/*/job.yaml")), ids=lambda job: job.parent.name)
def test_example_jobs_load(job: Path) -> None:
    assert JobSpec.load(job).input.path


def test_the_job_in_the_readme_loads(tmp_path: Path) -> None:
    text = (ROOT / "README.md").read_text()
    yaml = re.search(r"```yaml\n(.*?)```", text, re.DOTALL)
    assert yaml is not None
    (tmp_path / "job.yaml").write_text(yaml.group(1))
    assert JobSpec.load(tmp_path / "job.yaml").name == "nightly-summaries"


def test_the_readme_names_every_command_and_its_links_lead_somewhere() -> None:
    text = (ROOT / "README.md").read_text()
    assert all(f"specrun {name}" in text for name in cli.commands)
    for link in re.findall(r"\]\(([^)#:]+)\)", text):
        assert (ROOT / link).exists(), link
