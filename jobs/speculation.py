"""The speculation section of job.yaml: who drafts, from what, and who decides how far."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, Literal, get_args

from pydantic import AfterValidator, BeforeValidator, ConfigDict, Field, WithJsonSchema, model_validator

from .fields import Float, Int, Location, Text
from .sections import ContentHash, Section


def _not_empty(value: tuple[Any, ...]) -> tuple[Any, ...]:
    if not value:
        raise ValueError("must not be an empty list")
    return value


Locations = Annotated[
    tuple[Location, ...],
    BeforeValidator(lambda value: [value] if isinstance(value, str) else value),
    AfterValidator(_not_empty),
    WithJsonSchema({"anyOf": [{"type": "string"}, {"type": "array", "items": {"type": "string"}, "minItems": 1}]}),
]
"""One location or a list of them."""
Rate = Annotated[Float, Field(ge=0, le=1)]
Factor = Annotated[Float, Field(ge=0, allow_inf_nan=False)]
Points = tuple[tuple[Factor, Factor], ...]


class PolicySpec(Section):
    """Who decides how far to speculate; keys besides `name` go to the policy."""

    model_config = ConfigDict(extra="allow", json_schema_extra={"type": ["object", "string"]})

    name: Text = "goodput"
    """A known policy or module:Class."""

    @model_validator(mode="before")
    @classmethod
    def _from_name(cls, value: Any) -> Any:
        return {"name": value} if isinstance(value, str) else value

    @property
    def kwargs(self) -> dict[str, Any]:
        """The policy's own keys."""
        return dict(self.model_extra or {})


class RequestGroupsSpec(Section):
    """Rows of unlike acceptance."""

    factors: Annotated[tuple[Factor, ...], AfterValidator(_not_empty)]
    """On the rates of each group, taken in turn."""
    rows_per_group: Annotated[Int, Field(ge=1)] | None = None
    """Rows in a row that are of one group; null goes by the group that a request has."""


class SyntheticSpec(Section):
    """Drafts of a set acceptance: what an earlier run of the same job wrote, wrong where a coin says so."""

    replay: Location
    """output.path of that run, which had output.token_ids: true and repeatable outputs (deterministic or float64)."""
    acceptance_rates: Annotated[tuple[Rate, ...], AfterValidator(_not_empty)]
    """Chance of draft 1, 2, ... to be right if all before it were; the last one carries on."""
    groups: RequestGroupsSpec | None = None
    over_time: Points = ()
    """[tokens, factor] over the tokens that the run has generated; straight between two points."""
    by_context: Points = ()
    """[tokens, factor] over the tokens before the draft."""
    confidence: Literal["exact", "none"] = "exact"
    """What the policy hears of the chances: themselves, or nothing."""
    seed: Int = 0
    """Another seed is another draw of the same process."""

    @model_validator(mode="after")
    def _in_order(self) -> SyntheticSpec:
        for key in ("over_time", "by_context"):
            places = [point[0] for point in getattr(self, key)]
            if places != sorted(places):
                raise ValueError(f"{key} must name its points in ascending order of tokens")
        return self


Method = Literal["none", "ngram", "suffix", "draft_model", "suffix+draft_model", "synthetic", "auto"]
METHODS: tuple[str, ...] = get_args(Method)
DRAFT_MODEL_METHODS = ("draft_model", "suffix+draft_model")
"""Values of speculation.method that need speculation.model."""
SUFFIX_METHODS = ("suffix", "suffix+draft_model")
"""Those that keep an index of the job's outputs."""


class SpeculationSpec(Section):
    """How drafts are made and who decides about them."""

    method: Method = "none"
    """Where drafts come from; auto chooses from what is given, and the report says what and why."""
    model: Text | None = None
    """The draft model, spelled as model.path; for draft_model, suffix+draft_model and auto."""
    revision: str | None = None
    """Branch, tag or commit of a draft model on the hub; job.resolved.yaml has the commit that was found."""
    content_hash: ContentHash | None = None
    """As model.content_hash, of the draft model."""
    max_draft_tokens: Annotated[Int, Field(ge=1)] = 5
    """Most draft tokens for a request in a step."""
    warm_from: Locations | None = None
    """What fills the suffix index before the first row: an earlier output.path, a part file, a glob of either or a list
    of them; local, s3:// or gs://."""
    index_tokens: Annotated[Int, Field(ge=1000, le=2_000_000_000)] = 4_000_000
    """Most tokens in the suffix index; the oldest are forgotten first."""
    save_index: bool = False
    """Also write suffix_index/ into the output folder, for a later warm_from."""
    synthetic: SyntheticSpec | None = None
    """What method synthetic drafts."""
    policy: PolicySpec = PolicySpec()

    @model_validator(mode="after")
    def _model_where_it_drafts(self) -> SpeculationSpec:
        needed = self.method in DRAFT_MODEL_METHODS
        if needed and self.model is None:
            raise ValueError(f"model is missing; method {self.method} needs a draft model, name its checkpoint")
        if not needed and self.method != "auto":
            self._refuse(("model", "revision", "content_hash"), (*DRAFT_MODEL_METHODS, "auto"))
        if self.model is None:
            for key in ("revision", "content_hash"):
                if getattr(self, key) is not None:
                    raise ValueError(
                        f"{key} is that of a draft model and there is none; name it as model, or remove {key}"
                    )
        return self

    @model_validator(mode="after")
    def _index_where_there_is_one(self) -> SpeculationSpec:
        if self.method not in (*SUFFIX_METHODS, "auto"):
            self._refuse(("warm_from", "index_tokens", "save_index"), (*SUFFIX_METHODS, "auto"))
        return self

    @model_validator(mode="after")
    def _synthetic_on_purpose(self) -> SpeculationSpec:
        if self.method != "synthetic":
            self._refuse(("synthetic",), ("synthetic",))
        elif self.synthetic is None:
            raise ValueError("synthetic is missing; method synthetic needs its keys replay and acceptance_rates")
        return self

    def _refuse(self, keys: Sequence[str], methods: Sequence[str]) -> None:
        """No key of another method: one that says nothing is not refused, so that a resolved job loads again."""
        for key in keys:
            if getattr(self, key) != type(self).model_fields[key].default:
                raise ValueError(
                    f"{key} does not go with method {self.method}; remove it, or choose {_listed(methods)}"
                )


def _listed(names: Sequence[str]) -> str:
    return " or ".join(filter(None, [", ".join(names[:-1]), names[-1]]))
