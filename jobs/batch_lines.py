"""Lines of the OpenAI batch API as input: a JSONL reader whose rows are requests, each with an id of its own."""

from __future__ import annotations

from array import array
from collections.abc import Mapping, Sequence
from contextlib import closing
from typing import Any

import numpy as np
import pyarrow as pa

from .columns import RowBlock
from .errors import InputError
from .input_files import InputFile
from .json_line import parse_line, parse_lines
from .jsonl import JsonlReader
from .lines import Mark, TextStream, numbered_lines
from .openai_batch import BatchRequest
from .openai_batch import parse_line as read_request

REQUEST = "request"
"""The one value of a row: a BatchRequest, or None where the line is no JSON object."""

SCHEMA = pa.schema([("url", pa.string()), ("model", pa.string())])
"""What is carried to the output, for the result files."""


class BatchLinesReader(JsonlReader):
    """The requests of some files of batch lines as if they were one.

    Raises InputError naming file and lines where two lines have one custom_id.
    """

    def __init__(
        self, files: Sequence[InputFile], served_model_name: str, known: Mapping[str, Any] | None = None
    ) -> None:
        self._served_model_name = served_model_name
        self._params: dict[str, None] = {}
        self._hashes = array("q")
        super().__init__(files, known)

    @property
    def params(self) -> tuple[str, ...]:
        """Sampling parameters that some row sets, by name."""
        return tuple(sorted(self._params))

    def scan(self) -> dict[str, Any]:
        """What the first pass found, as JSON values."""
        return {**super().scan(), "kinds": {}, "params": list(self.params)}

    def _recall(self, known: Mapping[str, Any]) -> None:
        self._params = dict.fromkeys(known["params"])

    def _visit(self, lines: list[bytes]) -> None:
        for line in lines:
            record, _ = parse_line(line)
            if record is None:
                continue
            request = read_request(record, self._served_model_name)
            self._params.update(dict.fromkeys(request.params))
            if request.custom_id is not None:
                self._hashes.append(hash(request.custom_id))

    def _scanned(self) -> None:
        """Refuse a custom_id that comes twice: 8 bytes a row, and a second look where hashes agree."""
        hashes = np.frombuffer(self._hashes, np.int64) if self._hashes else np.empty(0, np.int64)
        hashes.sort()
        twice = {int(value) for value in hashes[1:][hashes[1:] == hashes[:-1]]}
        del hashes
        self._hashes = array("q")
        if twice:
            self._find_duplicates(twice)

    def _find_duplicates(self, hashes: set[int]) -> None:
        seen: dict[str, str] = {}
        for file in self.files:
            with closing(TextStream(file)) as stream:
                for number, line in numbered_lines(stream, Mark(0, 0, 0), None):
                    record, _ = parse_line(line)
                    custom_id = read_request(record, self._served_model_name).custom_id if record is not None else None
                    if custom_id is None or hash(custom_id) not in hashes:
                        continue
                    place = f"line {number} of {file.path}"
                    if custom_id in seen:
                        raise InputError(
                            f"custom_id {custom_id!r} stands on {seen[custom_id]} and on {place}; "
                            "give each request an id of its own"
                        )
                    seen[custom_id] = place

    def _block(self, start: int, file: InputFile, lines: list[tuple[int, bytes]]) -> RowBlock:
        records, errors = parse_lines(file, lines)
        requests: list[BatchRequest | None] = [
            None if position in errors else read_request(record, self._served_model_name)
            for position, record in enumerate(records)
        ]
        for position, request in enumerate(requests):
            if request is not None and request.error is not None:
                errors[position] = request.error
        columns = [
            pa.array([request and getattr(request, name) for request in requests], kind)
            for name, kind in zip(SCHEMA.names, SCHEMA.types, strict=True)
        ]
        return RowBlock(start, {REQUEST: requests}, errors, pa.RecordBatch.from_arrays(columns, schema=SCHEMA))
