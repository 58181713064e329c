"""The guarantees name tests that exist."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

TESTS = Path(__file__).parent
DOC = TESTS.parent / "docs" / "guarantees.md"
NAMED = re.findall(r"`(\w+\.py)(?:::(\w+))?`", DOC.read_text())
PROMISES = [line for line in DOC.read_text().partition("## What is not promised")[0].splitlines() if line.startswith("| ")]


@pytest.mark.parametrize(("file", "test"), sorted(set(NAMED)))
def test_a_named_test_exists(file: str, test: str) -> None:
    text = (TESTS / file).read_text()
    assert "def test_" in text
    assert not test or re.search(rf"^ *(?:async )?def {test}\(", text, re.M)


@pytest.mark.parametrize("line", [line for line in PROMISES if not line.startswith("| promise ")])
def test_each_promise_names_a_test(line: str) -> None:
    assert re.search(r"`(test_\w+|contract)\.py", line.split("|")[-2])
