"""Which kernel tests this process can run: those in triton_lang/ need a GPU, or the interpreter of Triton-lang.

`test_interpreted.py` runs them in processes of their own. By hand:
    TRITON_INTERPRET=1 ./nereid test tests/kernels/triton_lang
"""

from __future__ import annotations

import torch

from nereid_kernels.backends import is_interpreting

collect_ignore = [] if is_interpreting() or torch.cuda.is_available() else ["triton_lang"]
