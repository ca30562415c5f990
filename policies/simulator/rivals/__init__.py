"""The rules that other engines ship, as policies: what `goodput` is measured against.

Each is written from what its source documents and keeps its source's defaults. Where the source leaves something open,
the class says so and says how it was read. A job may name one as `specrun.policies.simulator.rivals:VllmTable`.
"""

from ...base import SpeculationPolicy
from .sglang_adaptive import SglangAdaptive
from .tensorrt_gate import TensorrtGate
from .tensorrt_schedule import TensorrtSchedule
from .tlt_switch import TltSwitch
from .ucb_bandit import UcbBandit
from .vllm_table import VllmTable

RIVALS: dict[str, type[SpeculationPolicy]] = {
    "vllm_table": VllmTable,
    "sglang_adaptive": SglangAdaptive,
    "tensorrt_schedule": TensorrtSchedule,
    "tensorrt_gate": TensorrtGate,
    "tlt_switch": TltSwitch,
    "ucb_bandit": UcbBandit,
}
"""Each makes a policy without arguments."""

__all__ = [
    "RIVALS",
    "SglangAdaptive",
    "TensorrtGate",
    "TensorrtSchedule",
    "TltSwitch",
    "UcbBandit",
    "VllmTable",
]
