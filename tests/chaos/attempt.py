"""One attempt at a job in a forked child: the real command on the stub engine, with a note for each finished row."""

from __future__ import annotations

import json
import os
import traceback
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute

from specrun.engine.request import Request, RequestOutput
from specrun.engine.testing import StubEngine, WordTokenizer
from specrun.jobs.spec import JobSpec
from specrun.policies.base import SpeculationPolicy
from specrun.runner import pipeline, progress  # noqa: F401  a child would import it
from specrun.runner.cli import run_command
from tests.chaos import broken_disk
from tests.chaos.chaos_job import FAIL_WORD, MAX_MODEL_LEN, WORDS
from tests.runner.conftest import StubBuilder

pa.array([""])  # the first array makes pyarrow import pandas; now once, and not in each child


class NotingEngine(StubEngine):
    """Tells of each row before it hands it over."""

    def __init__(self, note_to: int, **options: Any) -> None:
        super().__init__(**options)
        self._note_to = note_to

    def run(self, requests: Iterable[Request | None]) -> Iterator[RequestOutput]:
        """See StubEngine."""
        for output in super().run(requests):
            os.write(self._note_to, b"%d\n" % output.request_id)
            yield output


class ChaosBuilder(StubBuilder):
    """Builds the stub; words have the same ids in every attempt."""

    note_to = -1

    def max_model_len(self, spec: JobSpec) -> int:
        return MAX_MODEL_LEN

    def tokenizer(self, spec: JobSpec) -> WordTokenizer:
        tokenizer = WordTokenizer()
        for word in WORDS:
            tokenizer.token_id(word)
        return tokenizer

    def engine(self, spec: JobSpec, tokenizer: Any, policy: SpeculationPolicy) -> StubEngine:
        options = {"max_model_len": MAX_MODEL_LEN, "fail_on": tokenizer.token_id(FAIL_WORD), **self.options}
        return NotingEngine(self.note_to, **options) if self.note_to >= 0 else StubEngine(**options)


def run(task: dict[str, Any], note_to: int) -> int:
    """Runs the command of a task and returns its exit code; the process is spoilt for anything else."""
    log = os.open(task["log"], os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o666)
    nothing = os.open(os.devnull, os.O_RDONLY)
    for target, source in enumerate((nothing, log, log)):
        os.dup2(source, target)

    def note(**content: Any) -> None:
        os.write(note_to, json.dumps(content).encode() + b"\n")

    stub = dict(task["stub"])
    output_rows = stub.pop("output_rows", None)
    if output_rows is not None and hasattr(pipeline, "OUTPUT_ROWS"):
        pipeline.OUTPUT_ROWS = (
            output_rows  # few rows a write, so that small jobs meet the writer as often as large ones
        )
    builder = ChaosBuilder(stub)
    builder.note_to = note_to
    try:
        broken_disk.watch_open()
        broken_disk.arm(task["plan"], Path(task["out"]), note)
        return run_command(task["args"], builder)
    except BaseException:
        traceback.print_exc()
        raise
