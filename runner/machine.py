"""What a measurement ran on: libraries, processor, cores, memory, load."""

from __future__ import annotations

import os
import platform
import sys
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import psutil

LIBRARIES = ("specrun", "torch", "transformers", "tokenizers", "numpy", "pyarrow")


def library_versions() -> dict[str, str]:
    """Versions of Python and of the libraries that matter for speed, as far as they are installed."""
    versions = {"python": sys.version.split()[0]}
    for library in LIBRARIES:
        try:
            versions[library] = version(library)
        except PackageNotFoundError:
            continue
    return versions


def machine_facts() -> dict[str, Any]:
    """Processor, cores that this process may use, memory in bytes and the load average of the last minute."""
    return {
        "cpu": _cpu_model(),
        "cores": num_cores(),
        "memory_bytes": psutil.virtual_memory().total,
        "system": f"{platform.system()} {platform.release()} {platform.machine()}",
        "omp_num_threads": os.environ.get("OMP_NUM_THREADS"),
        "load_average": load_average(),
    }


def num_cores() -> int:
    """Cores that this process may run on."""
    affinity = getattr(os, "sched_getaffinity", None)  # Linux only
    return len(affinity(0)) if affinity else os.cpu_count() or 1


def load_average() -> float:
    """Processes that ran or waited for a core, over the last minute."""
    return psutil.getloadavg()[0]


def _cpu_model() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(errors="replace").splitlines()
    except OSError:
        return platform.processor()
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor()
