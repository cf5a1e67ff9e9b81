"""All mutants: importing their files registers them."""

from __future__ import annotations

from . import plants, plants_decrees, plants_owners
from .mutants import MUTANTS, planted

__all__ = ["MUTANTS", "planted", "plants", "plants_decrees", "plants_owners"]
