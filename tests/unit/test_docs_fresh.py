"""The generated pages hold what the tables say now, and explain every difference of the schemas."""

from __future__ import annotations

import copy
import doctest
from pathlib import Path
from typing import Any

import pytest

from pagedattn import api, contract, gqa
from pagedattn.support import ROWS, Feature
from scripts import generate_docs


@pytest.mark.parametrize("path", sorted(generate_docs.pages()), ids=lambda path: path.name)
def test_page_is_fresh(path: Path):
    assert path.read_text() == generate_docs.pages()[path], "run: python -m scripts.generate_docs"


def test_the_example_of_the_readme_runs():
    code = (generate_docs.ROOT / "README.md").read_text().partition("```python\n")[2].partition("```")[0]
    names: dict[str, Any] = {}
    exec(code, names)
    assert names["result"].output.shape == (2, 512)


def test_the_example_of_paged_attention_runs():
    results = doctest.testmod(api)
    assert results.attempted >= 5
    assert results.failed == 0


def test_check_finds_a_stale_page(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    assert generate_docs.main(["--check"]) == 0
    monkeypatch.setattr(generate_docs, "CONTRACT_INTRO", "# Something else")
    assert generate_docs.main(["--check"]) == 1
    assert "stale: docs/contract.md" in capsys.readouterr().out


def test_pages_name_every_row():
    page = generate_docs.contract_page()
    names = [row.name for rows in (contract.INPUTS, contract.OUTPUTS, contract.ATTRIBUTES) for row in rows]
    assert all(f"`{name}`" in page for name in names)
    page = generate_docs.support_page()
    assert all(feature.value in page for feature in Feature)
    assert all(f"`{row.name}`" in page for row in ROWS)


def test_tables_are_whole():
    """Every line of a table has as many cells as its header."""
    for path, text in generate_docs.pages().items():
        width = 0
        for line in text.splitlines():
            if not line.startswith("|"):
                width = 0
                continue
            cells = line.replace("\\|", "").count("|")
            assert not width or cells == width, f"{path.name}: {line}"
            width = cells


def test_what_a_gpu_measured_of_the_models():
    figures = {"rms_paged": 0.0135, "rms_unmodified": 0.0134, "largest_paged": 0.1, "largest_unmodified": 0.125}
    models = {"absent": None, "passed": 40, "failed": 0, "torch": "2", "transformers": "5", "families": {"x": figures}}
    record = {"pending": None, "environment": {"gpu": "H200", "date": "2026-01-02"}, "models": models}
    page = generate_docs.models_page(f"a\n{generate_docs.MEASURED} old {generate_docs.END_OF_MEASURED}\nb\n", record)
    assert page.startswith(f"a\n{generate_docs.MEASURED}\n\nH200, torch 2, transformers 5, 2026-01-02; 40 tests passed")
    assert "| x | 1.35 % | 1.34 % | 0.100 | 0.125 |" in page
    assert page.endswith(f"{generate_docs.END_OF_MEASURED}\nb\n")
    assert "old" not in page
    assert generate_docs.models_page(page, record) == page
    assert "torch not installed" in generate_docs.models_on_gpu({**record, "models": {"absent": "torch not installed"}})
    assert "is pending" in generate_docs.models_on_gpu({"pending": "no GPU", "models": None})


def changed(operator: str, **changes: Any) -> dict[str, Any]:
    schemas = copy.deepcopy(generate_docs.kept_schemas())
    for kind, more in changes.items():
        if isinstance(more, dict):
            schemas[operator][kind].update(more)
        else:
            schemas[operator][kind].append(more)
    return schemas


NEW: list[tuple[str, dict[str, Any], str]] = [
    (contract.NAME, {"inputs": ["k_token_scale", "T", "Optional"]}, "PagedAttention input k_token_scale"),
    (contract.NAME, {"outputs": ["lse", "T", "Optional"]}, "PagedAttention output lse"),
    (
        contract.NAME,
        {"attributes": {"qk_rotation": {"type": "STRING", "required": False, "default": ""}}},
        "PagedAttention attribute qk_rotation",
    ),
    (contract.NAME, {"types": {"S": ["tensor(int64)"]}}, "PagedAttention type S = tensor(int64)"),
    (gqa.NAME, {"inputs": ["slot_mapping", "M", "Optional"]}, "GroupQueryAttention input slot_mapping"),
]


@pytest.mark.parametrize(("operator", "changes", "message"), NEW, ids=[message for *_, message in NEW])
def test_what_a_new_onnxruntime_adds_is_found(operator: str, changes: dict[str, Any], message: str):
    known = generate_docs.kept_schemas()
    assert generate_docs.unknown_to_the_page(known, known) == []
    new = changed(operator, **changes)
    assert message in generate_docs.unknown_to_the_page(new, known)
    with pytest.raises(ValueError, match="differences without explanation"):
        generate_docs.schema_page(new)


def test_an_idle_explanation_is_found(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(generate_docs.EXPLANATIONS[contract.NAME], "input query", "It has none.")
    with pytest.raises(ValueError, match=r"explanations without: ..input query"):
        generate_docs.schema_page(generate_docs.kept_schemas())


def test_nothing_of_the_installed_onnxruntime_is_unknown():
    pytest.importorskip("onnxruntime", reason="onnxruntime, whose schemas are compared, is absent")
    pytest.importorskip("onnx", reason="onnx, which reads the schemas' defaults, is absent")
    installed, known = generate_docs.installed_schemas(), generate_docs.kept_schemas()
    if contract.NAME not in installed:
        pytest.skip(f"onnxruntime {installed['onnxruntime']} registers no {contract.NAME}")
    assert generate_docs.unknown_to_the_page(installed, known) == [], "run: python -m scripts.generate_docs --help"
    if installed["onnxruntime"] == known["onnxruntime"]:
        assert installed == known
