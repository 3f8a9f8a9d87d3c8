"""Which kernel tests this process can run: those in interpreted/ need triton imported with its interpreter on.

`test_interpreted.py` runs them in a process of their own. By hand:
    TRITON_INTERPRET=1 ./nereid test tests/kernels/interpreted
"""

from __future__ import annotations

from nereid_kernels.backends import is_interpreting

collect_ignore = [] if is_interpreting() else ["interpreted"]
