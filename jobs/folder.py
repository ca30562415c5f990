"""The output folder: where each file of a job lies, on a disk or in an object store, and how one gets there whole."""

from __future__ import annotations

import re
import shutil
import tempfile
import uuid
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

import orjson

from .errors import InputMissing, OutputError
from .shard import Shard
from .store import LocalStore, open_store, storage_errors

PART_NAME = re.compile(r"part-(\d{5,})-(\d{6,})\.parquet")
"""Parts in data/: shard, sequence."""
INDEX_NAME = re.compile(r"part-(\d{5,})\.parquet")
"""Files in suffix_index/: shard."""
STEPS_NAME = re.compile(r"part-(\d{5,})-(\d+)-(\d+)\.parquet")
"""Files in metrics/steps: shard, attempt, sequence."""

DATA = "data"
METRICS = "metrics"
STEPS = "metrics/steps"
SUFFIX_INDEX = "suffix_index"
JOB_PARQUET = "metrics/job.parquet"
SUCCESS = "_SUCCESS"
MANIFEST = "manifest.json"
REPORT = "report.json"
RESOLVED = "job.resolved.yaml"
ERRORS = "errors.jsonl"
RESULTS = "output.jsonl"
PROMETHEUS = "metrics.prom"
WORK = ".specrun"
INDEX = ".specrun/index.json"
_JOB_FILES = (JOB_PARQUET, REPORT, RESOLVED, ERRORS, RESULTS, PROMETHEUS, MANIFEST)


class OutputFolder:
    """The files of one job under `output.path`, by name.

    data/ holds parts and nothing else, since readers that are pointed at a folder trip over any other file in it.
    """

    def __init__(self, location: str) -> None:
        self.store = open_store(location)

    @property
    def location(self) -> str:
        """As people write it."""
        return self.store.location

    def shard(self, shard: Shard) -> ShardFolder:
        """The files of one shard."""
        return ShardFolder(self, shard)

    @contextmanager
    def finalizing(self) -> Iterator[WorkFolder]:
        """A work folder for one who finalizes the job without being one of its shards; InputMissing without a job."""
        if not self.store.exists(INDEX):
            raise InputMissing(f"{self.location} holds no job ({INDEX} is missing); give a job's output.path")
        folder = WorkFolder(self, f"finalize-{uuid.uuid4().hex[:8]}")
        try:
            folder.create()
            yield folder
        finally:
            self.store.delete_folder(folder.name)
            folder.close()

    def require_empty(self, among_shards: bool = False) -> None:
        """Raises OutputError when something lies at the location already.

        among_shards: other shards may be making their folders at this moment; those do not count.
        """
        top = [*self.store.list(""), *self.store.folders("")]
        if among_shards and not self.store.list(DATA):
            top = [name for name in top if name not in (DATA, METRICS) and not name.startswith(WORK)]
        if top or (isinstance(self.store, LocalStore) and self.store.root.exists() and not self.store.root.is_dir()):
            raise OutputError(
                f"output.path {self.location} is not empty; "
                "set output.if_exists to resume, overwrite or skip, or choose another output.path"
            )

    def foreign_data(self) -> list[str]:
        """Names in data/ that no job of ours wrote."""
        return [name for name in self.store.list(DATA) if not PART_NAME.fullmatch(name)] + self.store.folders(DATA)

    def clear(self) -> None:
        """Removes what a job left here, by known names only, locks that are held excepted.

        _SUCCESS goes first and the index last: a crash on the way leaves an unfinished job, never a wrong one.
        """
        store = self.store
        store.delete(SUCCESS)
        for folder, pattern in ((DATA, PART_NAME), (STEPS, STEPS_NAME), (SUFFIX_INDEX, INDEX_NAME)):
            for entry in store.list(folder):
                if pattern.fullmatch(entry):
                    store.delete(f"{folder}/{entry}")
        for name in _JOB_FILES:
            store.delete(name)
        for shard in store.folders(WORK):
            for entry in store.list(f"{WORK}/{shard}"):
                if not entry.startswith("lock"):
                    store.delete(f"{WORK}/{shard}/{entry}")
            for folder in ("spill", "tmp"):
                store.delete_folder(f"{WORK}/{shard}/{folder}")
        store.delete(INDEX)


class WorkFolder:
    """A local folder beside the output in which files lie until they are whole.

    It is inside the output where that is local, so that a file can be renamed to its name, and a temporary one where it
    is an object store. It is there from create() to close().
    """

    def __init__(self, output: OutputFolder, name: str) -> None:
        self.output = output
        self.store = output.store
        self.name = f"{WORK}/{name}"
        self._temporary: tempfile.TemporaryDirectory[str] | None = None

    @property
    def _work(self) -> Path:
        if isinstance(self.store, LocalStore):
            return self.store.root / self.name
        assert self._temporary is not None, "create() comes first"
        return Path(self._temporary.name)

    @property
    def tmp(self) -> Path:
        """Where files lie until they are whole."""
        return self._work / "tmp"

    def create(self) -> None:
        """Makes the folders and proves that they can be written; OutputError when they cannot."""
        self.store.create([DATA, STEPS, self.name])
        if not isinstance(self.store, LocalStore) and self._temporary is None:
            self._temporary = tempfile.TemporaryDirectory(prefix="specrun-")
        with storage_errors(self.tmp):
            self.tmp.mkdir(parents=True, exist_ok=True)

    def publish(self, tmp: Path, name: str) -> None:
        """Gives a closed file in tmp its name in the output, durably and in one step; StorageError when it cannot."""
        self.store.put(tmp, name)

    def write(self, name: str, content: bytes) -> None:
        """Writes a small file so that readers see the old one or the new one."""
        self.store.write(name, content, self.tmp)

    def write_json(self, name: str, content: object) -> None:
        """Writes JSON for people: indented, with a line end."""
        self.write(name, orjson.dumps(content, option=orjson.OPT_INDENT_2 | orjson.OPT_APPEND_NEWLINE))

    def write_lines(self, names: Sequence[str], lines: Iterable[tuple[int, bytes]]) -> None:
        """Writes files of lines; each line comes with the number of its file and ends in a line end.

        A file that would have no line is removed.
        """
        files = [self.tmp / f"lines-{name.rpartition('/')[2]}" for name in names]
        with ExitStack() as stack:
            stack.enter_context(storage_errors(self.tmp))
            streams = [stack.enter_context(open(file, "wb")) for file in files]
            for number, line in lines:
                streams[number].write(line)
        for name, file in zip(names, files, strict=True):
            if file.stat().st_size:
                self.publish(file, name)
            else:
                file.unlink()
                self.store.delete(name)

    def close(self) -> None:
        """Removes local folders that stood in for those of an object store."""
        if self._temporary is not None:
            self._temporary.cleanup()
            self._temporary = None


class ShardFolder(WorkFolder):
    """The files of one shard: its own folder in .specrun/, which no other process writes to."""

    def __init__(self, output: OutputFolder, shard: Shard) -> None:
        super().__init__(output, shard.name)
        self.lock = f"{self.name}/lock"
        self.manifest = f"{self.name}/manifest.json"
        self.report = f"{self.name}/report.json"
        self.retry = f"{self.name}/retry.json"
        self.errors = ERRORS if shard.is_all else f"{self.name}/errors.jsonl"

    @property
    def spill(self) -> Path:
        """Where the rows of unfinished parts wait."""
        return self._work / "spill"

    @property
    def journal(self) -> Path | None:
        """A log of commits; object stores, which cannot append to a file, have none."""
        return self._work / "journal.jsonl" if isinstance(self.store, LocalStore) else None

    def create(self) -> None:
        """As in the base class."""
        super().create()
        with storage_errors(self.spill):
            self.spill.mkdir(exist_ok=True)
        if isinstance(self.store, LocalStore) and (self.store.root / DATA).stat().st_dev != self.tmp.stat().st_dev:
            raise OutputError(
                f"{self.store.path(DATA)} and {self.store.path(WORK)} must lie on one file system, "
                "or parts cannot be renamed"
            )

    def clear_spill(self) -> None:
        """Forgets the rows of unfinished parts."""
        self._empty(self.spill)
        if self._temporary is not None:
            self.store.delete_folder(f"{self.name}/spill")

    def clear_tmp(self) -> None:
        """Removes files that a crash left half written."""
        self._empty(self.tmp)

    def _empty(self, folder: Path) -> None:
        with storage_errors(folder):
            shutil.rmtree(folder)
            folder.mkdir()

    def save_spill(self) -> None:
        """On an object store: uploads the results of unfinished parts, for the next attempt to take up."""
        if self._temporary is None:
            return
        saved = self.store.list(f"{self.name}/spill")
        for file in sorted(self.spill.glob("*.jsonl")):
            if saved.pop(file.name, None) != file.stat().st_size:
                copy = self.tmp / file.name
                with storage_errors(copy):
                    shutil.copyfile(file, copy)
                self.store.put(copy, f"{self.name}/spill/{file.name}")
        for name in saved:
            self.store.delete(f"{self.name}/spill/{name}")

    def fetch_spill(self) -> None:
        """On an object store: brings back what save_spill() of an earlier attempt left."""
        if self._temporary is None:
            return
        for name in self.store.list(f"{self.name}/spill"):
            with (
                storage_errors(self.spill / name),
                self.store.open(f"{self.name}/spill/{name}") as saved,
                open(self.spill / name, "wb") as file,
            ):
                shutil.copyfileobj(saved, file, 1 << 20)
