"""URLs are asked for once; hosts that fail are left alone; what cannot be reached is remembered for a time."""

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
from swift_vlpack.rows.urls import NUM_FAILURES, Urls, UrlUnreachable


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

    def failing(url, whole):
        raise OSError("too many at a time")

    monkeypatch.setattr(module, "_content", failing)
    urls.read([web.url(f"{n}.jpg") for n in range(16)], whole=True)
    monkeypatch.setattr(module, "_content", real)
    assert urls.open(web.give("b.jpg", jpeg(30, 20))).getvalue()


@pytest.mark.parametrize("kind", ["refused", "black hole"])
def test_host_that_fails_is_left_alone(kind, monkeypatch):
    """LEN-20: a thousand links to it cost three."""
    monkeypatch.setenv("SWIFT_TIMEOUT", "0.3")
    asked, real = Counter(), module._content
    monkeypatch.setattr(module, "_content", lambda url, whole: asked.update([url]) or real(url, whole))
    with black_hole() as (address, _):
        base = address if kind == "black hole" else refused()
        urls = Urls()
        urls.read([f"{base}/{n}.jpg" for n in range(1000)], whole=False)
        assert asked.total() == NUM_FAILURES
        assert "is not asked again" in failure(urls, f"{base}/999.jpg")
        urls.read([f"{base}/{n}.jpg" for n in range(1000, 1100)], whole=False)
        assert asked.total() == NUM_FAILURES


def test_what_failed_is_remembered_for_a_time(web, tmp_path, monkeypatch):
    """LEN-20: by other processes and later runs; afterwards it is asked for again."""
    memory, url, down = tmp_path / "unreachable.urls", web.url("late.jpg"), refused()
    Urls(memory).read([url, *[f"{down}/{n}" for n in range(5)]], whole=False)
    web.give("late.jpg", jpeg(30, 20))
    later = Urls(memory)
    later.read([url, f"{down}/new"], whole=False)
    assert "remembered" in failure(later, url)
    assert "is not asked again" in failure(later, f"{down}/new")
    assert web.asked == {"/late.jpg": 1}
    real = time.time
    monkeypatch.setattr(time, "time", lambda: real() + module.SECONDS_REMEMBERED + 1)
    again = Urls(memory)
    again.read([url], whole=False)
    assert again.open(url, whole=False).getvalue()
    assert web.asked == {"/late.jpg": 2}


def test_damaged_memory_is_none(web, tmp_path):
    """LEN-20"""
    memory = tmp_path / "unreachable.urls"
    memory.write_bytes(b'\xff\x00 5\n{"url": 5}\n[]\n{"url": "' + web.url("a.jpg").encode() + b'"}\n{"unfinished')
    urls = Urls(memory)
    urls.read([web.give("a.jpg", jpeg(30, 20))], whole=True)
    assert urls.open(web.url("a.jpg")).getvalue()


def test_nothing_is_kept_that_was_not_read_ahead_and_workers_can_have_it(web):
    """LEN-20: a worker asks for millions."""
    urls = pickle.loads(pickle.dumps(Urls(num_tries=2)))
    url = web.give("a.jpg", jpeg(30, 20))
    assert urls.open(url).getvalue()
    assert urls.open(url).getvalue()
    assert web.asked == {"/a.jpg": 2}
    assert not urls._found
