"""Bar plots of the benchmark beside other libraries: docs/benchmarks/decode.png, prefill.png and mla.png.

    python -m scripts.plot_bench                     from the GPU record, validation/h200.json
    python -m scripts.plot_bench results.json        from what `scripts/bench.py --json results.json` wrote
    python -m scripts.plot_bench results.json --out DIR

Bars are this library's sustained times and the others' of docs/benchmarks/peers.json, for decode steps no longer than
bursts; beside them stand bursts from rest, where such were timed. Needs matplotlib: `pip install -e ".[docs]"`.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from scripts import bench

ROOT = Path(__file__).resolve().parents[1]
FOLDER = ROOT / "docs" / "benchmarks"
RECORD = ROOT / "validation" / "h200.json"
PEERS = FOLDER / "peers.json"
OURS = "pagedattn"
FIGURES = {
    "decode": ("D1", "D2", "D3", "D4", "D5", "D6", "D7"),
    "prefill": ("P1", "P2", "P3", "P4"),
    "mla": ("M1", "M2", "M3"),
}
COLORS = {OURS: "#1f6f8b", "FlashInfer": "#b0b7bc", "ONNX Runtime": "#8d99a3", "torch": "#cfc8b8"}
CUT_FROM = 20  # times as long as the shortest bar: an axis for it would not show the others
Row = dict[str, Any]


class Pending(Exception):
    """There are no times yet; the text says why."""


class Bar(NamedTuple):
    """One time in a panel."""

    label: str
    microseconds: float
    burst: float | None
    color: str


def load_rows(file: Path) -> list[Row]:
    """Rows of a benchmark: of a record with a ``bench`` list, or of a list as `scripts/bench.py --json` writes.

    Raises
    ------
    Pending
        The record holds no times, maybe because it is pending.
    """
    content = json.loads(file.read_text())
    if isinstance(content, dict):
        if content.get("pending") and not content.get("bench"):
            raise Pending(f"{file.name} is pending: {content['pending']}")
        content = content.get("bench", [])
    if not any("graph_us" in row for row in content):
        raise Pending(f"{file.name} holds no times")
    return list(content)


def load_peers() -> dict[str, Any]:
    """docs/benchmarks/peers.json."""
    peers: dict[str, Any] = json.loads(PEERS.read_text())
    return peers


def time_of(row: Row) -> float:
    """Microseconds of a replayed graph, or of a call where no graph was timed."""
    return float(row["time_us"] if row["graph_us"] is None else row["graph_us"])


def best_of_peers(times: Sequence[Row], workload: str) -> list[Row]:
    """The fastest time of each library for a workload, apart from those with a note, which are of something else."""
    best: dict[tuple[str, str], Row] = {}
    for row in times:
        key = row["peer"], row.get("note", "")
        if row["workload"] == workload and (key not in best or time_of(row) < time_of(best[key])):
            best[key] = row
    return sorted(best.values(), key=time_of)


def peer_label(row: Row) -> str:
    """Library, variant, page and note of a peer's time."""
    page = "" if row["page"] is None else f", page {row['page']}"
    note = f"\n({row['note']})" if row.get("note") else ""
    return f"{row['peer']}: {row['variant']}{page}{note}"


def describe(w: bench.Workload) -> str:
    """A workload in a line."""
    sequences = set(w.sequences)
    if len(sequences) == 1:
        past, new = w.sequences[0]
        what = f"{len(w.sequences)} x {past + new if new == 1 else new} " + ("keys" if new == 1 else "tokens")
        what += f" after {past}" if new > 1 and past else ""
    else:
        what = f"{len(w.sequences)} sequences, {w.token_count} new of {sum(map(sum, w.sequences))} tokens"
    heads = f"{w.num_heads}/{w.kv_num_heads}/{w.head_size}" + (f":{w.v_head_size}" if w.is_latent else "")
    extras = [w.cache if w.quant == "NONE" else f"{w.cache} {w.quant}", f"window {w.window}" * (w.window > 0)]
    return ", ".join([what, heads, *filter(None, [*extras, "sink" * w.sink])])


def bars_of(rows: Sequence[Row], peers: dict[str, Any], workload: str) -> list[Bar]:
    """Bars of one panel: this library first, then the peers by time."""
    ours = [row for row in rows if row["workload"] == workload and "graph_us" in row]
    bars = [Bar(f"{OURS}, page {row['page']}", row["graph_us"], row.get("burst_us"), COLORS[OURS]) for row in ours]
    others = best_of_peers(peers["times"], workload)
    return bars + [Bar(peer_label(row), time_of(row), row.get("burst_us"), COLORS[row["peer"]]) for row in others]


def shown_time(bar: Bar) -> str:
    """What stands beside a bar."""
    sustained, burst = (us and f"{us:.{1 if us < 100 else 0}f}" for us in (bar.microseconds, bar.burst))
    return f"{sustained} ({burst} in a burst)" if burst else str(sustained)


def ceiling_of(rows: Sequence[Row], workload: str) -> float | None:
    """Microseconds that the ceiling would leave, of the memory or of the matrix products, whichever binds."""
    row = next((row for row in rows if row["workload"] == workload and "graph_us" in row), None)
    return None if row is None else float(row["graph_us"] * row["pct_of_ceiling"] / 100)


def digest_of(rows: Sequence[Row], peers: dict[str, Any]) -> str:
    """Names what the figures show; each holds it as its description, so that a stale one is found."""
    shown = {
        workload: [bars_of(rows, peers, workload), ceiling_of(rows, workload)]
        for names in FIGURES.values()
        for workload in names
    }
    return hashlib.sha256(json.dumps(shown).encode()).hexdigest()


def draw(rows: Sequence[Row], peers: dict[str, Any], folder: Path) -> list[Path]:
    """Draw every figure that has a time of this library; the files."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    files = []
    measured = {row["workload"] for row in rows if "graph_us" in row}
    for name, workloads in FIGURES.items():
        panels = [(workload, bars_of(rows, peers, workload)) for workload in workloads if workload in measured]
        if not panels:
            continue
        heights = [len(bars) + 1.2 for _, bars in panels]
        figure, axes = pyplot.subplots(
            len(panels),
            1,
            figsize=(9.5, 0.42 * sum(heights) + 0.6),
            gridspec_kw={"height_ratios": heights},
            squeeze=False,
            layout="constrained",
        )
        for axis, (workload, bars) in zip(axes[:, 0], panels, strict=True):
            times = [bar.microseconds for bar in bars]
            shown = [us for us in times if us <= CUT_FROM * min(times)]
            end = (1.3 if len(shown) == len(times) else 2) * max(shown)
            drawn = axis.barh(range(len(bars)), times, color=[bar.color for bar in bars], height=0.7)
            labels = [shown_time(bar) for bar in bars]
            axis.bar_label(drawn, [x if us < end else "" for x, us in zip(labels, times, strict=True)], padding=4)
            for i, us in enumerate(times):
                if us >= end:
                    axis.text(0.98 * end, i, f"{labels[i]}, beyond the axis", color="white", va="center", ha="right")
            axis.set_xlim(0, end)
            axis.set_yticks(range(len(bars)), [bar.label for bar in bars], fontsize=8.5)
            axis.invert_yaxis()
            ceiling = ceiling_of(rows, workload)
            if ceiling is not None:
                axis.axvline(ceiling, color="#b3261e", linestyle="--", linewidth=1.3)
                axis.text(ceiling, -0.55, " ceiling", color="#b3261e", fontsize=8, va="bottom", ha="left")
            axis.set_title(f"{workload}   {describe(bench.WORKLOADS[workload])}", loc="left", fontsize=10, pad=12)
            axis.tick_params(axis="x", labelsize=8)
            axis.spines[["top", "right"]].set_visible(False)
        axes[-1, 0].set_xlabel("microseconds a call, less is better", fontsize=9)
        folder.mkdir(parents=True, exist_ok=True)
        file = folder / f"{name}.png"
        figure.savefig(file, dpi=130, metadata={"Description": digest_of(rows, peers), "Software": None})
        pyplot.close(figure)
        files.append(file)
    return files


def main(argv: Sequence[str] | None = None) -> int:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file", nargs="?", type=Path, default=RECORD, help="a record, or results of scripts/bench.py")
    parser.add_argument("--out", type=Path, default=FOLDER, help="folder of the figures")
    options = parser.parse_args(argv)
    try:
        files = draw(load_rows(options.file), load_peers(), options.out)
    except Pending as reason:
        print(f"nothing to plot: {reason}", file=sys.stderr)
        return 1
    except ModuleNotFoundError as error:
        print(f'plots need {error.name}: pip install -e ".[docs]"', file=sys.stderr)
        return 1
    for file in files:
        print(file)
    return 0 if files else 1


if __name__ == "__main__":
    sys.exit(main())
