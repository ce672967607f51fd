import os

import pytest

from pagedattn import InvalidArgumentError, env


@pytest.fixture(autouse=True)
def _clean(monkeypatch):
    for variable in env.TABLE:
        monkeypatch.delenv(variable.name, raising=False)


def test_defaults():
    assert env.cache_dir() is None
    assert env.backend() is None
    assert not env.checks()
    assert not env.debug_info()
    assert not env.emulate()


@pytest.mark.parametrize(("text", "expected"), [("1", True), ("True", True), (" on ", True), ("0", False), ("", False)])
def test_flags_are_read_when_asked_for(monkeypatch, text, expected):
    monkeypatch.setenv("PAGEDATTN_CHECKS", text)
    assert env.checks() is expected


def test_a_flag_that_is_neither_names_itself(monkeypatch):
    monkeypatch.setenv("PAGEDATTN_CHECKS", "maybe")
    with pytest.raises(InvalidArgumentError, match=r"PAGEDATTN_CHECKS: expected one of 1, true.*'maybe'"):
        env.checks()


@pytest.mark.parametrize("name", ["PAGEDATTN_DEBUG_INFO", "ORT_ENABLE_ATTENTION_KERNEL_DEBUG_INFO"])
def test_either_name_switches_debug_info_on(monkeypatch, name):
    monkeypatch.setenv(name, "1")
    assert env.debug_info()


def test_text(monkeypatch):
    monkeypatch.setenv("PAGEDATTN_BACKEND", " numpy ")
    monkeypatch.setenv("PAGEDATTN_CACHE_DIR", "")
    assert env.backend() == "numpy"
    assert env.cache_dir() is None


@pytest.mark.parametrize("read", [env.backend, env.checks, env.debug_info])
def test_what_no_call_reads_concerns_none_and_what_one_reads_does(monkeypatch, read):
    for variable in env.TABLE:
        assert not env.concerns_calls()
        monkeypatch.setenv(variable.name, "1")
        assert env.concerns_calls() or not read()
        monkeypatch.delenv(variable.name)


def test_an_environment_that_is_none_of_pythons_is_asked_each_time(monkeypatch):
    monkeypatch.setattr(os, "environ", {"PAGEDATTN_CHECKS": "1"})
    assert env.concerns_calls()
    assert env.checks()


def test_every_variable_has_a_doc_and_a_name_of_its_own():
    assert len({variable.name for variable in env.TABLE}) == len(env.TABLE)
    assert all(variable.doc.endswith(".") for variable in env.TABLE)
