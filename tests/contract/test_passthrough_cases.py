"""Case t07: an input column that a job only carries comes out with the type and the bits that it went in with.

Every Arrow type that a Parquet file can hold, with nulls in every place. Parquet itself changes some types (seconds
become milliseconds), so what comes out is held against a plain read of the input file.
"""

from __future__ import annotations

import datetime
import uuid
from decimal import Decimal
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tests.runner.conftest import Job

NUM_ROWS = 60
ROWS_PER_PART = 20
CRASH_ROW = 37
ZONES = ["UTC", "Europe/Berlin", "+05:30"]
UNITS = ["s", "ms", "us", "ns"]
NAN, INF = float("nan"), float("inf")
INTEGERS = [pa.int8(), pa.int16(), pa.int32(), pa.int64(), pa.uint8(), pa.uint16(), pa.uint32(), pa.uint64()]


def column(values: list[Any], kind: pa.DataType) -> pa.Array:
    """NUM_ROWS rows: the values and a null, over and over."""
    cycle = [*values, None]
    return pa.array([cycle[i % len(cycle)] for i in range(NUM_ROWS)], kind)


def dictionary(values: list[Any], kind: pa.DataType, index: pa.DataType, ordered: bool = False) -> pa.Array:
    indices = pa.array([None if i % 5 == 4 else i % len(values) for i in range(NUM_ROWS)], index)
    return pa.DictionaryArray.from_arrays(indices, pa.array(values, kind), ordered=ordered)


def lists(values: pa.Array, kind: str = "list") -> pa.Array:
    """A list a row, of 0 to 2 of the values; every seventh list is null."""
    sizes = [0 if i % 7 == 6 else i % 3 for i in range(NUM_ROWS)]
    offsets = [sum(sizes[:i]) for i in range(NUM_ROWS + 1)]
    mask = pa.array([i % 7 == 6 for i in range(NUM_ROWS)])
    make = pa.LargeListArray if kind == "large_list" else pa.ListArray
    return make.from_arrays(pa.array(offsets, pa.int64() if kind == "large_list" else pa.int32()), values, mask=mask)


def void_column(kind: pa.DataType) -> pa.Array:
    # pa.nulls also puts nulls where a struct allows none; pa.array does not know each dictionary and extension.
    is_strict = pa.types.is_struct(kind) and not kind.field(0).nullable
    return pa.array([None] * 5, kind) if is_strict else pa.nulls(5, kind)


def limits(kind: pa.DataType) -> list[int]:
    bits = kind.bit_width
    return [0, 2**bits - 1] if str(kind).startswith("u") else [-(2 ** (bits - 1)), -1, 0, 2 ** (bits - 1) - 1]


def extension(kind: pa.DataType, storage: pa.Array) -> pa.Array:
    return pa.ExtensionArray.from_storage(kind, storage)


def plain_columns() -> dict[str, pa.Array]:
    columns = {str(kind): column(limits(kind), kind) for kind in INTEGERS}
    for kind in (pa.float16(), pa.float32(), pa.float64()):
        columns[str(kind)] = column([NAN, INF, -INF, -0.0, 0.0, 0.1, 1e-7, 65504.0], kind)
    columns["bool"] = column([True, False], pa.bool_())
    columns["null"] = pa.nulls(NUM_ROWS)
    for kind, digits in ((pa.decimal32, 9), (pa.decimal64, 18), (pa.decimal128, 38), (pa.decimal256, 76)):
        most = Decimal("9" * (digits - 2) + ".99")
        columns[kind.__name__] = column([most, most.copy_negate(), Decimal("0.00"), Decimal("-0.01")], kind(digits, 2))
    for kind in (pa.string(), pa.large_string(), pa.string_view()):
        columns[str(kind)] = column(["", "é\u2028\x00", "a long text that no view holds inline \U0001f600"], kind)
    for kind in (pa.binary(), pa.large_binary(), pa.binary_view()):
        columns[str(kind)] = column([b"", b"\xff\x00", b"\x80" * 40], kind)
    columns["fixed_size_binary"] = column([b"\xff\x00\x01"], pa.binary(3))
    return columns


def temporal_columns() -> dict[str, pa.Array]:
    day = 86_400
    columns = {
        "date32": column([-719_162, -1, 0, 2_932_896], pa.date32()),
        "date64": column([-day * 1000, 0, day * 1000 * 20_000], pa.date64()),
    }
    for unit in UNITS:
        seconds = 1 if unit == "s" else 1000 ** (UNITS.index(unit))
        # The last digit of each unit counts, and so does the time before 1970.
        columns[f"timestamp[{unit}]"] = column([-1, 0, 1, 1_700_000_000 * seconds + 1], pa.timestamp(unit))
        for zone in ZONES:
            kind = pa.timestamp(unit, zone)
            columns[str(kind)] = column([-1, 1_700_000_000 * seconds + 1], kind)
        columns[f"duration[{unit}]"] = column([-1, 0, 2**62 + 1], pa.duration(unit))
        time = pa.time32 if unit in ("s", "ms") else pa.time64
        columns[f"time[{unit}]"] = column([0, 1, day * seconds - 1], time(unit))
    columns["timestamp far away"] = column([-(2**62), 2**62 + 1], pa.timestamp("us", "UTC"))
    return columns


def dictionary_columns() -> dict[str, pa.Array]:
    words = ["z", "", "a"]
    columns = {f"dictionary {kind}": dictionary(words, pa.string(), kind) for kind in INTEGERS}
    columns["dictionary ordered"] = dictionary(words, pa.string(), pa.int8(), ordered=True)
    columns["dictionary large"] = dictionary(words, pa.large_string(), pa.int16())
    columns["dictionary binary"] = dictionary([b"\xff", b""], pa.binary(), pa.int32())
    columns["dictionary of numbers"] = dictionary([1.5, NAN], pa.float64(), pa.int32())
    columns["dictionary of decimals"] = dictionary([Decimal("1.5")], pa.decimal128(5, 1), pa.int32())
    columns["dictionary of dates"] = dictionary([datetime.date(2020, 1, 1)], pa.date32(), pa.int32())
    columns["dictionary all null"] = pa.nulls(NUM_ROWS, pa.dictionary(pa.int32(), pa.string()))
    return columns


def nested_columns() -> dict[str, pa.Array]:
    floats = column([0.1, NAN, -0.0], pa.float32())
    words = column(["x", "long enough to stand outside of a view"], pa.string())
    point = pa.struct([("a", pa.int32()), ("b", pa.list_(pa.string()))])
    points = column([{"a": 1, "b": ["x", None]}, {"a": None, "b": None}, {"a": 2, "b": []}], point)
    counts = column([[("k", 1), ("l", None)], [("k", 1), ("k", 2)], []], pa.map_(pa.string(), pa.int64()))
    required = pa.struct([pa.field("a", pa.int8(), nullable=False)])
    return {
        "list<float32>": lists(floats),
        "large_list<float32>": lists(floats, "large_list"),
        "fixed_size_list": column([[0.1, None], [None, None], [NAN, -0.0]], pa.list_(pa.float32(), 2)),
        "list_view": column([[1, None], []], pa.list_view(pa.int8())),
        "large_list_view": column([["a", None], []], pa.large_list_view(pa.string())),
        "list<string_view>": lists(words.cast(pa.string_view())),
        "list<null>": column([[None], []], pa.list_(pa.null())),
        "list<required>": column([["a"], []], pa.list_(pa.field("item", pa.string(), nullable=False))),
        "list<dictionary>": lists(dictionary(["u", "v"], pa.string(), pa.int8())),
        "list<list>": column([[[1, None], None, []], []], pa.list_(pa.large_list(pa.int16()))),
        "list<struct>": lists(points),
        "list<map>": lists(counts),
        "list<decimal>": column([[Decimal("1.25"), None]], pa.list_(pa.decimal256(60, 2))),
        "list<timestamp>": column([[1, None]], pa.list_(pa.timestamp("ns", "Asia/Tokyo"))),
        "list<fixed_size_binary>": column([[b"abc", None]], pa.list_(pa.binary(3))),
        "struct": points,
        "struct<null>": column([{"a": None}], pa.struct([("a", pa.null())])),
        "struct<required>": column([{"a": 1}], required),
        "struct<dictionary>": pa.StructArray.from_arrays([dictionary(["u"], pa.string(), pa.int32())], ["d"]),
        "struct<struct>": column([{"p": {"a": 1, "b": ["x"]}}, {"p": None}], pa.struct([("p", point)])),
        "struct<map>": column([{"m": [("k", 1)]}, {"m": None}], pa.struct([("m", counts.type)])),
        "struct of a dot": column([{"a.b": 1}], pa.struct([("a.b", pa.int8())])),
        "map": counts,
        "map sorted": column([[("k", 1)], []], pa.map_(pa.string(), pa.int64(), keys_sorted=True)),
        "map<string, list>": column([[("k", [1, None]), ("l", None)]], pa.map_(pa.string(), pa.list_(pa.int8()))),
        "map<int, struct>": column([[(1, {"a": 1, "b": None})]], pa.map_(pa.int32(), point)),
    }


def extension_columns() -> dict[str, pa.Array]:
    ids = column([uuid.UUID(int=i).bytes for i in range(3)], pa.binary(16))
    tensors = column([[0.1, 0.2]], pa.list_(pa.float32(), 2))
    return {
        "uuid": extension(pa.uuid(), ids),
        "json": extension(pa.json_(), column(["{}", '{"a": 1}'], pa.string())),
        "json large": extension(pa.json_(pa.large_string()), column(["{}"], pa.large_string())),
        "bool8": extension(pa.bool8(), column([0, 1, 7], pa.int8())),
        "opaque": extension(pa.opaque(pa.int8(), "a", "b"), column([1], pa.int8())),
        "fixed_shape_tensor": extension(pa.fixed_shape_tensor(pa.float32(), [2]), tensors),
        "list<uuid>": lists(extension(pa.uuid(), ids)),
        "struct<uuid>": pa.StructArray.from_arrays([extension(pa.uuid(), ids)], ["u"]),
    }


def all_columns() -> dict[str, pa.Array]:
    return {
        **plain_columns(),
        **temporal_columns(),
        **dictionary_columns(),
        **nested_columns(),
        **extension_columns(),
        # Slashes, dots, spaces and other letters in names are plain text too.
        "a.b": column([1], pa.int8()),
        "ключ / key": column(["x"], pa.string()),
    }


COLUMNS = all_columns()


def make_job(folder: Path) -> Job:
    prompts = [f"word {i}" if i != CRASH_ROW else "CRASH" for i in range(NUM_ROWS)]
    folder.mkdir()
    made = Job(folder).set(output__rows_per_part=ROWS_PER_PART, run__order="input")
    made.parquet(pa.table({"prompt": prompts, **COLUMNS}))
    return made


def output(made: Job) -> pa.Table:
    tables = [pq.read_table(part) for part in sorted((made.out / "data").iterdir())]
    assert len({str(table.schema.remove_metadata()) for table in tables}) == 1
    return pa.concat_tables(tables)


@pytest.fixture(scope="module")
def stored(tmp_path_factory: pytest.TempPathFactory) -> pa.Table:
    """The columns as Parquet itself gives them back."""
    file = tmp_path_factory.mktemp("stored") / "a.parquet"
    pq.write_table(pa.table(COLUMNS), file)
    return pq.read_table(file)


@pytest.fixture(scope="module")
def in_order(tmp_path_factory: pytest.TempPathFactory) -> pa.Table:
    """Rows that finish in input order."""
    made = make_job(tmp_path_factory.mktemp("in_order") / "job")
    assert made.run().exit_code == 0
    return output(made)


@pytest.fixture(scope="module")
def resumed(tmp_path_factory: pytest.TempPathFactory) -> pa.Table:
    """Rows that finish out of order, in a job that crashes with parts half full and goes on."""
    made = make_job(tmp_path_factory.mktemp("resumed") / "job")
    with pytest.raises(RuntimeError, match="holds the token"):
        made.run(raise_on="CRASH", max_num_seqs=9, seed=1)
    num_done = made.report()["num_rows"]
    assert 0 < num_done < NUM_ROWS and num_done % ROWS_PER_PART, "no part was half full"
    assert made.run(max_num_seqs=9, seed=2).exit_code == 0
    return output(made)


def assert_same(got: pa.ChunkedArray, want: pa.ChunkedArray) -> None:
    """Equal types, nulls and bits; NaN equals NaN, and -0.0 is not 0.0."""
    assert got.type == want.type
    assert got.is_null().combine_chunks().equals(want.is_null().combine_chunks())
    if pa.types.is_dictionary(got.type):
        got, want = (table.cast(got.type.value_type) for table in (got, want))
    if got.combine_chunks().equals(want.combine_chunks()):
        assert not has_float(got.type) or repr(got.to_pylist()) == repr(want.to_pylist())
    else:
        assert repr(got.to_pylist()) == repr(want.to_pylist())


def has_float(kind: pa.DataType) -> bool:
    return "float" in str(kind) or "double" in str(kind)


@pytest.mark.parametrize("name", COLUMNS)
def test_t07_in_order(name: str, in_order: pa.Table, stored: pa.Table) -> None:
    assert_same(in_order.column(name), stored.column(name))


@pytest.mark.parametrize("name", COLUMNS)
def test_t07_through_the_spill_and_a_resume(name: str, resumed: pa.Table, stored: pa.Table) -> None:
    assert_same(resumed.column(name), stored.column(name))


def test_t07_columns_keep_their_order(in_order: pa.Table, resumed: pa.Table) -> None:
    assert in_order.column_names[:2] == ["row_index", "id"]
    assert in_order.column_names[2 : 2 + len(COLUMNS)] == list(COLUMNS)
    assert in_order.schema.equals(resumed.schema)


def test_t07_no_nulls_at_all_and_nothing_but_nulls(job: Job) -> None:
    full = {name: pa.chunked_array([array[:1]] * 5) for name, array in COLUMNS.items()}
    void = {f"{name} void": void_column(array.type) for name, array in COLUMNS.items()}
    job.parquet(pa.table({"prompt": list("abcde"), **full, **void}))
    assert job.run().exit_code == 0
    want = pq.read_table(job.folder / "in.parquet")
    got = output(job)
    for name in (*full, *void):
        assert_same(got.column(name), want.column(name))


def test_t07_null_columns_of_one_file_take_the_type_of_another(job: Job) -> None:
    kinds = {name: array.type for name, array in COLUMNS.items()}
    (job.folder / "in").mkdir()
    pq.write_table(pa.table({"prompt": ["a"], **{name: pa.nulls(1) for name in kinds}}), job.folder / "in/1.parquet")
    pq.write_table(pa.table({"prompt": ["b"]}), job.folder / "in/2.parquet")
    table = pa.table({"prompt": ["c"] * NUM_ROWS, **COLUMNS})
    pq.write_table(table, job.folder / "in/10.parquet")
    job.config["input"]["path"] = str(job.folder / "in")
    assert job.run().exit_code == 0
    want, got = pq.read_table(job.folder / "in/10.parquet"), output(job)
    for name in kinds:
        assert got.column(name)[:2].null_count == 2
        assert_same(got.column(name)[2:], want.column(name))
