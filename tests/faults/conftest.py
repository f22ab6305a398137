"""The runtime's helpers (``ranks``, ``cases``, ``models``) serve here too, also when this directory is run alone."""

import sys
from pathlib import Path

sys.path.insert(1, str(Path(__file__).parents[1] / "runtime"))
