"""What of a job is done: lock, manifest with the job's fingerprint, committed parts, journal of commits.

The parts in data/ are the truth; manifest and journal only say what to expect of them.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import orjson

from .. import __version__
from .errors import ConfigError, OutputError
from .folder import OutputFolder, storage_errors
from .lock import FolderLock
from .parts import Part

MANIFEST_VERSION = 1
_SHOWN = 60
"""Characters shown of a value that changed."""


@dataclass(frozen=True, slots=True)
class _Manifest:
    state: str
    attempt: int
    fingerprint: dict[str, Any]
    parts: list[str]

    @classmethod
    def read(cls, path: Path) -> _Manifest | None:
        """None where there is none or it is not whole; ConfigError for one of another version of specrun."""
        try:
            content = orjson.loads(path.read_bytes())
            if content["version"] != MANIFEST_VERSION:
                raise ConfigError(
                    f"{path} has version {content['version']}, this specrun reads {MANIFEST_VERSION}; "
                    "submit with the specrun that began the job, or choose another output.path"
                )
            parts = [part["name"] for part in content["parts"]]
            return cls(content["state"], content["attempt"], content["fingerprint"], parts)
        except FileNotFoundError:
            return None
        except (ValueError, KeyError, TypeError):
            return None


class Ledger:
    """The record of one job in its output folder; used by one process at a time, which holds the lock.

    fingerprint: JSON values of everything that can change an output or the layout of the parts.
    if_exists: what to do with an output that is there already: resume, error, overwrite or skip.
    """

    def __init__(
        self,
        path: Path,
        fingerprint: Mapping[str, Any],
        if_exists: str = "resume",
        inputs: Sequence[Mapping[str, Any]] = (),
    ) -> None:
        self.folder = OutputFolder(path)
        self.parts: dict[int, Part] = {}
        """Committed parts by sequence."""
        self.lost: list[str] = []
        """Parts that the journal knows and data/ has no more; their rows run again."""
        self.attempt = 0
        """How many times the job has been opened, this time included."""
        self.is_complete = False
        """Whether nothing is left to do."""
        self.fingerprint_hash = _hash(fingerprint)
        self._fingerprint = _normalised(fingerprint)
        self._if_exists = if_exists
        self._inputs = [dict(entry) for entry in inputs]
        self._lock = FolderLock(self.folder.lock)

    @staticmethod
    def finished(path: Path, fingerprint: Mapping[str, Any], if_exists: str = "resume") -> bool:
        """Whether a submit has nothing to do, by a look that takes no lock: the job is done and its parts are there.

        With skip any finished job will do; with error and overwrite never.
        """
        if if_exists not in ("resume", "skip"):
            return False
        folder = OutputFolder(path)
        manifest = _Manifest.read(folder.manifest) if folder.success.exists() else None
        if manifest is None or manifest.state != "done":
            return False
        if if_exists == "resume" and manifest.fingerprint != _normalised(fingerprint):
            return False
        return folder.data.is_dir() and set(manifest.parts) <= set(os.listdir(folder.data))

    def open(self) -> None:
        """Makes the folder, takes the lock and finds out what is done.

        Raises OutputError (not writable, not empty, foreign files), TemporaryError (a live process holds the lock),
        ConfigError (the output belongs to another configuration, whose differences it names).
        """
        if self._if_exists == "error":
            self.folder.require_empty()
        self.folder.create()
        self._lock.acquire()
        try:
            self._load()
        except BaseException:
            self._lock.release()
            raise

    def _load(self) -> None:
        if foreign := self.folder.foreign_data():
            raise OutputError(
                f"{self.folder.data} holds files that are not specrun's ({', '.join(foreign[:3])}); "
                "move them away or choose another output.path"
            )
        if self._if_exists == "overwrite":
            self.folder.clear()
        self.is_complete = self.finished(self.folder.path, self._fingerprint, self._if_exists)
        manifest = _Manifest.read(self.folder.manifest)
        if manifest is not None and not self.is_complete:
            self._check_fingerprint(manifest.fingerprint)
        self.attempt = manifest.attempt if manifest is not None else 0
        if self.is_complete:
            return
        self.attempt += 1
        self.folder.clear_tmp()
        if manifest is None:
            self.folder.clear_spill()  # nothing says which configuration its rows are of
        with storage_errors(self.folder.success):
            self.folder.success.unlink(missing_ok=True)
        self._find_parts()
        self.lost = sorted(self._journal() - {part.name for part in self.parts.values()})
        self.save("running")

    def _check_fingerprint(self, before: Mapping[str, Any]) -> None:
        changes = fingerprint_changes(before, self._fingerprint)
        if changes:
            raise ConfigError(
                f"output.path {self.folder.path} holds results of another configuration: {'; '.join(changes)}. "
                "Set output.if_exists: overwrite, or choose another output.path"
            )

    def _find_parts(self) -> None:
        for path in sorted(self.folder.data.iterdir()):
            part = Part.read(path)
            if part is None:  # damaged after its commit: readers trip over it, and its rows can run again
                with storage_errors(path):
                    path.unlink()
            elif part.fingerprint != self.fingerprint_hash:
                raise ConfigError(
                    f"{path} holds results of another configuration; "
                    "set output.if_exists: overwrite, or choose another output.path"
                )
            else:
                self.parts[part.sequence] = part

    def _journal(self) -> set[str]:
        """Names of the parts that were committed; a torn line is of a commit that data/ tells about."""
        names: set[str] = set()
        with storage_errors(self.folder.journal):
            content = self.folder.journal.read_bytes() if self.folder.journal.exists() else b""
        for line in content.split(b"\n"):
            try:
                names.add(orjson.loads(line)["name"])
            except (ValueError, KeyError, TypeError):
                continue
        return names

    def commit(self, part: Part, tmp: Path) -> None:
        """Makes a verified part visible under its name, then journals it. TemporaryError when the lock is lost."""
        self._lock.check()
        self.folder.publish(tmp, self.folder.data / part.name)
        self.parts[part.sequence] = part
        with storage_errors(self.folder.journal), open(self.folder.journal, "ab") as journal:
            # The line begins with its own line end, so that a line torn before it stays alone.
            journal.write(b"\n" + orjson.dumps({**part.to_json(), "attempt": self.attempt}))

    def check(self) -> None:
        """Raises TemporaryError when another process has taken over."""
        self._lock.check()

    def save(self, state: str, num_rows: int | None = None) -> None:
        """Writes manifest.json. `state` is a word for people, "done" excepted, which complete() writes."""
        self._lock.check()
        content = {
            "version": MANIFEST_VERSION,
            "specrun": __version__,
            "state": state,
            "attempt": self.attempt,
            "num_rows": num_rows,
            "fingerprint": self._fingerprint,
            "inputs": self._inputs,
            "parts": [self.parts[sequence].to_json() for sequence in sorted(self.parts)],
        }
        self.folder.write(self.folder.manifest, orjson.dumps(content, option=orjson.OPT_INDENT_2))

    def complete(self, num_rows: int) -> None:
        """Declares the job done: manifest, then _SUCCESS, the last file of a job."""
        self.save("done", num_rows)
        self.folder.write(self.folder.success, b"")
        self.is_complete = True

    def close(self) -> None:
        """Gives up the lock; safe to call at any time and twice."""
        self._lock.release()


def fingerprint_changes(before: Mapping[str, Any], after: Mapping[str, Any]) -> list[str]:
    """One `key: old -> new` for each value that differs, nested keys as a.b.c, long values cut."""
    old, new = _flat(before), _flat(after)
    keys = [key for key in {**old, **new} if old.get(key, _Absent) != new.get(key, _Absent)]
    return [f"{key}: {_short(old.get(key, _Absent))} -> {_short(new.get(key, _Absent))}" for key in keys]


class _Absent:
    """Stands for the value of a key that one side does not have."""


def _flat(value: Any, prefix: str = "") -> dict[str, Any]:
    if isinstance(value, Mapping) and value:
        items = [_flat(child, f"{prefix}.{key}" if prefix else str(key)) for key, child in value.items()]
        return {key: child for item in items for key, child in item.items()}
    if isinstance(value, list) and any(isinstance(child, Mapping) for child in value):
        items = [_flat(child, f"{prefix}[{index}]") for index, child in enumerate(value)]
        return {key: child for item in items for key, child in item.items()}
    return {prefix: value}


def _short(value: Any) -> str:
    text = "absent" if value is _Absent else orjson.dumps(value).decode()
    return text if len(text) <= _SHOWN else text[: _SHOWN - 3] + "..."


def _normalised(fingerprint: Mapping[str, Any]) -> dict[str, Any]:
    """As it comes back from manifest.json: tuples are lists."""
    result: dict[str, Any] = orjson.loads(orjson.dumps(fingerprint))
    return result


def _hash(fingerprint: Mapping[str, Any]) -> str:
    return hashlib.sha256(orjson.dumps(fingerprint, option=orjson.OPT_SORT_KEYS)).hexdigest()
