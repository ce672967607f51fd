import pytest

import pagedattn
from pagedattn.jit import sources as module
from pagedattn.jit.sources import Sources, default_sources
from tests.support.tiny_kernel import HEADERS, write_sources


def rewrite(root, name):
    path = root / "include" / "pagedattn" / name
    path.write_text(path.read_text() + "// changed\n")
    return Sources(root)


def test_headers_are_followed(tmp_path):
    assert write_sources(tmp_path).headers("tiny") == ("pagedattn/deep/sign.cuh", "pagedattn/tiny.cuh")


def test_digest_depends_on_the_reached_headers_alone(tmp_path):
    before = write_sources(tmp_path).digest("tiny")
    assert Sources(tmp_path).digest("tiny") == before
    assert rewrite(tmp_path, "unused.cuh").digest("tiny") == before
    after = rewrite(tmp_path, "deep/sign.cuh").digest("tiny")
    assert after != before
    kernel = tmp_path / "kernels" / "tiny.cu"
    kernel.write_text(kernel.read_text() + "\n")
    assert Sources(tmp_path).digest("tiny") not in (before, after)


def test_digest_of_all(tmp_path):
    before = write_sources(tmp_path).digest_all()
    assert rewrite(tmp_path, "unused.cuh").digest_all() != before


def test_digest_does_not_depend_on_the_place(tmp_path):
    assert write_sources(tmp_path / "a").digest("tiny") == write_sources(tmp_path / "b").digest("tiny")


def test_moving_text_between_files_changes_the_digest(tmp_path):
    assert module._digest([("a", "xy"), ("b", "")]) != module._digest([("a", "x"), ("b", "y")])


def test_includes_in_a_circle_end(tmp_path):
    sources = write_sources(tmp_path)
    path = sources.include_dir / "pagedattn" / "deep" / "sign.cuh"
    path.write_text("#pragma once\n#include <pagedattn/tiny.cuh>\n")
    assert len(Sources(tmp_path).headers("tiny")) == 2


def test_a_quoted_include_is_refused(tmp_path):
    write_sources(tmp_path, '#include "tiny.cuh"\n')
    with pytest.raises(ValueError, match=r'kernels/tiny\.cu: includes "tiny\.cuh"'):
        Sources(tmp_path).digest("tiny")


def test_files(tmp_path):
    assert len(write_sources(tmp_path).files()) == 1 + len(HEADERS)


def test_default_sources_are_the_package_s():
    assert default_sources().root.name == "kernels_cu"
    assert (default_sources().include_dir / "pagedattn").is_dir()


def test_the_error_names_both_places(monkeypatch, tmp_path):
    monkeypatch.setattr(module, "__file__", str(tmp_path / "site" / pagedattn.__name__ / "jit" / "sources.py"))
    with pytest.raises(FileNotFoundError) as error:
        module.default_sources.__wrapped__()
    assert str(tmp_path / "site" / "pagedattn" / "kernels_cu") in str(error.value)
    assert str(tmp_path / "site" / "kernels_cu") in str(error.value)
