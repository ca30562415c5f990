"""What a bench compares: policies in their short forms, such as `never`, `always:3` or `my_module:MyPolicy`, with the
job's own drafts or, as in `suffix/always:3`, with those of another method."""

from __future__ import annotations

import difflib
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import click

from ..jobs.spec import JobSpec
from ..jobs.speculation import DRAFT_MODEL_METHODS, METHODS, SpeculationSpec
from ..policies.base import SpeculationPolicy
from ..policies.registry import PolicyError, make_policy
from .profile import with_costs

NEVER = "never"
NONE = "none"
JOB = "job"
NUMBER_KEYS = {"always": "num_draft_tokens", "batch_threshold": "disable_above"}
"""Which key the number of the short form `name:K` stands for."""


@dataclass(frozen=True, slots=True)
class Contender:
    """One policy of a bench, and what drafts under it."""

    label: str
    """As the user wrote it."""
    name: str
    """As the registry knows it; `none` builds no drafter at all."""
    kwargs: dict[str, Any] = field(default_factory=dict)
    search_path: Path | None = None
    """Where a user's own policy module may lie."""
    num_draft_tokens: int = 0
    """Draft length that the short form asks for; the engine's limit is raised to it."""
    method: str | None = None
    """As speculation.method; None is the job's."""

    @property
    def has_drafter(self) -> bool:
        """Whether the engine gets a drafter."""
        return self.name != NONE

    def policy(self) -> SpeculationPolicy:
        """A new policy, with nothing learned. Raises PolicyError."""
        name = NEVER if self.name == NONE else self.name
        return make_policy(name, search_path=self.search_path, **with_costs(self.name, self.kwargs))


def parse_contenders(text: str, spec: JobSpec, search_path: Path | None = None) -> list[Contender]:
    """Contenders of a comma-separated list. `never` is there in any case, and first: the others are compared with it.

    name           a policy with its defaults; `none`: no drafter; `job`: the policy and its keys as the job has them
    name:K         always: draft K tokens; batch_threshold: off above K requests
    module:Cls     the user's own
    METHOD/policy  any of these, with drafts by that speculation.method instead of the job's
    Raises click.BadParameter, one line with the mend.
    """
    labels = [label for part in text.split(",") if (label := part.strip())]
    contenders = [_parse(label, spec, search_path) for label in dict.fromkeys([NEVER, *labels])]
    for contender in contenders:
        try:
            contender.policy()
        except PolicyError as exc:
            raise _bad(str(exc)) from exc
    if spec.speculation.method == "none" and any(c.method is None and c.name not in (NEVER, NONE) for c in contenders):
        raise _bad(
            "speculation.method is none, so no policy could draft; add --set speculation.method=ngram, or name a "
            "method with the policy, as in ngram/always:3"
        )
    return contenders


def parse_batches(text: str) -> list[int]:
    """Batch sizes of a comma-separated list, ascending. Raises click.BadParameter."""
    try:
        batches = sorted({int(part) for part in text.split(",") if part.strip()})
    except ValueError:
        batches = []
    if not batches or batches[0] < 1:
        raise click.BadParameter(f"{text!r} is not a list of batch sizes such as 1,4,16", param_hint="--batch")
    return batches


def orders(contenders: Sequence[Contender], repeats: int) -> list[list[Contender]]:
    """The order of each repetition: there and back again, starting elsewhere after each pair.

    Over an even number of repetitions each contender has the same mean position, so a machine that grows slower
    or faster favours none.
    """
    result = []
    for repetition in range(repeats):
        start = repetition // 2 % len(contenders)
        order = [*contenders[start:], *contenders[:start]]
        result.append(order[::-1] if repetition % 2 else order)
    return result


def _parse(label: str, spec: JobSpec, search_path: Path | None) -> Contender:
    method, slash, policy = label.rpartition("/")
    contender = _parse_policy(policy, spec, search_path)
    if not slash:
        return contender
    if contender.name == NONE:
        raise _bad(f"{label!r}: none is without any drafter; write it without a method")
    return replace(contender, label=label, method=_check_method(method, spec.speculation))


def _check_method(method: str, speculation: SpeculationSpec) -> str:
    """The method, if the job has what it needs."""
    known = [name for name in METHODS if name not in ("none", "auto")]
    if method not in known:
        near = difflib.get_close_matches(method, known, n=1)
        raise _bad(
            f"{method!r} is no method that drafts; "
            + (f"did you mean {near[0]!r}?" if near else f"choose {', '.join(known)}")
        )
    if method in DRAFT_MODEL_METHODS and speculation.model is None:
        raise _bad(f"{method} needs a draft model; add --set speculation.method={method} --set speculation.model=...")
    if method == "synthetic" and speculation.synthetic is None:
        raise _bad("synthetic needs a recording; set speculation.method and speculation.synthetic in the job")
    return method


def _parse_policy(label: str, spec: JobSpec, search_path: Path | None) -> Contender:
    if label == JOB:
        policy = spec.speculation.policy
        return Contender(label, policy.name, policy.kwargs, search_path)
    name, colon, number = label.partition(":")
    if not colon or not _is_number(number):
        return Contender(label, label, {}, search_path)
    if name not in NUMBER_KEYS:
        takers = " and ".join(f"{taker}:K" for taker in NUMBER_KEYS)
        raise _bad(f"{label!r}: {name!r} takes no number; only {takers} do")
    kwargs = {NUMBER_KEYS[name]: int(number)}
    return Contender(label, name, kwargs, search_path, num_draft_tokens=kwargs.get("num_draft_tokens", 0))


def _is_number(text: str) -> bool:
    return text.removeprefix("-").isdigit()


def _bad(message: str) -> click.BadParameter:
    return click.BadParameter(message, param_hint="--policies")
