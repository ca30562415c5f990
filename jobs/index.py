"""What all shards and attempts of a job agree on, written once by whichever comes first."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import orjson

from .. import __version__
from .errors import ConfigError
from .fingerprint import Fingerprint
from .folder import INDEX, OutputFolder, ShardFolder
from .shard import Shard

INDEX_VERSION = 1


@dataclass(frozen=True, slots=True)
class JobIndex:
    """The job's fingerprint, its rows and how they are divided."""

    fingerprint: dict[str, Any]
    """As Fingerprint.to_json()."""
    fingerprint_hash: str
    num_shards: int
    num_rows: int
    rows_per_part: int
    scan: dict[str, Any] = field(default_factory=dict)
    """What reading the input from end to end found out, as PromptSource.scan(), so that no one does it again."""

    @classmethod
    def of(
        cls, fingerprint: Fingerprint, shard: Shard, num_rows: int, rows_per_part: int, scan: dict[str, Any]
    ) -> JobIndex:
        """The index of a job that begins."""
        return cls(fingerprint.to_json(), fingerprint.hash, shard.count, num_rows, rows_per_part, scan)

    @classmethod
    def read(cls, folder: OutputFolder) -> JobIndex | None:
        """None where there is none or it is not whole; ConfigError for one of another version of specrun."""
        try:
            content = orjson.loads(folder.store.read(INDEX) or b"null")
            if content is None:
                return None
            if content["version"] != INDEX_VERSION:
                raise ConfigError(
                    f"{folder.store.path(INDEX)} has version {content['version']}, this specrun reads {INDEX_VERSION}; "
                    "submit with the specrun that began the job, or choose another output.path"
                )
            return cls(**{name: content[name] for name in cls.__slots__})
        except (ValueError, KeyError, TypeError):
            return None

    def write(self, folder: ShardFolder) -> None:
        """Shards that come at the same time write the same."""
        content = {name: getattr(self, name) for name in self.__slots__}
        folder.write(INDEX, orjson.dumps({"version": INDEX_VERSION, "specrun": __version__, **content}))

    def check(self, fingerprint: Fingerprint, shard: Shard, location: str) -> None:
        """Raises ConfigError when the output belongs to another configuration, whose differences it names."""
        mend = "Choose another output.path" + (", or set output.if_exists: overwrite" if shard.is_all else "")
        if self.fingerprint_hash != fingerprint.hash:
            changes = "; ".join(fingerprint.changes(self.fingerprint)) or "of another version of specrun"
            raise ConfigError(f"output.path {location} holds results of another configuration: {changes}. {mend}")
        if self.num_shards != shard.count:
            raise ConfigError(
                f"output.path {location} was begun with {self.num_shards} shard(s), this run says {shard}; "
                f"keep the number of shards. {mend}"
            )
