"""Response formats as grammars over a model's vocabulary, on the library llguidance and with its limits.

Text is what the tokenizer's own token_bytes() say, the table that decides stop strings too; special tokens are never
part of it.
"""

from __future__ import annotations

import json
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from ..engine.grammar import GrammarError
from ..jobs.response_format import ResponseFormat
from ..jobs.row_errors import INVALID_RESPONSE_FORMAT, RowFailure
from .grammar_text import advice, grammar_text, one_line, parts_of
from .tokenizer import TextTokenizer

if TYPE_CHECKING:
    from llguidance import LLMatcher

MAX_COMPILED = 64
"""Formats kept compiled."""
MAX_PROBES = 500
"""Parts of a refused schema that are tried for the one that is at fault."""
LIMITS: dict[str, Any] = {"max_lexer_states": 100_000, "step_lexer_fuel": 5_000_000, "verbose_errors": False}
"""Of the library. All count something, so they hit everywhere alike; the fuel of a step counts only what the lexer
meets for the first time, so it leaves the states to decide."""
MARK = "\x02"
"""Goes before text to be encoded as the middle of one."""

T = TypeVar("T")


class GrammarCompiler:
    """Makes grammars of one vocabulary. May be called from any thread."""

    def __init__(self, tokenizer: TextTokenizer, vocab_size: int, eos_token_ids: Iterable[int]) -> None:
        """vocab_size is the model's; ids that the tokenizer does not have are never legal."""
        self._tokenizer = tokenizer
        self._vocab_size = vocab_size
        self._ends = Ends(sorted(eos_token_ids))
        self._lock = threading.Lock()
        self._compiled: OrderedDict[ResponseFormat, CompiledFormat | RowFailure] = OrderedDict()
        self._library: Any = None

    def compile(self, format: ResponseFormat) -> FormatGrammar:
        """A new grammar of the format, for one request; RowFailure where it is malformed or nothing can follow it."""
        with self._lock:
            found = self._compiled.get(format)
            if found is None:
                found = self._compiled[format] = self._compile(format)
                if len(self._compiled) > MAX_COMPILED:
                    self._compiled.popitem(last=False)
            self._compiled.move_to_end(format)
        if isinstance(found, RowFailure):
            raise RowFailure(found.code, str(found))
        return FormatGrammar(found, self._ends, self._vocab_size)

    def _compile(self, format: ResponseFormat) -> CompiledFormat | RowFailure:
        if not self._ends.token_ids:
            return _failure(": the model has no end-of-sequence token, so nothing can end an output in time; remove it")
        if self._library is None:
            self._library = TokenTable(self._tokenizer, self._vocab_size, self._ends.token_ids).library
        try:
            compiled = CompiledFormat(self._library, grammar_text(format))
        except ValueError as exc:
            return _failure(f".{format.type}: {exc}")
        if (error := compiled.error) is None:
            return compiled
        place = self._locate(json.loads(format.value), error) if format.type == "json_schema" else ""
        return _failure(f".{format.type}{f' at {place}' if place else ''}: {advice(error)}")

    def _locate(self, schema: Any, error: str) -> str:
        """JSON pointer of the smallest part of a schema that alone has the same error; "" for the whole."""
        shared = {key: schema[key] for key in ("$defs", "definitions") if key in schema}
        place, parts, num_probes = "", list(parts_of(schema)), 0
        while parts and num_probes < MAX_PROBES:
            name, part = parts.pop(0)
            num_probes += 1
            probe = ResponseFormat("json_schema", json.dumps({**shared, **part}))
            if CompiledFormat(self._library, grammar_text(probe)).error == error:
                place, parts = place + name, list(parts_of(part))
        return place


class Ends:
    """The ids that end an output, and which of them the model used last: the best guess for the next time."""

    def __init__(self, token_ids: Sequence[int]) -> None:
        self.token_ids = frozenset(token_ids)
        self.usual = token_ids[0] if token_ids else -1


class CompiledFormat:
    """A format's start, copied for each request. Copies share the lexer's states, which only ever become more."""

    def __init__(self, library: Any, grammar: str) -> None:
        self._library, self._grammar = library, grammar
        self.start = self._begin()

    @property
    def error(self) -> str | None:
        """Why nothing can follow it, in one line."""
        return one_line(self.start.get_error()) if self.start.is_error() else None

    def renew(self) -> LLMatcher:
        """A start that no request has used, for the caller and for those that come after it."""
        self.start = self._begin()
        return self.start

    def _begin(self) -> LLMatcher:
        from llguidance import LLMatcher, LLParserLimits

        matcher = LLMatcher(self._library, self._grammar, log_level=0, limits=LLParserLimits(**LIMITS))
        if not matcher.is_error():
            matcher.compute_bitmask()  # shows that something can follow, and warms what its requests share
        return matcher


class FormatGrammar:
    """One request's place in a compiled format; an engine.grammar.Grammar.

    Nothing is ever rolled back: the library remembers its last mask under a key that two paths from one place may
    share. Drafts are looked at in a copy of the state at the output, which costs a microsecond or two.
    """

    def __init__(self, compiled: CompiledFormat, ends: Ends, vocab_size: int) -> None:
        self._compiled, self._ends, self._vocab_size = compiled, ends, vocab_size
        self._output: list[int] = []
        self._at_output: LLMatcher | None = None
        """Made when first asked for: a request may wait for long."""
        self._at_drafts: LLMatcher | None = None
        self._ahead: list[int] = []
        """What lies between the two."""
        self._masks: dict[tuple[int, ...], NDArray[np.uint32] | GrammarError] = {}
        """Drafts after the output -> what may follow them: asked for to cut drafts, and again to sample."""
        self._has_ended = False

    def anew(self) -> FormatGrammar:
        """One of the same format, for a request that has not begun."""
        return FormatGrammar(self._compiled, self._ends, self._vocab_size)

    def mask(self, drafts: Sequence[int]) -> NDArray[np.uint32]:
        """See Grammar. Read-only. Where text is forced, only the tokenizer's own tokens of it are legal."""
        key = tuple(drafts)
        if key not in self._masks:
            try:
                self._masks[key] = self._mask(key)
            except GrammarError as exc:
                self._masks[key] = exc
        found = self._masks[key]
        if isinstance(found, GrammarError):
            raise found
        return found

    def num_legal(self, drafts: Sequence[int]) -> int:
        """See Grammar."""
        for count, token in enumerate(drafts):
            if not 0 <= token < self._vocab_size or not self.mask(drafts[:count])[token // 32] >> token % 32 & 1:
                return count
        return len(drafts)

    def forced(self, limit: int) -> list[int]:
        """See Grammar."""
        if self._has_ended or limit < 1:
            return []
        _, tokens = self._ask([], lambda matcher: matcher.compute_ff_tokens())
        tokens = tokens[:limit]
        count, is_complete = self._ask(tokens, lambda matcher: matcher.is_stopped())
        found = [*tokens, self._ends.usual] if is_complete and count < limit else tokens[:count]
        return found[: self.num_legal(found)]

    def accept(self, token: int) -> None:
        """See Grammar."""
        if self.num_legal([token]) == 0:
            raise GrammarError("the output cannot follow its response format any further")
        self._output.append(token)
        self._has_ended = token in self._ends.token_ids
        if self._has_ended:
            self._ends.usual = token
        elif self._here().try_consume_tokens([token]) == 0:
            self._restart()
        if self._ahead[:1] == [token]:
            self._ahead = self._ahead[1:]
        else:
            self._at_drafts, self._ahead = None, []
        self._masks = {key[1:]: mask for key, mask in self._masks.items() if key[:1] == (token,)}

    def _mask(self, drafts: tuple[int, ...]) -> NDArray[np.uint32]:
        """What the library says. It never sees an end of sequence."""
        num_words = -(-self._vocab_size // 32)
        if self._has_ended or not self._ends.token_ids.isdisjoint(drafts):
            return np.zeros(num_words, dtype=np.uint32)
        count, bits = self._ask(drafts, lambda matcher: matcher.compute_bitmask())
        if count < len(drafts):
            raise GrammarError("the drafts leave the response format")
        return np.frombuffer(bits, dtype=np.uint32)[:num_words]  # the library adds a word to a vocabulary of whole ones

    def _ask(self, drafts: Sequence[int], question: Callable[[LLMatcher], T]) -> tuple[int, T]:
        """How many leading drafts are legal, and the answer of the library's state just after them.

        An error of the library is for good, and may be that of another request that shares its lexer. So it counts only
        when it comes again with a lexer that nobody has used: what a request may write depends on its own output.
        """
        for _ in range(2):
            count, matcher = self._after(drafts)
            answer = question(matcher)
            if not matcher.is_error():
                return count, answer
            problem = one_line(matcher.get_error())
            self._restart()
        raise GrammarError(f"the response format is too complex here: {problem}")

    def _here(self) -> LLMatcher:
        if self._at_output is None:
            self._at_output = self._compiled.start.deep_copy()
        return self._at_output

    def _after(self, drafts: Sequence[int]) -> tuple[int, LLMatcher]:
        """How many leading drafts are legal, and the state just after them."""
        if not drafts:
            return 0, self._here()
        if self._at_drafts is None or self._ahead != list(drafts[: len(self._ahead)]):
            self._at_drafts, self._ahead = self._here().deep_copy(), []
        count = len(self._ahead)
        if count < len(drafts):
            count += self._at_drafts.try_consume_tokens(list(drafts[count:]))
        self._ahead = list(drafts[:count])
        return count, self._at_drafts

    def _restart(self) -> None:
        """The same place with a lexer of its own. GrammarError where even that cannot get there."""
        self._at_output = self._compiled.renew().deep_copy()
        self._at_drafts, self._ahead = None, []
        if self._at_output.try_consume_tokens(self._output) < len(self._output):
            raise GrammarError("the response format is too complex for an output of this length")


class TokenTable:
    """A tokenizer as the library reads it, which asks for these names."""

    is_tokenizer_wrapper = True
    bos_token_id = None

    def __init__(self, tokenizer: TextTokenizer, vocab_size: int, eos_token_ids: frozenset[int]) -> None:
        from llguidance import LLTokenizer

        pieces = tokenizer.token_bytes()[:vocab_size]
        pieces += [b""] * (vocab_size - len(pieces))
        self.tokens = [b"" if token in eos_token_ids else piece for token, piece in enumerate(pieces)]
        self.special_token_ids = [token for token, piece in enumerate(self.tokens) if not piece]
        self.eos_token_id = min(eos_token_ids)
        self._encode_batch = tokenizer.encode_batch
        self.library = LLTokenizer(self, n_vocab=vocab_size, eos_token=sorted(eos_token_ids))  # type: ignore[arg-type]
        """What the library makes of it; takes a third of a second for 49 thousand tokens."""

    def __call__(self, text: str) -> list[int]:
        """The tokens of a text that is forced, in the middle of an output. Must not raise."""
        wanted = text.encode()
        # Many a tokenizer puts a blank before the first word of a text, but not behind a control character.
        for before in ("", MARK):
            try:
                found = self._encode(before, text)
            except Exception:  # a tokenizer of any kind; what matters is that the tokens are of this text
                break
            if b"".join([self.tokens[token] for token in found if token < len(self.tokens)]) == wanted:
                return found
        return self.library.greedy_tokenize(text)

    def _encode(self, before: str, text: str) -> list[int]:
        (ids,) = self._encode_batch([before + text], False)
        (skipped,) = self._encode_batch([before], False) if before else ([],)
        return ids[len(skipped) :]


def _failure(text: str) -> RowFailure:
    return RowFailure(INVALID_RESPONSE_FORMAT, f"response_format{text}")
