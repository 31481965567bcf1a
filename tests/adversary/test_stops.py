"""Ctrl-C, SIGTERM and a kill at any moment: one line, and nothing is lost."""

import contextlib
import functools
import os
import random
import signal
import subprocess
import sys
import textwrap
import time

import pytest
import stopped
import stopped_server
import stops
import thorough
from typer.testing import CliRunner

from jaxhal.cli import app as cli

pytestmark = pytest.mark.skipif(os.name == "nt", reason="POSIX signals")


# --- commands -----------------------------------------------------------------------

# name -> the command, small, how much more each stop finds done at least, and which
# stops: all commands hear a signal in one way.
KILL, TERM, INT = stops.SIGNALS
SMALL = {
    "detect": (stopped.detect(60), 5, (KILL, TERM, INT)),
    "run": (stopped.run(100), 1, (KILL, TERM)),
    "tune": (stopped.tune(30), 3, (KILL, INT)),
    "generate": (stopped.generate(80), 4, (KILL, TERM)),
    "explore": (stopped.explore(6), 6, (KILL, INT)),
}


def finish(command, folder):
    with contextlib.chdir(folder):
        assert CliRunner().invoke(cli.app, command.arguments).exit_code == command.code
    assert not stops.hidden(folder)
    return command.results(folder)


def keeps(command, folder, least):
    return len(command.kept(folder)) >= least


@pytest.mark.parametrize(
    "name", ["detect", *thorough.more("explore", "run", "tune", "generate")]
)
def test_a_command_loses_nothing(name, tmp_path):
    """A kill, then SIGTERM or Ctrl-C, each when a little more is done."""
    command, more, numbers = SMALL[name]
    whole, folder = tmp_path / "whole", tmp_path / "stopped"
    for each in (whole, folder):
        each.mkdir()
        command.prepare(each)
    for number in numbers:
        least = len(command.kept(folder)) + more
        enough = functools.partial(keeps, command, folder, least)
        found = stops.stop(command, folder, number, enough)
        assert found.stopped and len(found.kept) >= least
        if name == "detect" and number != signal.SIGKILL:
            assert "out.jsonl.partial holds what is done" in found.errors
    assert finish(command, folder) == finish(command, whole)
    assert sorted(os.listdir(folder)) == sorted(os.listdir(whole))


@pytest.mark.parametrize(
    ("server", "then"),
    [
        ("serve", signal.SIGTERM),
        *thorough.more(("watchdog serve", signal.SIGINT)),
    ],
)
def test_a_server_loses_no_feedback(server, then, tmp_path):
    """What was acknowledged is there after every stop, and the next one has it."""
    stopped_server.prepare(tmp_path)
    for number in (signal.SIGKILL, then):
        before = len(stopped_server.known(tmp_path))
        found = stopped_server.stop(
            tmp_path,
            number,
            lambda clients: len(clients.acknowledged) >= 3,
            server=server,
        )
        assert len(found.kept) >= before + 3


@pytest.mark.parametrize("number", [signal.SIGINT, *thorough.more(signal.SIGTERM)])
def test_stops_while_importing(tmp_path, number):
    command = stopped.detect(2)
    command.prepare(tmp_path)
    before = sorted(os.listdir(tmp_path))
    draw = random.Random(number)
    for _ in range(2):
        moment = stops.later(draw.uniform(0, 1))
        found = stops.stop(command, tmp_path, number, moment, fresh=True)
        assert found.code == 128 + number
    assert sorted(os.listdir(tmp_path)) == before


# --- any command --------------------------------------------------------------------


def ended(tmp_path, code, *signals):
    """A process that says when it is ready, and is sent signals."""
    script = tmp_path / "script.py"
    script.write_text(
        f"from jaxhal.cli.stopping import orderly\n{textwrap.dedent(code)}"
    )
    process = subprocess.Popen(
        [sys.executable, script], stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    with process:
        assert process.stdout.readline() == b"ready\n"
        for number in signals:
            process.send_signal(number)
            time.sleep(0.1)
        said, errors = process.communicate(timeout=30)
    return process.returncode, said.decode(), errors.decode()


def test_what_swallows_a_stop_is_stopped_again(tmp_path):
    code = """
        import time
        with orderly():
            for said in ("ready", "", ""):
                try:
                    print(said, end="\\n" if said else "", flush=True)
                    time.sleep(20)
                except BaseException:
                    print("swallowed", flush=True)
            time.sleep(20)
    """
    found = ended(tmp_path, code, signal.SIGINT)
    assert found == (130, "swallowed\n" * 3, "jaxhal: stopped by Ctrl-C\n")


def test_a_module_that_is_imported_becomes_whole_first(tmp_path):
    (tmp_path / "slow.py").write_text(
        "import time\n"
        "print('ready', flush=True)\n"
        "try: time.sleep(0.3)\n"
        "except BaseException: print('broken', flush=True)\n"
        "print('whole', flush=True)\n"
    )
    code = """
        from jaxhal.cli.stopping import begun
        import time
        with orderly():
            begun()
            import slow
            time.sleep(20)
    """
    found = ended(tmp_path, code, signal.SIGTERM)
    assert found == (143, "whole\n", "jaxhal: stopped by SIGTERM\n")
    # Before there is anything to clean up it ends at once.
    found = ended(tmp_path, code.replace("begun()", ""), signal.SIGTERM)
    assert found == (143, "", "jaxhal: stopped by SIGTERM\n")


def test_what_nothing_can_be_raised_from_is_silent(tmp_path):
    code = """
        import time
        class Slow:
            def __del__(self):
                print("ready", flush=True)
                time.sleep(1)
        with orderly():
            slow = Slow()
            del slow
            time.sleep(20)
    """
    found = ended(tmp_path, code, signal.SIGINT)
    assert found == (130, "", "jaxhal: stopped by Ctrl-C\n")


def test_cleaning_up_is_not_interrupted(tmp_path):
    code = """
        import time
        with orderly():
            try:
                print("ready", flush=True)
                time.sleep(20)
            finally:
                try:
                    time.sleep(0.2)
                    {}["gone"]
                except KeyError as error:
                    time.sleep(0.2)
                    print("cleaned", flush=True)
    """
    found = ended(tmp_path, code, signal.SIGTERM, signal.SIGINT)
    assert found == (143, "cleaned\n", "jaxhal: stopped by SIGTERM\n")


def test_threads_do_not_hold_a_stop_up(tmp_path):
    code = """
        import threading, time
        with orderly():
            threading.Thread(target=time.sleep, args=(20,)).start()
            print("ready", flush=True)
            time.sleep(20)
    """
    begun = time.monotonic()
    found = ended(tmp_path, code, signal.SIGINT)
    assert found[0] == 130 and time.monotonic() - begun < 10


def test_a_server_ends_in_its_own_way_first(tmp_path):
    code = """
        import uvicorn
        async def app(scope, receive, send):
            message = await receive()
            print({"lifespan.startup": "ready"}.get(message["type"]), flush=True)
            await send({"type": "lifespan.startup.complete"})
            print((await receive())["type"], flush=True)
            await send({"type": "lifespan.shutdown.complete"})
        with orderly():
            uvicorn.run(app, port=0, log_level="error")
    """
    code, said, errors = ended(tmp_path, code, signal.SIGTERM)
    assert (code, said) == (143, "lifespan.shutdown\n")
    assert errors == "jaxhal: stopped by SIGTERM\n"


def test_what_jax_notes_on_its_frames_is_not_said(tmp_path):
    """A stop that comes out of a trace as an error has a note of several lines."""
    code = """
        import jax, time
        from jaxhal.cli.stopping import begun
        def traced(x):
            try:
                print("ready", flush=True)
                time.sleep(20)
            except BaseException:
                error = ValueError("half a program")
                error.add_note("one line")
                raise error
        with orderly():
            begun()
            jax.jit(traced)(1.0)
    """
    found = ended(tmp_path, code, signal.SIGINT)
    assert found == (130, "", "jaxhal: stopped by Ctrl-C; one line\n")


def test_an_event_loop_is_left(tmp_path):
    code = """
        import asyncio
        async def main():
            try:
                print("ready", flush=True)
                await asyncio.sleep(20)
            finally:
                print("left", flush=True)
        with orderly():
            asyncio.run(main())
    """
    found = ended(tmp_path, code, signal.SIGINT)
    assert found == (130, "left\n", "jaxhal: stopped by Ctrl-C\n")


def test_what_ignores_a_signal_goes_on_ignoring_it(tmp_path):
    code = """
        import signal, time
        signal.signal(signal.SIGHUP, signal.SIG_IGN)  # as nohup does
        with orderly():
            print("ready", flush=True)
            time.sleep(0.3)
            print("done", flush=True)
    """
    assert ended(tmp_path, code, signal.SIGHUP) == (0, "done\n", "")


def test_errors_and_exits_stay_what_they_are(tmp_path):
    code = """
        print("ready", flush=True)
        with orderly():
            raise SystemExit(3)
    """
    assert ended(tmp_path, code)[0] == 3
    code, _, errors = ended(tmp_path, code.replace("SystemExit(3)", "KeyError(3)"))
    assert code == 1 and "Traceback" in errors
