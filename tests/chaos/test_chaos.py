"""The campaign of `make chaos`, small: each kill and each fault at least once."""

from tests.chaos.chaos import campaign
from tests.chaos.plans import CHOSEN, FAULTS, KILLS


def test_no_row_is_lost_doubled_or_silently_wrong(tmp_path):
    chaos = campaign(tmp_path / "chaos", runs=12, faults=len(FAULTS), shards=2, rows=150)
    assert not chaos.violations, "\n".join(chaos.violations)
    assert chaos.num_runs == 12 + len(FAULTS)
    assert all(chaos.tally.aimed[name] for name in KILLS)
    assert all(chaos.tally.seen[name] for name in CHOSEN)
    assert chaos.tally.resumed_rows > 0
    assert chaos.tally.reads > 0
