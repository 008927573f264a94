"""Where tests find what they need."""

from __future__ import annotations

from pathlib import Path

ROOT = Path(__file__).parents[2]
HELPERS = ROOT / "tests" / "helpers"
EXAMPLE = ROOT / "examples" / "connector_file"
MODELS = ROOT / "tests" / "models"
