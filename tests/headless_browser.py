"""A headless Chromium, where one is installed, driven through its debugging pipe: no package is needed."""

from __future__ import annotations

import base64
import json
import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

_NAMES = ("chromium-headless-shell", "chromium", "chromium-browser", "google-chrome", "chrome")
_OPTIONS = ("--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", "--remote-debugging-pipe")


def find_browser() -> str | None:
    """The program of `HYBRIDFLOW_BROWSER`, or a Chromium of the path."""
    return os.environ.get("HYBRIDFLOW_BROWSER") or next(filter(None, map(shutil.which, _NAMES)), None)


class Page:
    """One tab. `problems`: console errors, uncaught exceptions and refused or requested network resources."""

    def __init__(self, read: int, write: int) -> None:
        self._read, self._write, self._number, self._rest = read, write, 0, b""
        self._session: str | None = None
        self.problems: list[str] = []
        target = self.send("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.send("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Runtime", "Log", "Page", "Network"):
            self.send(f"{domain}.enable")

    def send(self, method: str, **given: Any) -> dict[str, Any]:
        self._number += 1
        message = {"id": self._number, "method": method, "params": given}
        message |= {"sessionId": self._session} if self._session else {}
        os.write(self._write, json.dumps(message).encode() + b"\0")
        while (answer := self._next()).get("id") != self._number:
            self._note(answer)
        if "error" in answer:
            raise RuntimeError(f"{method}: {answer['error']}")
        return answer["result"]

    def open(self, path: Path, width: int = 1300, height: int = 900, dark: bool = False) -> None:
        """Load a file and wait until its script has ended."""
        features = [{"name": "prefers-color-scheme", "value": "dark" if dark else "light"}]
        self.send("Emulation.setEmulatedMedia", features=features)
        self.send("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=False)
        self.send("Page.navigate", url=path.resolve().as_uri())
        self.run("new Promise(done => document.readyState === 'complete' ? done() : addEventListener('load', done))")
        self.settle()

    def settle(self) -> None:
        """Wait for two frames, in which the page draws."""
        self.run("new Promise(done => setTimeout(() => requestAnimationFrame(() => requestAnimationFrame(done)), 50))")

    def run(self, script: str) -> Any:
        """The value of an expression; promises are waited for."""
        found = self.send("Runtime.evaluate", expression=script, awaitPromise=True, returnByValue=True)
        if "exceptionDetails" in found:
            raise RuntimeError(f"{script}: {found['exceptionDetails']}")
        return found["result"].get("value")

    def screenshot(self, path: Path, selector: str = "html") -> Path:
        box = self.run(
            f"(() => {{ const r = document.querySelector({json.dumps(selector)}).getBoundingClientRect();"
            "const height = Math.min(r.height, 6000);"
            "return {x: r.x + scrollX, y: r.y + scrollY, width: r.width, height, scale: 1};})()"
        )
        found = self.send("Page.captureScreenshot", format="png", captureBeyondViewport=True, clip=box)
        path.write_bytes(base64.b64decode(found["data"]))
        return path

    def _next(self) -> dict[str, Any]:
        while b"\0" not in self._rest:
            if not (part := os.read(self._read, 1 << 16)):
                raise RuntimeError("the browser has ended")
            self._rest += part
        message, _, self._rest = self._rest.partition(b"\0")
        return json.loads(message)

    def _note(self, event: dict[str, Any]) -> None:
        method, about = event.get("method", ""), event.get("params", {})
        if method == "Runtime.exceptionThrown":
            self.problems.append(str(about["exceptionDetails"]))
        elif method == "Runtime.consoleAPICalled" and about["type"] in ("error", "warning", "assert"):
            self.problems.append(str(about["args"]))
        elif method == "Log.entryAdded" and about["entry"]["level"] in ("error", "warning"):
            self.problems.append(str(about["entry"]))
        elif method == "Network.requestWillBeSent" and not about["request"]["url"].startswith(("file:", "data:")):
            self.problems.append(f"requests {about['request']['url']}")


@contextmanager
def open_browser(program: str, more: Sequence[str] = ()) -> Iterator[Page]:
    """A page of a browser that ends with the block."""
    to_browser, from_browser = os.pipe(), os.pipe()
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as profile:
        # the browser reads commands from descriptor 3 and answers on descriptor 4
        shell = f'exec "$0" "$@" 3<&{to_browser[0]} 4>&{from_browser[1]}'
        words = ["bash", "-c", shell, program, *_OPTIONS, f"--user-data-dir={profile}", *more]
        inherited = (to_browser[0], from_browser[1])
        process = subprocess.Popen(words, pass_fds=inherited, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        for end in inherited:
            os.close(end)
        try:
            yield Page(from_browser[0], to_browser[1])
        finally:
            process.kill()
            process.wait()
            os.close(to_browser[1])
            os.close(from_browser[0])
