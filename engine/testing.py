"""Stand-ins for the engine and a tokenizer, for tests and dry runs of everything around them. No torch, no model.

StubEngine answers each request with its own prompt tokens. It keeps the manners of the real one: it draws requests only
as capacity frees up, counts in `stats`, calls `on_step` once a step, and may finish requests out of order.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import islice
from typing import TYPE_CHECKING, Any

from .request import FinishReason, Request, RequestOutput
from .trace import EngineStats, StepRecord

if TYPE_CHECKING:
    from .drafters.base import Drafter

WORD_START = 256
FIRST_WORD = 257


class WordTokenizer:
    """One token a word, words being what whitespace separates. Past max_words distinct words it spells out bytes.

    `token_bytes` gives every word with a leading space, so stop strings see the text with single spaces.
    """

    def __init__(self, max_words: int = 1 << 17, has_chat_template: bool = False) -> None:
        self.has_chat_template = has_chat_template
        self._max_words = max_words
        self._ids: dict[str, int] = {}
        self._words: list[str] = []

    def token_id(self, word: str) -> int:
        """The id of a word, taking a new one where there is room; KeyError where there is none."""
        token = self._ids.get(word)
        if token is None:
            if len(self._words) >= self._max_words:
                raise KeyError(word)
            token = self._ids[word] = FIRST_WORD + len(self._words)
            self._words.append(word)
        return token

    def encode_batch(self, texts: Sequence[str], add_special_tokens: bool = True) -> list[list[int]]:
        """Token ids of each text."""
        get = self._ids.get
        rows: list[list[int]] = []
        for text in texts:
            words = text.split()
            ids = list(map(get, words))
            rows.append(self._spell(words) if None in ids else ids)  # type: ignore[arg-type]
        return rows

    def _spell(self, words: Sequence[str]) -> list[int]:
        """Token ids of words of which some are new."""
        ids: list[int] = []
        for word in words:
            token = self._ids.get(word)
            if token is not None:
                ids.append(token)
            elif len(self._words) < self._max_words:
                ids.append(self.token_id(word))
            else:
                ids += [WORD_START, *word.encode("utf-8", "replace")]
        return ids

    def decode_batch(self, rows: Sequence[Sequence[int]]) -> list[str]:
        """Words joined by single spaces."""
        words = self._words
        texts = []
        for row in rows:
            if row and min(row) < FIRST_WORD:
                texts.append(self._decode_bytes(row))
            else:
                texts.append(" ".join([words[token - FIRST_WORD] for token in row]))
        return texts

    def _decode_bytes(self, row: Sequence[int]) -> str:
        return b"".join(map(self._piece, row)).decode("utf-8", "replace").removeprefix(" ")

    def _piece(self, token: int) -> bytes:
        if token >= FIRST_WORD:
            return b" " + self._words[token - FIRST_WORD].encode("utf-8", "replace")
        return b" " if token == WORD_START else bytes([token])

    def token_bytes(self) -> list[bytes]:
        """Bytes that each token adds to the text, for the words seen so far."""
        return (
            [bytes([b]) for b in range(256)] + [b" "] + [b" " + word.encode("utf-8", "replace") for word in self._words]
        )

    def render(
        self,
        messages: Sequence[dict[str, Any]],
        chat_template: str | None = None,
        continue_final_message: bool = False,
    ) -> str:
        """Each message as `role: content`, then the assistant's turn, unless the last message is to be continued."""
        text = "\n".join(f"{m['role']}: {m['content']}" for m in messages)
        return text if continue_final_message else f"{text}\nassistant:"


class StubEngine:
    """Echoes prompts: the output is the first max_tokens tokens of the prompt.

    A request whose prompt holds the token `fail_on` ends with finish_reason error; one that holds `raise_on` makes
    `run` raise RuntimeError; one that holds `slow_on` runs for `slow_steps` steps, while the others go on. With a
    `seed`, half of the running requests (picked at random) finish in each step; without, all of them. Each step sleeps
    `sleep_s` seconds; a request that has run for `request_timeout_s` of them ends with finish_reason timeout. With
    `num_draft_tokens` > 0 every request counts one draft of that many tokens, as many accepted as its output allows. A
    `drafter` is carried along and asked for nothing.
    """

    device_name = "stub"
    dtype_name = "none"

    def __init__(
        self,
        *,
        max_model_len: int = 4096,
        max_num_seqs: int = 256,
        sleep_s: float = 0.0,
        fail_on: int | None = None,
        raise_on: int | None = None,
        slow_on: int | None = None,
        slow_steps: int = 200,
        request_timeout_s: float | None = None,
        seed: int | None = None,
        num_draft_tokens: int = 0,
        drafter: Drafter | None = None,
    ) -> None:
        self.drafter = drafter
        self.max_model_len = max_model_len
        self.max_num_seqs = max_num_seqs
        self.stats = EngineStats()
        self.on_step: Callable[[StepRecord], None] | None = None
        self._sleep_s = sleep_s
        self._fail_on = fail_on
        self._raise_on = raise_on
        self._slow_on = slow_on
        self._slow_steps = slow_steps
        self._request_timeout_s = request_timeout_s
        self._ends_at_step: dict[Request, int] = {}
        self._random = random.Random(seed) if seed is not None else None
        self._num_draft_tokens = num_draft_tokens

    def run(self, requests: Iterable[Request | None]) -> Iterator[RequestOutput]:
        """Outputs of the requests, each as soon as it is finished. Never holds more than max_num_seqs requests.

        None in `requests` means that nothing is ready yet.
        """
        source = iter(requests)
        running: list[Request] = []
        begin = time.perf_counter()
        while True:
            drawn_from = time.perf_counter()
            drawn = list(islice(_up_to_none(source), self.max_num_seqs - len(running)))
            admitted = [request for request in drawn if request is not None]
            started = time.perf_counter()
            running += admitted
            self._admit(admitted)
            if not running:
                if drawn:
                    continue
                return
            overdue, running = self._pick_overdue(running)
            finished, running = self._pick(running)
            outputs = self._step(finished) + [self._timeout(request) for request in overdue]
            record = self._record(started - begin, started - drawn_from, admitted, finished, outputs, started)
            try:
                if self.on_step is not None:
                    self.on_step(record)
            finally:
                yield from outputs

    def _admit(self, requests: list[Request]) -> None:
        for request in requests:
            request.began_at_s = self.stats.busy_s
            if self._slow_on is not None and self._slow_on in request.prompt_token_ids:
                self._ends_at_step[request] = self.stats.num_steps + self._slow_steps - 1

    def _pick_overdue(self, running: list[Request]) -> tuple[list[Request], list[Request]]:
        if self._request_timeout_s is None:
            return [], running
        latest = self.stats.busy_s - self._request_timeout_s
        return _partition(running, lambda request: request.began_at_s is not None and request.began_at_s <= latest)

    def _pick(self, running: list[Request]) -> tuple[list[Request], list[Request]]:
        """Those that finish in this step, and those that do not."""
        slow: list[Request] = []
        if self._ends_at_step:
            slow, running = _partition(running, lambda r: self._ends_at_step.get(r, 0) > self.stats.num_steps)
        if self._random is None:
            return running, slow
        self._random.shuffle(running)
        half = (len(running) + 1) // 2
        return running[:half], running[half:] + slow

    def _timeout(self, request: Request) -> RequestOutput:
        self._ends_at_step.pop(request, None)
        error = f"not finished after {self._request_timeout_s:g} s"
        return RequestOutput(
            request.request_id, [], FinishReason.TIMEOUT, None, len(request.prompt_token_ids), error=error
        )

    def _step(self, requests: list[Request]) -> list[RequestOutput]:
        if self._sleep_s:
            time.sleep(self._sleep_s)
        outputs = []
        fail_on, raise_on = self._fail_on, self._raise_on
        stop, length = FinishReason.STOP, FinishReason.LENGTH
        for request in requests:
            prompt = request.prompt_token_ids
            self._ends_at_step.pop(request, None)
            if raise_on is not None and raise_on in prompt:
                raise RuntimeError(f"stub engine: request {request.request_id} holds the token {raise_on}")
            if fail_on is not None and fail_on in prompt:
                error = f"request {request.request_id} holds the token {fail_on}"
                outputs.append(RequestOutput(request.request_id, [], FinishReason.ERROR, error=error))
                continue
            max_tokens = request.sampling_params.max_tokens
            reason = length if max_tokens < len(prompt) else stop
            logprobs = [0.0] * min(len(prompt), max_tokens) if request.sampling_params.logprobs is not None else None
            output = RequestOutput(
                request.request_id, prompt[:max_tokens], reason, None, len(prompt), logprobs=logprobs
            )
            self._speculate(output)
            outputs.append(output)
        return outputs

    def _speculate(self, output: RequestOutput) -> None:
        if self._num_draft_tokens:
            output.num_drafts = 1
            output.num_draft_tokens = self._num_draft_tokens
            output.num_accepted_tokens = min(self._num_draft_tokens, max(0, len(output.token_ids) - 1))

    def _record(
        self,
        start_s: float,
        input_wait_s: float,
        admitted: list[Request],
        finished: list[Request],
        outputs: list[RequestOutput],
        started: float,
    ) -> StepRecord:
        busy_s = time.perf_counter() - started
        num_drafts = sum([o.num_drafts for o in outputs])
        num_generation_tokens = sum([len(o.token_ids) for o in outputs])
        record = StepRecord(
            step=self.stats.num_steps,
            start_s=start_s,
            num_running=len(finished),
            num_scheduled=len(finished),
            num_waiting=0,
            num_prefill_tokens=sum([len(r.prompt_token_ids) for r in admitted]),
            num_batched_tokens=num_generation_tokens,
            num_context_tokens=0,
            num_drafts=num_drafts,
            num_proposed_tokens=sum([o.num_draft_tokens for o in outputs]),
            num_draft_tokens=sum([o.num_draft_tokens for o in outputs]),
            max_draft_len=max([o.num_draft_tokens for o in outputs], default=0),
            num_accepted_tokens=sum([o.num_accepted_tokens for o in outputs]),
            num_generation_tokens=num_generation_tokens,
            num_preemptions=0,
            kv_usage=len(finished) / self.max_num_seqs,
            rolling_acceptance_rate=None,
            reason="stub",
            policy_s=0.0,
            draft_s=0.0,
            verify_s=busy_s,
            other_s=0.0,
            input_wait_s=input_wait_s,
        )
        self.stats.add(record)
        self.stats.num_prompt_tokens += record.num_prefill_tokens
        self.stats.num_running = record.num_running
        self.stats.kv_usage = record.kv_usage
        return record


def _partition(requests: list[Request], belongs: Callable[[Request], bool]) -> tuple[list[Request], list[Request]]:
    """Those that belong, and the others."""
    return [r for r in requests if belongs(r)], [r for r in requests if not belongs(r)]


def _up_to_none(source: Iterator[Request | None]) -> Iterator[Request | None]:
    """What is ready: requests, and the None that ends them."""
    for request in source:
        yield request
        if request is None:
            return
