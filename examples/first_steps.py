"""First steps with the Python API: one run, a comparison of two policies, and a small sweep.

Covers: load_trace, load_cluster, simulate, sweep. Scenario: 200 coding workflows, 8 a second, on a small and
a large model that hold 32 calls each.
"""

from __future__ import annotations

from chimsim import load_cluster, load_trace, simulate, sweep

# One run. Everything that happened is in data frames: requests, workflows, engines, timeline.
trace = load_trace("apps")
cluster = load_cluster("qwen1.5b+7b", max_batch_size=32)
result = simulate(trace, cluster, "chimera", rps=8, seed=0, workflows=200)

workflows = result.workflows
print(workflows[["workflow_id", "model", "latency_s", "queue_time_s", "solved"]].head(3).to_string(index=False))
print(f"mean latency {workflows['latency_s'].mean():.1f} s, solved {workflows['solved'].mean():.0%}")

# The same arrivals and workflows under another policy: the seed decides both, the policy neither.
other = simulate(trace, cluster, "fcfs", rps=8, seed=0, workflows=200)
faster = (result.workflows["latency_s"] < other.workflows["latency_s"]).mean()
print(f"chimera is faster than fcfs for {faster:.0%} of the workflows")

# A sweep is the same keys as a spec file; its summary has one row a cell.
results = sweep(
    trace="apps", combo="qwen1.5b+7b", policy=["fcfs", "chimera"], tau=[0, 1], rps=8, slots=32, workflows=100
)
columns = ["policy", "tau", "mean_workflow_latency_s", "solved_rate"]
print(results.summary[columns].to_string(index=False, na_rep="-"))
