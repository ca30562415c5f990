"""Cases t51 to t53: what a job writes opens in the readers that people use."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import datasets
import duckdb
import pandas
import polars
import pyarrow as pa
import pyarrow.dataset
import pyarrow.parquet as pq
import pytest

from specrun import __version__
from tests.runner.conftest import Job

Texts = list[str | None]


def with_arrow_dataset(data: Path, cache: Path) -> Texts:
    texts: Texts = pa.dataset.dataset(data).to_table().column("text").to_pylist()
    return texts


def with_arrow_table(data: Path, cache: Path) -> Texts:
    texts: Texts = pq.read_table(data).column("text").to_pylist()
    return texts


def with_pandas(data: Path, cache: Path) -> Texts:
    texts = pandas.read_parquet(data)["text"]
    return [None if pandas.isna(text) else text for text in texts]


def with_polars_folder(data: Path, cache: Path) -> Texts:
    return list(polars.read_parquet(data)["text"])


def with_polars_glob(data: Path, cache: Path) -> Texts:
    return list(polars.scan_parquet(str(data / "*.parquet")).collect()["text"])


def with_duckdb(data: Path, cache: Path) -> Texts:
    with duckdb.connect() as connection:
        query = f"SELECT text FROM '{data}/*.parquet' ORDER BY row_index"
        return [text for (text,) in connection.execute(query).fetchall()]


def with_datasets(data: Path, cache: Path) -> Texts:
    return list(datasets.load_dataset(str(data), cache_dir=str(cache))["train"]["text"])


def with_datasets_data_dir(data: Path, cache: Path) -> Texts:
    return list(datasets.load_dataset("parquet", data_dir=str(data), cache_dir=str(cache))["train"]["text"])


def with_datasets_streaming(data: Path, cache: Path) -> Texts:
    rows = datasets.load_dataset(str(data), split="train", streaming=True, cache_dir=str(cache))
    return [row["text"] for row in rows]


READERS: dict[str, Callable[[Path, Path], Texts]] = {
    name.removeprefix("with_"): reader for name, reader in list(globals().items()) if name.startswith("with_")
}


def annotated(table: pa.Table) -> pa.Table:
    """With the metadata that pandas and Hugging Face datasets leave in a file: it describes other columns than ours."""
    features = b'{"info": {"features": {"prompt": {"dtype": "string", "_type": "Value"}}}}'
    return table.replace_schema_metadata({b"huggingface": features, b"pandas": b'{"index_columns": ["lost"]}'})


def make_output(job: Job, content: str) -> Texts:
    """Run a job; returns the texts that it should have."""
    extras = {
        "all kinds of columns": {
            "f": pa.array([0.5, None] * 15, pa.float32()),
            "tags": pa.array([["a"], None] * 15, pa.list_(pa.string())),
            "when": pa.array([1, None] * 15, pa.timestamp("us", "UTC")),
            "meta": pa.array([{"k": 1, "v": None}, None] * 15, pa.struct([("k", pa.int32()), ("v", pa.string())])),
            "word": pa.array(["a", None] * 15).dictionary_encode(),
        }
    }.get(content, {})
    texts: Texts = [f"word {i}" for i in range(30)]
    if content == "no rows":
        texts = []
    prompts = list(texts)
    if content == "an error in the second part":
        prompts[15] = None
    elif content == "only errors in the first part":
        prompts[:10] = [None] * 10
    table = pa.table({"prompt": pa.array(prompts, pa.string()), **extras})
    job.parquet(annotated(table)).set(output__rows_per_part=10, errors__max_failed_fraction=1.0)
    assert job.run().exit_code == 0
    return prompts


CONTENTS = [
    "an error in the second part",
    "only errors in the first part",
    "all rows are good",
    "all kinds of columns",
    "no rows",
]


# Hugging Face datasets caches no data set without rows, whoever wrote it; it streams ours.
PAIRS = [(r, c) for r in READERS for c in CONTENTS if c != "no rows" or r not in ("datasets", "datasets_data_dir")]


@pytest.mark.parametrize(("reader", "content"), PAIRS)
def test_t51_readers(job: Job, reader: str, content: str, monkeypatch: pytest.MonkeyPatch) -> None:
    cache = job.folder / "cache"
    monkeypatch.setenv("HF_HOME", str(cache))
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", cache)
    datasets.disable_progress_bars()
    texts = make_output(job, content)
    assert READERS[reader](job.out / "data", cache) == texts


def test_t51_data_holds_parts_and_nothing_else(job: Job) -> None:
    make_output(job, "an error in the second part")
    names = [path.name for path in sorted((job.out / "data").iterdir())]
    assert names == [f"part-00000-00000{i}.parquet" for i in range(3)]


def test_t51_metrics_open_too(job: Job) -> None:
    make_output(job, "an error in the second part")
    assert pandas.read_parquet(job.out / "metrics" / "job.parquet")["num_rows"].tolist() == [30]
    steps = polars.read_parquet(job.out / "metrics" / "steps")
    assert steps["num_generation_tokens"].sum() == 58


@pytest.mark.parametrize("max_num_seqs", [1, 7])
def test_t52_rows_that_finish_singly_make_few_row_groups(job: Job, max_num_seqs: int) -> None:
    job.prompts(20_000).set(output__rows_per_part=10_000)
    assert job.run(max_num_seqs=max_num_seqs).exit_code == 0
    for part in sorted((job.out / "data").iterdir()):
        footer = pq.read_metadata(part)
        assert footer.num_rows == 10_000 and footer.num_row_groups <= 2
        assert footer.serialized_size < 20_000


def metadata(part: Path) -> dict[str, str]:
    found = pq.read_schema(part).metadata
    return {key.decode(): value.decode() for key, value in found.items() if key != b"ARROW:schema"}


def test_t53_metadata_says_where_a_part_comes_from(job: Job) -> None:
    job.config["name"] = "nightly"
    make_output(job.set(model__revision="v1.2"), "an error in the second part")
    found = [metadata(part) for part in sorted((job.out / "data").iterdir())]
    for sequence, keys in enumerate(found):
        assert keys["specrun.job"] == "nightly" and keys["specrun.model"] == "stub"
        assert keys["specrun.model_revision"] == "v1.2" and keys["specrun.version"] == __version__
        assert keys["specrun.row_start"] == str(10 * sequence) and keys["specrun.row_end"] == str(10 * sequence + 10)
        assert keys["specrun.attempt"] == "1"
    assert len({keys["specrun.fingerprint"] for keys in found}) == 1
    assert '"null_prompt":1' in found[1]["specrun.counts"].replace(" ", "")
    # What the input said about its own columns is not copied.
    assert not {"pandas", "huggingface"} & set(found[0])


def test_t53_a_part_names_its_attempt(job: Job) -> None:
    job.prompts(30).set(output__rows_per_part=10, run__order="input")
    with pytest.raises(RuntimeError):
        job.run(raise_on="15", max_num_seqs=5)
    assert job.run().exit_code == 0
    attempts: list[Any] = [metadata(part)["specrun.attempt"] for part in sorted((job.out / "data").iterdir())]
    assert attempts == ["1", "2", "2"]
