"""What can go wrong with a job, apart from a single row. Each class carries the exit code of the command."""

from __future__ import annotations

from typing import ClassVar


class JobError(Exception):
    """A job cannot go on; the text names the file, row, column or key and the mend, one line a problem."""

    exit_code: ClassVar[int] = 70


class ConfigError(JobError):
    """The job file, or what it says about the data, is wrong."""

    exit_code = 78


class InputError(JobError):
    """Input data that cannot be read."""

    exit_code = 65


class InputMissing(JobError):
    """Input files that are not there or not readable."""

    exit_code = 66


class OutputError(JobError):
    """The output cannot be created."""

    exit_code = 73


class StorageError(JobError):
    """Reading or writing failed half-way; the job can be run again."""

    exit_code = 74


class TemporaryError(JobError):
    """Another run is at work or time is up; progress is saved, run again."""

    exit_code = 75
