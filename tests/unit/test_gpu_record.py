"""The record of the last check on a GPU stands for these sources."""

from __future__ import annotations

import json

import pytest

from scripts import gpu_check


def test_the_record_is_of_these_sources_and_clean():
    record = json.loads(gpu_check.RECORD.read_text())
    assert gpu_check.problems(record) == []


RECORD = {
    "digest": "",
    "pending": None,
    "tests": {"passed": 5, "failed": 0, "skipped": 1},
    "sanitizer": [{"tool": "memcheck", "findings": 0, "passed": 3, "failed": 0}],
    "bench": [{"workload": "D1", "graph_us": 1.0}],
}


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
    ],
)
def test_what_a_record_must_not_hold(change, complaint):
    good = {**RECORD, "digest": gpu_check.digest()}
    assert gpu_check.problems(good) == []
    found = gpu_check.problems({**good, **change})
    assert len(found) == 1
    assert complaint in found[0]


def test_a_pending_record_says_why():
    assert gpu_check.problems({"digest": "", "pending": "no GPU was to be had"}) == []
    assert gpu_check.problems({"digest": "", "pending": True}) == ["pending: expected a reason, got True"]
