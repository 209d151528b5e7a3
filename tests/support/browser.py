"""How does a test look at a page as a person does? A headless Chromium, driven over its debugging pipe.

    with Browser(tmp_path) as browser:
        page = browser.open(file, width=400)
        assert page.evaluate("document.title") == "..."
        page.screenshot(tmp_path / "page.png")

No package is needed beside the browser: commands and answers are JSON texts that end with a zero byte.
"""

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

NAMES = ("chromium", "chromium-browser", "google-chrome", "chrome")
FLAGS = (
    "--headless=new",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-dev-shm-usage",
    "--disable-extensions",
    "--disable-background-networking",
    "--no-first-run",
    "--hide-scrollbars",
    "--remote-debugging-pipe",
)
PATIENCE_S = 45.0
"""Starting takes 1-2 s on a quiet machine."""


def find_browser() -> str | None:
    """The program, if there is one."""
    return next((path for name in NAMES if (path := shutil.which(name))), None)


class Page:
    """One page that has been drawn."""

    def __init__(self, browser: Browser, session: str) -> None:
        self._browser, self._session = browser, session
        self.requests: list[str] = []
        self.complaints: list[str] = []
        """Errors and warnings of the console, exceptions of scripts, and what the page's policy refused."""

    def send(self, method: str, **params: Any) -> dict[str, Any]:
        """A command of the DevTools protocol, and its answer."""
        return self._browser.send(method, params, self)

    def evaluate(self, expression: str) -> Any:
        """The value of a JavaScript expression."""
        answer = self.send("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in answer, answer["exceptionDetails"]
        return answer["result"].get("value")

    def key(self, name: str) -> None:
        """Press and release a key that has a name: Tab, ArrowRight, Enter."""
        for kind in ("keyDown", "keyUp"):
            code = {"Enter": 13, "Tab": 9, "ArrowLeft": 37, "ArrowUp": 38, "ArrowRight": 39, "ArrowDown": 40}
            self.send("Input.dispatchKeyEvent", type=kind, key=name, windowsVirtualKeyCode=code[name])

    def screenshot(self, file: Path) -> None:
        """The whole page as PNG."""
        answer = self.send("Page.captureScreenshot", captureBeyondViewport=True)
        file.write_bytes(base64.b64decode(answer["data"]))

    def hear(self, message: dict[str, Any]) -> None:
        """Note what happened."""
        method, params = message.get("method", ""), message.get("params", {})
        if method == "Network.requestWillBeSent":
            self.requests.append(params["request"]["url"])
        elif method == "Runtime.exceptionThrown":
            self.complaints.append(str(params["exceptionDetails"]))
        elif method == "Runtime.consoleAPICalled" and params["type"] in ("error", "warning"):
            self.complaints.append(str(params["args"]))
        elif method == "Log.entryAdded" and params["entry"]["level"] in ("error", "warning"):
            self.complaints.append(params["entry"]["text"])

    @property
    def session(self) -> str:
        """Its name in the protocol."""
        return self._session


class Browser:
    """A browser that ends with the `with` block."""

    def __init__(self, folder: Path) -> None:
        program = find_browser()
        assert program is not None
        to_browser, self._to = os.pipe()
        self._from, from_browser = os.pipe()
        # It reads from 3 and writes to 4; the shell puts our two pipes there, whatever their numbers are.
        line = f'exec "$0" "$@" 3<&{to_browser} 4>&{from_browser}'
        home = {
            **os.environ,
            "HOME": str(folder),
            "XDG_CONFIG_HOME": str(folder),
            "XDG_CACHE_HOME": str(folder),
        }
        self._process = subprocess.Popen(
            ["bash", "-c", line, program, *FLAGS, f"--user-data-dir={folder / 'profile'}", "about:blank"],
            pass_fds=(to_browser, from_browser),
            env=home,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        os.close(to_browser)
        os.close(from_browser)
        self._heard, self._number, self._pages = b"", 0, {}

    def __enter__(self) -> Browser:
        return self

    def __exit__(self, *_: object) -> None:
        try:
            self.send("Browser.close", {})
            self._process.wait(20)
        except (OSError, AssertionError, subprocess.TimeoutExpired):
            os.killpg(self._process.pid, 9)
            self._process.wait(10)
        os.close(self._to)
        os.close(self._from)

    def open(self, file: Path, *, width: int, height: int = 900, dark: bool = False) -> Page:
        """A page of a file, drawn at this width."""
        target = self.send("Target.createTarget", {"url": "about:blank"})["targetId"]
        session = self.send("Target.attachToTarget", {"targetId": target, "flatten": True})["sessionId"]
        page = self._pages[session] = Page(self, session)
        for domain in ("Page", "Runtime", "Log", "Network"):
            page.send(f"{domain}.enable")
        page.send(
            "Emulation.setDeviceMetricsOverride",
            width=width,
            height=height,
            deviceScaleFactor=1,
            mobile=False,
        )
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        page.send("Emulation.setEmulatedMedia", features=[scheme])
        page.send("Page.navigate", url=file.as_uri())
        drawn = "document.documentElement?.dataset.drawn === 'yes' && [...document.querySelectorAll('.plot')].every(p => p.firstChild)"
        deadline = time.monotonic() + PATIENCE_S
        while not page.evaluate(drawn):
            assert not page.complaints, page.complaints
            assert time.monotonic() < deadline, "the page was not drawn"
            time.sleep(0.05)  # the protocol has no event for it
        return page

    def send(self, method: str, params: dict[str, Any], page: Page | None = None) -> dict[str, Any]:
        """A command and its answer; what happens meanwhile is given to its page."""
        self._number += 1
        message = {"id": self._number, "method": method, "params": params}
        if page is not None:
            message["sessionId"] = page.session
        os.write(self._to, json.dumps(message).encode() + b"\0")
        while True:
            heard = self._next()
            if heard.get("id") == self._number:
                assert "error" not in heard, heard["error"]
                return heard.get("result", {})
            about = self._pages.get(heard.get("sessionId", ""))
            if about is not None:
                about.hear(heard)

    def _next(self) -> dict[str, Any]:
        while b"\0" not in self._heard:
            ready, _, _ = select.select([self._from], [], [], PATIENCE_S)
            assert ready, "the browser is silent"
            more = os.read(self._from, 1 << 20)
            assert more, "the browser has ended"
            self._heard += more
        text, self._heard = self._heard.split(b"\0", 1)
        return json.loads(text)
