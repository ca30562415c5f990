"""The suffix index across jobs, attempts and shards: what fills it, what is kept of it, and that no output shows it."""

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest

from specrun.engine.drafters.hybrid import SuffixThenModel
from specrun.engine.drafters.ngram import NgramDrafter
from specrun.engine.drafters.suffix import SuffixDrafter
from specrun.engine.request import FinishReason, Request, SamplingParams
from specrun.engine.testing import FIRST_WORD, WordTokenizer
from specrun.jobs.earlier_output import EarlierOutput
from specrun.jobs.errors import ConfigError, InputMissing
from specrun.jobs.folder import OutputFolder
from specrun.jobs.saved_index import VOCABULARY, vocabulary_hash
from specrun.jobs.shard import Shard
from specrun.jobs.spec import JobSpec
from specrun.jobs.store import LocalStore
from specrun.runner.run import run_job
from specrun.runner.tokenizer import Tokenizer
from specrun.runner.warm_start import check_sources, save_index, warm_start
from tests.contract import tiny_model
from tests.contract.tiny_model import EOS
from tests.jobs.output_jobs import close, expect, failed_row, finish_job, open_writer, row, run_shard

ROOT = Path(__file__).parents[2]
VOCAB_SIZE = 260


@pytest.fixture(scope="module")
def tokenizer():
    """A token a byte, and EOS."""
    return Tokenizer(tiny_model.make_tokenizer())


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    return tiny_model.save(tmp_path_factory.mktemp("warm") / "model")


@pytest.fixture
def model_job(job, checkpoint):
    """A job with a suffix index on a real engine."""
    job.set(model__path=str(checkpoint), model__dtype="float64", engine__device="cpu", prompt__chat_template="none")
    job.set(output__rows_per_part=10, sampling__temperature=0.7, engine__max_num_seqs=8)
    speculation = {"method": "suffix", "index_tokens": 5000, "policy": {"name": "always", "num_draft_tokens": 4}}
    job.config["speculation"] = speculation
    return job.jsonl([{"prompt": f"question {i % 7}", "max_tokens": 8 + i % 9} for i in range(40)])


def spec_of(out, **speculation):
    return JobSpec.model_validate(
        {
            "model": {"path": "m"},
            "input": {"path": "i"},
            "output": {"path": str(out)},
            "speculation": {"method": "suffix", "index_tokens": 5000, **speculation},
        }
    )


def rows_of(drafter):
    """What the index holds, oldest first."""
    tokens, starts = drafter.index.rows()
    return [row.tolist() for row in np.split(tokens, starts[1:])] if len(starts) else []


def text_rows(name):
    """Rows that the model ended, with texts that begin with a name."""
    return lambda i: row(i, text=f"{name}{i}")


def ended(*texts):
    return [[*text.encode(), EOS] for text in texts]


def warmed(spec, tokenizer, warn=None):
    drafter = SuffixDrafter(spec.speculation.index_tokens)
    facts = warm_start(drafter, spec, tokenizer, VOCAB_SIZE, warn or pytest.fail)
    assert facts.num_tokens == drafter.num_seeded_tokens >= sum(map(len, rows_of(drafter)))
    return rows_of(drafter), facts


def seeded(*rows, index_tokens=5000):
    drafter = SuffixDrafter(index_tokens)
    drafter.seed(rows)
    return drafter


def move(job, name, **options):
    """The same job with another output."""
    job.out = job.folder / name
    return job.set(output__path=str(job.out), **options)


def test_texts_become_tokens_and_end_as_the_model_ended_them(tmp_path, tokenizer):
    def make_row(i):
        endings = [("stop", None), ("stop", "\n"), ("length", None)]
        reason, stop = endings[i % 3]
        return (
            failed_row(i) if i == 3 else row(i, text="" if i == 4 else f"é{i}", finish_reason=reason, stop_reason=stop)
        )

    finish_job(tmp_path / "old", 6, make_row=make_row)
    rows, facts = warmed(spec_of(tmp_path / "new", warm_from=str(tmp_path / "old")), tokenizer)
    assert rows == [[*"é0".encode(), EOS], [*"é1".encode()], [*"é2".encode()], [*"é5".encode()]]
    assert (facts.num_rows, facts.num_encoded_tokens) == (4, facts.num_tokens) and facts.seconds > 0


@pytest.mark.parametrize("kind", ["stub", "without"])
def test_a_tokenizer_that_does_not_know_its_end_adds_none(tmp_path, kind):
    finish_job(tmp_path / "old", 2, make_row=text_rows(""))
    plain = tiny_model.make_tokenizer()
    plain.eos_token = None
    rows, _ = warmed(
        spec_of(tmp_path / "new", warm_from=str(tmp_path / "old")),
        WordTokenizer() if kind == "stub" else Tokenizer(plain),
    )
    assert rows == ([[FIRST_WORD], [FIRST_WORD + 1]] if kind == "stub" else [[48], [49]])


def test_earlier_jobs_then_this_one_then_what_waits(tmp_path, tokenizer):
    for day in (1, 2):
        finish_job(tmp_path / f"day-{day}", 1, make_row=text_rows(f"{day}:"))
    out = tmp_path / "day-3"
    writer = open_writer(out, 6, rows_per_part=2)
    expect(writer)
    writer.write([text_rows("3:")(i) for i in (0, 1, 4)])
    close(writer)
    rows, _ = warmed(spec_of(out, warm_from=f"{tmp_path}/day-*"), tokenizer)
    assert rows == ended("1:0", "2:0", "3:0", "3:1", "3:4")
    assert warmed(spec_of(out), tokenizer)[0] == ended("3:0", "3:1", "3:4")
    drafter = SuffixDrafter(5000)
    warm_start(drafter, spec_of(out, warm_from=f"{tmp_path}/day-*"), tokenizer, VOCAB_SIZE, pytest.fail, with_own=False)
    assert rows_of(drafter) == ended("1:0", "2:0")


def test_the_rows_of_other_shards_count(tmp_path, tokenizer):
    run_shard(tmp_path / "out", 4, shard="1/2", make_row=text_rows(""))
    assert warmed(spec_of(tmp_path / "out"), tokenizer)[0] == ended("2", "3")


def test_token_ids_of_this_job_need_no_proof(tmp_path, tokenizer):
    run_shard(tmp_path / "out", 2, token_ids=True, make_row=lambda i: row(i, token_ids=[i, 7, EOS]))
    rows, facts = warmed(spec_of(tmp_path / "out"), tokenizer)
    assert rows == [[0, 7, EOS], [1, 7, EOS]] and facts.num_encoded_tokens == 0


def test_token_ids_that_the_model_does_not_have_are_dropped(tmp_path, tokenizer):
    rows = [[1, 2], [260], [-5, 3], [3, 10**9], [259]]
    run_shard(tmp_path / "out", 5, token_ids=True, make_row=lambda i: row(i, token_ids=rows[i]))
    assert warmed(spec_of(tmp_path / "out"), tokenizer)[0] == [[1, 2], [259]]


def test_the_newest_stay_where_there_is_no_room(tmp_path, tokenizer):
    for day in range(4):
        finish_job(tmp_path / f"day-{day}", 80, make_row=text_rows(f"day {day}: "))
        for path in (tmp_path / f"day-{day}").rglob("*.parquet"):
            os.utime(path, (day, day))
    rows, facts = warmed(spec_of(tmp_path / "out", warm_from=f"{tmp_path}/day-*", index_tokens=1000), tokenizer)
    everything = ended(*(f"day {day}: {i}" for day in range(4) for i in range(80)))
    assert rows[1:] == everything[-len(rows) + 1 :] and 60 < len(rows) < 120
    # The footers tell of 160 tokens a job, so nothing was left out before it came to the index.
    assert facts.num_rows == 320


def test_no_yesterday_is_a_warning(tmp_path, tokenizer):
    warnings: list[str] = []
    rows, _ = warmed(spec_of(tmp_path / "out", warm_from=f"{tmp_path}/day-*"), tokenizer, warnings.append)
    assert rows == [] and len(warnings) == 1 and "nothing behind" in warnings[0]


def test_answers_that_the_model_has_no_tokens_for_are_left_out(tmp_path, tokenizer):
    """A tokenizer may have been given tokens past the model's embeddings."""
    finish_job(tmp_path / "old", 2, make_row=text_rows(""))
    drafter = SuffixDrafter(5000)
    spec = spec_of(tmp_path / "new", warm_from=str(tmp_path / "old"))
    assert warm_start(drafter, spec, tokenizer, ord("1"), pytest.fail).num_rows == 0
    assert warm_start(drafter, spec, tokenizer, EOS + 1, pytest.fail).num_rows == 2


def test_overwrite_does_not_clear_what_the_job_begins_with(tmp_path):
    out = tmp_path / "out"
    spec = spec_of(out, warm_from=f"{out}/")
    check_sources(spec)
    overwriting = spec.model_copy(update={"output": spec.output.model_copy(update={"if_exists": "overwrite"})})
    with pytest.raises(ConfigError, match=r"speculation\.warm_from: .* clears; choose another"):
        check_sources(overwriting)


def test_spill_that_goes_away_meanwhile_is_no_loss(tmp_path, tokenizer, monkeypatch):
    writer = open_writer(tmp_path / "out", 6, rows_per_part=3)
    expect(writer)
    writer.write([text_rows("")(i) for i in (0, 1, 2, 4)])
    close(writer)
    opened = LocalStore.open

    def gone(store, name):
        if "spill" in name:
            raise FileNotFoundError(2, "No such file or directory", name)
        return opened(store, name)

    monkeypatch.setattr(LocalStore, "open", gone)
    assert warmed(spec_of(tmp_path / "out"), tokenizer)[0] == ended("0", "1", "2")


def test_only_a_suffix_index_is_filled(tmp_path, tokenizer):
    finish_job(tmp_path / "old", 2, make_row=text_rows(""))
    spec = spec_of(tmp_path / "new", warm_from=str(tmp_path / "old"))
    suffix = SuffixDrafter(5000)
    warm_start(SuffixThenModel(suffix, NgramDrafter()), spec, tokenizer, VOCAB_SIZE, pytest.fail)
    assert rows_of(suffix) == ended("0", "1")
    for drafter in (None, NgramDrafter(), SuffixDrafter(0)):
        assert warm_start(drafter, spec, tokenizer, VOCAB_SIZE, pytest.fail).num_rows == 0


def test_an_index_is_kept_and_found_again(tmp_path, tokenizer):
    finish_job(tmp_path / "old", 3, make_row=text_rows(""))
    output = OutputFolder(str(tmp_path / "old"))
    folder = output.shard(Shard(1, 2))
    folder.create()
    drafter = SuffixThenModel(seeded([5, 6, EOS], [7]), NgramDrafter())
    save_index(drafter, folder, Shard(1, 2), tokenizer, pytest.fail)
    part = tmp_path / "old" / "suffix_index" / "part-00001.parquet"
    assert pq.read_schema(part).metadata[VOCABULARY].decode() == vocabulary_hash(tokenizer.token_bytes())
    rows, facts = warmed(spec_of(tmp_path / "new", warm_from=str(tmp_path / "old")), tokenizer)
    assert rows == [[5, 6, EOS], [7], *ended("0", "1", "2")] and facts.num_encoded_tokens == 6


def test_what_finished_after_the_last_draft_is_kept(tmp_path, tokenizer):
    drafter = SuffixDrafter(5000)
    request = Request(0, [1], SamplingParams(), output_token_ids=[5, 6, EOS], finish_reason=FinishReason.STOP)
    drafter.forget(request)
    folder = OutputFolder(str(tmp_path)).shard(Shard())
    folder.create()
    save_index(drafter, folder, Shard(), tokenizer, pytest.fail)
    assert pq.read_table(tmp_path / "suffix_index")["token_ids"].to_pylist() == [[5, 6, EOS]]


def test_another_tokenizers_index_is_refused(tmp_path, tokenizer):
    class Other(Tokenizer):
        def token_bytes(self):
            return [bytes([255 - b]) for b in range(256)] + [b""] * 4

    finish_job(tmp_path / "old", 2, make_row=text_rows(""))
    with OutputFolder(str(tmp_path / "old")).finalizing() as folder:
        save_index(seeded([5, 6]), folder, Shard(), Other(tiny_model.make_tokenizer()), pytest.fail)
    assert warmed(spec_of(tmp_path / "new", warm_from=str(tmp_path / "old")), tokenizer)[0] == ended("0", "1")


KILLED = """
import os, sys
import numpy as np
from specrun.jobs import store
from specrun.jobs.folder import OutputFolder
from specrun.jobs.saved_index import write_saved_index
if sys.argv[2] == "replace":
    os.replace = lambda *paths: os._exit(9)
else:
    store.sync = lambda path: os._exit(9)
folder = OutputFolder(sys.argv[1]).shard(__import__("specrun.jobs.shard", fromlist=["Shard"]).Shard())
folder.create()
write_saved_index(folder, 0, np.arange(6, dtype=np.int32), np.array([0, 3]), "mine")
"""


@pytest.mark.parametrize("call", ["sync", "replace"])
def test_a_kill_while_saving_leaves_the_old_index_or_none(tmp_path, call):
    run_shard(tmp_path / "out", 2, make_row=text_rows(""))
    environment = {**os.environ, "PYTHONPATH": str(ROOT / ".src")}
    killed = subprocess.run([sys.executable, "-c", KILLED, str(tmp_path / "out"), call], env=environment)
    assert killed.returncode == 9
    assert list((tmp_path / "out" / ".specrun").rglob("suffix_index-*"))  # it had begun
    assert list((tmp_path / "out" / "suffix_index").iterdir()) == []
    batches = EarlierOutput(str(tmp_path / "out"), "mine", warn=pytest.fail).batches()
    assert [text for batch in batches for text in batch.texts] == ["0", "1"]
    assert run_shard(tmp_path / "out", 2) == []
    assert not list((tmp_path / "out" / ".specrun").rglob("suffix_index-*"))


@pytest.mark.parametrize("save", [True, False])
def test_a_job_saves_its_index_when_told_to(job, save):
    job.prompts(3).set(speculation__method="suffix", speculation__save_index=save)
    assert job.run(drafter=seeded([1, 2], [3])).exit_code == 0 and job.is_success
    assert [path.name for path in job.out.glob("suffix_index/*")] == ["part-00000.parquet"] * save


def test_an_empty_index_is_not_saved(job):
    job.prompts(3).set(speculation__method="suffix", speculation__save_index=True)
    assert job.run(drafter=SuffixDrafter(5000)).exit_code == 0 and job.run(drafter=None).exit_code == 0
    assert not (job.out / "suffix_index").exists()


def test_a_stopped_job_saves_its_index_after_its_rows(job, monkeypatch):
    job.prompts(400).set(speculation__method="suffix", speculation__save_index=True)
    states = []
    monkeypatch.setattr("specrun.runner.run.save_index", lambda *args: states.append(job.report()["state"]))
    assert job.preempt(30, max_num_seqs=16, drafter=seeded([1, 2])).exit_code == 75
    assert states == ["preempted"]


def test_an_index_that_cannot_be_saved_fails_no_job(job):
    job.prompts(3).set(speculation__method="suffix", speculation__save_index=True)
    job.out.mkdir()
    (job.out / "suffix_index").write_text("in the way")
    warnings: list[str] = []
    result = run_job(job.spec, builder=job.stub(drafter=seeded([1, 2])), warn=warnings.append)
    assert result.exit_code == 0 and job.is_success
    (warning,) = warnings
    assert warning.startswith("speculation.save_index: the index is not saved, the rows are (")


def test_a_bucket_that_is_denied_ends_the_job_before_the_load(job, bucket):
    job.prompts(3).set(speculation__method="suffix", speculation__warm_from=f"{bucket.url}/out/day-*")
    bucket.server.fail("denied")
    with pytest.raises(InputMissing, match=r"speculation\.warm_from .*is denied"):
        job.run()
    assert job.builder.num_loads == 0


def test_from_bucket_to_bucket(job, bucket, tokenizer):
    job.prompts(3).set(speculation__method="suffix", speculation__save_index=True)
    job.set(output__path=f"{bucket.url}/out/day-1")
    assert job.run(drafter=seeded([1, 2], [3])).exit_code == 0
    assert bucket.names("out/day-1/suffix_index") == ["out/day-1/suffix_index/part-00000.parquet"]
    spec = spec_of(f"{bucket.url}/out/day-2", warm_from=f"{bucket.url}/out/day-*")
    assert warmed(spec, tokenizer)[0] == ended("word 0", "word 1", "word 2")  # the stub has another tokenizer
    job.set(output__path=f"{bucket.url}/out/day-3")
    job.prompts(400).preempt(30, max_num_seqs=16)
    rows, _ = warmed(spec_of(f"{bucket.url}/out/day-3"), tokenizer)
    assert len(rows) >= 16 and all(bytes(row[:5]) == b"word " for row in rows)


def test_no_output_shows_where_the_drafts_came_from(model_job):
    def finish(name, **options):
        result = run_job(move(model_job, name, **options).spec, warn=pytest.fail)
        assert result.exit_code == 0
        return result.report

    cold = finish("cold", speculation__save_index=True, output__token_ids=True)
    rows = model_job.rows()
    cold_out, facts = str(model_job.out), cold["drafter_facts"]
    assert facts["seeded_tokens"] == 0 and facts["index_rows"] == 40
    warm = finish("warm", speculation__warm_from=cold_out, speculation__save_index=False)
    assert model_job.rows() == rows and warm["drafter_facts"]["seeded_tokens"] == facts["index_tokens"]
    texts = finish("texts", speculation__warm_from=f"{cold_out}/data")
    assert model_job.rows() == rows and texts["drafter_facts"]["seeded_tokens"] > 0
    # Temperature and noise are the same, so yesterday's answers are today's, and their drafts are right.
    assert warm["num_accepted_tokens"] > 2 * cold["num_accepted_tokens"]


def test_a_resumed_job_drafts_from_what_it_did_before(model_job):
    spec = model_job.set(speculation__save_index=True, output__token_ids=True).spec
    steps = iter(range(10**6))
    limited = JobSpec.load(model_job.file, ["run.max_runtime_s=1", "run.grace_s=0"])
    stopped = run_job(limited, clock=lambda: 2.0 if next(steps) > 30 else 0.0)
    done = stopped.report["num_rows"]
    assert stopped.exit_code == 75 and 0 < done < 40
    assert (model_job.out / "suffix_index" / "part-00000.parquet").exists()
    result = run_job(spec)
    assert result.exit_code == 0
    assert result.report["drafter_facts"]["seeded_tokens"] > 4 * done
    stopped_rows = model_job.rows()
    assert run_job(move(model_job, "straight").spec).exit_code == 0
    assert model_job.rows() == stopped_rows
