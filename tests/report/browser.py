"""A headless Chromium that tests can drive: DevTools messages over two pipes, with the standard library alone."""

from __future__ import annotations

import base64
import json
import os
import select
import shutil
import subprocess
import time
from pathlib import Path
from typing import Any

__all__ = ["Browser", "find_chromium"]

_NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")

_FLAGS = (
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--disable-dev-shm-usage",
    "--hide-scrollbars",
    "--remote-debugging-pipe",
)

_TIMEOUT_S = 60.0


def find_chromium() -> str:
    """Where Chromium is; a test that needs it fails where there is none, and is never skipped."""
    for name in _NAMES:
        path = shutil.which(name)
        if path is not None:
            return path
    raise AssertionError(
        f"this test needs a browser, and none of {', '.join(_NAMES)} is on PATH; on Debian: "
        "apt-get update && apt-get install -y chromium"
    )


class Browser:
    """One page of a browser of its own.

    Args:
        profile: An empty folder for its profile.
        width: Of the window, in pixels.
        height: Of the window.
    """

    def __init__(self, profile: Path, *, width: int = 1440, height: int = 1000) -> None:
        # Chromium reads commands from descriptor 3 and answers on descriptor 4.
        to_browser, self._writes = os.pipe()
        self._reads, from_browser = os.pipe()
        command = (
            'exec "$@" 3<&0 4>&1 0</dev/null 1>/dev/null',
            "browser",
            find_chromium(),
            *_FLAGS,
            f"--user-data-dir={profile}",
            f"--window-size={width},{height}",
            "about:blank",
        )
        self._process = subprocess.Popen(
            ["/bin/sh", "-c", *command], stdin=to_browser, stdout=from_browser, stderr=subprocess.DEVNULL
        )
        os.close(to_browser)
        os.close(from_browser)
        self._pending = b""
        self._number = 0
        self.problems: list[str] = []
        self.requests: list[str] = []
        target = self._send("Target.createTarget", url="about:blank")["targetId"]
        self._session = self._send("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Network", "Log"):
            self._send(f"{domain}.enable")

    _session: str | None = None

    def open(self, path: Path) -> None:
        """Load a file and wait until its script says that the page is ready."""
        self._send("Page.navigate", url=path.resolve().as_uri())
        deadline_s = time.monotonic() + _TIMEOUT_S
        here = json.dumps(path.resolve().as_posix())
        ready = f"location.pathname === {here} && document.documentElement?.dataset.ready"
        while self.evaluate(ready) != "true":
            assert not self.problems, self.problems
            assert time.monotonic() < deadline_s, "the page did not become ready"
            time.sleep(0.05)

    def evaluate(self, expression: str) -> Any:
        """The value of a JavaScript expression."""
        answer = self._send("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in answer, answer["exceptionDetails"]
        return answer["result"].get("value")

    def mouse(self, kind: str, x: float, y: float, **options: Any) -> None:
        """A mouse event (``mouseMoved``, ``mouseWheel`` ...) at a place of the window."""
        self._send("Input.dispatchMouseEvent", type=kind, x=x, y=y, **options)

    def click(self, x: float, y: float, *, count: int = 1) -> None:
        """Press and release the left button."""
        for number in range(1, count + 1):
            for kind in ("mousePressed", "mouseReleased"):
                self.mouse(kind, x, y, button="left", clickCount=number)

    def resize(self, width: int, height: int, *, scale: float = 1.0) -> None:
        """Give the page another size."""
        metrics = {"width": width, "height": height, "deviceScaleFactor": scale, "mobile": False}
        self._send("Emulation.setDeviceMetricsOverride", **metrics)

    def blind(self, kind: str) -> None:
        """Emulate a colour vision deficiency: ``deuteranopia``, ``protanopia``, ``achromatopsia`` or ``none``."""
        self._send("Emulation.setEmulatedVisionDeficiency", type=kind)

    def screenshot(self, path: Path) -> None:
        """Save what the window shows as PNG."""
        path.write_bytes(base64.b64decode(self._send("Page.captureScreenshot", format="png")["data"]))

    def close(self) -> None:
        """End the browser."""
        try:
            self._send("Browser.close")
            self._process.wait(timeout=10)
        except (AssertionError, OSError, subprocess.TimeoutExpired):
            self._process.kill()
            self._process.wait(timeout=10)
        os.close(self._writes)
        os.close(self._reads)

    def _send(self, method: str, **params: Any) -> dict[str, Any]:
        self._number += 1
        message: dict[str, Any] = {"id": self._number, "method": method, "params": params}
        if self._session is not None and method != "Browser.close":
            message["sessionId"] = self._session
        os.write(self._writes, json.dumps(message).encode() + b"\0")
        while True:
            answer = self._read()
            if answer.get("id") == self._number:
                assert "error" not in answer, f"{method}: {answer['error']}"
                return answer["result"]
            self._note(answer)

    def _read(self) -> dict[str, Any]:
        deadline_s = time.monotonic() + _TIMEOUT_S
        while b"\0" not in self._pending:
            ready, _, _ = select.select([self._reads], [], [], max(0.0, deadline_s - time.monotonic()))
            assert ready, "the browser does not answer"
            chunk = os.read(self._reads, 1 << 20)
            assert chunk, "the browser has ended"
            self._pending += chunk
        text, self._pending = self._pending.split(b"\0", 1)
        return json.loads(text)

    def _note(self, event: dict[str, Any]) -> None:
        params = event.get("params", {})
        match event.get("method"):
            case "Runtime.exceptionThrown":
                self.problems.append(str(params["exceptionDetails"]))
            case "Runtime.consoleAPICalled" if params["type"] in ("error", "warning", "assert"):
                self.problems.append(str(params["args"]))
            case "Log.entryAdded" if params["entry"]["level"] in ("error", "warning"):
                self.problems.append(str(params["entry"]))
            case "Network.requestWillBeSent":
                self.requests.append(params["request"]["url"])
            case _:
                pass
