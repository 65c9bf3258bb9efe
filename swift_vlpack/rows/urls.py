"""Fetch images by URL, once, in threads, with a short timeout, and remember failures.

ms-swift requests a URL four times in each of three tries, for one row at a time. Here a URL is requested once. A host
that has not answered yet gets at most three requests at a time, and a host that failed three times in a row gets none.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from io import BytesIO
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import requests
from PIL import Image
from urllib3.exceptions import HTTPError

from swift_vlpack import json_lines

NUM_FAILURES = 3
"""Stop requests to a host that never answered after this many failures in a row."""
SECONDS_REMEMBERED = 3600
"""Time during which a URL or host that could not be reached is not requested again, in this run and in later ones."""
_NUM_THREADS = 16
_NUM_FAILURES_OF_GOOD = NUM_FAILURES + _NUM_THREADS  # for a host that did answer: more than are in flight at a time
_SECONDS_TO_CONNECT, _SECONDS_TO_ANSWER, _SECONDS_FOR_WHOLE = 5.0, 10.0, 60.0
_PART, _FIRST_LOOK = 1 << 16, 1 << 12  # bytes
_HEADED = ("JPEG", "PNG")
"""Formats whose whole header is in the first bytes of a file, so that the rest need not be fetched."""


class UrlUnreachable(OSError):
    """A URL could not be fetched: the host did not answer, or answered with an error."""


class Urls:
    """Fetch URLs ahead of their use. Keeps their contents, and the URLs and hosts that failed."""

    def __init__(
        self, memory: Path | None = None, *, seconds_remembered: float = SECONDS_REMEMBERED, num_tries: int = 1
    ) -> None:
        """Take the file in which failures are remembered; fetch nothing yet.

        Processes and runs share the failures in `memory`. With None, failures are known to this object only.
        """
        self._memory = memory
        self._seconds_remembered = seconds_remembered
        self._num_tries = num_tries
        self._found: dict[str, tuple[bytes, bool]] = {}  # the content, and whether it is all of it
        self._failed: dict[str, tuple[float, str]] = {}  # by URL or host: when, and why
        self._num_failed: dict[str, int] = {}  # of each host, in a row
        self._answered: set[str] = set()  # hosts
        self._num_read = 0  # bytes of the memory
        self._lock = threading.Lock()

    def __getstate__(self) -> dict[str, Any]:
        """Leave out contents and lock, because another process has its own."""
        return {**self.__dict__, "_lock": None, "_found": {}}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._lock = threading.Lock()

    def read(self, urls: Iterable[str], *, whole: bool) -> None:
        """Fetch URLs in threads; unless `whole`, only image headers. Failures are not raised here, but by `open`."""
        todo = [url for url in dict.fromkeys(urls) if not self._has(url, whole)]
        if not todo:
            return
        self._take_over()
        # Request a few URLs of every unknown host first, so that a dead host costs three timeouts and not a thousand.
        first, rest = self._divided(todo)
        for some in filter(None, (first, rest)):
            with ThreadPoolExecutor(min(_NUM_THREADS, len(some))) as threads:
                for url, found in zip(some, threads.map(lambda url: self._ask(url, whole), some), strict=True):
                    if found is not None:
                        self._found[url] = found

    def open(self, url: str, *, whole: bool = True) -> BytesIO:
        """Return the content of a URL; unless `whole`, perhaps only the beginning, with the header of an image.

        Raises `UrlUnreachable`.
        """
        found = self._found[url] if self._has(url, whole) else self._ask(url, whole)
        if found is not None:
            return BytesIO(found[0])
        _, why = self._failure(url) or (0.0, "no answer")
        raise UrlUnreachable(f"{url}: {why}")

    def forget(self) -> None:
        """Drop the contents that were read ahead, but not the failures."""
        self._found.clear()

    def _has(self, url: str, whole: bool) -> bool:
        found = self._found.get(url)
        return found is not None and (found[1] or not whole)

    def _divided(self, urls: list[str]) -> tuple[list[str], list[str]]:
        """Return (a few URLs of every host that has not answered yet, all other URLs)."""
        first: list[str] = []
        rest: list[str] = []
        num_asked = dict.fromkeys(map(_host, urls), 0)
        for url in urls:
            host = _host(url)
            num_failed = self._num_failed.get(host, 0)
            is_new = host not in self._answered and num_asked[host] < NUM_FAILURES - num_failed
            num_asked[host] += 1
            (first if is_new else rest).append(url)
        return first, rest

    def _ask(self, url: str, whole: bool) -> tuple[bytes, bool] | None:
        if self._failure(url) is not None:
            return None
        why, answered = "", False
        for number in range(self._num_tries):
            # Wait 0 s before the first try, 1 s before the second and so on, so that a busy server has a moment.
            time.sleep(number)
            try:
                found = _content(url, whole)
            except (requests.RequestException, HTTPError, OSError, ValueError) as error:
                why, answered = f"{type(error).__name__}: {error}", isinstance(error, requests.HTTPError)
                # The server answered with an error, and a retry would not change that.
                if answered:
                    break
                continue
            self._num_failed[_host(url)] = 0
            self._answered.add(_host(url))
            return found
        self._note(url, why, answered)
        return None

    def _note(self, url: str, why: str, answered: bool) -> None:
        host, now = _host(url), time.time()
        with self._lock:
            self._num_failed[host] = 0 if answered else self._num_failed.get(host, 0) + 1
            self._answered |= {host} if answered else set()
            self._failed[url] = now, why
            lines = [{"url": url, "at": now, "why": why}]
            most = _NUM_FAILURES_OF_GOOD if host in self._answered else NUM_FAILURES
            # Write this once, when the limit is reached: later failures of the host would say the same.
            if self._num_failed[host] == most:
                why = f"its host {host} failed {most} times in a row and is not asked again ({why})"
                self._failed[host] = now, why
                lines.append({"url": host, "at": now, "why": why})
            self._write(lines)

    def _failure(self, url: str) -> tuple[float, str] | None:
        since = time.time() - self._seconds_remembered
        for name in (url, _host(url)):
            failed = self._failed.get(name)
            if failed is not None and failed[0] > since:
                return failed
        return None

    def _take_over(self) -> None:
        """Load the failures that other processes and earlier runs saved since the last call."""
        if self._memory is None:
            return
        with suppress(OSError), self._memory.open("rb") as file:
            file.seek(self._num_read)
            content = file.read()
            # Whole lines only, because another process may be writing the last one.
            self._num_read += content.rfind(b"\n") + 1
            for line in filter(_is_of_failure, json_lines.parsed(content.splitlines())):
                self._failed[line["url"]] = line["at"], f"{line['why']} (remembered)"

    def _write(self, lines: list[dict[str, Any]]) -> None:
        if self._memory is not None:
            with suppress(OSError):  # the cache of lengths, in the same folder, reports it
                json_lines.append(self._memory, lines)


def _is_of_failure(line: Any) -> bool:
    is_line = isinstance(line, dict) and isinstance(line.get("at"), float)
    return is_line and isinstance(line.get("url"), str) and "why" in line


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


def _content(url: str, whole: bool) -> tuple[bytes, bool]:
    """Fetch a URL. Returns (content, whether it is the whole file); unless `whole`, an image's header may be enough."""
    seconds = _seconds_to_answer()
    limit = max(_SECONDS_FOR_WHOLE, 6 * seconds) if whole else 2 * seconds
    deadline = time.monotonic() + limit
    content, next_look = bytearray(), _FIRST_LOOK
    with requests.get(url, stream=True, timeout=(min(_SECONDS_TO_CONNECT, seconds), seconds)) as response:
        response.raise_for_status()
        # `read1` returns the bytes that have come and does not wait for more, so that a short header is seen at once.
        read = getattr(response.raw, "read1", response.raw.read)
        while part := read(_PART, decode_content=True):
            content += part
            if not whole and len(content) >= next_look:
                if _has_header(content):
                    return bytes(content), False
                # Look again at twice the size, so that looking costs no more than reading.
                next_look = 2 * len(content)
            # `requests` limits only the wait for the next bytes, so a server that sends a byte a second would never
            # end.
            if time.monotonic() > deadline:
                raise TimeoutError(f"{len(content)} bytes came in {limit:.0f} s, and that was not all")
    return bytes(content), True


def _has_header(content: bytearray) -> bool:
    try:
        with Image.open(BytesIO(content)) as image:
            return image.format in _HEADED
    except Exception:
        return False
