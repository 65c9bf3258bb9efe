"""URLs are asked for once, within a time and a size; hosts that fail are left alone."""

import gzip
import pickle
import socket
import threading
import time
from collections import Counter
from contextlib import contextmanager, suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from io import BytesIO

import numpy as np
import pytest
from PIL import Image

from swift_vlpack.rows import urls as module
from swift_vlpack.rows.urls import NUM_AT_A_TIME, NUM_FAILURES, Urls, UrlUnreachable


class Web:
    """A server in a thread that counts what it is asked for, and how many bytes it could send."""

    def __init__(self):
        self.asked, self.files = Counter(), {}
        web = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self):
                web.asked[self.path] += 1
                content = web.files.get(self.path)
                self.send_response(200 if content is not None else 404)
                self.send_header("Content-Length", str(len(content or b"")))
                self.end_headers()
                self.wfile.write(content or b"")

            def log_message(self, *args):
                pass

            def handle(self):
                with suppress(OSError):  # whoever asked had enough
                    super().handle()

        class Server(ThreadingHTTPServer):
            request_queue_size = 64  # beyond it the system drops who wants to connect

        self.server = Server(("127.0.0.1", 0), Handler)
        self.server.daemon_threads = True
        self.server.block_on_close = False
        threading.Thread(target=self.server.serve_forever, args=(0.01,), daemon=True).start()

    def url(self, path):
        return f"http://127.0.0.1:{self.server.server_port}/{path}"

    def give(self, path, content):
        self.files[f"/{path}"] = content
        return self.url(path)

    def close(self):
        self.server.shutdown()
        self.server.server_close()


@pytest.fixture
def web():
    made = Web()
    yield made
    made.close()


@contextmanager
def black_hole():
    """A port that takes connections and never answers; how many it took."""
    taken, sockets = [], []
    with socket.create_server(("127.0.0.1", 0)) as server:

        def take():
            while True:
                try:
                    sockets.append(server.accept()[0])
                except OSError:
                    return
                taken.append(1)

        thread = threading.Thread(target=take, daemon=True)
        thread.start()
        yield f"http://127.0.0.1:{server.getsockname()[1]}", taken
        server.shutdown(socket.SHUT_RDWR)
        thread.join()
        for one in sockets:
            one.close()


def refused():
    """The address of a port on which nobody listens."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        return f"http://127.0.0.1:{server.getsockname()[1]}"


def jpeg(width, height, seed=0, **options):
    file = BytesIO()
    pixels = np.random.default_rng(seed).integers(0, 255, (height, width, 3), dtype=np.uint8)
    Image.fromarray(pixels).save(file, "JPEG", **options)
    return file.getvalue()


def failure(urls, url):
    with pytest.raises(UrlUnreachable) as caught:
        urls.open(url)
    return str(caught.value)


def test_header_is_read_and_the_rest_is_not(web):
    """LEN-20: once for both, where the whole file is read."""
    content = jpeg(900, 700)
    url, urls = web.give("large.jpg", content), Urls()
    urls.read([url, url], whole=False)
    head = urls.open(url, whole=False).getvalue()
    assert len(head) < len(content) / 2
    with Image.open(BytesIO(head)) as image:
        assert image.size == (900, 700)
    urls.forget()
    urls.read([url], whole=True)
    assert urls.open(url).getvalue() == urls.open(url, whole=False).getvalue() == content
    assert web.asked == {"/large.jpg": 2}


def test_formats_that_say_more_behind_their_beginning_are_read_whole(web):
    """LEN-20"""
    for kind in ("GIF", "WEBP", "TIFF", "BMP"):
        file = BytesIO()
        Image.fromarray(np.random.default_rng(0).integers(0, 255, (300, 300, 3), dtype=np.uint8)).save(file, kind)
        assert Urls().open(web.give(kind, file.getvalue()), whole=False).getvalue() == file.getvalue()


def test_url_that_is_not_there_is_asked_for_once_and_its_host_goes_on(web):
    """LEN-20: and what it answered is said."""
    urls = Urls()
    gone = [web.url(f"gone{n}.jpg") for n in range(10)]
    good = web.give("good.jpg", jpeg(30, 20))
    urls.read([*gone, good], whole=True)
    for url in gone:
        assert "404" in failure(urls, url)
        assert "404" in failure(urls, url)
    assert urls.open(good).getvalue()
    assert set(web.asked.values()) == {1}


def test_host_that_answered_is_not_given_up_for_a_few_failures(web, monkeypatch):
    """LEN-20: one burst of them is none."""
    urls, real = Urls(), module._content
    urls.read([web.give("a.jpg", jpeg(30, 20))], whole=True)

    def failing(*args):
        raise OSError("too many at a time")

    monkeypatch.setattr(module, "_content", failing)
    urls.read([web.url(f"{n}.jpg") for n in range(16)], whole=True)
    monkeypatch.setattr(module, "_content", real)
    assert urls.open(web.give("b.jpg", jpeg(30, 20))).getvalue()


@pytest.fixture
def asked(monkeypatch):
    """How often each URL is requested."""
    counts, real = Counter(), module._content
    monkeypatch.setattr(module, "_content", lambda url, *args: counts.update([url]) or real(url, *args))
    return counts


@pytest.mark.parametrize("kind", ["refused", "black hole"])
def test_host_that_fails_is_left_alone(kind, asked, monkeypatch):
    """LEN-20: a thousand links to it cost what is in flight, and later ones nothing."""
    monkeypatch.setenv("SWIFT_TIMEOUT", "0.3")
    with black_hole() as (address, _):
        base = address if kind == "black hole" else refused()
        urls = Urls()
        urls.read([f"{base}/{n}.jpg" for n in range(1000)], whole=False)
        num_asked = asked.total()
        assert NUM_FAILURES <= num_asked < NUM_FAILURES + NUM_AT_A_TIME
        assert "is not asked again" in failure(urls, f"{base}/999.jpg")
        urls.read([f"{base}/{n}.jpg" for n in range(1000, 1100)], whole=False)
        assert asked.total() == num_asked


def test_what_failed_is_asked_for_again_after_a_time(web, asked, monkeypatch):
    """LEN-20: in training, where a server may come back; a host too."""
    urls, late, down = Urls(seconds_left_alone=300), web.url("late.jpg"), refused()
    urls.read([late, *[f"{down}/{n}" for n in range(50)]], whole=False)
    web.give("late.jpg", jpeg(30, 20))
    assert "404" in failure(urls, late)
    num_asked = asked.total()
    real = time.monotonic
    monkeypatch.setattr(module.time, "monotonic", lambda: real() + 301)
    assert urls.open(late).getvalue()
    assert "ConnectionError" in failure(urls, f"{down}/0")
    assert asked.total() == num_asked + 2


@contextmanager
def answering(send):
    """A server that answers every request as `send(connection)` does, until that fails."""

    def answer(connection):
        with connection, suppress(OSError):
            connection.recv(4096)
            send(connection)

    def serve():
        with suppress(OSError):
            while True:
                threading.Thread(target=answer, args=(server.accept()[0],), daemon=True).start()

    with socket.create_server(("127.0.0.1", 0)) as server:
        threading.Thread(target=serve, daemon=True).start()
        yield f"http://127.0.0.1:{server.getsockname()[1]}/image.jpg"
        server.shutdown(socket.SHUT_RDWR)


OK = b"HTTP/1.1 200 OK\r\n"


def endlessly(connection, part, pause=0.0):
    for _ in range(10_000):  # bounded, should the reader fail to end
        connection.sendall(part)
        time.sleep(pause)


BOMB = gzip.compress(bytes(1 << 24))
"""A few kilobytes that become 16 MB."""


def bomb(connection):
    connection.sendall(OK + b"Content-Encoding: gzip\r\nContent-Length: %d\r\n\r\n" % len(BOMB) + BOMB)


def elsewhere(connection):
    """A redirect with a body that never ends."""
    connection.sendall(b"HTTP/1.1 302 Found\r\nLocation: /image.jpg\r\n\r\n")
    endlessly(connection, bytes(1 << 16))


ANSWERS = {
    "an endless body": (lambda one: (one.sendall(OK + b"\r\n"), endlessly(one, bytes(1 << 16))), "larger than 1 MB"),
    "a bomb": (bomb, "larger than 1 MB"),
    "a body byte by byte": (lambda one: (one.sendall(OK + b"\r\n"), endlessly(one, b"x", 0.02)), "TimeoutError"),
    "headers byte by byte": (lambda one: (one.sendall(OK), endlessly(one, b"x", 0.02)), "TimeoutError"),
    "redirects with endless bodies": (elsewhere, "TooManyRedirects"),
}


@pytest.mark.parametrize("whole", [False, True])
@pytest.mark.parametrize("name", ANSWERS)
def test_answers_that_never_end_are_ended(name, whole, monkeypatch):
    """LEN-20: by the limit of bytes or of time, whatever the server does."""
    monkeypatch.setattr(module, "BYTES_FOR_ALL", 1 << 20)
    monkeypatch.setattr(module, "SECONDS_FOR_ALL", 1.0)
    monkeypatch.setenv("SWIFT_TIMEOUT", "0.5")
    send, said = ANSWERS[name]
    urls, start = Urls(), time.monotonic()
    with answering(send) as url:
        urls.read([url], whole=whole)
        assert said in failure(urls, url)
    assert time.monotonic() - start < 5


def test_image_that_does_not_fit_into_memory_is_one_that_failed(web, monkeypatch):
    """LEN-20"""

    def full(*args):
        raise MemoryError

    monkeypatch.setattr(module, "_content", full)
    urls = Urls()
    urls.read([web.url("a.jpg")], whole=True)
    assert "MemoryError" in failure(urls, web.url("a.jpg"))


def test_redirects_are_followed(web):
    """LEN-20"""
    target = web.give("b.jpg", jpeg(30, 20))
    with answering(lambda one: one.sendall(f"HTTP/1.1 302 Found\r\nLocation: {target}\r\n\r\n".encode())) as url:
        assert Urls().open(url).getvalue() == jpeg(30, 20)


def test_nothing_is_kept_that_was_not_read_ahead_and_workers_can_have_it(web):
    """LEN-20: a worker asks for millions."""
    urls = pickle.loads(pickle.dumps(Urls(num_tries=2)))
    url = web.give("a.jpg", jpeg(30, 20))
    assert urls.open(url).getvalue()
    assert urls.open(url).getvalue()
    assert web.asked == {"/a.jpg": 2}
    assert not urls._found
