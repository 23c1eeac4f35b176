"""`python -m tests.emulated_cuda PROGRAM ARGUMENTS`, or `-m MODULE ARGUMENTS`: run Python on emulated CUDA.

Sets it up first, once. On a machine with an NVIDIA GPU the program runs on that.
"""

import sys

from tests.emulated_cuda import environment

if len(sys.argv) < 2:
    sys.exit(f"usage: {__doc__}")
sys.exit(environment.run(sys.argv[1:]))
