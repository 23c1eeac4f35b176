"""The table of families in docs/backends.md is that of the suites' cases."""

from __future__ import annotations

from tests.contracts.family_cases import (
    DOCUMENT,
    FAMILIES,
    MEGATRON,
    MEGATRON_CASES,
    OTHERS,
    QUICK_ON_MEGATRON,
    QUICK_ON_SHARDS,
    SHARDED_CASES,
    written,
)


def test_the_document_says_what_is_tested():
    text = DOCUMENT.read_text()
    assert written(text) == text, "run python -m tests.contracts.family_cases"


def test_there_are_enough_families():
    configs = FAMILIES | MEGATRON | OTHERS
    for cases, count in ((MEGATRON_CASES, 15), (SHARDED_CASES, 25)):
        assert len({configs[name]["model_type"] for name, _ in cases}) >= count


def test_quick_cases_have_most_families_and_every_grid():
    families = {name for name, _ in SHARDED_CASES}
    assert len({name for name, _ in QUICK_ON_SHARDS}) >= 0.6 * len(families)
    assert {name for name, _ in QUICK_ON_MEGATRON} == set(MEGATRON)
    assert {grid for _, grid in QUICK_ON_SHARDS} == {grid for _, grid in SHARDED_CASES}
