"""A job as a picture: batch size, draft length, acceptance and tokens per second over its time."""

from __future__ import annotations

import os
import tempfile
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..jobs.errors import ConfigError, OutputError
from ..jobs.fields import REMOTE_SCHEMES
from ..jobs.store import open_store
from .timeline import read_lanes, timeline

if TYPE_CHECKING:
    from matplotlib.figure import Figure

FORMATS = ("svg", "pdf", "png")
DPI = 150
_STYLE: Any = {
    "font.family": "DejaVu Sans",
    "font.size": 9.0,
    "axes.edgecolor": "0.3",
    "axes.linewidth": 0.8,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.titlesize": 10.0,
    "hatch.color": "0.6",
    "hatch.linewidth": 0.7,
    "svg.fonttype": "none",  # text stays text
    "svg.hashsalt": "specrun",  # names within the file are not drawn by lot
    "pdf.fonttype": 42,
}


def check_plot(path: Path) -> None:
    """ConfigError where no plot could come of it: a suffix that is none of FORMATS, no local file, no matplotlib."""
    if str(path).partition(":/")[0] in REMOTE_SCHEMES:
        raise ConfigError(f"--plot {path}: plots are written to local files; name one and copy it from there")
    if path.suffix.lower().removeprefix(".") not in FORMATS:
        known = ", ".join(f".{name}" for name in FORMATS)
        raise ConfigError(f"--plot {path}: the suffix says what to draw; give the file one of {known}")
    try:
        import matplotlib  # noqa: F401
    except ImportError as exc:
        raise ConfigError(f"--plot needs matplotlib ({exc}); run pip install 'specrun[plot]'") from exc


def plot_job(location: str, report: Mapping[str, Any], path: Path) -> None:
    """Draw the job at an output.path, whose report names it, into a local file, which is whole or not there.

    Raises ConfigError as check_plot(), StorageError for steps that cannot be read, OutputError for a file that cannot
    be written.
    """
    check_plot(path)
    time = timeline(read_lanes(open_store(location)))
    import matplotlib

    from .panels import draw

    with matplotlib.rc_context(), warnings.catch_warnings():
        matplotlib.rcdefaults()  # and not what the user's own matplotlibrc says
        matplotlib.rcParams.update(_STYLE)
        warnings.filterwarnings("ignore", message="Glyph .* missing")  # of a job's name; the file is whole without
        _write(draw(time, report), path)


def _write(figure: Figure, path: Path) -> None:
    format = path.suffix.lower().removeprefix(".")
    undated = {"svg": {"Date": None}, "pdf": {"CreationDate": None}}  # the same steps give the same file
    with _beside(path) as tmp:
        figure.savefig(tmp, format=format, dpi=DPI, metadata=undated.get(format))


@contextmanager
def _beside(path: Path) -> Iterator[Path]:
    """A file of the same folder that takes the name `path` once the block has filled it."""
    tmp = None
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        if path.is_dir():
            raise IsADirectoryError(21, "Is a directory")
        handle, name = tempfile.mkstemp(prefix=f".{path.stem[:32]}-", suffix=path.suffix, dir=path.parent)
        os.close(handle)
        tmp = Path(name)
        yield tmp
        umask = os.umask(0)
        os.umask(umask)
        tmp.chmod(0o666 & ~umask)  # mkstemp's own are for nobody else
        os.replace(tmp, path)
    except OSError as exc:
        raise OutputError(f"{path}: {exc.strerror or exc}; choose another place with --plot") from exc
    finally:
        if tmp is not None:
            with suppress(OSError):
                tmp.unlink(missing_ok=True)
