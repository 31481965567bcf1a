"""A Milvus server in a process of its own, to reach by an address and to kill."""

import socket
import subprocess
import sys
import time

_RUN = """\
import sys
from milvus_lite.adapter.grpc.server import run_server
run_server(sys.argv[1], "127.0.0.1", int(sys.argv[2]))
"""


class MilvusServer:
    """Serves a folder at ``uri`` from :meth:`start` to :meth:`kill`, and again."""

    def __init__(self, folder):
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self._port = free.getsockname()[1]
        self._folder, self.uri = str(folder), f"http://127.0.0.1:{self._port}"

    def start(self):
        self._process = subprocess.Popen(
            [sys.executable, "-c", _RUN, self._folder, str(self._port)],
            stdout=subprocess.DEVNULL,
        )
        ends = time.monotonic() + 60
        while time.monotonic() < ends:
            with socket.socket() as line:
                if line.connect_ex(("127.0.0.1", self._port)) == 0:
                    return
            time.sleep(0.05)
        raise TimeoutError(f"no Milvus at {self.uri}")

    def kill(self):
        self._process.kill()
        self._process.wait()
