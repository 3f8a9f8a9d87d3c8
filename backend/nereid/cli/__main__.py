"""`python -m nereid.cli`: what the launcher calls."""

from __future__ import annotations

import sys

from nereid.cli import main

sys.exit(main())
