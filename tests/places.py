"""Where tests keep temporary files."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

_MEMORY = Path("/dev/shm")

# A folder in memory, where there is room; else None. A disk takes its time to sync, and what tests ask of it is not
# whether it does.
IN_MEMORY = _MEMORY if os.access(_MEMORY, os.W_OK) and shutil.disk_usage(_MEMORY).free > 4 << 30 else None
