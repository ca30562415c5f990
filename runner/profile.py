"""A saved profile: what steps cost on one machine with one model and drafter, and the check that it fits a job."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..jobs.errors import ConfigError, OutputError
from ..jobs.spec import JobSpec
from ..policies.cost_model import CostModel
from .drafting import choose_method
from .machine import library_versions, machine_facts

if TYPE_CHECKING:
    from ..engine.target import Target

VERSION = 1
LIBRARIES = ("specrun", "torch", "transformers")
"""Those whose version decides what a step costs."""


def profile_identity(spec: JobSpec, target: Target | None = None) -> dict[str, str]:
    """What a profile is only good for. spec: pinned to its models (run.pin); target: adds what only loading tells."""
    machine, versions = machine_facts(), library_versions()
    threads = machine["omp_num_threads"] or "unset"
    method = choose_method(spec.speculation)
    identity = {
        "machine": f"{machine['cpu']}, {machine['cores']} cores, OMP_NUM_THREADS {threads}",
        "model": str(spec.model.content_hash),
        "method": method.method,
        "draft_model": str(spec.speculation.content_hash) if method.has_draft_model else "none",
        "deterministic": str(spec.engine.deterministic).lower(),
        **{library: versions[library] for library in LIBRARIES if library in versions},
    }
    if target is not None:
        identity |= {"device": target.device_name, "dtype": str(target.dtype).removeprefix("torch.")}
    return identity


def write_profile(path: Path, identity: Mapping[str, str], costs: CostModel, facts: Mapping[str, Any]) -> None:
    """Save a profile, whole or not at all. Raises OutputError."""
    content = {"version": VERSION, "identity": dict(identity), "cost_model": costs.to_json(), **facts}
    with _placing(path) as beside:
        beside.write_text(json.dumps(content) + "\n", encoding="utf-8")
        os.replace(beside, path)


def check_place(path: Path) -> None:
    """Raises OutputError where write_profile would, before minutes are spent on measuring."""
    with _placing(path) as beside:
        beside.touch()


@contextmanager
def _placing(path: Path) -> Iterator[Path]:
    """A file beside the path, gone afterwards unless it was renamed."""
    beside = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        yield beside
    except OSError as exc:
        raise OutputError(f"{path}: {exc.strerror or exc}; choose another place with --save") from exc
    finally:
        with suppress(OSError):
            beside.unlink(missing_ok=True)


def read_profile(
    path: Path, identity: Mapping[str, str] | None = None, key: str = "speculation.policy.profile"
) -> dict[str, Any]:
    """The costs of a profile, as CostModel.to_json gives them.

    identity: that of the job (profile_identity), where it is to run on what was measured; None: not checked.
    key: where the path was given.
    Raises ConfigError for a file that is no profile, and for one of another machine, model, drafter, dtype or version:
    the text names the first key that differs, and both its values.
    """
    again = "save one with specrun calibrate"
    identity = identity or {}
    try:
        content = json.loads(path.expanduser().read_text(encoding="utf-8"))
        saved, costs = content["identity"], content["cost_model"]
        if content["version"] != VERSION:
            raise ValueError(f"version {content['version']!r}")
        if not CostModel.from_json(costs).is_ready:
            raise ValueError("nothing was measured")
        differing = [name for name, value in identity.items() if saved.get(name) != value]
    except OSError as exc:
        raise ConfigError(f"{key}: {path}: {exc.strerror or exc}; {again}") from exc
    except (ValueError, KeyError, TypeError, AttributeError, IndexError) as exc:
        reason = f"{type(exc).__name__}: {' '.join(str(exc).split())}"
        raise ConfigError(f"{key}: {path} is no profile of this version ({reason}); {again}") from exc
    if differing:
        name = differing[0]
        values = f"{saved.get(name)!r}, this job has {identity[name]!r}"
        raise ConfigError(f"{key}: {path} was measured with another {name}: {values}; {again}")
    assert isinstance(costs, dict)
    return costs


def with_costs(name: str, kwargs: Mapping[str, Any], identity: Mapping[str, str] | None = None) -> dict[str, Any]:
    """A policy's keys, goodput's `profile` replaced by what the file of that path holds; errors as read_profile.

    identity: what the profile must be of; None: not checked.
    """
    if name != "goodput" or not isinstance(path := kwargs.get("profile"), str):
        return dict(kwargs)
    return {**kwargs, "profile": read_profile(Path(path), identity)}
