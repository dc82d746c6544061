"""Experiments' files: what they say, where they are found, and what is wrong with a bad one."""

from __future__ import annotations

from pathlib import Path

import pytest

from chimsim.errors import ChimsimError
from chimsim.grid import plan
from chimsim.reproduce.experiment import experiment_files, find_experiment, read_experiment
from chimsim.spec import read_spec, spec_from

GOOD = """
trace = "apps"
combo = "qwen1.5b+7b"
policy = ["fcfs", "stjf"]
rps = 4

[experiment]
title = "A title"
question = "A question?"

[quick]
workflows = 50

[[relation]]
claim = "stjf.mean_queue_time_s < fcfs.mean_queue_time_s"
says = "STJF waits less"
where = { rps = 4 }
when = "fcfs.queues_filled > 0.1"
"""


def written(folder: Path, text: str) -> Path:
    path = folder / "mine.toml"
    path.write_text(text)
    return path


def test_a_file_is_a_sweep_with_a_question(tmp_path: Path) -> None:
    path = written(tmp_path, GOOD)
    experiment = read_experiment(path)
    assert (experiment.name, experiment.title, experiment.quick) == ("mine", "A title", {"workflows": 50})
    (relation,) = experiment.relations
    assert relation.where == {"rps": [4]}
    assert relation.when is not None
    assert relation.when.number == 0.1
    # the same file for `chimsim sweep`
    assert read_spec(path) | {"trace": ["apps"]} == dict(experiment.keys)


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ('title = "A title"', "", "experiment: title is missing"),
        ('title = "A title"', 'titel = "A title"', "experiment: unknown key 'titel'; did you mean 'title'?"),
        ('title = "A title"', "title = 3", "experiment: title: 3 is not allowed here"),
        ('question = "A question?"', 'question = "?"\nkind = "swep"', "kind 'swep' is unknown; did you mean 'sweep'?"),
        ('says = "STJF waits less"', "", "relation 1: says is missing"),
        ("stjf.mean_queue_time_s <", "stjf.mean_queue_time_s is below", "relation 1: 'stjf.mean_queue_time_s is below"),
        ('when = "fcfs.queues_filled > 0.1"', 'when = "fcfs dominates stjf"', "is no comparison by < or >"),
        ("[[relation]]", "[relation]", "relation: expected tables, each headed"),
    ],
)
def test_what_is_wrong_is_named(tmp_path: Path, old: str, new: str, message: str) -> None:
    path = written(tmp_path, GOOD.replace(old, new))
    with pytest.raises(ChimsimError) as caught:
        read_experiment(path)
    assert str(path) in str(caught.value)
    assert message in str(caught.value)


def test_an_unknown_name_is_answered_with_those_there_are() -> None:
    with pytest.raises(ChimsimError, match="'fig33' is unknown; did you mean 'fig3'\\?"):
        find_experiment("fig33")


@pytest.mark.parametrize("path", experiment_files(), ids=lambda path: path.stem)
@pytest.mark.parametrize("quick", [False, True])
def test_shipped_experiments_are_well_formed(path: Path, quick: bool) -> None:
    """Every grid can be planned, and every relation speaks of policies that its file has."""
    experiment = read_experiment(path)
    assert experiment.relations
    keys = experiment.asked(quick)
    if experiment.kind != "sweep" or experiment.needs or experiment.prepare:
        return
    cells, _ = plan(spec_from({}, keys, source=str(path)))
    labels = {cell.axes["policy"] for cell in cells}
    for relation in experiment.relations:
        sides = [relation.claim.left, relation.claim.right]
        assert {side.label for side in sides if side is not None} <= labels
