"""The example micro_swe, whose modules are imported from its folder."""

import sys
from pathlib import Path

EXAMPLE = Path(__file__).parents[2] / "examples" / "micro_swe"
sys.path.insert(0, str(EXAMPLE))
