"""Combinations and cluster files: names, defaults, overrides, and what is refused."""

from __future__ import annotations

import doctest
import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

import chimsim.config
from calibration.profile import PROFILES
from chimsim.config import Cluster, EngineSpec, combo_cluster, combo_models, engines_by_combo, load_cluster
from chimsim.errors import ChimsimError, near

Write = Callable[[str], Path]


@pytest.fixture
def write(tmp_path: Path) -> Write:
    def write_file(text: str) -> Path:
        path = tmp_path / "c.toml"
        path.write_text(text, encoding="utf-8")
        return path

    return write_file


def engine_of(**settings: object) -> EngineSpec:
    return replace(combo_cluster("qwen7b").engines[0], **settings)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("combo", "name", "models"),
    [
        ("qwen7b", "qwen7b", ("Qwen2.5-7B",)),
        ("qwen1.5b+7b", "qwen1.5b+7b", ("Qwen2.5-1.5B", "Qwen2.5-7B")),
        ("QWEN7B + 1.5b", "qwen1.5b+7b", ("Qwen2.5-1.5B", "Qwen2.5-7B")),
        ("Qwen2.5-1.5B+7B", "qwen1.5b+7b", ("Qwen2.5-1.5B", "Qwen2.5-7B")),
        ("qwen1.5b+3b+14b", "qwen1.5b+3b+14b", ("Qwen2.5-1.5B", "Qwen2.5-14B", "Qwen2.5-3B")),
        ("llama3b+ministral8b", "llama3b+ministral8b", ("Llama-3.2-3B", "Ministral-8B")),
        ("llama3-8b+70b", "llama3-8b+70b", ("Llama-3-70B", "Llama-3-8B")),
        ("llama8b+qwen3b+14b", "qwen3b+llama8b+qwen14b", ("Llama-3.1-8B", "Qwen2.5-14B", "Qwen2.5-3B")),
    ],
)
def test_combinations(combo: str, name: str, models: tuple[str, ...]) -> None:
    cluster = combo_cluster(combo)
    assert cluster.name == name
    assert cluster.models == combo_models(combo) == models
    assert [engine.name for engine in cluster.engines] == list(models)
    assert combo_cluster(name) == cluster


def test_defaults_are_the_profiles() -> None:
    engine = combo_cluster("qwen14b").engines[0]
    assert (engine.max_num_seqs, engine.max_num_batched_tokens, engine.block_tokens) == (256, 2048, 16)
    assert (engine.scheduling, engine.prefix_caching, engine.max_model_len) == ("fcfs", True, 32768)
    assert engine.max_batch_size == 39
    assert engine.num_kv_tokens == PROFILES["Qwen2.5-14B"].num_kv_tokens
    assert engine.decode_s_per_token == PROFILES["Qwen2.5-14B"].decode_s_per_token(39)
    assert engine.warnings == ()


@pytest.mark.parametrize("counts", [{"qwen7b": 2}, {"Qwen2.5-7B": 2}])
def test_several_engines_of_a_model_are_numbered(counts: dict[str, int]) -> None:
    cluster = combo_cluster("qwen1.5b+7b", engines=counts)
    assert [engine.name for engine in cluster.engines] == ["Qwen2.5-1.5B", "Qwen2.5-7B/0", "Qwen2.5-7B/1"]
    assert cluster.models == ("Qwen2.5-1.5B", "Qwen2.5-7B")
    assert cluster.name == "qwen1.5b+7bx2"
    assert combo_cluster("qwen1.5b+7bx2") == cluster


def test_engine_counts_go_to_the_combinations_that_have_the_model() -> None:
    combos = ["qwen1.5b+7b", "qwen14b"]
    assert engines_by_combo(combos, {"qwen7b": 2, "Qwen2.5-14B": 3}) == {
        "qwen1.5b+7b": {"Qwen2.5-7B": 2},
        "qwen14b": {"Qwen2.5-14B": 3},
    }
    assert engines_by_combo(combos, {}) == {"qwen1.5b+7b": {}, "qwen14b": {}}


@pytest.mark.parametrize(
    ("combos", "counts", "message"),
    [
        (
            ["qwen1.5b+7b", "qwen14b"],
            {"qwen3b": 2},
            r"all combinations: engines of 'qwen3b', but the models are Qwen2\.5-1\.5B, Qwen2\.5-14B, Qwen2\.5-7B",
        ),
        (["qwen1.5b+7b", "qwen14b"], {"qwen77b": 2}, r"'qwen77b', .*did you mean 'qwen7b'\?"),
        (["qwen7b"], {"qwen3b": 2}, r"qwen7b: engines of 'qwen3b', but the models are Qwen2\.5-7B"),
        (["qwen7b", "qwen14b"], {"qwen7b": 2, "Qwen2.5-7B": 3}, r"engines of Qwen2\.5-7B are given twice"),
        (["qwen7b", "qwn14b"], {"qwen7b": 2}, r"'qwn14b': .*did you mean 'qwen14b'\?"),
    ],
)
def test_engine_counts_for_no_combination_are_refused(combos: list[str], counts: dict[str, int], message: str) -> None:
    with pytest.raises(ChimsimError, match=message):
        engines_by_combo(combos, counts)


def test_settings_of_a_combination() -> None:
    cluster = combo_cluster(
        "qwen1.5b+7b",
        max_batch_size={"qwen7b": 32},
        max_num_seqs=64,
        max_num_batched_tokens=512,
        prefix_caching=False,
        scheduling="priority",
    )
    small, large = cluster.engines
    assert (small.max_batch_size, large.max_batch_size) == (64, 32)
    for engine in cluster.engines:
        assert (engine.max_num_seqs, engine.max_num_batched_tokens) == (64, 512)
        assert (engine.prefix_caching, engine.scheduling) == (False, "priority")
    assert {engine.max_batch_size for engine in combo_cluster("qwen1.5b+7b", max_batch_size=16).engines} == {16}


def test_slots_that_kv_memory_cannot_hold_are_allowed_with_a_warning() -> None:
    cluster = combo_cluster("qwen1.5b+14b", max_batch_size=64)
    assert [engine.max_batch_size for engine in cluster.engines] == [64, 64]
    assert len(cluster.warnings) == 1
    assert "'Qwen2.5-14B': 64 slots of 2,000 tokens need 128,000 KV tokens and 78,048 are there" in cluster.warnings[0]


def test_engines_alike_warn_once() -> None:
    cluster = combo_cluster("qwen7b+14bx4", max_batch_size=64)
    assert len(cluster.engines) == 5
    assert [warning.split(":")[0] for warning in cluster.warnings] == ["engine 'Qwen2.5-14B/0'"]


@pytest.mark.parametrize(
    ("combo", "message"),
    [
        ("qwn7b", r"'qwn7b': .*did you mean 'qwen7b'\?"),
        ("qwen1.5b+8b", r"'qwen8b'; did you mean"),
        ("qwen7b+", r"has an empty part; .*say qwen1\.5b\+7b"),
        ("", r"has an empty part"),
        ("qwen7b+7b", r"names Qwen2\.5-7B twice; .*write qwen7bx2"),
        ("qwen7bx0", r"engines of Qwen2\.5-7B is 0; expected"),
        ("zzz", r"known: .*Ministral-8B"),
    ],
)
def test_a_wrong_combination_is_refused(combo: str, message: str) -> None:
    with pytest.raises(ChimsimError, match=message):
        combo_cluster(combo)


def test_settings_of_a_model_that_is_not_there_are_refused() -> None:
    with pytest.raises(ChimsimError, match=r"engines of 'qwen3b', but the models are Qwen2\.5-1\.5B, Qwen2\.5-7B"):
        combo_cluster("qwen1.5b+7b", engines={"qwen3b": 2})
    with pytest.raises(ChimsimError, match=r"slots of 'qwen77b', .*did you mean 'qwen7b'\?"):
        combo_cluster("qwen1.5b+7b", max_batch_size={"qwen77b": 2})
    with pytest.raises(ChimsimError, match=r"slots of Qwen2\.5-7B are given twice"):
        combo_cluster("qwen7b", max_batch_size={"qwen7b": 2, "Qwen2.5-7B": 2})
    with pytest.raises(ChimsimError, match=r"engines of Qwen2\.5-7B is 0"):
        combo_cluster("qwen7b", engines={"qwen7b": 0})


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"max_batch_size": 300}, r"max_batch_size \(slots\) is 300; expected at most max_num_seqs \(256\)"),
        ({"max_batch_size": 0}, "max_batch_size is 0; expected a whole number above 0"),
        ({"max_batch_size": 1.5}, "max_batch_size is 1.5"),
        ({"max_num_batched_tokens": 255}, "max_num_batched_tokens is 255; .*as vLLM demands"),
        ({"num_kv_blocks": 1}, r"KV memory of 1 block; expected at least 2 \(32 tokens\)"),
        ({"max_model_len": -1}, "max_model_len is -1"),
        ({"scheduling": "priorty"}, "scheduling is 'priorty'; expected fcfs or priority; did you mean 'priority'"),
        ({"prefix_caching": "yes"}, "prefix_caching is 'yes'; expected true or false"),
    ],
)
def test_an_engine_that_cannot_be_is_refused(settings: dict[str, object], message: str) -> None:
    with pytest.raises(ChimsimError, match=f"engine 'Qwen2.5-7B': {message}"):
        engine_of(**settings)


def test_an_engine_whose_context_exceeds_its_memory_is_warned_of() -> None:
    engine = engine_of(num_kv_blocks=1001, max_batch_size=8)
    assert "max_model_len is 32,768, more than KV memory holds (16,000 tokens)" in engine.warnings[0]


def test_a_cluster_has_engines_with_names_of_their_own_in_order() -> None:
    with pytest.raises(ChimsimError, match="cluster 'c' has no engine"):
        Cluster("c", ())
    with pytest.raises(ChimsimError, match="two engines are named 'a'"):
        Cluster("c", (engine_of(name="a"), engine_of(name="a")))
    assert [e.name for e in Cluster("c", (engine_of(name="b"), engine_of(name="a"))).engines] == ["a", "b"]


def test_the_manifest_entry_is_json_and_follows_the_profile() -> None:
    cluster = combo_cluster("qwen1.5b+7b")
    entry = cluster.to_dict()
    assert json.loads(json.dumps(entry)) == entry
    assert entry["engines"][1]["profile"]["digest"] == PROFILES["Qwen2.5-7B"].digest
    slower = engine_of(profile=replace(PROFILES["Qwen2.5-7B"], host_s=0.001))
    assert Cluster("c", (slower,)).to_dict() != Cluster("c", (engine_of(),)).to_dict()


FILE = """
name = "mixed"
[[engine]]
model = "qwen1.5b"
count = 2
max_batch_size = 64
prefix_caching = false
[[engine]]
model = "Qwen2.5-14B"
tensor_parallel = 2
gpu = "rtx a6000"
name = "large"
max_num_seqs = 128
max_num_batched_tokens = 4096
max_model_len = 16384
num_kv_tokens = 400000
scheduling = "priority"
[[engine]]
model = "Qwen2.5-72B"
profile = "qwen14b"
"""


def test_a_cluster_file(write: Write) -> None:
    cluster = load_cluster(write(FILE))
    assert cluster.name == "mixed"
    small, second, other, large = cluster.engines
    assert (small.name, second.name, large.name) == ("Qwen2.5-1.5B/0", "Qwen2.5-1.5B/1", "large")
    assert (small.max_batch_size, small.prefix_caching, small.scheduling) == (64, False, "fcfs")
    assert (large.model, large.profile.gpus, large.max_num_seqs, large.max_batch_size) == ("Qwen2.5-14B", 2, 128, 128)
    assert (large.max_num_batched_tokens, large.max_model_len, large.num_kv_tokens) == (4096, 16384, 400_000)
    assert large.scheduling == "priority"
    assert (other.name, other.model, other.profile.model) == ("Qwen2.5-72B", "Qwen2.5-72B", "Qwen2.5-14B")


def test_the_example_of_the_readme_is_this_one(write: Write) -> None:
    readme = (Path(__file__).parents[2] / "calibration" / "README.md").read_text(encoding="utf-8")
    example = readme.split("## Cluster files")[1].split("```toml")[1].split("```")[0]
    assert load_cluster(write(example)) == load_cluster(write(FILE))


def test_unnamed_engines_of_a_model_are_numbered_across_entries(write: Write) -> None:
    text = '[[engine]]\nmodel = "qwen7b"\n[[engine]]\nmodel = "qwen7b"\nmax_batch_size = 8\n'
    cluster = load_cluster(write(text))
    assert cluster.name == "c"
    assert [(e.name, e.max_batch_size) for e in cluster.engines] == [("Qwen2.5-7B/0", 256), ("Qwen2.5-7B/1", 8)]


def test_a_profile_file_beside_the_cluster_file(write: Write, tmp_path: Path) -> None:
    slower = PROFILES["Qwen2.5-7B"].to_toml().replace("value = 0.0219", "value = 0.0220")
    (tmp_path / "mine.toml").write_text(slower, encoding="utf-8")
    engine = load_cluster(write('[[engine]]\nprofile = "mine.toml"\n')).engines[0]
    assert engine.model == "Qwen2.5-7B"
    assert engine.profile.decode_s_per_token(1) == 0.022


def test_what_is_given_goes_before_the_file(write: Write) -> None:
    path = write(FILE)
    assert {e.max_batch_size for e in load_cluster(path, max_batch_size=16).engines} == {16}
    by_model = load_cluster(path, max_batch_size={"qwen1.5b": 16}, scheduling="priority", prefix_caching=True)
    assert [e.max_batch_size for e in by_model.engines] == [16, 16, 39, 128]
    assert {(e.scheduling, e.prefix_caching) for e in by_model.engines} == {("priority", True)}
    with pytest.raises(ChimsimError, match="number of engines stands in the file"):
        load_cluster(path, engines={"qwen1.5b": 3})


def test_a_combination_is_loaded_too() -> None:
    assert load_cluster("qwen1.5b+7b", engines={"qwen7b": 2}, max_batch_size=8) == combo_cluster(
        "qwen1.5b+7b", engines={"qwen7b": 2}, max_batch_size=8
    )


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", r"no \[\[engine\]\]; expected at least one"),
        ("[engine]\nmodel = 'qwen7b'", r"expected tables that begin with \[\[engine\]\]"),
        ("engines = 1", "unknown key 'engines'; did you mean 'engine'"),
        ("name = 7\n[[engine]]\nmodel = 'qwen7b'", "name is 7"),
        ("[[engine]]\nmodle = 'qwen7b'", "engine 1: unknown key 'modle'; did you mean 'model'"),
        ("[[engine]]\nzzz = 1", "engine 1: unknown key 'zzz'; known: model, profile"),
        ("[[engine]]\ncount = 1", "engine 1: names no model"),
        ("[[engine]]\nmodel = 'qwen7b'\n[[engine]]\nmodel = 'qwn7b'", "engine 2: .*did you mean 'qwen7b'"),
        ("[[engine]]\nmodel = 7", "engine 1: model is 7"),
        ("[[engine]]\nmodel = 'qwen7b'\ncount = 0", "engine 1: count is 0"),
        ("[[engine]]\nmodel = 'qwen7b'\nmax_batch_size = -4", "engine 1: max_batch_size is -4"),
        ("[[engine]]\nmodel = 'qwen7b'\nmax_batch_size = nan", "engine 1: max_batch_size is nan"),
        ("[[engine]]\nmodel = 'qwen7b'\nmax_batch_size = 300", "engine 1: .*at most max_num_seqs"),
        ("[[engine]]\nmodel = 'qwen7b'\nprefix_caching = 1", "engine 1: .*prefix_caching is 1"),
        ("[[engine]]\nmodel = 'qwen7b'\nscheduling = 'lifo'", "engine 1: .*scheduling is 'lifo'"),
        ("[[engine]]\nmodel = 'qwen7b'\ngpu = 'H100'", "engine 1: gpu is 'H100', but Qwen2.5-7B's profile is of"),
        ("[[engine]]\nmodel = 'qwen7b'\ntensor_parallel = 3", "engine 1: tensor_parallel is 3; expected a divisor"),
        ("[[engine]]\nmodel = 'qwen7b'\nnum_kv_tokens = 20", "engine 1: .*KV memory of 1 block"),
        ("[[engine]]\nprofile = 'absent.toml'", "engine 1: .*absent.toml: no such profile file"),
        ("[[engine]]\nmodel = 'qwen7b'\nname = 'a'\n[[engine]]\nmodel = 'qwen3b'\nname = 'a'",
         "two engines are named 'a'"),
        ("[[engine]]\nmodel = \nname = 1", "not valid TOML: .*line 2"),
    ],
)  # fmt: skip
def test_a_wrong_cluster_file_is_refused(write: Write, text: str, message: str) -> None:
    with pytest.raises(ChimsimError, match=rf"c\.toml: .*{message}"):
        load_cluster(write(text))


def test_a_missing_cluster_file_is_refused() -> None:
    with pytest.raises(ChimsimError, match=r"absent\.toml: no such cluster file"):
        load_cluster("absent.toml")


def test_the_docstring_example_holds() -> None:
    assert doctest.testmod(chimsim.config).failed == 0
    assert "combo_cluster(" in (combo_cluster.__doc__ or "")


def test_near_names() -> None:
    assert near("chimra", ["chimera", "fcfs"]) == "; did you mean 'chimera'?"
    assert near("CHIMERA", ["Chimera"]) == "; did you mean 'Chimera'?"
    assert near("zzz", ["chimera"]) == near("zzz", []) == ""
