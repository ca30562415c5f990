"""Answers of earlier jobs, read back from where they lie: what the drafts of a new job may begin with.

Nothing here can fail a job over what an earlier one left. A part that is damaged, gone or of another make is passed
over with a warning, and a location that holds nothing gives nothing: the first night of a nightly job has no yesterday.
"""

from __future__ import annotations

import glob
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np
import orjson
import pyarrow.parquet as pq

from .answers import ID_COLUMNS, TEXT_COLUMNS, Answers
from .errors import ConfigError, InputError, JobError
from .fields import check_location
from .filesystem import is_remote
from .folder import DATA, INDEX_NAME, PART_NAME, SUFFIX_INDEX
from .input_files import InputFile, reading
from .input_search import _QUERY, find_files
from .saved_index import NUM_TOKENS, VOCABULARY
from .sections import InputSpec

BATCH_ROWS = 512
_NUM_WARNINGS = 3
"""Damaged parts that are named; of more there is only the number."""
_COUNTS = b"specrun.counts"


@dataclass(frozen=True, slots=True)
class _Part:
    """A part that can be read, as its footer describes it."""

    file: InputFile
    num_tokens: int
    row_groups: list[int]
    """Rows in each."""
    has_ids: bool
    """Whether it has token ids that can be trusted."""
    is_index: bool

    def last_groups(self, max_tokens: int) -> list[int]:
        """The row groups at its end that hold so many tokens, taking all rows for equally long."""
        num_rows = sum(self.row_groups)
        skipped = int(num_rows * (1 - max_tokens / self.num_tokens)) if self.num_tokens > max_tokens else 0
        ends = np.cumsum(self.row_groups)
        return [group for group, end in enumerate(ends.tolist()) if end > skipped]


@dataclass(slots=True)
class _Folder:
    """What was found of one job: parts of data/ and of suffix_index/."""

    parts: list[InputFile] = field(default_factory=list)
    indexes: list[InputFile] = field(default_factory=list)

    @property
    def newest_ns(self) -> int:
        """When the newest file was written."""
        return max(file.mtime_ns for file in (*self.parts, *self.indexes))


class EarlierOutput:
    """The answers behind one location or several.

    locations: output folders, globs of them, part files, or globs of those; local, s3:// or gs://.
    vocabulary: vocabulary_hash() of this job's tokenizer: a saved index counts where it is of the same; without one
        suffix_index/ is not looked at. Token ids of data/ do not say of which they are, so its texts are read.
    same_tokenizer: token ids of data/ count, and suffix_index/ is not looked at: the job's own output.
    exclude: an output folder that is left out, such as that of the job itself in a glob of its predecessors.
    warn: hears of what was passed over.
    """

    def __init__(
        self,
        locations: str | Sequence[str],
        vocabulary: str | None = None,
        *,
        same_tokenizer: bool = False,
        exclude: str | None = None,
        warn: Callable[[str], None] = lambda text: None,
        key: str = "speculation.warm_from",
    ) -> None:
        self._locations = (locations,) if isinstance(locations, str) else tuple(locations)
        self._vocabulary = None if same_tokenizer else vocabulary
        self._same_tokenizer = same_tokenizer
        self._exclude = _place(exclude) if exclude is not None else None
        self._warn = warn
        self._key = key
        self._num_damaged = 0

    @property
    def has_parts(self) -> bool:
        """Whether there is anything to read. Raises as batches()."""
        return bool(self._folders)

    def batches(self, max_tokens: int | None = None) -> Iterator[Answers]:
        """The answers in pieces of bounded size: job after job, the one that wrote last at the end, each in its order.

        max_tokens: leave out the oldest, as far as those that follow hold about so many tokens.
        Raises ConfigError for a broken location, InputMissing or StorageError for a bucket that is not there, denied or
        out of reach.
        """
        self._num_damaged = 0
        if not self._folders:
            self._warn(f"{self._key}: nothing behind {', '.join(self._locations)}; the job begins without")
        chosen = []
        for part, num_sharing in self._newest_first():
            limit = max_tokens // num_sharing if max_tokens is not None else None
            chosen.append((part, part.last_groups(limit) if limit is not None else None))
            if max_tokens is not None:
                max_tokens -= min(part.num_tokens, limit or part.num_tokens)
                if max_tokens <= 0:
                    break
        for part, row_groups in reversed(chosen):
            yield from self._read(part, row_groups)
        if self._num_damaged > _NUM_WARNINGS:
            self._warn(f"{self._key}: {self._num_damaged} parts in all could not be read")

    @cached_property
    def _folders(self) -> list[_Folder]:
        """Those behind the locations, the newest first."""
        found: dict[str, InputFile] = {}
        for location in self._locations:
            for pattern in _patterns(location, self._vocabulary is not None):
                found.update((file.path, file) for file in self._find(pattern))
        folders: dict[str, _Folder] = {}
        for path, file in found.items():
            above, _, name = path.rpartition("/")
            top, _, kind = above.rpartition("/")
            if self._exclude is not None and _place(top) == self._exclude:
                continue
            folder = folders.setdefault(top if kind in (DATA, SUFFIX_INDEX) else above, _Folder())
            (folder.indexes if kind == SUFFIX_INDEX and INDEX_NAME.fullmatch(name) else folder.parts).append(file)
        # By name where two are of one moment: they were copied, and names of nightly outputs sort.
        return sorted(folders.values(), key=lambda folder: folder.newest_ns)[::-1]

    def _find(self, pattern: str) -> list[InputFile]:
        """The Parquet files behind a pattern in natural order; [] where there are none."""
        try:
            check_location(pattern)
            return find_files(InputSpec.model_construct(path=pattern, format="parquet"))[1]
        except ValueError as exc:
            raise ConfigError(f"{self._key}: {exc}") from None
        except JobError as exc:
            if isinstance(exc, ConfigError):
                raise
            if exc.__cause__ is None:  # nothing there, as against nothing that can be looked at
                return []
            if is_remote(pattern):
                raise type(exc)(str(exc).replace("input.path", self._key, 1)) from exc
            return self._find_readable(pattern, exc)

    def _find_readable(self, pattern: str, problem: JobError) -> list[InputFile]:
        """Those of a local pattern that can be looked at, when one of them cannot."""
        paths = glob.glob(os.path.expanduser(pattern))
        if paths == [pattern] or not paths:
            self._pass_over(str(problem).replace("input.path", self._key, 1))
            return []
        return [file for path in sorted(paths) for file in self._find(glob.escape(path))]

    def _newest_first(self) -> Iterator[tuple[_Part, int]]:
        """Parts of the folders, the newest folder first, and how many are to share what is left of the budget: shards
        that all began with the same answers have saved those, too."""
        for folder in self._folders:
            indexes = [part for file in folder.indexes if (part := self._look(file, is_index=True)) is not None]
            saved_ns = {_shard(part.file): part.file.mtime_ns for part in indexes}
            for file in reversed(folder.parts):
                # A saved index holds what its shard had written; what is newer came in a later attempt.
                saved = saved_ns.get(_shard(file))
                if (saved is None or file.mtime_ns > saved) and (part := self._look(file)) is not None:
                    yield part, 1
            yield from zip(reversed(indexes), range(len(indexes), 0, -1), strict=True)

    def _look(self, file: InputFile, is_index: bool = False) -> _Part | None:
        """A file by its footer; None where it is damaged, not a part, or an index of another tokenizer."""
        try:
            with reading(file.path), file.open() as stream:
                parquet = pq.ParquetFile(stream)
                footer, schema = parquet.metadata, parquet.schema_arrow
            facts = footer.metadata or {}
            if is_index:
                same = self._vocabulary is not None and facts.get(VOCABULARY) == self._vocabulary.encode()
                return self._part(file, footer, int(facts[NUM_TOKENS]), True, True) if same else None
            has_ids = "token_ids" in schema.names and self._same_tokenizer
            if missing := set(ID_COLUMNS if has_ids else TEXT_COLUMNS) - set(schema.names):
                raise InputError(f"{file.path}: has no column {min(missing)}")
            num_tokens = int(orjson.loads(facts[_COUNTS])["num_output_tokens"])
            return self._part(file, footer, num_tokens, has_ids, False)
        except JobError as exc:
            self._pass_over(str(exc))
        except (ValueError, KeyError, TypeError):
            self._pass_over(f"{file.path}: is not a part that specrun wrote")
        return None

    def _part(self, file: InputFile, footer: pq.FileMetaData, num_tokens: int, has_ids: bool, is_index: bool) -> _Part:
        groups = [footer.row_group(i).num_rows for i in range(footer.num_row_groups)]
        return _Part(file, num_tokens, groups, has_ids, is_index)

    def _read(self, part: _Part, row_groups: list[int] | None) -> Iterator[Answers]:
        """A part's answers, as far as it can be read."""
        columns = ["token_ids"] if part.is_index else ID_COLUMNS if part.has_ids else TEXT_COLUMNS
        start = 0
        try:
            with reading(part.file.path), part.file.open() as stream:
                parquet = pq.ParquetFile(stream, pre_buffer=False, buffer_size=1 << 20)
                for batch in parquet.iter_batches(BATCH_ROWS, row_groups, columns, use_threads=False):
                    yield Answers.of_index(batch, start) if part.is_index else Answers.of_part(batch, part.has_ids)
                    start += batch.num_rows
        except JobError as exc:
            self._pass_over(str(exc))
        except (ValueError, TypeError):  # text that is no UTF-8, columns of other types
            self._pass_over(f"{part.file.path}: its columns are not those that specrun writes")

    def _pass_over(self, reason: str) -> None:
        self._num_damaged += 1
        if self._num_damaged <= _NUM_WARNINGS:
            self._warn(f"{self._key}: passed over: {reason}")


def _patterns(location: str, with_index: bool) -> Iterable[str]:
    """What to look for: the location as files or as folders of them, and as output folders."""
    yield location
    address, *options = _QUERY.split(location, maxsplit=1)
    if not is_remote(location):
        address, options = os.path.expanduser(location), []
        if os.path.isdir(address):
            address = glob.escape(address)
    query = f"?{options[0]}" if options else ""
    for folder in ("", f"/{DATA}", f"/{SUFFIX_INDEX}")[: 3 if with_index else 2]:
        yield f"{address.rstrip('/')}{folder}/part-*.parquet{query}"


def same_place(one: str, other: str) -> bool:
    """Whether two locations are one folder."""
    return _place(one) == _place(other)


def _place(folder: str) -> str:
    """One spelling of a folder."""
    if is_remote(folder):
        return _QUERY.split(folder, maxsplit=1)[0].rstrip("/")
    return os.path.realpath(os.path.expanduser(folder))


def _shard(file: InputFile) -> int | None:
    """The shard that a file's name tells; None for a file of another name."""
    match = PART_NAME.fullmatch(file.name) or INDEX_NAME.fullmatch(file.name)
    return int(match[1]) if match is not None else None
