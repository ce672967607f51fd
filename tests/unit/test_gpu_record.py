"""The record of the last check on a GPU stands for these sources."""

from __future__ import annotations

import hashlib
import json
import sys

import pytest

from scripts import gpu_check

RECORD = {
    "digest": "",
    "pending": None,
    "tests": {"passed": 5, "failed": 0, "skipped": 1},
    "sanitizer": [{"tool": "memcheck", "findings": 0, "passed": 3, "failed": 0}],
    "bench": [{"workload": "D1", "graph_us": 1.0}],
    "outputs": {"calls": 2, "sha256": hashlib.sha256(b"outputs").hexdigest()},
    "models": {"absent": None, "passed": 4, "failed": 0, "skipped": 0, "families": {}},
}


def test_the_record_is_of_these_sources_and_clean():
    record = json.loads(gpu_check.RECORD.read_text())
    assert gpu_check.problems(record) == []


@pytest.fixture
def outputs(monkeypatch, tmp_path):
    """A file of outputs beside the record."""
    path = tmp_path / "h200_outputs.npz"
    path.write_bytes(b"outputs")
    monkeypatch.setattr(gpu_check, "OUTPUTS", path)
    return path


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        ({"digest": "of other sources"}, "the sources have changed"),
        ({"tests": {"passed": 5, "failed": 1, "skipped": 0}}, "tests: 5 passed, 1 failed"),
        ({"tests": {"passed": 0, "failed": 0, "skipped": 9}}, "tests: 0 passed, 0 failed"),
        ({"sanitizer": []}, "no tool ran"),
        ({"sanitizer": [{"tool": "racecheck", "findings": 2, "passed": 3, "failed": 0}]}, "racecheck: 2 findings"),
        ({"sanitizer": [{"tool": "memcheck", "findings": None, "passed": 0, "failed": 0}]}, "memcheck: None findings"),
        ({"bench": [{"workload": "D1", "error": "wrong"}]}, "bench D1: wrong"),
        ({"bench": []}, "bench: nothing was measured"),
        ({"outputs": {"calls": 2, "sha256": ""}}, "outputs: h200_outputs.npz is not the file that was recorded"),
        ({"models": {**RECORD["models"], "failed": 1}}, "models: 4 passed, 1 failed"),
        ({"models": {**RECORD["models"], "passed": 0}}, "models: 0 passed, 0 failed"),
    ],
)
def test_what_a_record_must_not_hold(change, complaint, outputs):
    good = {**RECORD, "digest": gpu_check.digest()}
    assert gpu_check.problems(good) == []
    found = gpu_check.problems({**good, **change})
    assert len(found) == 1
    assert complaint in found[0]


def test_a_pending_record_says_why():
    assert gpu_check.problems({"digest": "", "pending": "no GPU was to be had"}) == []
    assert gpu_check.problems({"digest": "", "pending": True}) == ["pending: expected a reason, got True"]


def test_a_record_without_outputs_and_one_without_torch(outputs):
    record = {**RECORD, "digest": gpu_check.digest()}
    absent = {"absent": "torch not installed", "passed": 0, "failed": 0, "skipped": 0, "families": {}}
    assert gpu_check.problems({**record, "models": absent}) == []
    outputs.unlink()
    assert gpu_check.problems(record) == ["outputs: h200_outputs.npz is not the file that was recorded with the rest"]


@pytest.fixture
def parts(monkeypatch, tmp_path, outputs):
    """A folder of parts, as runs on a GPU leave them, and a record elsewhere."""
    folder = tmp_path / "parts"
    folder.mkdir()
    monkeypatch.setattr(gpu_check, "RECORD", tmp_path / "h200.json")
    for part in gpu_check.PARTS:
        content = {"digest": gpu_check.digest(), "environment": {"gpu": "one"}, "result": RECORD[part]}
        (folder / f"{part}.json").write_text(json.dumps(content))
    outputs.rename(folder / outputs.name)
    return folder


def test_parts_are_merged_with_their_outputs(monkeypatch, parts, outputs):
    monkeypatch.setattr(sys, "argv", ["gpu_check.py", "merge", "--out", str(parts)])
    assert gpu_check.main() == 0
    assert outputs.read_bytes() == b"outputs"
    record = json.loads(gpu_check.RECORD.read_text())
    assert record == {**RECORD, "digest": gpu_check.digest(), "environment": {"gpu": "one"}}


def test_a_record_may_lack_parts_and_say_why(monkeypatch, parts):
    (parts / "sanitizer.json").unlink()
    with pytest.raises(SystemExit, match="not there yet: sanitizer"):
        gpu_check.merge(parts)
    monkeypatch.setattr(sys, "argv", ["gpu_check.py", "merge", "--out", str(parts), "--pending", "no time"])
    assert gpu_check.main() == 0
    record = json.loads(gpu_check.RECORD.read_text())
    assert (record["pending"], record["sanitizer"], record["tests"]) == ("no time", [], RECORD["tests"])
    for part in gpu_check.PARTS:
        (parts / f"{part}.json").unlink(missing_ok=True)
    with pytest.raises(SystemExit, match="not there yet"):
        gpu_check.merge(parts, "no time")


def test_parts_of_different_sources_are_refused(parts):
    content = json.loads((parts / "models.json").read_text())
    (parts / "models.json").write_text(json.dumps({**content, "digest": "of other sources"}))
    with pytest.raises(SystemExit, match="different sources"):
        gpu_check.merge(parts)


def test_models_without_torch_say_so(monkeypatch):
    monkeypatch.setattr(gpu_check, "_has_module", lambda name: name != "torch")
    assert gpu_check.run_models()["absent"] == "torch not installed"
