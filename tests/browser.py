"""A headless Chromium, driven over a pipe by its DevTools protocol: for pages that must be looked at.

One page at a time, opened from a file. What it logs and whatever it requests is kept.
"""

from __future__ import annotations

import base64
import json
import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
_FLAGS = ("--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--no-first-run")
_QUIET = ("--disable-background-networking", "--disable-component-update", "--disable-sync", "--disable-extensions")


@dataclass
class Browser:
    """An open page.

    Attributes:
        requests: addresses that the page asked for, itself included.
        problems: what it logged: errors, and violations of its policy.
    """

    to_browser: int
    from_browser: int
    session: str = ""
    n_sent: int = 0
    unread: bytes = b""
    requests: list[str] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)

    def send(self, method: str, **parameters: Any) -> dict[str, Any]:
        """The result of a command; events that come before it are taken note of."""
        self.n_sent += 1
        message = {"id": self.n_sent, "method": method, "params": parameters}
        if self.session:
            message["sessionId"] = self.session
        os.write(self.to_browser, json.dumps(message).encode() + b"\0")
        while True:
            answer = self._read()
            if answer.get("id") == self.n_sent:
                assert "error" not in answer, answer
                return answer["result"]

    def open(
        self, path: Path, *, width: int = 1100, height: int = 900, dark: bool = False, script: bool = True
    ) -> None:
        """Show a file in a window of this size, and wait until it is loaded."""
        self.requests.clear()
        self.problems.clear()
        phone = width < 600
        self.send("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=phone)
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.send("Emulation.setEmulatedMedia", features=[scheme])
        self.send("Emulation.setScriptExecutionDisabled", value=not script)
        self.send("Page.navigate", url=path.absolute().as_uri())
        while self._read().get("method") != "Page.loadEventFired":
            pass

    def run(self, code: str, *, wait: bool = False) -> Any:
        """The value of an expression in the page; of the promise it gives, with `wait`."""
        found = self.send("Runtime.evaluate", expression=code, returnByValue=True, awaitPromise=wait)
        assert "exceptionDetails" not in found, found
        return found["result"].get("value")

    def screenshot(self, path: Path, *, whole: bool = True) -> bytes:
        """Write what is shown as PNG, and return it."""
        body = base64.b64decode(self.send("Page.captureScreenshot", captureBeyondViewport=whole)["data"])
        path.write_bytes(body)
        return body

    def screenshot_of(self, clip: dict[str, float]) -> bytes:
        """A part of the page as PNG: x, y, width and height in its units, and how much smaller it is shown."""
        found = self.send("Page.captureScreenshot", captureBeyondViewport=True, clip=clip)
        return base64.b64decode(found["data"])

    def _read(self) -> dict[str, Any]:
        while b"\0" not in self.unread:
            part = os.read(self.from_browser, 1 << 20)
            assert part, "the browser has ended"
            self.unread += part
        text, _, self.unread = self.unread.partition(b"\0")
        message: dict[str, Any] = json.loads(text)
        self._note(message)
        return message

    def _note(self, message: dict[str, Any]) -> None:
        if message.get("method") == "Network.requestWillBeSent":
            self.requests.append(message["params"]["request"]["url"])
        elif message.get("method") == "Log.entryAdded":
            self.problems.append(message["params"]["entry"]["text"])
        elif message.get("method") == "Runtime.exceptionThrown":
            self.problems.append(str(message["params"]))


@contextmanager
def open_browser() -> Iterator[Browser]:
    """A browser with one empty page; it is gone afterwards."""
    assert CHROMIUM is not None
    to_browser_read, to_browser = os.pipe()
    from_browser, from_browser_write = os.pipe()
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as profile:
        # Chromium reads commands from descriptor 3 and writes answers to 4
        shell = f'exec 3<&{to_browser_read} 4>&{from_browser_write}; exec "$0" "$@"'
        command = [CHROMIUM, *_FLAGS, *_QUIET, f"--user-data-dir={profile}", "--remote-debugging-pipe", "about:blank"]
        process = subprocess.Popen(
            ["bash", "-c", shell, *command],
            pass_fds=(to_browser_read, from_browser_write),
            stderr=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
        )
        os.close(to_browser_read)
        os.close(from_browser_write)
        try:
            yield _attached(Browser(to_browser, from_browser))
        finally:
            os.close(to_browser)  # the browser ends when nobody can tell it anything
            os.close(from_browser)
            try:
                process.wait(timeout=10)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def _attached(browser: Browser) -> Browser:
    target = browser.send("Target.createTarget", url="about:blank")["targetId"]
    browser.session = browser.send("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
    for domain in ("Page", "Runtime", "Network", "Log"):
        browser.send(f"{domain}.enable")
    return browser
