"""A test run starts long files and folders first."""

from pathlib import Path

from tests.conftest import LONG_FILES

ROOT = Path(__file__).parents[3]


def test_everything_that_begins_early_is_there_once() -> None:
    assert [name for name in LONG_FILES if not (ROOT / name).exists()] == []
    assert len(set(LONG_FILES)) == len(LONG_FILES)
