"""Running the failed rows of a finished job again, shard by shard, from what the job left in its output folder."""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Sequence

from ..jobs.errors import ConfigError, InputMissing
from ..jobs.folder import INDEX, RESOLVED, OutputFolder
from ..jobs.index import JobIndex
from ..jobs.job_file import escape
from ..jobs.manifest import ShardManifest
from ..jobs.metrics import read_report
from ..jobs.shard import Shard
from ..jobs.spec import JobSpec
from .build import Builder
from .exit_codes import DONE
from .pipeline import Ending
from .run import JobResult, Progress, run_job


def stored_job(location: str, overrides: Sequence[str] = ()) -> JobSpec:
    """The job that lies in an output folder, wherever that has been moved.

    Raises InputMissing where there is none, ConfigError when it names environment variables that are not set here.
    """
    output = OutputFolder(location)
    text = output.store.read(RESOLVED)
    if text is None:
        raise InputMissing(f"{location} holds no job ({RESOLVED} is missing); give a job's output.path")
    here = json.dumps(escape(output.location), ensure_ascii=False)  # as text, whatever it looks like
    given = [f"output.path={here}", "output.if_exists=resume", *overrides]
    return JobSpec.parse(text.decode(), output.store.path(RESOLVED), given)


def retry_job(
    spec: JobSpec,
    codes: Collection[str],
    *,
    builder: Builder | None = None,
    progress: Progress | None = None,
    warn: Callable[[str], None] = lambda text: None,
) -> JobResult:
    """Run failed rows again: those with one of the error codes, or all; every other row stays as it is.

    Each row is merged exactly once, whatever stops it on the way: until a part is done again readers see the old one.
    spec: stored_job(); its run.shard limits the retry to one shard.
    Raises InputMissing where there is no job, TemporaryError for a job that is not finished, and what run_job() raises.
    """
    output = OutputFolder(spec.output.path)
    index = JobIndex.read(output)
    if index is None:
        raise InputMissing(f"{output.location} holds no job ({INDEX} is missing); give a job's output.path")
    result = None
    for shard in _shards(spec, index, output.location):
        if not _has_failed_rows(output, shard, codes):
            continue
        run = spec.run.model_copy(update={"shard": str(shard)})
        result = run_job(
            spec.model_copy(update={"run": run}), builder=builder, progress=progress, warn=warn, retry_codes=codes
        )
        if result.state != Ending.DONE:
            break
    return result or JobResult(DONE, Ending.DONE, read_report(output.store) or {}, was_done=True)


def _shards(spec: JobSpec, index: JobIndex, location: str) -> list[Shard]:
    if spec.run.shard is None:
        return [Shard(i, index.num_shards) for i in range(index.num_shards)]
    shard = Shard.of(spec.run.shard, {})
    if shard.count != index.num_shards:
        raise ConfigError(f"{location} has {index.num_shards} shard(s), not {shard.count}; retry one of those")
    return [shard]


def _has_failed_rows(output: OutputFolder, shard: Shard, codes: Collection[str]) -> bool:
    """Also where a retry was begun and not ended, and where the shard is not finished, which run_job() tells."""
    folder = output.shard(shard)
    manifest = ShardManifest.read(folder)
    if manifest is None or not manifest.is_done or output.store.exists(folder.retry):
        return True
    return any(code in codes or not codes for part in manifest.parts for code in part.counts.error_codes)
