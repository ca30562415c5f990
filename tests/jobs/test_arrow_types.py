"""Arrow types in Parquet input: as text, ids and messages, carried to the output, and between files that differ."""

from datetime import UTC, datetime
from decimal import Decimal

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from specrun.jobs.errors import ConfigError, InputError
from tests.jobs.prompt_inputs import prompts, read, source, write_parquet


@pytest.mark.parametrize(
    "kind", [pa.string(), pa.large_string(), pa.string_view(), pa.dictionary(pa.int32(), pa.string()), pa.binary()]
)
def test_text_types(tmp_path, kind):
    column = pa.array(["a", None, "ü"]).cast(kind)
    file = write_parquet(tmp_path / "a.parquet", {"prompt": column})
    assert prompts(source(file)) == ["a", None, "ü"]


def test_text_under_an_extension_type(tmp_path):
    file = write_parquet(tmp_path / "a.parquet", {"prompt": pa.array(['"a"', None], pa.json_())})
    assert prompts(source(file)) == ['"a"', None]
    chats = pa.array(['[{"role": "user", "content": "x"}]'], pa.json_())
    file = write_parquet(tmp_path / "b.parquet", {"chat": chats})
    assert read(source(file, {"messages": "chat"}))[0][0].messages == [{"role": "user", "content": "x"}]


@pytest.mark.parametrize("column", [[1, 2], [1.5, 2.5], [["a"], ["b"]]])
def test_other_prompt_types_are_refused(tmp_path, column):
    file = write_parquet(tmp_path / "a.parquet", {"prompt": column})
    with pytest.raises(ConfigError, match=r"column 'prompt' of .*a.parquet is .*; it must be text"):
        source(file)


@pytest.mark.parametrize("kind", [pa.binary(), pa.string()])
def test_bytes_that_are_not_utf8(tmp_path, kind):
    raw = pa.array([b"ok", b"a\xff", b"fine"])
    column = pa.Array.from_buffers(kind, 3, raw.buffers())
    file = write_parquet(tmp_path / "a.parquet", {"prompt": column})
    rows, _ = read(source(file))
    assert [row.error_code for row in rows] == [None, "encoding_error", None]
    assert [row.prompt for row in rows] == ["ok", None, "fine"]
    assert rows[1].error_message == "column 'prompt' is not UTF-8 at byte 1"


def test_integer_ids_are_text(tmp_path):
    file = write_parquet(tmp_path / "a.parquet", {"num": pa.array([2**63, 1], pa.uint64()), "prompt": ["a", "b"]})
    rows, table = read(source(file, {"id": "num"}))
    assert [row.id for row in rows] == ["9223372036854775808", "1"]
    assert table.column_names == []
    with pytest.raises(ConfigError, match=r"input.columns.id: column 'prompt' of .* is double"):
        source(write_parquet(tmp_path / "b.parquet", {"prompt": [1.0]}), {"id": "prompt", "prompt": "prompt"})


def test_uuids_as_ids(tmp_path):
    ids = pa.array([bytes(range(16)), None], pa.uuid())
    rows, _ = read(source(write_parquet(tmp_path / "a.parquet", {"k": ids, "prompt": ["a", "b"]}), {"id": "k"}))
    assert [row.id for row in rows] == ["00010203-0405-0607-0809-0a0b0c0d0e0f", None]


def test_passthrough_keeps_types_and_bits(tmp_path):
    table = pa.table(
        {
            "prompt": ["a", "b"],
            "floats": pa.array([[0.1, 0.2], None], pa.list_(pa.float32())),
            "pair": pa.array([[0.1, 0.2], [3, 4]], pa.list_(pa.float32(), 2)),
            "when": pa.array([datetime(2020, 1, 1, tzinfo=UTC), None], pa.timestamp("ns", "Europe/Berlin")),
            "money": pa.array([Decimal("1.2345"), None], pa.decimal128(20, 4)),
            "nested": pa.array(
                [{"a": 1, "b": ["x"]}, None], pa.struct([("a", pa.int32()), ("b", pa.list_(pa.string()))])
            ),
            "map": pa.array([[("k", 1)], []], pa.map_(pa.string(), pa.int64())),
            "word": pa.array(["u", "v"]).dictionary_encode(),
            "blob": [b"\xff", b""],
            "empty": pa.nulls(2),
            "large": pa.array(["u", None], pa.large_string()),
            "view": pa.array(["u" * 50, None], pa.string_view()),
            "large_list": pa.array([[1], None], pa.large_list(pa.int8())),
            "wide": pa.array([Decimal("1.5"), None], pa.decimal256(50, 1)),
            "half": pa.array([1.5, float("nan")], pa.float16()),
            "unsigned": pa.array([2**64 - 1, None], pa.uint64()),
            "flag": [True, None],
            "day": pa.array([1, None], pa.date32()),
            "clock": pa.array([1, None], pa.time64("ns")),
            "span": pa.array([1, None], pa.duration("us")),
            "fixed": pa.array([b"ab", None], pa.binary(2)),
            "json": pa.array(["{}", None], pa.json_()),
            "uuid": pa.array([b"0" * 16, None], pa.uuid()),
            "deep": pa.array(
                [[{"k": [[1, None], None]}], [None]], pa.list_(pa.struct([("k", pa.list_(pa.list_(pa.int8())))]))
            ),
        }
    )
    file = write_parquet(tmp_path / "a.parquet", table)
    _, carried = read(source(file))
    stored = pq.read_table(file).drop_columns("prompt")
    assert carried.schema.types == stored.schema.types and carried.drop_columns("half").equals(
        stored.drop_columns("half")
    )
    assert str(carried["half"].to_pylist()) == "[1.5, nan]"


def test_schemas_of_files_are_unified(tmp_path):
    write_parquet(tmp_path / "a.parquet", {"prompt": pa.nulls(1), "q": pa.nulls(1)})
    write_parquet(tmp_path / "b.parquet", {"q": pa.array([7], pa.int8()), "prompt": ["b"], "r": ["s"]})
    rows, table = read(source(tmp_path))
    assert [row.prompt for row in rows] == [None, "b"]
    assert table.to_pylist() == [{"q": None, "r": None}, {"q": 7, "r": "s"}]
    assert table.schema == pa.schema([("q", pa.int8()), ("r", pa.string())])
    write_parquet(tmp_path / "c.parquet", {"prompt": ["c"], "q": ["text"]})
    with pytest.raises(InputError, match=r"column 'q' is int8 in .*b.parquet and string in .*c.parquet"):
        source(tmp_path)


CATEGORIES = [pa.dictionary(pa.int8(), pa.string()), pa.dictionary(pa.int16(), pa.string())]


@pytest.mark.parametrize(
    ("one", "other", "both"),
    [
        (pa.string(), pa.large_string(), pa.large_string()),
        (pa.string_view(), pa.string(), pa.large_string()),
        (CATEGORIES[0], pa.string(), pa.large_string()),
        (CATEGORIES[0], CATEGORIES[1], CATEGORIES[1]),
        (pa.binary(), pa.large_binary(), pa.large_binary()),
        (pa.int8(), pa.int64(), pa.int64()),
        (pa.uint8(), pa.uint32(), pa.uint32()),
        (pa.float32(), pa.float64(), pa.float64()),
        (pa.list_(pa.null()), pa.list_(pa.string()), pa.list_(pa.string())),
        (pa.list_(pa.int8()), pa.large_list(pa.int16()), pa.large_list(pa.int16())),
        (
            pa.struct([("a", pa.null())]),
            pa.struct([("a", pa.string()), ("b", pa.int8())]),
            pa.struct([("a", pa.string()), ("b", pa.int8())]),
        ),
        (pa.map_(pa.string(), pa.int8()), pa.map_(pa.string(), pa.int64()), pa.map_(pa.string(), pa.int64())),
    ],
    ids=str,
)
def test_types_that_differ_without_loss(tmp_path, one, other, both):
    values = {pa.float32(): 0.1, pa.int8(): 5, pa.uint8(): 5, pa.binary(): b"x", pa.list_(pa.int8()): [5]}
    values |= {pa.list_(pa.null()): [], pa.struct([("a", pa.null())]): {"a": None}}
    values |= {pa.map_(pa.string(), pa.int8()): [("k", 1)]}
    first = pa.array([values[one], None], one) if one in values else pa.array(["x", None]).cast(one)
    for names in ("ab", "ba"):
        write_parquet(tmp_path / f"{names[0]}.parquet", {"prompt": ["1", "2"], "x": first})
        write_parquet(tmp_path / f"{names[1]}.parquet", {"prompt": ["3"], "x": pa.nulls(1, other)})
        _, table = read(source(tmp_path))
        assert table["x"].type == both
        begin = 0 if names == "ab" else 1
        assert table["x"].slice(begin, 2).combine_chunks().equals(first.cast(both))


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (pa.int32(), pa.float64()),
        (pa.int64(), pa.uint64()),
        (pa.string(), pa.binary()),
        (pa.timestamp("us"), pa.timestamp("ns")),
        (pa.timestamp("us"), pa.timestamp("us", "UTC")),
        (pa.list_(pa.int8()), pa.list_(pa.string())),
        (pa.struct([("a", pa.int8())]), pa.struct([("a", pa.float32())])),
        (pa.bool_(), pa.int8()),
        (pa.uuid(), pa.binary(16)),
    ],
    ids=str,
)
def test_types_that_only_a_loss_would_unite(tmp_path, one, other):
    write_parquet(tmp_path / "a.parquet", {"prompt": ["a"], "x": pa.nulls(1, one)})
    write_parquet(tmp_path / "b.parquet", {"prompt": ["b"], "x": pa.nulls(1, other)})
    with pytest.raises(InputError, match=r"column 'x' is .* in .*a.parquet and .* in .*b.parquet; write one type"):
        source(tmp_path)
    assert prompts(source(tmp_path, keep="none")) == ["a", "b"]
