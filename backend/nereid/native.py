"""The CPU's native library: built once, where there is a compiler, and kept in Nereid's cache folder.

`./nereid` calls this module when it sets up an environment (python -m nereid.native), so that no server has to wait.
"""

from __future__ import annotations

import logging
import sys
from pathlib import Path

from nereid.paths import Progress, build_once, cache_dir
from nereid_kernels.native.build import BuildError, build, key
from nereid_kernels.native.library import Library, fitting_variant

_LOG = logging.getLogger(__name__)


def ensure_built(progress: Progress) -> Path:
    """The folder of the library's variants. Raises BuildError, or OSError where the folder cannot be written."""
    return build_once(cache_dir() / f"native-{key()}", build, progress)


def open_library() -> Library | None:
    """The variant for this processor; None, with a line in the log, where there is none or it cannot be built."""
    variant = fitting_variant()
    if variant is None:
        _LOG.info("no native library: there is none for this processor")
        return None
    try:
        return Library(ensure_built(_LOG.info) / f"{variant}.so")
    except (BuildError, OSError) as error:
        _LOG.warning("no native library, so that steps take longer: %s", error)
        return None


def main() -> int:
    """Build it. 0 also where that cannot be done, since everything works without it."""
    try:
        print(f"native library: {ensure_built(print)}")
    except (BuildError, OSError) as error:
        print(f"native library: not built: {error}", file=sys.stderr)
    return 0


if __name__ == "__main__":
    sys.exit(main())
