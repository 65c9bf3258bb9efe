"""Fetch images by URL: each once, 16 at a time, within a limit of time and of bytes.

ms-swift requests a URL four times in each of three tries, for one row at a time. A host that failed three times is
left alone, so that a hundred thousand links to it cost a few requests and not hours.
"""

from __future__ import annotations

import math
import os
import threading
import time
from collections import Counter
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from io import BytesIO
from queue import Empty, SimpleQueue
from typing import Any
from urllib.parse import urljoin, urlsplit

import requests
from PIL import Image

NUM_FAILURES = 3
"""Leave a host alone after this many failures in a row."""
NUM_AT_A_TIME = 16
SECONDS_FOR_ALL = 60.0
"""Limit for a whole request: its name, connection, redirects, headers and body."""
BYTES_FOR_ALL = 1 << 28
"""Limit for the content of a URL, after decompression."""
_BYTES_FOR_HEADER = 1 << 16
_SECONDS_TO_CONNECT, _SECONDS_TO_ANSWER = 5.0, 10.0
_HEADED = ("JPEG", "PNG")
"""Formats whose whole header is in the first bytes of a file, so that the rest need not be fetched."""


class UrlUnreachable(OSError):
    """A URL could not be fetched: the host did not answer, or answered with an error, or with too much."""


class Urls:
    """Fetch URLs ahead of their use. Keeps their contents, and the URLs and hosts that failed, in memory."""

    def __init__(self, *, num_tries: int = 1, seconds_left_alone: float = math.inf) -> None:
        """Fetch nothing yet. A URL or host that failed is requested again after `seconds_left_alone`."""
        self._num_tries = num_tries
        self._seconds_left_alone = seconds_left_alone
        self._found: dict[str, tuple[bytes, bool]] = {}  # the content, and whether it is all of it
        self._failed: dict[str, tuple[float, str]] = {}  # by URL or host: when, and why
        self._num_failed: Counter[str] = Counter()  # of each host, in a row
        self._answered: set[str] = set()  # hosts

    def read(self, urls: Iterable[str], *, whole: bool) -> None:
        """Fetch URLs in threads; unless `whole`, only image headers. Failures are not raised here, but by `open`."""
        todo = [url for url in dict.fromkeys(urls) if not self._has(url, whole)]
        with ThreadPoolExecutor(NUM_AT_A_TIME) as threads:
            for url, found in zip(todo, threads.map(partial(self._ask, whole=whole), todo), strict=True):
                if found is not None:
                    self._found[url] = found

    def open(self, url: str, *, whole: bool = True) -> BytesIO:
        """Return the content of a URL; unless `whole`, perhaps only the beginning, with the header of an image.

        Raises `UrlUnreachable`.
        """
        found = self._found[url] if self._has(url, whole) else self._ask(url, whole=whole)
        if found is None:
            raise UrlUnreachable(f"{url}: {self._failure(url)}")
        return BytesIO(found[0])

    def forget(self) -> None:
        """Drop the contents that were read ahead, but not the failures."""
        self._found.clear()

    def _has(self, url: str, whole: bool) -> bool:
        found = self._found.get(url)
        return found is not None and (found[1] or not whole)

    def _ask(self, url: str, *, whole: bool) -> tuple[bytes, bool] | None:
        if self._failure(url) is not None:
            return None
        host, why = _host(url), ""
        for number in range(self._num_tries):
            # Wait 0 s before the first try, 1 s before the second and so on, so that a busy server has a moment.
            time.sleep(number)
            try:
                found = _fetched(url, whole)
            except requests.HTTPError as error:  # an answer, which another request would not change
                self._note(url, f"{type(error).__name__}: {error}")
                found = None
            except Exception as error:  # MemoryError too: one image must not end the run
                why = f"{type(error).__name__}: {error}"
                continue
            self._num_failed[host] = 0
            self._answered.add(host)
            return found
        self._note(url, why)
        self._num_failed[host] += 1
        # Requests in flight to a host that answers may fail together, and that is no reason to give it up.
        if self._num_failed[host] >= NUM_FAILURES + NUM_AT_A_TIME * (host in self._answered):
            self._note(host, f"its host {host} failed {self._num_failed[host]} times and is not asked again ({why})")
        return None

    def _note(self, name: str, why: str) -> None:
        self._failed[name] = time.monotonic(), why

    def _failure(self, url: str) -> str | None:
        """Return why a URL is not requested; None if it may be."""
        since = time.monotonic() - self._seconds_left_alone
        failed = (self._failed.get(name, (-math.inf, "")) for name in (url, _host(url)))
        return next((why for when, why in failed if when > since), None)


def _host(url: str) -> str:
    with suppress(ValueError):
        return urlsplit(url).netloc
    return url


def _seconds_to_answer() -> float:
    """Return the timeout of `SWIFT_TIMEOUT`, ms-swift's own variable, if it is set to a positive number."""
    with suppress(ValueError):
        seconds = float(os.environ.get("SWIFT_TIMEOUT", ""))
        return seconds if seconds > 0 else _SECONDS_TO_ANSWER
    return _SECONDS_TO_ANSWER


def _fetched(url: str, whole: bool) -> tuple[bytes, bool]:
    """Fetch a URL within `SECONDS_FOR_ALL`. Returns its content, and whether it is all of it."""
    seconds = _seconds_to_answer()
    limit = max(SECONDS_FOR_ALL, seconds)
    answers: SimpleQueue[Any] = SimpleQueue()

    def fetch() -> None:
        try:
            answers.put(_content(url, whole, seconds, time.monotonic() + limit))
        except BaseException as error:  # raised again below
            answers.put(error)

    # A thread that can be left alone, because no timeout of `requests` ends a server that sends its headers, or the
    # name of its next redirect, a byte at a time.
    threading.Thread(target=fetch, daemon=True, name="vlpack-url").start()
    try:
        answer = answers.get(timeout=limit)
    except Empty:
        raise TimeoutError(f"it was not there in {limit:g} s") from None
    if isinstance(answer, BaseException):
        raise answer
    found: tuple[bytes, bool] = answer
    return found


def _content(url: str, whole: bool, seconds: float, deadline: float) -> tuple[bytes, bool]:
    """Fetch a URL; unless `whole`, stop after the beginning if an image's header is in it."""
    timeout, content, looks_for_header = (min(_SECONDS_TO_CONNECT, seconds), seconds), bytearray(), not whole
    with _OneByOne() as session:
        for _ in range(session.max_redirects):
            with session.request("GET", url, stream=True, timeout=timeout) as response:
                response.raise_for_status()
                if (target := requests.Session.get_redirect_target(session, response)) is not None:
                    url = urljoin(url, target)
                    continue
                # `read1` returns the bytes that have come, and does not wait for more.
                read = getattr(response.raw, "read1", response.raw.read)
                while part := read(_BYTES_FOR_HEADER, decode_content=True):
                    content += part
                    if time.monotonic() > deadline:
                        raise TimeoutError(f"{len(content)} bytes came in time, and that was not all")
                    if len(content) > BYTES_FOR_ALL:
                        raise ValueError(f"it is larger than {BYTES_FOR_ALL >> 20} MB")
                    if looks_for_header and len(content) >= _BYTES_FOR_HEADER:
                        if _has_header(content):
                            return bytes(content), False
                        looks_for_header = False
                return bytes(content), True
    raise requests.TooManyRedirects(f"more than {session.max_redirects} redirects")


class _OneByOne(requests.Session):
    """Leave redirects to the caller, because `requests` reads their bodies, however long."""

    def get_redirect_target(self, resp: requests.Response) -> None:
        """Return no target."""


def _has_header(content: bytearray) -> bool:
    try:
        with Image.open(BytesIO(content)) as image:
            return image.format in _HEADED
    except Exception:
        return False
