"""Sandbox for untrusted programs. `sandbox` is the entry.

`sandbox` starts a fork server, by bubblewrap where that works; per program it forks a process (`runner`), which gives
up its rights (`containment`) and runs the program, or the `judge` of another one. Judge and program exchange plain
values, which are data (`program`). `test_source` reads the tests.
"""
