"""What ends an output, token by token."""

import pytest

from specrun.engine import FinishReason, Request, SamplingParams
from specrun.engine.stop import StopChecker

BYTES = [b"", b"a", b"b", b"ab", b"c", b"cab", "é".encode()[:1], "é".encode()[1:]]
NONE, A, B, AB, C, CAB, E1, E2 = range(8)
EOS = 0


def feed(tokens, max_model_len=100, num_prompt=1, **params):
    """(tokens taken, finish_reason, stop_reason) of an output that is appended token by token."""
    checker = StopChecker(frozenset({EOS}), BYTES, max_model_len)
    request = Request(0, [1] * num_prompt, SamplingParams(**params))
    for count, token in enumerate(tokens, start=1):
        request.output_token_ids.append(token)
        reason = checker.check(request)
        if reason is not None:
            return count, reason, request.stop_reason
    return len(tokens), None, request.stop_reason


def test_end_of_sequence_and_ignore_eos():
    assert feed([A, EOS, B]) == (2, FinishReason.STOP, None)
    assert feed([A, EOS, B], ignore_eos=True) == (3, None, None)


def test_stop_ids_are_named_as_text():
    assert feed([A, C, B], stop_token_ids=(C,)) == (2, FinishReason.STOP, "4")


def test_an_end_of_sequence_that_is_also_a_stop_id_needs_no_reason_unless_ignored():
    assert feed([EOS], stop_token_ids=(EOS,)) == (1, FinishReason.STOP, None)
    assert feed([EOS], stop_token_ids=(EOS,), ignore_eos=True) == (1, FinishReason.STOP, "0")


@pytest.mark.parametrize(
    ("tokens", "stop", "taken"),
    [
        ([A, B, C], "abc", 3),
        ([AB, C], "abc", 2),
        ([A, A, B, CAB], "abc", 4),
        ([CAB, CAB], "bc", 2),
        ([CAB], "a", 1),
        ([A, NONE, B], "ab", 3),
        ([E1, E2], "é", 2),
        ([C, E1, E1, E2, A], "é", 4),
    ],
)
def test_stop_strings_across_tokens(tokens, stop, taken):
    assert feed(tokens, stop=(stop,), ignore_eos=True) == (taken, FinishReason.STOP, stop)


def test_the_earliest_of_several_stop_strings_is_named():
    assert feed([C, CAB], stop=("b", "cca", "ab")) == (2, FinishReason.STOP, "cca")


def test_a_long_stop_string_does_not_widen_the_search_for_a_short_one():
    """ "a" came while min_tokens held it back; later tokens do not complete it."""
    assert feed([A, B, B, B], stop=("a", "bbbbbb"), min_tokens=2) == (4, None, None)
    assert feed([A, B, B, A], stop=("a", "bbbbbb"), min_tokens=2) == (4, FinishReason.STOP, "a")


def test_a_stop_string_may_begin_before_min_tokens():
    assert feed([A, B, C], stop=("abc",), min_tokens=3) == (3, FinishReason.STOP, "abc")
    assert feed([A, B, C], stop=("ab",), min_tokens=3) == (3, None, None)


def test_min_tokens_holds_back_every_kind_of_stop():
    assert feed([EOS, EOS, EOS], min_tokens=3) == (3, FinishReason.STOP, None)
    assert feed([C, C, C], stop_token_ids=(C,), min_tokens=2) == (2, FinishReason.STOP, "4")
    assert feed([EOS, A], max_tokens=2, min_tokens=2) == (2, FinishReason.LENGTH, None)


def test_length_by_max_tokens_and_by_model():
    assert feed([A, A, A], max_tokens=2) == (2, FinishReason.LENGTH, None)
    assert feed([A] * 9, max_model_len=6, num_prompt=3) == (3, FinishReason.LENGTH, None)


def test_a_stop_on_the_last_token_counts_as_a_stop():
    assert feed([A, EOS], max_tokens=2) == (2, FinishReason.STOP, None)
    assert feed([A, B], max_tokens=2, stop=("ab",)) == (2, FinishReason.STOP, "ab")


def test_a_token_past_the_tokenizer_has_no_text():
    assert feed([A, 200, B], stop=("ab",)) == (3, FinishReason.STOP, "ab")
