"""One of n contiguous ranges of a job's rows, each run by a process of its own."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from .errors import ConfigError


@dataclass(frozen=True, slots=True)
class Shard:
    """Shard `index` (from 0) of `count`. A job that is not sharded is shard 0 of 1."""

    index: int = 0
    count: int = 1

    def __post_init__(self) -> None:
        if not 0 <= self.index < self.count:
            raise ConfigError(
                f"shard {self} is out of range; shards of {self.count} are 0 to {self.count - 1} "
                "(run.shard, --shard, or JOB_COMPLETION_INDEX and JOB_COMPLETIONS)"
            )

    @classmethod
    def of(cls, given: str | None, environ: Mapping[str, str]) -> Shard:
        """From `run.shard` ("i/n") or else from the environment of an indexed Kubernetes job.

        JOB_COMPLETION_INDEX is set by Kubernetes, JOB_COMPLETIONS by whoever writes the job. By completions and not by
        parallelism, since a queue may admit fewer pods at a time than there are shards. Raises ConfigError.
        """
        if given is not None:
            index, _, count = given.partition("/")
            return cls(int(index), int(count))
        if "JOB_COMPLETIONS" not in environ:
            if environ.get("JOB_COMPLETION_INDEX", "0") != "0":
                raise ConfigError(
                    "JOB_COMPLETION_INDEX is set and JOB_COMPLETIONS is not; "
                    "set JOB_COMPLETIONS to the job's spec.completions, or give --shard i/n"
                )
            return cls()
        try:
            return cls(int(environ["JOB_COMPLETION_INDEX"]), int(environ["JOB_COMPLETIONS"]))
        except (KeyError, ValueError) as exc:
            raise ConfigError(
                "JOB_COMPLETIONS is set, so JOB_COMPLETION_INDEX must be a number too; give --shard i/n instead"
            ) from exc

    def rows(self, num_rows: int) -> tuple[int, int]:
        """First row of the shard and the one after its last."""
        return num_rows * self.index // self.count, num_rows * (self.index + 1) // self.count

    @property
    def is_all(self) -> bool:
        """Whether this is the whole job."""
        return self.count == 1

    @property
    def name(self) -> str:
        """Name of its folder in .specrun/."""
        return f"shard-{self.index:05d}"

    def __str__(self) -> str:
        return f"{self.index}/{self.count}"
