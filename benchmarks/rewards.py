"""Rows per second of the verifiers on this machine, called in one process as by a RewardWorker.

`exact` and `math` score solutions in GSM8K's style; `math_verify` is the library alone on the same rows, one by one in
this process; `formulas` are LaTeX answers. `code` runs a small program against three
asserts in each kind of sandbox available; `subprocess` runs the same source in plain Python processes without a
sandbox, one after the other. Prints one JSON line.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from collections.abc import Callable

from hybridflow import rewards
from hybridflow.errors import ConfigError
from hybridflow.rewards.sandbox.sandbox import Sandbox

PROGRAM = "def add(a, b):\n    return a + b\n"
TESTS = ["assert add(1, 2) == 3", "assert add(-1, 1) == 0", "assert add(0, 0) == 0"]


def solution(i: int) -> tuple[str, str]:
    a, b = 3 + i % 17, 5 + i % 11
    stated = a * b + (i % 5 == 0)  # one in five is wrong
    return f"Each of the {a} boxes holds {b} eggs: {a} * {b} = <<{a}*{b}={stated}>>{stated} eggs.\n#### {stated}", str(
        a * b
    )


def formula(i: int) -> tuple[str, str]:
    return rf"So the answer is $\boxed{{\sqrt{{{i % 7 + 2}}} + x^2}}$.", rf"x^2 + \sqrt{{{i % 7 + 2}}}"


def rate(rows: int, judge: Callable[[], object]) -> float:
    """Rows per second after a warm-up."""
    judge()
    began = time.perf_counter()
    judge()
    return rows / (time.perf_counter() - began)


def judged(function: object, pairs: list[tuple[str, str]], column: str = "answer") -> Callable[[], object]:
    functions = rewards.Functions(function, on_failure="zero")
    texts, references = [text for text, _ in pairs], [reference for _, reference in pairs]
    return lambda: functions([""] * len(texts), texts, {column: references})


def by_math_verify(pairs: list[tuple[str, str]]) -> Callable[[], object]:
    from math_verify import parse, verify

    return lambda: [verify(parse(reference), parse(text)) for text, reference in pairs]


def mechanisms() -> list[str]:
    found = []
    for name in ("bubblewrap", "landlock"):
        try:
            Sandbox(name).close()  # type: ignore[arg-type]
            found.append(name)
        except ConfigError:  # this machine does not have it
            continue
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, default=2000)
    parser.add_argument("--programs", type=int, default=100)
    args = parser.parse_args()
    solutions, formulas = [solution(i) for i in range(args.rows)], [formula(i) for i in range(200)]
    few = solutions[:200]
    programs = [(f"```python\n{PROGRAM}```", TESTS)] * args.programs
    source = PROGRAM + "\n".join(TESTS)
    found = {
        "exact": rate(args.rows, judged(rewards.Exact(), solutions)),
        "math": rate(args.rows, judged(rewards.Math(), solutions)),
        "math_verify": rate(len(few), by_math_verify(few)),
        "formulas": rate(len(formulas), judged(rewards.Math(), formulas)),
        "subprocess": rate(20, lambda: [subprocess.run([sys.executable, "-c", source], check=True) for _ in range(20)]),
    }
    for name in mechanisms():
        found[f"code_{name}"] = rate(args.programs, judged(rewards.Code(mechanism=name), programs, "tests"))
    rounded = {name: round(value, 1) for name, value in found.items()}
    ratio = {"math_over_math_verify": round(found["math"] / found["math_verify"], 1)}
    print(json.dumps({"benchmark": "rewards", "rows_per_second": rounded, **ratio}))


if __name__ == "__main__":
    main()
