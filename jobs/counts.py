"""How rows ended, counted. The counts of a part stand in its footer, so they agree with data/ after any crash."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(slots=True)
class RowCounts:
    """Rows by outcome and the tokens they hold."""

    num_ok: int = 0
    num_failed: int = 0
    """Rows with an error code."""
    num_prompt_tokens: int = 0
    num_output_tokens: int = 0
    error_codes: dict[str, int] = field(default_factory=dict)
    finish_reasons: dict[str, int] = field(default_factory=dict)

    @property
    def num_rows(self) -> int:
        """Rows counted."""
        return self.num_ok + self.num_failed

    def add(self, finish_reason: str | None, error_code: str | None, prompt_tokens: int, output_tokens: int) -> None:
        """Counts one row."""
        if error_code is None:
            self.num_ok += 1
        else:
            self.num_failed += 1
            self.error_codes[error_code] = self.error_codes.get(error_code, 0) + 1
        if finish_reason is not None:
            self.finish_reasons[finish_reason] = self.finish_reasons.get(finish_reason, 0) + 1
        self.num_prompt_tokens += prompt_tokens
        self.num_output_tokens += output_tokens

    def update(self, other: RowCounts) -> None:
        """Adds the rows that `other` counted."""
        self.num_ok += other.num_ok
        self.num_failed += other.num_failed
        self.num_prompt_tokens += other.num_prompt_tokens
        self.num_output_tokens += other.num_output_tokens
        for mine, theirs in ((self.error_codes, other.error_codes), (self.finish_reasons, other.finish_reasons)):
            for name, count in theirs.items():
                mine[name] = mine.get(name, 0) + count
