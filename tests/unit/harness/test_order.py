"""A test run starts long files and folders first."""

from pathlib import Path

from tests.conftest import LONG_FILES

ROOT = Path(__file__).parents[3]


def test_every_long_file_exists_and_is_listed_once() -> None:
    assert [name for name in LONG_FILES if not (ROOT / name).exists()] == []
    assert len(set(LONG_FILES)) == len(LONG_FILES)
