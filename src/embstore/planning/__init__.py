"""What tables will cost on machines that one does not have yet.

    machine      what an id, a row, a byte, a message cost here; `measure` finds out
    workload     tables, ids a second, hosts with their cores, memory, network and disks
    plan         memory, traffic, step time, dumps, recovery, freshness, and what breaks first

The step is counted, not simulated: work of the cores, bytes on the wire, messages. `python -m
trust.plan_check` compares it with real runs.
"""

from embstore.planning.machine import REFERENCE, Machine
from embstore.planning.model import Limit, Plan, plan
from embstore.planning.workload import Hosts, PlannedTable, Workload, planned_table

__all__ = [
    "REFERENCE",
    "Hosts",
    "Limit",
    "Machine",
    "Plan",
    "PlannedTable",
    "Workload",
    "plan",
    "planned_table",
]
