"""Target and draft are part of a job's identity: pinned when it first runs, checked whenever it goes on."""

from typing import Any

import pytest
import yaml

from specrun.jobs.errors import ConfigError
from specrun.jobs.spec import JobSpec
from specrun.runner.cli import run_command
from specrun.runner.drafting import choose_method
from specrun.runner.fingerprint import content_hash
from specrun.runner.report import full_lines
from specrun.runner.retry import stored_job
from tests.runner.failed_jobs import fill

OTHER = "sha256:" + "0" * 64


class Models:
    """What the stub builder finds where the job's models are said to lie."""

    def __init__(self, builder: type, monkeypatch: pytest.MonkeyPatch) -> None:
        self.target: dict[str, Any] = {"revision": "t" * 40, "files": {"w": "1"}}
        self.draft: dict[str, Any] = {"revision": None, "files": {"d": "1"}}
        monkeypatch.setattr(builder, "identity", lambda _, spec: self.target)
        monkeypatch.setattr(builder, "draft_identity", lambda _, spec: self.draft_of(spec))

    def draft_of(self, spec: JobSpec) -> dict[str, Any] | None:
        return self.draft if choose_method(spec.speculation).has_draft_model else None


@pytest.fixture
def models(job, monkeypatch):
    return Models(type(job.stub()), monkeypatch)


@pytest.fixture
def drafting(job, models):
    """A job with failed rows and a draft model."""
    return fill(job).set(speculation__method="draft_model", speculation__model="org/small")


def resolved(job):
    return yaml.safe_load((job.out / "job.resolved.yaml").read_text())


def test_both_are_pinned_and_reported(drafting, models):
    drafting.run(fail_on="BOOM")
    target, draft = content_hash(models.target), content_hash(models.draft)
    values = resolved(drafting)
    assert (values["model"]["revision"], values["model"]["content_hash"]) == ("t" * 40, target)
    assert (values["speculation"]["revision"], values["speculation"]["content_hash"]) == (None, draft)
    report = drafting.report()
    assert (report["revision"], report["content_hash"]) == ("t" * 40, target)
    assert (report["draft_model"], report["draft_revision"], report["draft_content_hash"]) == ("org/small", None, draft)
    lines = dict(full_lines(report))
    assert lines["model files"] == f"revision {'t' * 40}, sha256 {target[7:19]}"
    assert (lines["draft model"], lines["draft model files"]) == ("org/small", f"sha256 {draft[7:19]}")


def test_a_job_without_a_draft_model_has_none(job, models):
    job.prompts(3).run()
    report = job.report()
    assert report["draft_model"] is report["draft_content_hash"] is None
    assert report["content_hash"] == content_hash(models.target) == resolved(job)["model"]["content_hash"]
    assert "draft model" not in dict(full_lines(report))


@pytest.mark.parametrize("key", ["model.content_hash", "speculation.content_hash"])
def test_other_content_than_the_job_asks_for(drafting, models, capsys, key):
    drafting.set(**{key.replace(".", "__"): OTHER})
    found = content_hash(models.target if key.startswith("model") else models.draft)
    builder = drafting.stub()
    assert run_command(["submit", str(drafting.file)], builder) == 78
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"specrun: {key}: the files of ") and found in line and OTHER in line
    assert f"set {key}: null" in line
    assert builder.num_loads == 0 and not drafting.out.exists()
    drafting.set(**{key.replace(".", "__"): found})
    assert run_command(["submit", str(drafting.file)], drafting.stub()) == 0


@pytest.mark.parametrize(("which", "label"), [("target", "weights"), ("draft", "draft")])
def test_a_changed_model_does_not_go_on(drafting, models, which, label):
    with pytest.raises(RuntimeError):
        drafting.run(raise_on="400", max_num_seqs=16)
    rows = drafting.rows()
    setattr(models, which, {"revision": None, "files": {"w": "1", "d": "2"}})
    with pytest.raises(ConfigError, match=rf"another configuration: .*{label}\.files\.d: .* -> \"2\""):
        drafting.run()
    assert drafting.builder.num_loads == 0 and drafting.rows() == rows


@pytest.mark.parametrize(("which", "key"), [("target", "model"), ("draft", "speculation")])
def test_a_retry_with_a_changed_model_is_refused(drafting, models, which, key):
    drafting.run(fail_on="BOOM")
    before = drafting.rows()
    kept = getattr(models, which)
    setattr(models, which, {"revision": None, "files": {"d": "2"}})
    with pytest.raises(ConfigError, match=rf"^{key}\.content_hash: the files of .*, the job asks for sha256:"):
        drafting.retry()
    with pytest.raises(ConfigError, match="another configuration"):
        drafting.retry(overrides=(f"{key}.content_hash=null",))
    assert drafting.rows() == before and drafting.builder.num_loads == 0
    setattr(models, which, kept)
    assert drafting.retry().exit_code == 0
    assert stored_job(str(drafting.out)).speculation.content_hash == content_hash(models.draft)


@pytest.mark.parametrize(
    "changes",
    [
        {"method": "suffix+draft_model"},
        {"method": "auto"},
        {"method": "suffix+draft_model", "index_tokens": 5000, "save_index": True},
        {"max_draft_tokens": 2, "policy": "batch_threshold"},
        {"model": "the/same/elsewhere"},
    ],
)
def test_the_rest_of_speculation_may_change(drafting, changes):
    with pytest.raises(RuntimeError):
        drafting.run(raise_on="400", max_num_seqs=16)
    drafting.set(**{f"speculation__{key}": value for key, value in changes.items()})
    assert drafting.run(fail_on="BOOM").state == "done"


def test_all_shards_write_the_same(drafting):
    texts = set()
    for index in (0, 1):
        drafting.run_shard(index, 2)
        texts.add((drafting.out / "job.resolved.yaml").read_bytes())
    assert len(texts) == 1


def test_the_content_hash_is_of_the_files_alone():
    files = {"a": "1:x", "b": "2:y"}
    same: list[dict[str, Any]] = [
        {"revision": None, "files": files},
        {"revision": "r", "files": dict(reversed(files.items()))},
    ]
    assert len({content_hash(identity) for identity in same}) == 1
    assert content_hash({"revision": "r", "files": {**files, "a": "1:z"}}) != content_hash(same[0])
    assert content_hash({"revision": "r", "files": {"a": "1:x", "c": "2:y"}}) != content_hash(same[0])


def test_validate_shows_the_pins_and_checks_them(drafting, models, capsys):
    drafting.set(errors__max_failed_fraction=1.0)
    assert run_command(["validate", str(drafting.file)], drafting.stub()) == 0
    out = capsys.readouterr().out
    assert content_hash(models.target) in out and content_hash(models.draft) in out
    drafting.set(speculation__content_hash=OTHER)
    assert run_command(["validate", str(drafting.file)], drafting.stub()) == 78
    assert "speculation.content_hash: the files of " in capsys.readouterr().err
