"""A headless Chromium, driven over the WebDriver protocol (plain HTTP): for tests of the page.

`from browser import ...`. Needs `chromium` and `chromedriver` on the PATH.
"""

import contextlib
import os
import pathlib
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Iterator
from typing import Any

import httpx
from waiting import PATIENCE, wait_until

ELEMENT = "element-6066-11e4-a52e-4f735466cecf"  # the key under which WebDriver wraps an element
KEYS = {"Enter": "\ue007", "Escape": "\ue00c", "Tab": "\ue004", "ArrowUp": "\ue013", "Shift": "\ue008"}


def missing() -> str | None:
    """Return what a test of the page needs and this machine lacks."""
    lacking = [name for name in ("chromium", "chromedriver") if shutil.which(name) is None]
    return f"no {' and no '.join(lacking)} on the PATH" if lacking else None


class Browser:
    """One browser window."""

    def __init__(self, driver: httpx.Client, session: str):
        self._driver = driver
        self._session = session

    def open(self, url: str) -> None:
        self._post("url", url=url)

    def run(self, script: str, *arguments: Any) -> Any:
        """Run the body of a function in the page, and return its result."""
        return self._post("execute/sync", script=script, args=list(arguments))

    def text(self, selector: str) -> str:
        return self.run("return document.querySelector(arguments[0])?.innerText ?? ''", selector)

    def is_shown(self, selector: str) -> bool:
        return self.run("return !!document.querySelector(arguments[0])?.checkVisibility()", selector)

    def count(self, selector: str) -> int:
        return self.run("return document.querySelectorAll(arguments[0]).length", selector)

    def click(self, selector: str) -> None:
        self._post(f"element/{self._find(selector)}/click")

    def type(self, selector: str, text: str) -> None:
        """Keys into a field; names of KEYS in braces: "hello{Enter}"."""
        for name, code in KEYS.items():
            text = text.replace(f"{{{name}}}", code)
        self._post(f"element/{self._find(selector)}/value", text=text)

    def press(self, key: str) -> None:
        """Press a key, wherever the focus is."""
        code = KEYS.get(key, key)
        actions = [{"type": "keyDown", "value": code}, {"type": "keyUp", "value": code}]
        self._post("actions", actions=[{"type": "key", "id": "keyboard", "actions": actions}])

    def hover(self, selector: str) -> None:
        origin = {ELEMENT: self._find(selector)}
        move = {"type": "pointerMove", "duration": 0, "x": 0, "y": 0, "origin": origin}
        self._post("actions", actions=[{"type": "pointer", "id": "mouse", "actions": [move]}])

    def resize(self, width: int, height: int) -> None:
        """Set the page's size, whatever the window's minimum size is."""
        metrics = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": False}
        self._command("Emulation.setDeviceMetricsOverride", metrics)

    def prefer(self, scheme: str) -> None:
        """`light` or `dark`, as if the system said so."""
        features = [{"name": "prefers-color-scheme", "value": scheme}]
        self._command("Emulation.setEmulatedMedia", {"features": features})

    def forget(self, url: str) -> None:
        """Drop what pages of this origin have kept, of which none is open."""
        self._command("Storage.clearDataForOrigin", {"origin": url, "storageTypes": "local_storage"})

    def log(self) -> list[str]:
        """Return the page's messages since the last call: errors, and violations of its security policy."""
        return [entry["message"] for entry in self._post("se/log", type="browser")]

    def wait_until(self, script: str, *arguments: Any) -> Any:
        """Return the value of the expression as soon as it is truthy."""
        deadline = time.monotonic() + PATIENCE
        while not (value := self.run(f"return {script}", *arguments)):
            assert time.monotonic() < deadline, f"it did not come about: {script}; {self.log()}"
            time.sleep(0.03)
        return value

    def _find(self, selector: str) -> str:
        return self._post("element", using="css selector", value=selector)[ELEMENT]

    def _command(self, name: str, parameters: dict[str, Any]) -> None:
        self._post("goog/cdp/execute", cmd=name, params=parameters)

    def _post(self, path: str, **body: Any) -> Any:
        value = self._driver.post(f"/session/{self._session}/{path}", json=body).json()["value"]
        assert not (isinstance(value, dict) and "error" in value), value
        return value


@contextlib.contextmanager
def browsing(folder: pathlib.Path) -> Iterator[Browser]:
    """A browser from start to end, with its profile in `folder`."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = ["chromedriver", f"--port={port}", f"--log-path={folder / 'driver.log'}"]
    driver = subprocess.Popen(command, start_new_session=True)
    arguments = [
        "--headless=new",
        "--no-sandbox",  # CI runs as root, in a container of its own; the pages are ours
        "--disable-gpu",
        "--disable-dev-shm-usage",
        f"--user-data-dir={folder / 'profile'}",
        "--window-size=1280,800",
    ]
    options = {"binary": shutil.which("chromium"), "args": arguments}
    capabilities = {"goog:chromeOptions": options, "goog:loggingPrefs": {"browser": "ALL"}}
    try:
        with httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=PATIENCE, verify=False) as client:
            _wait_for(client)
            answer = client.post("/session", json={"capabilities": {"alwaysMatch": capabilities}}).json()["value"]
            session = answer.get("sessionId")
            assert session, answer
            try:
                yield Browser(client, session)
            finally:
                with contextlib.suppress(httpx.TransportError):
                    client.delete(f"/session/{session}", timeout=10)
    finally:
        # A driver whose browser hangs does not heed SIGTERM; both are in its process group, and their work is done.
        os.killpg(driver.pid, signal.SIGKILL)
        driver.wait()


def _wait_for(client: httpx.Client) -> None:
    def is_ready() -> bool:
        with contextlib.suppress(httpx.TransportError):
            return client.get("/status").json()["value"]["ready"]
        return False

    wait_until(is_ready)
