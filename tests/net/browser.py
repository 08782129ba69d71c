"""A headless Chromium that sees the status page, and tells all that it did."""

from __future__ import annotations

import json
import shutil
import time
from pathlib import Path
from typing import Any

from selenium.webdriver import Chrome, ChromeOptions, ChromeService

CHROMIUM = shutil.which("chromium")
DRIVER = shutil.which("chromedriver")
PATIENCE_SECONDS = 20
FLAGS = (
    *("--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run"),
    *("--disable-background-networking", "--disable-component-update", "--disable-sync"),
)


class Browser:
    """One tab. `get` opens a page in it and forgets what was before."""

    def __init__(self, profile: Path) -> None:
        options = ChromeOptions()
        options.binary_location = str(CHROMIUM)
        for flag in (*FLAGS, f"--user-data-dir={profile}", "--window-size=1280,1000"):
            options.add_argument(flag)
        options.set_capability("goog:loggingPrefs", {"browser": "ALL", "performance": "ALL"})
        self.driver = Chrome(options=options, service=ChromeService(str(DRIVER)))

    def close(self) -> None:
        self.driver.quit()

    def get(self, url: str, *, width: int = 1280, dark: bool = False) -> None:
        size = {"width": width, "height": 1000, "deviceScaleFactor": 1, "mobile": width < 600}
        self.cdp("Emulation.setDeviceMetricsOverride", size)
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.cdp("Emulation.setEmulatedMedia", {"features": [scheme]})
        self.driver.get("about:blank")
        self.errors()
        self.requests()
        self.driver.get(url)

    def cdp(self, command: str, parameters: dict[str, Any]) -> None:
        self.driver.execute_cdp_cmd(command, parameters)

    def js(self, expression: str) -> Any:
        return self.driver.execute_script(f"return {expression}")

    def press(self, key: str) -> None:
        """A key, pressed and released."""
        for kind in ("keyDown", "keyUp"):
            self.cdp("Input.dispatchKeyEvent", {"type": kind, "key": key})

    def text(self, selector: str) -> str:
        """The text of an element as people see it; empty where there is none."""
        found = self.js(f"document.querySelector({json.dumps(selector)})?.innerText ?? ''")
        return " ".join(str(found).split())

    def wait_for(self, selector: str, text: str) -> None:
        """Wait until the element shows this text."""
        deadline = time.monotonic() + PATIENCE_SECONDS
        while text not in (seen := self.text(selector)):
            assert time.monotonic() < deadline, f"no {text!r} in {selector}: {seen!r}"
            time.sleep(0.05)

    def errors(self) -> list[str]:
        """What the console has said since the last call."""
        return [entry["message"] for entry in self.driver.get_log("browser")]

    def requests(self) -> set[str]:
        """The URLs that were asked for since the last call."""
        entries = [json.loads(e["message"])["message"] for e in self.driver.get_log("performance")]
        return {
            entry["params"]["request"]["url"]
            for entry in entries
            if entry["method"] == "Network.requestWillBeSent"
        }

    def screenshot(self, path: Path) -> None:
        """The whole page as a PNG."""
        height = self.js("document.documentElement.scrollHeight")
        width = self.js("window.innerWidth")
        size = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": width < 600}
        self.cdp("Emulation.setDeviceMetricsOverride", size)
        assert self.driver.save_screenshot(str(path))
