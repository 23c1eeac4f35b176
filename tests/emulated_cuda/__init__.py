"""A CUDA device without a GPU: torch's and vLLM's CUDA wheels on stand-ins for CUDA's libraries.

Device memory is host memory (stand_ins/), and every operator of the CUDA dispatch key runs the CPU's kernel on it
(operators.py). All else is torch's and vLLM's own code: allocator, streams, events, autograd's device threads,
ProcessGroupNCCL, FSDP2, the GPU worker. `python -m tests.emulated_cuda PROGRAM ...` runs a program on it; README.md
says what is checked.
"""
