"""The benchmark's page and figures: what they compare is the same work, and what they show is the record's."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from scripts import bench, generate_docs, plot_bench

PEERS = plot_bench.load_peers()
PLOTTED = [name for names in plot_bench.FIGURES.values() for name in names]


def measured() -> list[dict[str, Any]]:
    """Rows as `scripts/bench.py` makes them: this library takes twice what the ceiling would leave."""
    rows: list[dict[str, Any]] = [
        {"workload": "ceilings", "read_gbps": 4600.0, "matmul_tflops": 660.0, "matmul_tflops_burst": 780.0}
    ]
    for name, workload in bench.WORKLOADS.items():
        us = 2 * max(workload.kv_bytes() / 4600e3, workload.flops() / 660e6)
        times = {"graph_us": us, "time_us": us + 5, "burst_us": us - 5}
        row = {"workload": name, "backend": "decode", "page": workload.page, **times}
        rates = {"kv_gbps": workload.kv_bytes() / us / 1e3, "tflops": workload.flops() / us / 1e6, "host_us": 14.0}
        rows.append({**row, **rates, "pct_of_ceiling": 50.0, "sm_mhz": 1755, "power_w": None})
    return [*rows, {"workload": "start", **{name: [2.5, 0.125] for name in bench.STARTS}}]


def record_of(rows: list[dict[str, Any]]) -> dict[str, Any]:
    environment = {"gpu": "H200", "driver": 13020, "cupy": "14", "date": "2026-01-02"}
    return {"pending": None, "environment": environment, "bench": rows}


@pytest.mark.parametrize("name", PLOTTED)
def test_others_did_the_same_work(name: str) -> None:
    workload = bench.WORKLOADS[name]
    assert PEERS["work"][name] == {"kv_bytes": workload.kv_bytes(), "flops": workload.flops()}


@pytest.mark.parametrize("name", PLOTTED)
def test_the_best_of_each_library_is_shown(name: str) -> None:
    best = plot_bench.best_of_peers(PEERS["times"], name)
    assert {"FlashInfer", "ONNX Runtime"} <= {row["peer"] for row in best}
    for row in PEERS["times"]:
        if row["workload"] == name:
            same = [b for b in best if (b["peer"], b.get("note")) == (row["peer"], row.get("note"))]
            assert len(same) == 1
            assert plot_bench.time_of(same[0]) <= plot_bench.time_of(row)


def test_peers_are_of_workloads_and_libraries_that_are_named() -> None:
    assert {row["workload"] for row in PEERS["times"]} == set(PLOTTED)
    assert {row["peer"] for row in PEERS["times"]} <= set(PEERS["environment"]["versions"])


def test_the_page_of_a_record() -> None:
    rows = measured()
    page = generate_docs.benchmarks_on_gpu(record_of(rows), PEERS)
    assert "pending" not in page
    assert "H200, CUDA driver 13.2, CuPy 14; 2026-01-02." in page
    assert "4600 GB/s read, 660 TFLOP/s" in page
    for name in bench.WORKLOADS:
        assert f"| {name} |" in page
    numbers = "933.7 | 928.7 | 938.7 | 14.0 | 2300 | 18 | 50 | 1755 | - |"
    assert f"| D1 | 64 x 8192 keys, 64/8/128, bfloat16 | decode | 16 | {numbers}" in page
    assert f"| D1 | FlashInfer | decode, fa2 | 16 | 494.5 | - | 495.6 | {494.5 / rows[1]['graph_us']:.2f} |" in page
    assert "| M1 | FlashInfer | MLA, fa3 | 64 | 131.7 | 131.5 | 133.0 |" in page
    assert "kernels of D1 2.50, 0.12; P1 2.50, 0.12; M1 2.50, 0.12; M2 2.50, 0.12." in page
    assert all(f"({figure}.png)" in page for figure in plot_bench.FIGURES)


def test_the_page_of_a_part_of_a_record_and_of_an_error() -> None:
    rows = [row for row in measured() if row["workload"] in ("ceilings", "D1", "M1")]
    rows.append({"workload": "D2", "page": 16, "error": "OutOfMemoryError"})
    page = generate_docs.benchmarks_on_gpu(record_of(rows), PEERS)
    assert "| D2 | 1 x 131072 keys, 64/8/128, bfloat16 | OutOfMemoryError | 16 |" in page
    assert "(prefill.png)" not in page
    assert "(mla.png)" in page


def test_the_page_of_first_calls_that_failed() -> None:
    rows = [*measured()[:-1], {"workload": "start", "page": None, "error": "CalledProcessError: no room"}]
    page = generate_docs.benchmarks_on_gpu(record_of(rows), PEERS)
    assert "First calls of a process were not timed: CalledProcessError: no room." in page
    assert "kernels of" not in page


def test_first_calls_are_of_new_processes_twice_over_one_new_cache_three_times(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[tuple[str, str]] = []

    def run(command: list[str], *, env: dict[str, str], **more: Any) -> Any:
        folder = Path(env["PAGEDATTN_CACHE_DIR"])
        found = [file.name for file in folder.iterdir()]
        (folder / "kernel").touch()
        seen.append((command[-1], env["PAGEDATTN_CACHE_DIR"]))
        return SimpleNamespace(stdout=b"0.125\n" if found else b"2.5\n")

    monkeypatch.setattr(bench.subprocess, "run", run)
    row = bench.starts()
    assert row == measured()[-1]
    assert [name for name, _ in seen] == [name for name in bench.STARTS for _ in range(3 * 2)]
    assert len({folder for _, folder in seen}) == 3 * len(bench.STARTS)
    assert bench.line(row).startswith("first call: D1 2.50 s, 0.12 s from disk, P1 2.50 s")
    assert bench.line({"workload": "start", "page": None, "error": "wrong"}) == "start wrong"


def test_the_page_of_a_pending_record() -> None:
    partly = generate_docs.benchmarks_on_gpu({**record_of(measured()), "pending": "no sanitizer"}, PEERS)
    assert partly.startswith("The GPU record is **pending**: no sanitizer.\n\nH200, ")
    page = generate_docs.benchmarks_on_gpu({**record_of([]), "pending": "no GPU"}, PEERS)
    assert "the GPU record is pending" in page
    assert "| D1 | FlashInfer | decode, fa2 | 16 | 494.5 | - | 495.6 | - |" in page
    assert ".png" not in page


def test_nothing_is_plotted_of_a_pending_record(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "record.json"
    for content, reason in (
        ({"pending": "no GPU was to be had", "bench": []}, "record.json is pending: no GPU was to be had"),
        (record_of([]), "record.json holds no times"),
        ([{"workload": "D1", "error": "wrong"}], "record.json holds no times"),
    ):
        file.write_text(json.dumps(content))
        assert plot_bench.main([str(file), "--out", str(tmp_path)]) == 1
        assert f"nothing to plot: {reason}" in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["record.json"]


def test_bars_and_ceilings() -> None:
    rows = measured()
    for name in PLOTTED:
        ours, *others = plot_bench.bars_of(rows, PEERS, name)
        assert ours.label.startswith(plot_bench.OURS)
        assert [bar.microseconds for bar in others] == sorted(bar.microseconds for bar in others)
        assert ours.burst == ours.microseconds - 5
        assert plot_bench.ceiling_of(rows, name) == pytest.approx(ours.microseconds / 2)
    assert plot_bench.ceiling_of(rows[:1], "D1") is None


def test_a_bar_shows_a_burst_where_there_was_one() -> None:
    assert plot_bench.shown_time(plot_bench.Bar("", 134.2, 99.96, "")) == "134 (100.0 in a burst)"
    assert plot_bench.shown_time(plot_bench.Bar("", 11.72, None, "")) == "11.7"


class Clock:
    """Stands for the GPU of the benchmark: every replay takes one microsecond less than the one before."""

    def __init__(self) -> None:
        self.replays: list[tuple[int, float]] = []

    def timed(self, calls: Any, repeats: int, ahead_ms: float = 0.0) -> float:
        self.replays.append((repeats, ahead_ms))
        return 160.0 - len(self.replays)


def test_a_burst_is_of_three_graphs_behind_a_pause_or_of_three_prompts(monkeypatch: pytest.MonkeyPatch) -> None:
    rests: list[float] = []
    monkeypatch.setattr(bench.time, "sleep", rests.append)
    step, prompt = Clock(), Clock()
    assert bench.burst(step, bench.M1, []) == 158.0
    assert step.replays == [(3, bench.PAUSE_MS)] * 3
    assert bench.burst(prompt, bench.P1, []) == 159.0
    assert (prompt.replays, rests) == ([(3, 0.0)], [1.0])


@pytest.mark.parametrize("whole", [True, False], ids=["record", "results"])
def test_figures(whole: bool, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib", reason="matplotlib, which draws the figures, is absent")
    rows = measured()
    file = tmp_path / "times.json"
    file.write_text(json.dumps(record_of(rows) if whole else rows))
    assert plot_bench.main([str(file), "--out", str(tmp_path / "figures")]) == 0
    for name in plot_bench.FIGURES:
        content = (tmp_path / "figures" / f"{name}.png").read_bytes()
        assert content.startswith(b"\x89PNG")
        assert plot_bench.digest_of(rows, PEERS).encode() in content


def test_figures_of_the_page_are_of_the_record() -> None:
    try:
        rows = plot_bench.load_rows(plot_bench.RECORD)
    except plot_bench.Pending:
        assert not list(plot_bench.FOLDER.glob("*.png")), "figures of times that the record does not hold"
        return
    digest = plot_bench.digest_of(rows, PEERS).encode()
    for name in plot_bench.FIGURES:
        file = plot_bench.FOLDER / f"{name}.png"
        content = file.read_bytes() if file.exists() else b""
        assert digest in content, "run: python -m scripts.plot_bench"
