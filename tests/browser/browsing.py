"""Debian's Chromium, driven without a window: what a page shows, what its console says, what axe finds, and a picture of it."""

from __future__ import annotations

import base64
import importlib.resources
import os
import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from selenium import webdriver
from selenium.webdriver.chrome.options import Options
from selenium.webdriver.chrome.service import Service

CHROMIUM, DRIVER = shutil.which("chromium"), shutil.which("chromedriver")
needs_chromium = pytest.mark.skipif(not (CHROMIUM and DRIVER), reason="not installed here: apt-get install chromium chromium-driver")
PICTURES = Path(os.environ.get("WATCHDOG_PICTURES") or Path(__file__).parents[2] / "build" / "pictures")
PATIENCE_S = 60.0
MOST_PIXELS_HIGH = 8_000


class Browser:
    """A window of Chromium. `errors` has everything that its console complained of since it was last asked."""

    def __init__(self, driver: webdriver.Chrome) -> None:
        self.driver = driver

    def open(self, url: str) -> None:
        self.driver.get(url)

    def text(self, selector: str = "body") -> str:
        found: str = self.driver.execute_script("return document.querySelector(arguments[0])?.textContent ?? ''", selector)
        return found

    def run(self, script: str, *arguments: Any) -> Any:
        return self.driver.execute_script(script, *arguments)

    def press(self, selector: str) -> None:
        self.driver.find_element("css selector", selector).click()

    def until(self, condition: Callable[[], Any], what: str) -> Any:
        deadline = time.monotonic() + PATIENCE_S
        while not (found := condition()):
            assert time.monotonic() < deadline, f"not within {PATIENCE_S:g} s: {what}; the page: {self.text()[:400]!r}"
            time.sleep(0.05)
        return found

    def picture(self, name: str) -> None:
        """Of the whole page, however long, for people to look at: CI keeps the folder."""
        PICTURES.mkdir(parents=True, exist_ok=True)
        size = self.driver.execute_cdp_cmd("Page.getLayoutMetrics", {})["cssContentSize"]
        width = self.run("return window.innerWidth")  # no scroll bar is drawn beyond the viewport
        clip = {"x": 0, "y": 0, "width": width, "height": min(size["height"], MOST_PIXELS_HIGH), "scale": 1}
        shot = self.driver.execute_cdp_cmd("Page.captureScreenshot", {"captureBeyondViewport": True, "clip": clip})
        (PICTURES / f"{name}.png").write_bytes(base64.b64decode(shot["data"]))

    def errors(self) -> list[str]:
        return [entry["message"] for entry in self.driver.get_log("browser") if entry["level"] in ("SEVERE", "WARNING")]

    def violations(self) -> list[str]:
        """What axe finds against WCAG 2.1 AA and its best practices."""
        self.driver.execute_script((importlib.resources.files("axe_core_python") / "axe.min.js").read_text())
        found = self.driver.execute_async_script("const done = arguments[0]; axe.run().then(found => done(found.violations), done)")
        return [f"{one['id']}: {one['nodes'][0]['html'][:200]} {one['nodes'][0]['failureSummary'][:200]}" for one in found]

    def dark(self, wanted: bool) -> None:
        scheme = [{"name": "prefers-color-scheme", "value": "dark" if wanted else "light"}]
        self.driver.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": scheme})

    def size(self, width: int, height: int) -> None:
        metrics = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": width < 600}
        self.driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", metrics)

    def offline(self) -> None:
        self.driver.execute_cdp_cmd("Network.enable", {})
        self.driver.execute_cdp_cmd(
            "Network.emulateNetworkConditions", {"offline": True, "latency": 0, "downloadThroughput": 0, "uploadThroughput": 0}
        )

    def first_paint_ms(self) -> float:
        paint = "return performance.getEntriesByName('first-contentful-paint')[0]?.startTime"
        return float(self.until(lambda: self.run(paint), "a first paint"))


@contextmanager
def browser() -> Iterator[Browser]:
    options = Options()
    options.binary_location = CHROMIUM or ""
    for word in (
        "--headless=new",
        "--no-sandbox",
        "--disable-dev-shm-usage",
        "--disable-gpu",
        "--no-first-run",
        "--disable-background-networking",
    ):
        options.add_argument(word)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    driver = webdriver.Chrome(options=options, service=Service(DRIVER))
    try:
        driver.set_script_timeout(60)
        yield Browser(driver)
    finally:
        driver.quit()
