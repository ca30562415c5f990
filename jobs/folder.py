"""The output folder: where each file of a job lies, and how a file gets there whole."""

from __future__ import annotations

import errno
import os
import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from tempfile import TemporaryDirectory

from .errors import OutputError, StorageError

PART_NAME = re.compile(r"part-(\d{5})-(\d{6,})\.parquet")
"""Parts in data/: shard, sequence."""
_STEPS_NAME = re.compile(r"part-\d{5}-\d+-\d+\.parquet")


@contextmanager
def storage_errors(path: Path) -> Iterator[None]:
    """Turns an OSError within (disk full, I/O error) into a StorageError that names `path`."""
    try:
        yield
    except OSError as error:
        reason = os.strerror(error.errno) if error.errno else str(error).splitlines()[0]
        mend = "free some space" if error.errno in (errno.ENOSPC, errno.EDQUOT) else "check the disk"
        raise StorageError(f"{path}: {reason}; {mend} and submit again, finished rows are kept") from error


class OutputFolder:
    """The files of one job under `output.path`.

    data/ holds parts and nothing else, since readers that are pointed at a folder trip over any other file in it.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.data = path / "data"
        self.metrics = path / "metrics"
        self.job_parquet = self.metrics / "job.parquet"
        self.steps = self.metrics / "steps"
        self.success = path / "_SUCCESS"
        self.manifest = path / "manifest.json"
        self.report = path / "report.json"
        self.resolved = path / "job.resolved.yaml"
        self.prometheus = path / "metrics.prom"
        self.work = path / ".specrun"
        self.lock = self.work / "lock"
        self.journal = self.work / "journal.jsonl"
        self.spill = self.work / "spill"
        self.tmp = self.work / "tmp"

    def require_empty(self) -> None:
        """Raises OutputError when something lies at the path already."""
        if self.path.exists() and (not self.path.is_dir() or any(self.path.iterdir())):
            raise OutputError(
                f"output.path {self.path} is not empty; "
                "set output.if_exists to resume, overwrite or skip, or choose another output.path"
            )

    def check(self) -> None:
        """Raises OutputError when create() could not make the folder; leaves nothing behind."""
        try:
            above = next(folder for folder in (self.path, *self.path.absolute().parents) if folder.exists())
            with TemporaryDirectory(prefix=".specrun-", dir=above):
                return
        except OSError as error:
            raise self._unwritable(error) from error

    def create(self) -> None:
        """Makes the folders and proves that they can be written; OutputError when they cannot."""
        try:
            for folder in (self.data, self.steps, self.spill, self.tmp):
                folder.mkdir(parents=True, exist_ok=True)
            probe = self.tmp / f"probe-{os.getpid()}"
            with open(probe, "wb") as file:
                file.write(bytes(4096))
                file.flush()
                os.fsync(file.fileno())
            probe.unlink()
            for folder in (self.path, self.data, self.metrics, self.steps, self.spill):
                if not os.access(folder, os.W_OK | os.X_OK):
                    raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(folder))
            if self.data.stat().st_dev != self.tmp.stat().st_dev:
                raise OutputError(
                    f"{self.data} and {self.work} must lie on one file system, or parts cannot be renamed"
                )
        except OSError as error:
            raise self._unwritable(error) from error

    def _unwritable(self, error: OSError) -> OutputError:
        return OutputError(
            f"output.path {self.path} cannot be written: {error.strerror} ({error.filename or self.path}); "
            "choose another output.path or mend its permissions"
        )

    def foreign_data(self) -> list[str]:
        """Names in data/ that no job of ours wrote."""
        return sorted(entry.name for entry in self.data.iterdir() if not PART_NAME.fullmatch(entry.name))

    def clear(self) -> None:
        """Removes what a job left here, by known names only, the lock excepted.

        _SUCCESS goes first and the manifest last: a crash on the way leaves an unfinished job, never a wrong one.
        """
        with storage_errors(self.path):
            self.success.unlink(missing_ok=True)
            self.clear_spill()
            for folder, name in ((self.data, PART_NAME), (self.steps, _STEPS_NAME)):
                for entry in list(folder.iterdir()):
                    if name.fullmatch(entry.name):
                        entry.unlink()
            for file in (self.journal, self.job_parquet, self.report, self.resolved, self.prometheus, self.manifest):
                file.unlink(missing_ok=True)

    def clear_spill(self) -> None:
        """Forgets the rows of unfinished parts."""
        self._empty(self.spill)

    def clear_tmp(self) -> None:
        """Removes files that a crash left half written."""
        self._empty(self.tmp)

    def _empty(self, folder: Path) -> None:
        with storage_errors(folder):
            shutil.rmtree(folder)
            folder.mkdir()

    def publish(self, tmp: Path, final: Path) -> None:
        """Moves a closed file of ours to its final name, durably and in one step; StorageError when it cannot."""
        with storage_errors(final):
            sync(tmp)
            os.replace(tmp, final)
            sync(final.parent)

    def write(self, final: Path, content: bytes) -> None:
        """Writes a small file so that readers see the old one or the new one."""
        tmp = self.tmp / final.name
        with storage_errors(final):
            tmp.write_bytes(content)
        self.publish(tmp, final)


def sync(path: Path) -> None:
    """fsync of a file or folder; some file systems have none for folders."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        if path.is_dir():
            with suppress(OSError):
                os.fsync(descriptor)
        else:
            os.fsync(descriptor)
    finally:
        os.close(descriptor)
