"""Values from the environment are never written down or shown, and nothing in the data or the job reaches outside."""

import os

import pyarrow.parquet as pq
import pytest

from specrun.runner.cli import run_command
from tests.runner.test_cli import start_stub, wait_for_rows

TOKEN = "s3cr3t-8f1c"
PROMPT_COLUMNS = {"text"}
"""Of an engine that echoes: made of the prompt, which holds the secret."""

POLICY = """
from specrun.policies.fixed import Never


class Keyed(Never):
    def __init__(self, key):
        assert key == {token!r}


class Choosy(Never):
    def __init__(self, key):
        raise ValueError("not this key")
"""


@pytest.fixture(autouse=True)
def token(monkeypatch):
    monkeypatch.setenv("TOKEN", TOKEN)
    monkeypatch.setenv("SPECRUN_DEBUG", "1")


@pytest.fixture
def job(job, monkeypatch):
    """The secret in a system prompt, a template, a stop string and a key of the policy; two shards, one failed row."""
    (job.folder / "keyed_policy.py").write_text(POLICY.format(token=TOKEN))
    monkeypatch.syspath_prepend(job.folder)
    job.jsonl([{"prompt": None if i == 7 else f"word {i}", "lang": "en"} for i in range(40)])
    job.set(prompt__system="be brief ${TOKEN}", prompt__template="{{ prompt }} ${TOKEN}", sampling__max_tokens=64)
    job.set(sampling__stop=["${TOKEN}-${TOKEN}"], errors__max_failed_fraction=0.5, output__rows_per_part=10)
    return job.set(speculation__policy={"name": "keyed_policy:Keyed", "key": "${TOKEN}"})


def written(out):
    """All that lies in the output, Parquet decoded, but what is made of the prompt."""
    for path in sorted(out.rglob("*")):
        yield path, path.name
        if path.suffix == ".parquet":
            table = pq.read_table(path)
            if path.parent.name == "data":
                table = table.drop_columns([name for name in table.column_names if name in PROMPT_COLUMNS])
            yield path, str(table.to_pylist()) + str(pq.read_metadata(path).metadata)
        elif path.is_file() and "spill" not in path.parts:
            yield path, path.read_bytes().decode()


def assert_clean(job, capsys):
    out, err = capsys.readouterr()
    assert TOKEN not in out + err
    assert [path for path, content in written(job.out) if TOKEN in content] == []
    return out + err


def submit(job, *args, **options):
    return run_command(["submit", str(job.file), *args], job.stub(has_chat_template=True, **options))


def test_a_good_run(job, capsys):
    assert submit(job) == 0
    assert TOKEN in job.rows()[0]["text"], "the model must see it"
    assert "${TOKEN}" in (job.out / "job.resolved.yaml").read_text()
    assert_clean(job, capsys)
    for command in ("report", "finalize"):
        for args in ([], ["--json"]):
            assert run_command([command, str(job.out), *args], job.stub(has_chat_template=True)) == 0
    assert run_command(["retry", str(job.out)], job.stub(has_chat_template=True)) == 0
    assert_clean(job, capsys)


def test_shards(job, capsys):
    for index in range(2):
        assert submit(job, "--shard", f"{index}/2") == 0
        assert_clean(job, capsys)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("sampling__max_tokens", "${TOKEN}"),
        ("sampling__stop_token_ids", ["${TOKEN}"]),
        ("sampling__logit_bias", {1: "${TOKEN}"}),
        ("sampling__temperature", "${TOKEN}"),
        ("run__shard", "${TOKEN}"),
        ("run__order", "${TOKEN}"),
        ("engine__device", "${TOKEN}"),
        ("engine__max_num_seqs", "${TOKEN}"),
        ("model__dtype", "${TOKEN}"),
        ("input__format", "${TOKEN}"),
        ("input__columns", "${TOKEN}"),
        ("output__if_exists", "${TOKEN}"),
        ("speculation__method", "${TOKEN}"),
        ("prompt__sytem", "${TOKEN}"),
        ("prompt__system", ["${TOKEN}"]),
        ("errors__max_failed_fraction", "${TOKEN}"),
        ("metrics__prometheus_port", "${TOKEN}"),
    ],
)
def test_a_value_that_does_not_fit(job, capsys, key, value):
    job.set(**{key: value})
    assert submit(job) == 78
    assert key.replace("__", ".") in assert_clean(job, capsys)
    assert not job.out.exists()


@pytest.mark.parametrize(
    "policy",
    [
        {"name": "always", "num_draft_tokens": "${TOKEN}"},
        {"name": "always", "num_draft_tokens": 1, "nope": "${TOKEN}"},
        {"name": "batch_threshold", "disable_above": "${TOKEN}"},
        {"name": "acceptance_gate", "low": "${TOKEN}"},
        {"name": "keyed_policy:Choosy", "key": "${TOKEN}"},
    ],
)
def test_a_policy_that_refuses_its_key(job, capsys, policy):
    job.set(speculation__policy=policy, speculation__method="ngram")
    assert submit(job) == 78
    assert "speculation.policy" in assert_clean(job, capsys)


@pytest.mark.parametrize("template", ["{{ prompt }} {% ${TOKEN} %}", "{{ prompt | ${TOKEN} }}", "{{ ${TOKEN} }}"])
def test_a_template_that_is_none(job, capsys, monkeypatch, template):
    monkeypatch.setenv("TOKEN", "s3cr3t")
    job.set(prompt__template=template, prompt__system=None, sampling__stop=[], speculation__policy="never")
    assert submit(job) == 78
    out, err = capsys.readouterr()
    assert "prompt.template" in err and "s3cr3t" not in out + err


@pytest.mark.parametrize("secret", ["prompt__system", "prompt__template", "sampling__stop"])
def test_a_changed_value(job, capsys, monkeypatch, secret):
    assert submit(job) == 0
    assert_clean(job, capsys)
    other = "0th3r-77aa"
    value = job.config[secret.partition("__")[0]][secret.partition("__")[2]]
    changed = [text.replace("TOKEN", "OTHER") for text in value] if isinstance(value, list) else value + "${OTHER}"
    monkeypatch.setenv("OTHER", other)
    job.set(**{secret: changed})
    assert submit(job) == 78
    text = assert_clean(job, capsys)
    assert secret.replace("__", ".") in text and "another configuration" in text and other not in text


def test_an_internal_error(job, capsys):
    with_crash = {"raise_on": "13"}
    assert submit(job, **with_crash) == 70
    assert job.report()["state"] == "failed"
    assert "Traceback" in assert_clean(job, capsys)


def test_a_model_that_does_not_load(job, capsys):
    assert submit(job, load_error="no device") == 69
    assert_clean(job, capsys)


def test_a_run_that_is_killed(job, capsys):
    """What is made of the prompt waits in the spill; everything else is as clean as after a good end."""
    job.set(speculation__policy="never", prompt__system=None)
    process = start_stub(job, sleep_s=0.1, max_num_seqs=4)
    wait_for_rows(job, process)
    process.kill()
    out, err = process.communicate(timeout=60)
    assert TOKEN not in out + err
    assert_clean(job, capsys)
    assert submit(job) == 0
    assert_clean(job, capsys)


def test_validate(job, capsys):
    """It shows a prompt, which is how one sees that the template is right; the secret in it is not shown."""
    for args in ([], ["--json"]):
        assert run_command(["validate", str(job.file), *args], job.stub(has_chat_template=True)) == 0
        assert "be brief" in assert_clean(job, capsys)


IDS = ["../../escape", "/etc/passwd", "a\nb", "a\x00b", "..", "", "a/b", "\u2028", "😀", "C:\\x", "x" * 5000]


@pytest.mark.parametrize("kind", ["jsonl", "openai-batch"])
def test_ids_stay_in_their_column(tmp_path, job, capsys, kind):
    if kind == "jsonl":
        job.jsonl([{"doc": row_id, "prompt": None} for row_id in IDS]).config["input"]["columns"] = {"id": "doc"}
        job.set(prompt__template=None)
    else:
        body = {"model": "stub", "messages": [{"role": "user", "content": "a"}]}
        lines = [
            {"custom_id": row_id, "method": "POST", "url": "/v1/chat/completions", "body": body}
            for row_id in IDS
            if row_id
        ]
        job.jsonl(lines).set(input__format=kind, output__format=kind, prompt__system=None, prompt__template=None)
    job.set(errors__max_failed_fraction=1.0, errors__abort_after_consecutive=100)
    before = {path for path in tmp_path.rglob("*") if job.out not in (path, *path.parents)}
    assert submit(job) == 0
    after = {path for path in tmp_path.rglob("*") if job.out not in (path, *path.parents)}
    assert after - before <= {job.file} | set(job.folder.glob("__pycache__/*")) | {job.folder / "__pycache__"}
    ids = [row["id"] for row in job.rows()]
    assert ids == (IDS if kind == "jsonl" else [row_id for row_id in IDS if row_id])
    if kind == "jsonl":
        assert [line["id"] for line in job.error_lines()] == IDS
    assert set(os.listdir(job.out / "data")) <= {f"part-00000-00000{i}.parquet" for i in range(2)}


@pytest.mark.parametrize("name", ["../../escape", "a\nb", "/etc/x", "..", "a b", "a\u0000b"])
def test_the_jobs_name_is_no_path(tmp_path, job, name):
    job.config["name"] = name
    assert submit(job) == 0
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(
        {"in.jsonl", "job.yaml", "keyed_policy.py", "out", "__pycache__"} & set(os.listdir(tmp_path))
    )
    assert job.report()["job"] == name
    prometheus = (job.out / "metrics.prom").read_text()
    assert all(line.startswith(("#", "specrun_")) for line in prometheus.splitlines())


def simple(job, **values):
    values = {"prompt__system": None, "sampling__stop": [], "speculation__policy": "never", **values}
    return job.set(errors__max_failed_fraction=1.0, errors__abort_after_consecutive=1000, **values)


def test_a_template_that_is_too_large(job, capsys):
    simple(job, prompt__template="{{ prompt }}" + "a" * (64 << 10))
    assert submit(job) == 78
    assert "prompt.template: 65548 bytes; at most 65536 are allowed" in capsys.readouterr().err


@pytest.mark.parametrize(
    "template",
    [
        "{{ prompt }}{% for i in range(90000) %}" + "a" * 1000 + "{% endfor %}",
        "{{ prompt }}{% for i in range(10 ** 9) %}a{% endfor %}",
        "{{ ''.__class__.__mro__[1].__subclasses__() }}{{ prompt }}",
        "{{ prompt.__class__ }}",
        "{{ prompt.format.__globals__ }}",
        "{{ ('{0.__class__}').format(prompt) }}",
        "{{ prompt | attr('__class__') }}",
        "{{ range.__init__.__globals__ }}{{ prompt }}",
        "{% include '/etc/passwd' %}{{ prompt }}",
        "{% import 'os' as os %}{{ prompt }}",
    ],
)
def test_a_template_that_wants_too_much_fails_its_rows(job, template):
    job.jsonl([{"prompt": f"word {i}"} for i in range(3)])
    simple(job, prompt__template=template)
    code = submit(job)
    if code == 78:  # refused as a whole
        return
    assert code == 0 and [row["error_code"] for row in job.rows()] == ["template_error"] * 3
    assert all(row["text"] is None and row["error_message"] for row in job.rows())


def test_a_template_cannot_change_its_row(job):
    job.jsonl([{"prompt": "a", "tags": ["x"]}, {"prompt": "b", "tags": ["y"]}])
    simple(job, prompt__template="{{ tags.append('z') }}{{ prompt }}")
    assert submit(job) == 0
    assert [(row["error_code"], row["tags"]) for row in job.rows()] == [
        ("template_error", '["x"]'),
        ("template_error", '["y"]'),
    ]


def test_a_message_in_a_report_is_json(job):
    """Whatever a row or a template says, errors.jsonl stays one object a line."""
    job.jsonl([{"prompt": f'"\n}}{i}\u2028\x00'} for i in range(3)])
    simple(job, prompt__template="{{ {}[prompt] }}")
    assert submit(job) == 0
    assert [line["row_index"] for line in job.error_lines()] == [0, 1, 2]
