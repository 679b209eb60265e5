"""Debian's Chromium without a window, driven by its DevTools protocol over two pipes.

The protocol: https://chromedevtools.github.io/devtools-protocol. A message is JSON that ends with a NUL.
"""

from __future__ import annotations

import base64
import json
import os
import subprocess
from pathlib import Path
from typing import Any

PROGRAM = "/usr/bin/chromium"
SWITCHES = (
    "--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--remote-debugging-pipe",
    "--disable-background-networking", "--disable-component-update", "--no-first-run",
)  # fmt: skip
WAIT_S = 120
"""Seconds after which a browser that does not answer is killed."""


class Chromium:
    """A browser with one page. Use it in a `with` statement."""

    def __init__(self, profile: Path) -> None:
        """Start the browser.

        Args:
            profile: folder for its files.
        """
        reads, commands = os.pipe()
        events, writes = os.pipe()

        def pipes() -> None:  # Chromium reads from descriptor 3 and writes to 4
            kept = os.dup(reads), os.dup(writes)
            os.dup2(kept[0], 3)
            os.dup2(kept[1], 4)

        argv = [PROGRAM, *SWITCHES, f"--user-data-dir={profile}", "about:blank"]
        self._process = subprocess.Popen(
            argv, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, preexec_fn=pipes,
            close_fds=False, start_new_session=True,
        )  # fmt: skip
        os.close(reads)
        os.close(writes)
        self._commands, self._events = os.fdopen(commands, "wb", 0), os.fdopen(events, "rb", 0)
        self._rest, self._number, self._session, self._width = b"", 0, "", 800
        self.errors: list[str] = []
        """Errors and warnings on the page's console, and exceptions that nothing caught."""
        self.requests: list[str] = []
        """Addresses that the page asked for."""
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.call(f"{domain}.enable")

    def __enter__(self) -> Chromium:
        return self

    def __exit__(self, *_: object) -> None:
        self._commands.close()  # the browser ends when nobody holds this end
        try:
            self._process.wait(WAIT_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._events.close()

    def call(self, method: str, **parameters: Any) -> Any:
        """Return the result of a command of the protocol; what the page reports meanwhile is collected."""
        self._number += 1
        message = {"id": self._number, "method": method, "params": parameters}
        if self._session:
            message["sessionId"] = self._session
        self._commands.write(json.dumps(message).encode() + b"\0")
        while True:
            answer = self._message()
            if answer.get("id") == self._number:
                assert "error" not in answer, answer["error"]
                return answer["result"]

    def open(self, page: Path, width: int, dark: bool = False) -> None:
        """Open a file, and return when it is loaded."""
        self.errors.clear()
        self.requests.clear()
        self._width = width
        self._resize(900)
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.call("Emulation.setEmulatedMedia", features=[scheme])
        self.call("Page.navigate", url=page.as_uri())
        self.value("new Promise(done => document.readyState === 'complete' ? done() : addEventListener('load', done))")
        self._settle()

    def _resize(self, height: int) -> None:
        self.call(
            "Emulation.setDeviceMetricsOverride", width=self._width, height=height, deviceScaleFactor=1, mobile=False
        )

    def _settle(self) -> None:
        """Return when the page has been drawn twice."""
        self.value("new Promise(done => requestAnimationFrame(() => requestAnimationFrame(done)))")

    def value(self, expression: str) -> Any:
        """Return the value of an expression of JavaScript on the page."""
        done = self.call("Runtime.evaluate", expression=expression, awaitPromise=True, returnByValue=True)
        assert "exceptionDetails" not in done, done["exceptionDetails"]
        return done["result"].get("value")

    def screenshot(self, target: Path) -> None:
        """Write a picture of the whole page as PNG."""
        self._resize(self.value("document.documentElement.scrollHeight"))
        self._settle()
        target.write_bytes(base64.b64decode(self.call("Page.captureScreenshot")["data"]))
        self._resize(900)

    def _message(self) -> dict[str, Any]:
        while b"\0" not in self._rest:
            part = self._events.read(1 << 20)
            assert part, "the browser ended"
            self._rest += part
        text, _, self._rest = self._rest.partition(b"\0")
        message: dict[str, Any] = json.loads(text)
        match message.get("method"):
            case "Runtime.exceptionThrown":
                self.errors.append(message["params"]["exceptionDetails"]["text"] + str(message["params"])[:500])
            case "Runtime.consoleAPICalled" if message["params"]["type"] in ("error", "warning", "assert"):
                self.errors.append(str(message["params"]["args"])[:500])
            case "Log.entryAdded" if message["params"]["entry"]["level"] in ("error", "warning"):
                self.errors.append(message["params"]["entry"]["text"])
            case "Network.requestWillBeSent":
                self.requests.append(message["params"]["request"]["url"])
            case _:
                pass
        return message
