"""Reading operation tables: what counts how often, and what is wrong with a file, by file, line and column."""

from __future__ import annotations

import gzip
from pathlib import Path

import pandas as pd
import pytest

from calibration.figures import ProfileError
from calibration.operations import ONCE, V0_BLOCK, read_tables
from tests.calibration import tables as known


def test_times_are_summed_by_layer_and_step(tmp_path: Path) -> None:
    folder = known.write_tables(tmp_path / "RTX4090" / "meta-llama" / "Llama-3.1-8B" / "bf16" / "tp1")
    tables = read_tables(tmp_path)
    assert (tables.model, tables.gpu, tables.tp, tables.format) == ("Llama-3.1-8B", "RTX4090", 1, "current")
    assert tables.folder == folder
    assert tables.block[64] == pytest.approx(known.block_us(64) * 1e-6)
    assert tables.once[64] == pytest.approx(known.once_us(64) * 1e-6)
    assert tables.rows[256] == pytest.approx(known.rows_us(256) * 1e-6)
    assert tables.skew is None
    cell = tables.attention.query("chunk == 64 and context == 256 and batch == 4 and decode_context == 1024")
    assert cell["seconds"].item() == pytest.approx((known.chunk_us(64, 256) + known.mixed_us(4, 1024, 64)) * 1e-6)


def test_the_metadata_names_model_and_gpu_and_can_switch_skew_off(tmp_path: Path) -> None:
    folder = known.write_tables(tmp_path / "bf16" / "tp1", known.META.format(enabled="false"), skew=True)
    tables = read_tables(folder)
    assert (tables.model, tables.gpu, tables.version) == ("Llama-3.1-8B", "NVIDIA GeForce RTX 4090", "vLLM 0.19.0")
    assert tables.skew is None
    assert "switches skew_fit off" in tables.notes[0]
    assert read_tables(folder, skew=True).skew is not None
    known.write_tables(folder, known.META.format(enabled="true"), skew=True)
    assert read_tables(folder).skew is not None
    assert read_tables(folder, skew=False).skew is None


def test_skew_is_the_mean_over_usual_batches(tmp_path: Path) -> None:
    skew = read_tables(known.write_tables(tmp_path / "tp1", skew=True)).skew
    assert skew is not None
    assert skew["decode"].to_dict() == pytest.approx({8: 0.2, 32: 0.2})
    assert skew["mixed"].to_dict() == pytest.approx({8: 0.4, 32: 0.4})


def test_newer_columns_are_understood(tmp_path: Path) -> None:
    folder = known.write_tables(tmp_path / "tp1")
    frame = pd.read_csv(folder / "attention.csv.gz")
    frame["prefill_key"] = frame.pop("kv_prefill") + frame["prefill_chunk"] / 2
    frame["layer"], frame["decode_q_len"] = "attention", 1
    other = frame.assign(layer="indexer", time_us=1e9)
    verify = frame.assign(decode_q_len=3, time_us=1e9)
    before = read_tables(folder).attention
    pd.concat([frame, other, verify]).to_csv(folder / "attention.csv.gz", index=False)
    pd.testing.assert_frame_equal(read_tables(folder).attention, before)


def test_an_unknown_operation_counts_once_and_is_named(tmp_path: Path) -> None:
    folder = known.write_tables(tmp_path / "tp1")
    before = read_tables(folder).block[64]
    frame = pd.read_csv(folder / "dense.csv")
    extra = frame[frame["layer"] == "act_fn"].assign(layer="gate_glue", time_us=10.0)
    pd.concat([frame, extra]).to_csv(folder / "dense.csv", index=False)
    tables = read_tables(folder)
    assert tables.block[64] - before == pytest.approx(10e-6)
    assert tables.notes == ("operations not known, counted once a layer: gate_glue",)


def test_several_folders_need_a_choice(tmp_path: Path) -> None:
    for name in ("Llama-3.1-8B/bf16/tp1", "Qwen3-32B/bf16/tp1", "Qwen3-32B/bf16/tp2"):
        known.write_tables(tmp_path / "GPU" / "org" / name)
    with pytest.raises(
        ProfileError, match=r"3 folders with tables, several fit; name one, or --model and --tp: GPU/org"
    ):
        read_tables(tmp_path)
    with pytest.raises(ProfileError, match="none fits"):
        read_tables(tmp_path, model="Qwen3-8B")
    chosen = read_tables(tmp_path, model="qwen3 32b", tp=2)
    assert (chosen.folder.parts[-3:], chosen.tp) == (("Qwen3-32B", "bf16", "tp2"), 2)


@pytest.mark.parametrize(
    ("name", "old", "new", "message"),
    [
        (
            "dense.csv",
            "act_fn,4,4.16",
            "act_fn,4,fast",
            r"dense.csv: line \d+: time_us is 'fast'; expected a number above 0",
        ),
        ("dense.csv", "act_fn,4,4.16", "act_fn,4,0", r"time_us is 0; expected a number above 0"),
        ("dense.csv", "layer,tokens,time_us", "layer,token,time_us", r"no column 'tokens'; did you mean 'token'\?"),
        ("dense.csv", "o_proj", "attn_out", r"dense.csv lacks o_proj; it has act_fn, attn_out"),
        ("per_sequence.csv", "sampler", "sampling", r"per_sequence.csv lacks sampler"),
        ("per_sequence.csv", "lm_head,1,", "lm_head,-1,", r"line 2: sequences is -1; expected a number of at least 0"),
    ],
)
def test_a_wrong_file_is_refused(tmp_path: Path, name: str, old: str, new: str, message: str) -> None:
    path = known.write_tables(tmp_path / "tp1") / name
    text = path.read_text()
    assert old in text
    path.write_text(text.replace(old, new))
    with pytest.raises(ProfileError, match=message):
        read_tables(tmp_path)


def test_missing_and_broken_files_are_named(tmp_path: Path) -> None:
    with pytest.raises(ProfileError, match="no such folder"):
        read_tables(tmp_path / "none")
    with pytest.raises(ProfileError, match=r"no dense.csv or layers.csv in or below"):
        read_tables(tmp_path)
    folder = known.write_tables(tmp_path / "tp1")
    (folder / "attention.csv.gz").write_bytes(gzip.compress(b"\xff\xfe\x00")[:-9])
    with pytest.raises(ProfileError, match=r"attention.csv.gz: cannot be read"):
        read_tables(folder)
    (folder / "attention.csv.gz").unlink()
    with pytest.raises(ProfileError, match=r"attention.csv is missing; expected columns prefill_chunk"):
        read_tables(folder)
    (folder / "moe.csv").write_text("tokens,activated_experts,time_us\n")
    with pytest.raises(ProfileError, match="mixture-of-experts"):
        read_tables(folder)


def test_the_older_format(tmp_path: Path) -> None:
    folder = tmp_path / "A6000" / "Llama-3.1-8B-tp1"
    folder.mkdir(parents=True)
    names = [*V0_BLOCK, *ONCE, "lm_head", "attn"]
    rows = [(name, tokens, 0, 1, 1000 * tokens) for name in names for tokens in (1, 2)]
    columns = ["layer_name", "input", "kv_cache", "tp_size", "latency(ns)"]
    pd.DataFrame(rows, columns=columns).to_csv(folder / "layers.csv", index=False)
    kinds = ["time_stats.attn_prefill.median", "time_stats.attn_decode.median", "batch_size", "prefill_chunk_size",
             "kv_cache_size", "is_prefill"]  # fmt: skip
    cells = [(0.05, None, 1, 32, 96, True), (None, 0.02, 8, 0, 160, False)]
    pd.DataFrame(cells, columns=kinds).to_csv(folder / "attention.csv", index=False)
    tables = read_tables(tmp_path)
    assert (tables.model, tables.gpu, tables.tp, tables.format) == ("Llama-3.1-8B", "A6000", 1, "v0")
    assert tables.block[2] == pytest.approx(11 * 2e-6)
    assert tables.once[2] == pytest.approx(2 * 2e-6)
    assert tables.rows[2] == pytest.approx(2e-6)
    assert tables.attention.to_numpy().tolist() == [[32, 64, 0, 0, 5e-5], [0, 0, 8, 160, 2e-5]]


def test_metadata_that_says_nothing_is_refused_and_a_relabelling_is_told(tmp_path: Path) -> None:
    folder = known.write_tables(
        tmp_path / "RTX4090" / "org" / "Llama-3.1-8B" / "bf16" / "tp1", known.META.format(enabled="false")
    )
    assert any(
        "they are taken for Qwen2.5-7B, as asked" in note for note in read_tables(folder, model="Qwen2.5-7B").notes
    )
    meta = next(tmp_path.rglob("meta.yaml"))
    for data, message in ((b"", "no key in it"), (b"\xff\xfe\x00", "cannot be read")):
        meta.write_bytes(data)
        with pytest.raises(ProfileError, match=f"meta.yaml: {message}"):
            read_tables(folder)
