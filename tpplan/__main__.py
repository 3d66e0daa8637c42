"""``python -m tpplan``."""

from __future__ import annotations

import sys

from tpplan.cli import main

sys.exit(main())
