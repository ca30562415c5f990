"""Jobs replayed or made up, under any policy, in seconds of a cost surface: no model and no GPU needed."""

from .acceptance_process import Acceptance, AcceptanceProcess, Guesser, Guesses
from .oracle import Oracle
from .recorded_surface import RecordedSurface
from .result import Result
from .simulation import Simulation, simulate
from .surface import CostSurface, CsvSurface, Distorted, DraftCost, a100, h100, roofline, staircase
from .workload import Workload

__all__ = [
    "Acceptance",
    "AcceptanceProcess",
    "CostSurface",
    "CsvSurface",
    "Distorted",
    "DraftCost",
    "Guesser",
    "Guesses",
    "Oracle",
    "RecordedSurface",
    "Result",
    "Simulation",
    "Workload",
    "a100",
    "h100",
    "roofline",
    "simulate",
    "staircase",
]
