"""How far one shard is: the words of its last attempt and the parts it has committed."""

from __future__ import annotations

from dataclasses import dataclass, field

import orjson

from .. import __version__
from .errors import ConfigError
from .folder import ShardFolder
from .parts import Part

MANIFEST_VERSION = 2


@dataclass(slots=True)
class ShardManifest:
    """Written by the shard alone; the parts in data/ are the truth, this only says what to expect of them."""

    state: str
    """done, or a word for people."""
    attempt: int
    row_start: int
    row_stop: int
    fingerprint: str
    """Its hash."""
    max_failed_fraction: float
    format: str
    """output.format"""
    model: str
    """The name for result files. These three as the last attempt had them, for whoever finalizes the job."""
    saved_at: float
    """Unix time, by which the last attempt of all shards is found."""
    parts: list[Part] = field(default_factory=list)
    """Committed ones, in order."""

    @property
    def is_done(self) -> bool:
        """Whether every row of the shard is in a committed part."""
        return self.state == "done"

    @classmethod
    def read(cls, folder: ShardFolder) -> ShardManifest | None:
        """None where there is none or it is not whole; ConfigError for one of another version of specrun."""
        try:
            content = orjson.loads(folder.store.read(folder.manifest) or b"null")
            if content is None:
                return None
            if content["version"] != MANIFEST_VERSION:
                raise ConfigError(
                    f"{folder.store.path(folder.manifest)} has version {content['version']}, this specrun reads "
                    f"{MANIFEST_VERSION}; submit with the specrun that began the job, or choose another output.path"
                )
            parts = [Part.of_json(entry, content["fingerprint"]) for entry in content["parts"]]
            return cls(**{name: content[name] for name in cls.__slots__ if name != "parts"}, parts=parts)
        except (ValueError, KeyError, TypeError):
            return None

    def write(self, folder: ShardFolder) -> None:
        """StorageError when it cannot be written."""
        values = {name: getattr(self, name) for name in self.__slots__}
        values["parts"] = [part.to_json() for part in self.parts]
        folder.write_json(folder.manifest, {"version": MANIFEST_VERSION, "specrun": __version__, **values})
