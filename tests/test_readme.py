"""The examples that a newcomer copies must run as they stand."""

import re
from pathlib import Path

import pytest

README = Path(__file__).parent.parent / "README.md"
BLOCKS = re.findall(r"```python\n(.*?)```", README.read_text(), flags=re.DOTALL)


def test_readme_shows_two_examples() -> None:
    assert len(BLOCKS) == 2


@pytest.mark.parametrize("block", BLOCKS, ids=["train", "plan"])
def test_readme_example_runs(block: str, capsys: pytest.CaptureFixture[str]) -> None:
    namespace: dict[str, object] = {}
    exec(block, namespace)
    if "opt" in namespace:
        printed = capsys.readouterr().out
        assert re.search(r"^0\.weight +64x32 +matrix", printed, flags=re.MULTILINE), printed
        namespace["opt"].close()  # type: ignore[attr-defined]
