"""README's own policy runs, so that what a newcomer copies works."""

from __future__ import annotations

import re
from pathlib import Path

from chimsim.config import combo_cluster
from chimsim.predictors import build_predictor
from chimsim.simulation import simulate
from policies import check_policy, load_policy
from traces import load_trace

README = Path(__file__).parents[1] / "README.md"


def test_the_policy_of_the_readme_passes_the_contract_and_runs(tmp_path: Path) -> None:
    found = re.search(r"<!-- policy -->\n```python\n(.*?)```", README.read_text(encoding="utf-8"), re.DOTALL)
    assert found is not None
    path = tmp_path / "my_policy.py"
    path.write_text(found[1], encoding="utf-8")
    name = f"{path}:ShortToBig"
    check_policy(lambda: load_policy(name))
    trace = load_trace("apps", limit=40)
    cluster = combo_cluster("qwen1.5b+7b")
    result = simulate(trace, cluster, load_policy(name), rps=4, predictor=build_predictor(trace, router="trace"))
    assert (result.workflows["status"] == "completed").all()
    assert set(result.workflows["model"]) == {"Qwen2.5-1.5B", "Qwen2.5-7B"}
