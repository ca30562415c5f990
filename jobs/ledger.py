"""What of a shard is done: lock, index, committed parts, journal of commits, retry.

The parts in data/ are the truth; index, manifest and journal only say what to expect of them.
"""

from __future__ import annotations

import time
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path

import orjson

from .errors import ConfigError, OutputError, TemporaryError
from .fingerprint import Fingerprint
from .folder import DATA, MANIFEST, PART_NAME, SUCCESS, WORK, OutputFolder
from .index import JobIndex
from .lock import Lock, open_lock
from .manifest import MANIFEST_VERSION, ShardManifest
from .parts import Part, PartRanges
from .retry import Retry
from .shard import Shard
from .store import storage_errors


@dataclass(frozen=True, slots=True)
class Terms:
    """What a job says about its output and about how it is judged."""

    if_exists: str = "resume"
    """resume, error, overwrite or skip."""
    max_failed_fraction: float = 0.01
    format: str = "parquet"
    model: str = ""
    """The name under which result files of the OpenAI format know the model."""


class Ledger:
    """The record of one shard in the output folder; used by one process at a time, which holds the shard's lock.

    index: of the job as this process understands it.
    """

    def __init__(
        self,
        output: OutputFolder,
        shard: Shard,
        index: JobIndex,
        fingerprint: Fingerprint,
        terms: Terms | None = None,
    ) -> None:
        self.output = output
        self.shard = shard
        self.folder = output.shard(shard)
        self.index = index
        self.ranges = PartRanges.of(shard, index.num_rows, index.rows_per_part)
        self.parts: dict[int, Part] = {}
        """Committed parts by sequence."""
        self.reopened: dict[int, Part] = {}
        """Parts that stand in data/ until a retry has replaced them."""
        self.retry: Retry | None = None
        self.lost: list[str] = []
        """Parts that the journal knows and data/ has no more; their rows run again."""
        self.attempt = 0
        """How many times the shard has been opened, this time included."""
        self.is_finished = False
        """Whether the job was finished before."""
        self._fingerprint = fingerprint
        self._terms = terms or Terms()
        self._lock: Lock | None = None

    @staticmethod
    def finished(output: OutputFolder, fingerprint: Fingerprint, if_exists: str = "resume") -> bool:
        """Whether a submit has nothing to do, by a look that takes no lock: the job is done and its parts are there.

        With skip any finished job will do; with error and overwrite never.
        """
        if if_exists not in ("resume", "skip") or not output.store.exists(SUCCESS):
            return False
        try:
            content = orjson.loads(output.store.read(MANIFEST) or b"null")
            if content["version"] != MANIFEST_VERSION or content["state"] != "done":
                return False
            if if_exists == "resume" and content["fingerprint_hash"] != fingerprint.hash:
                return False
            return {part["name"]: part["bytes"] for part in content["parts"]} == output.store.list(DATA)
        except (ValueError, KeyError, TypeError):
            return False

    def open(self, retry_codes: Collection[str] | None = None) -> None:
        """Makes the folder, takes the lock and finds out what is done.

        retry_codes: run failed rows with these error codes again (all failed rows when empty); None: no retry, unless
        one has been begun and not ended.
        Raises OutputError (not writable, not empty, foreign files), TemporaryError (a live process holds the lock),
        ConfigError (the output belongs to another configuration, whose differences it names).
        """
        if self._terms.if_exists == "error" and retry_codes is None:
            self._require_new()
        try:
            self.folder.create()
            lock = open_lock(self.output.store, self.folder.lock, self.folder.tmp)
            lock.acquire()
            self._lock = lock
            self._load(retry_codes)
        except BaseException:
            self.close()
            raise

    def _require_new(self) -> None:
        """This very job, begun and not finished, may go on: a shard beside others, or a pod that is started again."""
        index = JobIndex.read(self.output)
        is_ours = index is not None and index.fingerprint_hash == self._fingerprint.hash
        if not is_ours or self.output.store.exists(SUCCESS):
            self.output.require_empty(among_shards=not self.shard.is_all and index is None)

    def _load(self, retry_codes: Collection[str] | None) -> None:
        if foreign := self.output.foreign_data():
            raise OutputError(
                f"{self.output.store.path(DATA)} holds files that are not specrun's ({', '.join(foreign[:3])}); "
                "move them away or choose another output.path"
            )
        if self._terms.if_exists == "overwrite" and retry_codes is None:
            self._clear()
        if retry_codes is None and self.finished(self.output, self._fingerprint, self._terms.if_exists):
            self.is_finished = True
            return
        self._agree_on_index()
        manifest = ShardManifest.read(self.folder)
        self.attempt = 1 + (manifest.attempt if manifest is not None else 0)
        self.folder.clear_tmp()
        if manifest is not None and manifest.fingerprint == self._fingerprint.hash:
            self.folder.fetch_spill()
        else:
            self.folder.clear_spill()  # nothing says which configuration its rows are of
        self._find_parts()
        self._take_up_retry(retry_codes)
        # In this order: whoever finalizes the job meanwhile must see that this shard is not done.
        self.save("running")
        self.output.store.delete(SUCCESS)

    def _clear(self) -> None:
        if not self.shard.is_all:
            raise ConfigError(
                f"output.if_exists: overwrite does not go with shards ({self.shard}): one that starts late would "
                "remove the rows of the others; remove the output yourself or choose another output.path"
            )
        for name in self.output.store.folders(WORK):
            if name != self.shard.name:  # a live shard must not lose its files under its hands
                other = open_lock(self.output.store, f"{WORK}/{name}/lock", self.folder.tmp)
                other.acquire()
                other.release()
        self.output.clear()
        self.folder.create()

    def _agree_on_index(self) -> None:
        """Finds the job's index, or writes it. One under which nothing was done yet may be replaced."""
        index = JobIndex.read(self.output)
        if index is not None and index.fingerprint_hash != self._fingerprint.hash and self._is_untouched(index):
            index = None
        if index is None:
            self.index.write(self.folder)
            index = JobIndex.read(self.output) or self.index  # another shard may have been quicker
        index.check(self._fingerprint, self.shard, self.output.location)
        self.index = index

    def _is_untouched(self, index: JobIndex) -> bool:
        if not self.shard.is_all or index.num_shards != 1 or self.output.store.list(DATA):
            return False
        spill = self.output.store.list(f"{self.folder.name}/spill")
        return not any(size for name, size in spill.items() if name.endswith(".jsonl"))

    def _find_parts(self) -> None:
        for name, num_bytes in self.output.store.list(DATA).items():
            match = PART_NAME.fullmatch(name)
            if match is None or int(match[1]) != self.shard.index:
                continue
            part = Part.read(self.output.store, name, num_bytes)
            if part is None:  # damaged after its commit: readers trip over it, and its rows can run again
                self.output.store.delete(f"{DATA}/{name}")
                continue
            path = self.output.store.path(part.path)
            if part.fingerprint != self._fingerprint.hash:
                raise ConfigError(
                    f"{path} holds results of another configuration; "
                    "set output.if_exists: overwrite, or choose another output.path"
                )
            if part.sequence >= self.ranges.num_parts or (part.row_start, part.row_stop) != self.ranges.rows(
                part.sequence
            ):
                raise OutputError(
                    f"{path} holds rows {part.row_start} to {part.row_stop - 1}, which is not its range; "
                    "set output.if_exists: overwrite, or choose another output.path"
                )
            self.parts[part.sequence] = part
        # Without its manifest the shard still counts on: a retry tells old parts from new ones by their attempts.
        self.attempt = max([self.attempt, *(part.attempt + 1 for part in self.parts.values())])
        self.lost = sorted(self._journal() - {part.name for part in self.parts.values()})

    def _take_up_retry(self, codes: Collection[str] | None) -> None:
        """Goes on with a retry that was begun, or begins one; parts of it that are not through become open again."""
        self.retry = Retry.read(self.folder)
        if self.retry is not None and codes is not None and sorted(codes) != self.retry.codes:
            begun = ", ".join(self.retry.codes) or "all failed rows"
            raise ConfigError(
                f"output.path {self.output.location} holds a retry of {begun} that was begun and not ended; "
                "end it first, by a retry of the same, then retry others"
            )
        if self.retry is None and codes is not None:
            if len(self.parts) < self.ranges.num_parts:
                raise TemporaryError(
                    f"output.path {self.output.location} is not finished ({len(self.parts)} of {self.ranges.num_parts} "
                    "parts are there); submit the job again first, then retry its failed rows"
                )
            self.folder.clear_spill()  # what a crash left of committed parts must not pass for rows run again
            self.retry = Retry.begin(self.folder, self.parts.values(), self.attempt, codes)
        if self.retry is None:
            return
        self.reopened = {sequence: part for sequence, part in self.parts.items() if self.retry.reopens(part)}
        self.parts = {sequence: part for sequence, part in self.parts.items() if sequence not in self.reopened}

    def _journal(self) -> set[str]:
        """Names of the parts that were committed; a torn line is of a commit that data/ tells about."""
        path = self.folder.journal
        names: set[str] = set()
        if path is None or not path.exists():
            return names
        with storage_errors(path):
            content = path.read_bytes()
        for line in content.split(b"\n"):
            try:
                names.add(orjson.loads(line)["name"])
            except (ValueError, KeyError, TypeError):
                continue
        return names

    def commit(self, part: Part, tmp: Path) -> None:
        """Makes a verified part visible under its name, then journals it. TemporaryError when the lock is lost."""
        self.check()
        self.folder.publish(tmp, part.path)
        self.parts[part.sequence] = part
        self.reopened.pop(part.sequence, None)
        if (path := self.folder.journal) is not None:
            with storage_errors(path), open(path, "ab") as journal:
                # The line begins with its own line end, so that a line torn before it stays alone.
                journal.write(b"\n" + orjson.dumps(part.to_json()))

    def check(self) -> None:
        """Raises TemporaryError when another process has taken over."""
        assert self._lock is not None, "open() comes first"
        self._lock.check()

    def save(self, state: str) -> None:
        """Writes the shard's manifest. `state` is a word for people, "done" excepted, which complete() writes."""
        self.check()
        parts = sorted([*self.parts.values(), *self.reopened.values()], key=lambda part: part.sequence)
        ShardManifest(
            state=state,
            attempt=self.attempt,
            row_start=self.ranges.start,
            row_stop=self.ranges.stop,
            fingerprint=self._fingerprint.hash,
            max_failed_fraction=self._terms.max_failed_fraction,
            format=self._terms.format,
            model=self._terms.model,
            saved_at=time.time(),
            parts=parts,
        ).write(self.folder)

    def complete(self) -> None:
        """Declares the shard done: every row is in a committed part."""
        if len(self.parts) != self.ranges.num_parts:
            raise RuntimeError(f"{len(self.parts)} of {self.ranges.num_parts} parts are committed")
        if self.retry is not None:
            self.retry.end(self.folder)
        self.save("done")
        self.folder.clear_spill()

    def close(self) -> None:
        """Gives up the lock; safe to call at any time and twice."""
        if self._lock is not None:
            self._lock.release()
            self._lock = None
        self.folder.close()
