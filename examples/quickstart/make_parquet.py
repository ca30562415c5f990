"""Write prompts.parquet with the rows of prompts.jsonl, which is the one to edit."""

import json
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

FOLDER = Path(__file__).parent
SCHEMA = pa.schema([("id", pa.string()), ("task", pa.string()), ("prompt", pa.string())])


def main() -> None:
    lines = (FOLDER / "prompts.jsonl").read_text(encoding="utf-8").splitlines()
    table = pa.Table.from_pylist([json.loads(line) for line in lines], schema=SCHEMA)
    pq.write_table(table, FOLDER / "prompts.parquet", compression="zstd")


if __name__ == "__main__":
    main()
