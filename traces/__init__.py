"""What arrives: workflows, their stages and true lengths, from files, public formats or a generator."""

from traces.files import SHIPPED, load_trace, read_trace, write_trace
from traces.schema import (
    Run,
    SharedPrefix,
    Stage,
    Trace,
    TraceError,
    Workflow,
    to_dict,
    workflow_from_dict,
)

__all__ = [
    "SHIPPED",
    "Run",
    "SharedPrefix",
    "Stage",
    "Trace",
    "TraceError",
    "Workflow",
    "load_trace",
    "read_trace",
    "to_dict",
    "workflow_from_dict",
    "write_trace",
]
