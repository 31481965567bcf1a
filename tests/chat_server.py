"""A chat model behind an address, which says what a test tells it to."""

import contextlib
import http.server
import json
import re
import socket
import threading

# In place of a reply: none comes before the test is over.
STALL = object()
# In place of a piece: the connection ends.
BREAK = object()


class ChatServer(http.server.ThreadingHTTPServer):
    """Answers with each of `replies`, then with the last for ever; remembers requests.

    A reply is a text, None for a message without text, a status, STALL, or bytes that
    are sent as they are; or a function that makes one of these of the question.  A list
    is pieces of bytes, sent with pauses between them.  Where a stream is asked for, a
    text is sent word by word, bytes as they are, and a list is the pieces, of which
    STALL waits, and BREAK ends the connection.
    """

    def __init__(self, reply):
        super().__init__(("127.0.0.1", 0), _Chat)
        self.replies, self.asked, self.keys = [reply], [], []
        self.closing = threading.Event()
        self.url = f"http://127.0.0.1:{self.server_address[1]}/v1"

    @property
    def questions(self):
        """The last message of each request."""
        return [body["messages"][-1]["content"] for _, body in self.asked]


class _Chat(http.server.BaseHTTPRequestHandler):
    server: ChatServer

    def handle(self):
        with contextlib.suppress(ConnectionError):  # nobody listens any more
            super().handle()

    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        server = self.server
        server.asked.append((self.path, body))
        server.keys.append(self.headers["Authorization"])
        later = len(server.replies) > 1
        reply = server.replies.pop(0) if later else server.replies[0]
        if callable(reply):
            reply = reply(body["messages"][-1]["content"])
        if reply is STALL:
            server.closing.wait()
            return
        if body.get("stream") and not isinstance(reply, int):
            self.stream(reply)
            return
        if isinstance(reply, list):
            self.drip(reply)
            return
        status = reply if isinstance(reply, int) else 200
        text = None if isinstance(reply, bytes) else reply
        message = {"role": "assistant", "content": text}
        choices = [{"index": 0, "finish_reason": "stop", "message": message}]
        found = {"id": "1", "object": "chat.completion", "created": 0, "model": "m"}
        whole = json.dumps(found | {"choices": choices if status == 200 else []})
        raw = reply if isinstance(reply, bytes) else whole.encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(raw)))
        self.send_header("retry-after-ms", "1")
        self.end_headers()
        self.wfile.write(raw)

    def drip(self, pieces):
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Connection", "close")
        self.end_headers()
        self.close_connection = True
        for piece in pieces:
            self.wfile.write(piece)
            self.wfile.flush()
            if self.server.closing.wait(0.05):
                return

    def stream(self, reply):
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream")
        self.send_header("Connection", "close")
        self.end_headers()
        self.close_connection = True
        for piece in reply if isinstance(reply, list) else re.split(r"(?= )", reply):
            if piece is BREAK:
                self.connection.shutdown(socket.SHUT_RDWR)
                return
            if piece is STALL:
                self.server.closing.wait()
                return
            if callable(piece):
                piece = piece()
            if isinstance(piece, str):
                choice = {"index": 0, "delta": {"content": piece}}
                chunk = {"id": "1", "object": "chat.completion.chunk", "model": "m"}
                whole = json.dumps(chunk | {"created": 0, "choices": [choice]})
                piece = f"data: {whole}\n\n".encode()
            self.wfile.write(piece)
            self.wfile.flush()
        self.wfile.write(b"data: [DONE]\n\n")

    def log_message(self, *args):
        pass


@contextlib.contextmanager
def serving(reply, tmp_path, monkeypatch):
    """A server, no key, and a cache of its own."""
    monkeypatch.setenv("JAXHAL_CACHE", str(tmp_path / "cache"))
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)
    with ChatServer(reply) as server, contextlib.ExitStack() as stack:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        stack.callback(thread.join)
        stack.callback(server.shutdown)
        stack.callback(server.closing.set)
        yield server
