"""From the name in a job to a policy: one of the built-in ones, or `module:Class` of the user's own."""

from __future__ import annotations

import importlib
import inspect
import sys
from collections.abc import Iterable
from difflib import get_close_matches
from pathlib import Path
from types import ModuleType
from typing import Any

from .acceptance_gate import AcceptanceGate
from .base import SpeculationPolicy
from .batch_threshold import BatchThreshold
from .fixed import Always, Never
from .goodput import Goodput

POLICIES: dict[str, type[SpeculationPolicy]] = {
    "goodput": Goodput,
    "never": Never,
    "always": Always,
    "batch_threshold": BatchThreshold,
    "acceptance_gate": AcceptanceGate,
}


class PolicyError(ValueError):
    """A job asks for a policy that cannot be made; the text is one line with the mend."""


def make_policy(name: str, *, search_path: Path | None = None, **kwargs: Any) -> SpeculationPolicy:
    """A new policy from its name and its keys in the job.

    `module:Class` imports the user's own; besides installed packages, its module may lie in search_path (a folder,
    such as the job file's) or in the current one. Raises PolicyError, whatever it is that fails.
    """
    policy_class = _import_class(name, search_path) if ":" in name else POLICIES.get(name)
    if policy_class is None:
        raise PolicyError(f"no policy {name!r}{_nearest(name, POLICIES)}; choose {', '.join(POLICIES)} or module:Class")
    _check_keys(name, policy_class, kwargs)
    try:
        return policy_class(**kwargs)
    except Exception as exc:  # the class may be the user's own, which may raise anything
        raise PolicyError(f"policy {name!r}: {_first_line(exc)}") from exc


def _check_keys(name: str, policy_class: type[SpeculationPolicy], kwargs: dict[str, Any]) -> None:
    """Raise PolicyError for a key that the class does not take and for one that it needs."""
    parameters = _parameters(policy_class)
    keys = [p.name for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)]
    takes_any = any(p.kind is p.VAR_KEYWORD for p in parameters)
    allowed = f"allowed: {', '.join(keys)}" if keys else "it takes none"
    for key in kwargs:
        if key not in keys and not takes_any:
            raise PolicyError(f"policy {name!r} has no key {key!r}{_nearest(key, keys)}; {allowed}")
    missing = [p.name for p in parameters if p.name in keys and p.default is p.empty and p.name not in kwargs]
    if missing:
        raise PolicyError(f"policy {name!r} needs the key {missing[0]!r}; {allowed}")


def _parameters(policy_class: type[SpeculationPolicy]) -> list[inspect.Parameter]:
    # A class without __init__ inherits the Protocol's, which claims to take anything and then takes nothing.
    own = inspect.getattr_static(policy_class, "__init__")
    if own in (object.__init__, inspect.getattr_static(SpeculationPolicy, "__init__")):
        return []
    return list(inspect.signature(policy_class).parameters.values())


def _import_class(name: str, search_path: Path | None) -> type[SpeculationPolicy]:
    module_name, _, class_name = name.partition(":")
    if not module_name or not class_name:
        raise PolicyError(f"policy {name!r} is not of the form module:Class")
    module = _import_module(name, module_name, search_path)
    found = getattr(module, class_name, None)
    if not isinstance(found, type):
        classes = [key for key, value in vars(module).items() if isinstance(value, type)]
        where = getattr(module, "__file__", None) or module_name
        raise PolicyError(f"policy {name!r}: no class {class_name!r} in {where}{_nearest(class_name, classes)}")
    # `issubclass` does not serve here: it refuses protocols that are not runtime-checkable.
    if SpeculationPolicy not in found.__mro__:
        raise PolicyError(f"policy {name!r}: {class_name} must be a subclass of specrun.policies.SpeculationPolicy")
    if getattr(found, "decide", None) is SpeculationPolicy.decide:
        raise PolicyError(f"policy {name!r}: {class_name} must define decide(self, state) -> SpecDecision")
    return found


def _import_module(name: str, module_name: str, search_path: Path | None) -> ModuleType:
    folders = [str(path.resolve()) for path in (search_path, Path.cwd()) if path is not None]
    # Behind the installed packages, so that a file beside a job cannot shadow the standard library; left there, since
    # the user's module may import its neighbours later on.
    sys.path.extend(folder for folder in dict.fromkeys(folders) if folder not in sys.path)
    importlib.invalidate_caches()
    try:
        return importlib.import_module(module_name)
    except Exception as exc:  # user code may raise anything
        if isinstance(exc, ModuleNotFoundError) and exc.name and f"{module_name}.".startswith(f"{exc.name}."):
            looked = " and ".join(dict.fromkeys(folders))
            raise PolicyError(f"policy {name!r}: no module {exc.name!r} in {looked} or installed") from exc
        kind = type(exc).__name__
        raise PolicyError(f"policy {name!r}: importing {module_name} failed with {kind}: {_first_line(exc)}") from exc


def _nearest(word: str, known: Iterable[str]) -> str:
    near = get_close_matches(word, list(known), n=1)
    return f" (did you mean {near[0]!r}?)" if near else ""


def _first_line(exc: Exception) -> str:
    return (str(exc).strip().splitlines() or [type(exc).__name__])[0]
