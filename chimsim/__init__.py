"""chimsim: a simulator of mixed vLLM clusters that serve multi-stage agent workflows.

    from chimsim import load_cluster, load_trace, simulate, sweep

    result = simulate(load_trace("apps"), load_cluster("qwen1.5b+7b"), "chimera", rps=8, seed=0)
    result.workflows  # a DataFrame

The names are loaded when they are first used, so that ``import chimsim`` stays quick.
"""

from __future__ import annotations

from importlib import import_module
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from chimsim.config import load_cluster
    from chimsim.simulation import simulate
    from chimsim.sweeps import sweep
    from traces import load_trace

__version__ = "0.1.0"

__all__ = ["__version__", "compiled", "load_cluster", "load_trace", "simulate", "sweep"]

_HOMES = {
    "load_cluster": "chimsim.config",
    "load_trace": "traces",
    "simulate": "chimsim.simulation",
    "sweep": "chimsim.sweeps",
}


def compiled() -> bool:
    """Whether what every simulated call passes through was compiled when this package was built (docs/scale.md)."""
    spec = find_spec("chimsim.engine")
    return spec is not None and spec.origin is not None and not spec.origin.endswith(".py")


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'chimsim' has no attribute {name!r}")
    value = getattr(import_module(_HOMES[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
