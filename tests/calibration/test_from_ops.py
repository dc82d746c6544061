"""Profiles from operation tables: what the tables do not say, the older format, and the real tables where they are."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from calibration.datasheets import CARDS, architecture, data_sheet, read_config
from calibration.engine_profile import EngineProfile
from calibration.figures import ProfileError
from calibration.fit import Fit
from calibration.from_ops import Settings, capture_sizes, operations_profile
from calibration.operations import read_tables
from calibration.profile import PROFILES
from calibration.scaling import Architecture, on_other_gpu
from tests.calibration import tables as known

DATA = Path(__file__).resolve().parents[3] / "shared" / "data" / "llmservingsim" / "profiler"
SHAPES = Architecture("M", (), 10, 512, 8, 4, 64, 5e8, 4e8, 1e8, 4096)


def test_the_profile_says_of_every_number_where_it_is_from(tmp_path: Path) -> None:
    tables = read_tables(known.write_tables(tmp_path / "tp1", known.META.format(enabled="true")))
    profile, _ = operations_profile(tables, SHAPES, Settings(max_num_seqs=128))
    assert (profile.gpu, profile.gpus, profile.max_model_len) == ("RTX 4090", 1, 4096)
    assert all("not stated" not in row.source for row in profile.provenance())
    for name in ("dense[1]", "decode", "mixed", "chunk", "sequences"):
        figure = profile.figure(name)
        assert figure.provenance == "measured"
        assert "kernels measured, sum fitted" in figure.source
    assert profile.figure("num_kv_tokens").provenance == "scaled"
    assert profile.num_kv_tokens == pytest.approx(
        (0.9 * 24 * 2**30 - 1.5e9 - 1e9) / SHAPES.kv_bytes_per_token, rel=1e-3
    )
    given, _ = operations_profile(tables, SHAPES, Settings(num_kv_tokens=41_408, max_model_len=2048))
    assert (given.num_kv_tokens, given.max_model_len) == (41_408, 2048)
    assert given.figure("num_kv_tokens").provenance == "assumed"


def test_graph_sizes_are_those_of_vllm() -> None:
    assert capture_sizes(256)[-3:] == (480, 496, 512)
    assert capture_sizes(128)[:5] == (1, 2, 4, 8, 16)
    assert capture_sizes(128)[-1] == 256
    assert capture_sizes(2) == (1, 2, 4)


def test_tensor_parallel_adds_an_all_reduce_that_the_tables_lack(tmp_path: Path) -> None:
    folder = known.write_tables(tmp_path / "GPU9" / "org" / "M" / "bf16" / "tp2")
    tables = read_tables(folder)
    with pytest.raises(ProfileError, match=r"hold no all-reduce.*'GPU9'.*--allreduce-us and --link-gb-per-s"):
        operations_profile(tables, SHAPES, Settings(num_kv_tokens=50_000))
    with pytest.raises(ProfileError, match="go together"):
        operations_profile(tables, SHAPES, Settings(num_kv_tokens=50_000, allreduce_call_s=1e-5))
    link = Settings(num_kv_tokens=50_000, allreduce_call_s=1e-5, link_bytes_per_s=20e9)
    two, _ = operations_profile(tables, SHAPES, link)
    one, _ = operations_profile(read_tables(folder, tp=2), SHAPES, link)
    assert two.gpus == one.gpus == 2
    assert two.allreduce_base_s == pytest.approx(21 * 1e-5)
    assert two.allreduce_token_s == pytest.approx(21 * 512 * 2 / 20e9, rel=1e-3)
    known_link, _ = operations_profile(tables, SHAPES, Settings(gpu="RTX PRO 6000", num_kv_tokens=50_000))
    assert known_link.allreduce_base_s == pytest.approx(21 * 14e-6)
    assert "hardware.yaml" in known_link.figure("allreduce_base_s").source


def test_what_is_missing_is_asked_for(tmp_path: Path) -> None:
    tables = read_tables(known.write_tables(tmp_path / "GPU9" / "org" / "M" / "bf16" / "tp1"))
    with pytest.raises(ProfileError, match=r"how much KV memory there is; give --num-kv-tokens .*or --memory-gib"):
        operations_profile(tables, SHAPES, Settings())
    with pytest.raises(ProfileError, match=r"1 x 1 GiB leave no room for KV beside the weights \(0.9 GiB\)"):
        operations_profile(tables, SHAPES, Settings(memory_bytes=2**30))


def test_gpus_are_known_by_any_of_their_names() -> None:
    for name in ("RTXPRO6000", "NVIDIA RTX PRO 6000 Blackwell Server Edition", "rtx-pro-6000"):
        sheet = data_sheet(name)
        assert sheet is not None
        assert sheet.bandwidth_bytes_per_s == 1792e9
    assert data_sheet("A6000") == data_sheet("NVIDIA RTX A6000")
    assert data_sheet("H100") is None


def test_models_are_known_by_name_or_by_their_config(tmp_path: Path) -> None:
    known_card = architecture("Qwen/Qwen3-32B")
    assert known_card is not None
    assert known_card.parameters == pytest.approx(32.76e9, rel=2e-3)
    shipped = architecture("meta-llama/Llama-3.1-8B")
    assert shipped is not None
    assert shipped.layers == PROFILES["Llama-3.1-8B"].layers
    assert architecture("unheard-of") is None
    config = tmp_path / "config.json"
    config.write_text(
        '{"num_hidden_layers": 64, "hidden_size": 5120, "num_attention_heads": 64, "num_key_value_heads": 8, '
        '"head_dim": 128, "intermediate_size": 25600, "vocab_size": 151936, "max_position_embeddings": 40960}'
    )
    card = read_config(config, "Qwen3-32B")
    assert card.parameters == next(each for each in CARDS if each.model == "Qwen3-32B").parameters
    config.write_text('{"num_hidden_layers": 4, "num_experts": 8}')
    with pytest.raises(ProfileError, match="num_experts is 8; expected a dense model"):
        read_config(config, "m")
    config.write_text('{"num_hidden_layers": "4"}')
    with pytest.raises(ProfileError, match="num_hidden_layers is '4'; expected a whole number"):
        read_config(config, "m")


def real(folder: str, model: str = "Llama-3.1-8B") -> tuple[EngineProfile, Fit]:
    if not (DATA / folder).is_dir():
        pytest.skip("the public operation tables are not here")
    card = architecture(model)
    assert card is not None
    return operations_profile(read_tables(DATA / folder), card, Settings())


@pytest.mark.parametrize(("gpu", "step_p95"), [("RTX4090", 0.03), ("RTXPRO6000", 0.04)])
def test_real_tables_are_fitted_this_well(gpu: str, step_p95: float) -> None:
    profile, fit = real(f"perf/{gpu}")
    parts = {part.part: part for part in fit.residuals}
    assert parts["dense"].p95 < 0.004
    assert parts["whole decode step"].median < 0.007
    assert parts["whole decode step"].p95 < step_p95
    assert parts["whole prefill step"].p95 < 0.007
    assert parts["whole mixed step"].median < 0.02
    assert parts["whole mixed step"].p95 < 0.12
    usual = [cell for cell in parts["whole decode step"].cells if cell.label.split()[-1] in ("512", "1024", "2048")]
    assert max(abs(cell.error) for cell in usual) < 0.015
    assert profile.skewed == (gpu == "RTXPRO6000")


def test_one_gpu_predicted_from_the_other_by_data_sheets_is_about_15_percent_too_fast() -> None:
    ada, _ = real("perf/RTX4090")
    blackwell, _ = real("perf/RTXPRO6000")
    here, there = data_sheet("RTX 4090"), data_sheet("RTX PRO 6000")
    assert here is not None
    assert there is not None
    guess = on_other_gpu(ada, here, there)
    errors = [
        guess.mixed_step_s(n, n * d, chunks) / blackwell.mixed_step_s(n, n * d, chunks) - 1
        for n, d, chunks in (
            *((n, d, []) for n in (1, 8, 32, 64, 128) for d in (256, 1024, 4096)),
            *((0, 0, [(c, 0)]) for c in (128, 512, 1024, 2048)),
        )
    ]
    assert min(errors) > -0.20
    assert max(errors) < -0.10
    assert float(np.mean(errors)) == pytest.approx(-0.145, abs=0.02)


def test_the_shipped_a6000_profile_is_the_older_tables() -> None:
    made, fit = real("v0")
    shipped = PROFILES["Llama-3.1-8B"]
    assert made.decode == shipped.decode
    assert made.chunk == shipped.chunk
    assert made.dense == shipped.dense
    assert made.num_kv_tokens == shipped.num_kv_tokens
    untrusted = next(part for part in fit.residuals if "not trusted" in part.part)
    assert untrusted.bias > 1.0  # its kernels read their context several times faster than the memory can
    assert made.figure("decode").provenance == "scaled"


LADDER_MS = {1: 21.9, 8: 22.3, 64: 27.5, 128: 36.0, 256: 53.1}


def test_the_ladder_of_qwen2_5_7b_from_the_kernels_of_llama_3_1_8b() -> None:
    """Layers by their parameters, output projection by its own, attention by KV heads and bytes; 256 tokens each."""
    llama, qwen = PROFILES["Llama-3.1-8B"], PROFILES["Qwen2.5-7B"]
    assert llama.decode is not None
    assert llama.sequences is not None
    errors = {}
    for n, measured_ms in LADDER_MS.items():
        layers_s = llama.dense_s(n) * qwen.block_parameters / llama.block_parameters
        head_s = llama.sequences.at(n) * qwen.head_parameters / llama.head_parameters
        fixed_s = qwen.layers * llama.decode.at(n)[0] * qwen.kv_heads / llama.kv_heads
        context_s = qwen.kv_bytes_per_token / (0.84 * 768e9) * n * 256
        errors[n] = (layers_s + head_s + fixed_s + context_s) * 1e3 / measured_ms - 1
    assert all(abs(errors[n]) < 0.05 for n in (1, 8, 64))
    assert errors[128] == pytest.approx(-0.13, abs=0.02)
    assert errors[256] == pytest.approx(0.08, abs=0.02)
