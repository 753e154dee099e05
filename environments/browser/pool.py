"""Pages of a few browsers, lent to episodes; a browser that hangs or dies is replaced."""

from __future__ import annotations

import asyncio
import logging
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rlflow_environments.browser.chromium import BrowserError, Chromium

logger = logging.getLogger(__name__)

SCRIPT = (Path(__file__).parent / "page.js").read_text(encoding="utf-8")
ALIVE_S = 15.0  # for a browser to say that it is, on a machine that is busy too
PICTURE = {"width": 160, "height": 210}  # pixels
WINDOW = {"width": 340, "height": 210}  # what lies beside a task is not to be scrolled away


@dataclass(frozen=True)
class PoolOptions:
    """browsers: processes. pages: at the most, of all of them. timeout_s: of one call of a page.
    start_s: of a browser, and of a new page."""

    program: str
    browsers: int
    pages: int
    timeout_s: float
    start_s: float


@dataclass
class Page:
    """A tab. url: of the document in it. failed: nobody can use it any longer."""

    browser: Chromium
    target: str
    session: str
    timeout_s: float
    url: str = ""
    failed: bool = False

    async def open(self, url: str) -> None:
        """Loads a document, unless it is there. Raises BrowserError."""
        if self.url != url:
            found = await self._ask("Page.navigate", url=url)
            if "errorText" in found:
                self.failed = True
                raise BrowserError(f"chromium: {url}: {found['errorText']}.")
            self.url = url

    async def call(self, expression: str) -> Any:
        """The value of a JavaScript expression, awaited. Raises BrowserError."""
        how = {"awaitPromise": True, "returnByValue": True}
        found = await self._ask("Runtime.evaluate", expression=expression, **how)
        if "exceptionDetails" in found:
            self.failed = True
            said = found["exceptionDetails"].get("exception", {}).get("description", "")
            raise BrowserError(f"chromium: the page's script failed: {said[:200]}.")
        return found["result"].get("value")

    async def picture(self) -> str:
        """A screenshot as a data URL. Raises BrowserError."""
        clip = {"x": 0, "y": 0, **PICTURE, "scale": 1}
        found = await self._ask("Page.captureScreenshot", format="jpeg", quality=60, clip=clip)
        return f"data:image/jpeg;base64,{found['data']}"

    async def _ask(self, method: str, **parameters: Any) -> dict[str, Any]:
        try:
            return await self.browser.ask(method, self.timeout_s, self.session, **parameters)
        except BaseException:  # cancelled: what it was at may still be going on
            self.failed = True
            raise


@dataclass
class _Place:
    """Of one browser, which is started with its first page."""

    browser: Chromium | None = None
    pages: int = 0
    opening: int = 0
    starting: asyncio.Lock = field(default_factory=asyncio.Lock)


class Pool:
    """All calls belong into one event loop. An episode takes a page and gives it back."""

    def __init__(self, options: PoolOptions) -> None:
        self._options = options
        self._places = [_Place() for _ in range(options.browsers)]
        self._room = asyncio.Semaphore(options.pages)
        self._idle: list[Page] = []  # the longest idle first
        self.restarts = 0
        self.lost_pages = 0

    async def take(self, url: str) -> Page:
        """A page with the document of the URL, waited for. Raises BrowserError."""
        await self._room.acquire()
        page = None
        try:
            page = self._idle_page(url) or await self._new_page()
            await page.open(url)
            return page
        except BaseException:
            if page is not None:
                await self._discard(page)
            self._room.release()
            raise

    async def give(self, page: Page, used_up: bool = False) -> None:
        """Takes a page back. used_up: its document serves no other episode."""
        try:
            if page.failed or page.browser.ended:
                await self._discard(page)
            else:
                page.url = "" if used_up else page.url
                self._idle.append(page)
        finally:
            self._room.release()

    async def close(self) -> None:
        """Ends all browsers."""
        for place in self._places:
            if place.browser is not None:
                await place.browser.close()

    def _idle_page(self, url: str) -> Page | None:
        """One that shows the document; another one only where there may be no more of them."""
        self._idle = [page for page in self._idle if not page.browser.ended]
        fitting = [page for page in self._idle if page.url == url]
        open_pages = sum(place.pages for place in self._places)
        page = next(iter(fitting or self._idle), None)
        if page is not None and (fitting or open_pages >= self._options.pages):
            self._idle.remove(page)
            return page
        return None

    async def _new_page(self) -> Page:
        place = min(self._places, key=lambda one: one.pages + one.opening)
        place.opening += 1  # at once: others choose meanwhile
        try:
            browser = await self._running(place)
            try:
                page = await self._tab(browser)
            except BaseException:
                await self._end_if_hung(browser)
                raise
        finally:
            place.opening -= 1
        place.pages += browser is place.browser
        return page

    async def _running(self, place: _Place) -> Chromium:
        """The place's browser, a new one where there is none that runs."""
        async with place.starting:
            if place.browser is None or place.browser.ended:
                if place.browser is not None:
                    self.restarts += 1
                    place.pages = 0
                    logger.warning("browser: %s; another one is started", place.browser.ended)
                    await place.browser.close()
                browser = Chromium(self._options.program, self._options.start_s)
                await browser.open()
                place.browser = browser
            return place.browser

    async def _tab(self, browser: Chromium) -> Page:
        limit_s = self._options.start_s
        # In a window of its own: a tab behind another one is not drawn
        how = {"url": "about:blank", "newWindow": True}
        made = await browser.ask("Target.createTarget", limit_s, **how)
        target = made["targetId"]
        joined = await browser.ask("Target.attachToTarget", limit_s, targetId=target, flatten=True)
        session = joined["sessionId"]
        metrics = {**WINDOW, "deviceScaleFactor": 1, "mobile": False}
        await browser.ask("Page.enable", limit_s, session)
        await browser.ask("Emulation.setDeviceMetricsOverride", limit_s, session, **metrics)
        await browser.ask("Page.addScriptToEvaluateOnNewDocument", limit_s, session, source=SCRIPT)
        return Page(browser, target, session, self._options.timeout_s)

    async def _discard(self, page: Page) -> None:
        """Closes a page, and its browser where that cannot."""
        self.lost_pages += 1
        for place in self._places:
            if place.browser is page.browser:
                place.pages -= 1
        if page.browser.ended:
            return
        try:
            await page.browser.ask("Target.closeTarget", ALIVE_S, targetId=page.target)
        except BrowserError:
            await page.browser.close("a page of its could not be closed")

    async def _end_if_hung(self, browser: Chromium) -> None:
        if browser.ended:
            return
        try:
            await browser.ask("Browser.getVersion", ALIVE_S)
        except BrowserError:
            await browser.close("it did not answer")
