# SPDX-License-Identifier: Apache-2.0
"""Workers that no GPU is needed for: some misbehave, one plays a GPU by a script.

``python fake_worker.py MODE READ_FD WRITE_FD PARENT_PID``. A mode is the name of a function below,
or ``{...}``, JSON for :class:`Gpu`.
"""

from __future__ import annotations

import json
import os
import pickle
import random
import re
import signal
import struct
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

sys.path.append(str(Path(__file__).parents[1]))  # a script's own folder is all that it is given

HEADER = struct.Struct("<Q")


class Pipe:
    def __init__(self, read_fd, write_fd):
        self.requests = os.fdopen(read_fd, "rb")
        self.answers = os.fdopen(write_fd, "wb", buffering=0)

    def receive(self):
        header = self.requests.read(HEADER.size)
        if len(header) < HEADER.size:
            sys.exit(0)
        return pickle.loads(self.requests.read(*HEADER.unpack(header)))

    def send(self, message):
        self.write(pickle.dumps(message))

    def write(self, content):
        self.answers.write(HEADER.pack(len(content)) + content)


# --- misbehaviour --------------------------------------------------------------------------------


def honest(pipe):
    """Says how many operands' worth of bytes each request took, until it is closed."""
    from tunegen.runner.protocol import Close, Prepared

    while not isinstance(request := pipe.receive(), Close):
        pipe.send(Prepared(len(pickle.dumps(request)), 0.0))


def exits(pipe):
    pipe.receive()
    print("the last words", file=sys.stderr)
    sys.exit(3)


def crashes(pipe):
    pipe.receive()
    os.kill(os.getpid(), signal.SIGSEGV)


def hangs(pipe):
    pipe.receive()
    print("about to hang", flush=True)
    time.sleep(600)


def never_reads(pipe):
    time.sleep(600)


def late(pipe):
    from tunegen.runner.protocol import Prepared

    pipe.receive()
    time.sleep(0.6)
    pipe.send(Prepared(0, 0.0))
    honest(pipe)


def no_pickle(pipe):
    pipe.receive()
    pipe.write(b"\x80\x05this is no pickle")
    time.sleep(600)


def no_module(pipe):
    pipe.receive()
    pipe.write(b"cno_such_module\nThing\n.")
    time.sleep(600)


def no_answer(pipe):
    pipe.receive()
    pipe.send({"not": "an answer"})
    time.sleep(600)


def no_frame(pipe):
    pipe.receive()
    os.write(pipe.answers.fileno(), b"hello, parent! This is no frame.")
    time.sleep(600)


def half_a_frame(pipe):
    pipe.receive()
    os.write(pipe.answers.fileno(), HEADER.pack(100) + b"and then it ends")
    sys.exit(0)


def chatters(pipe):
    from tunegen.runner.protocol import Prepared

    pipe.send(Prepared(0, 0.0))
    honest(pipe)


def lets_go(pipe):
    """Closes its pipes and lives on."""
    pipe.receive()
    pipe.requests.close()
    pipe.answers.close()
    time.sleep(600)


def has_a_child(pipe):
    """Hangs, and so does a process that it started; both numbers go to a file."""
    child = subprocess.Popen(["sleep", "600"])
    Path(os.environ["FAKE_WORKER_FILE"]).write_text(f"{os.getpid()} {child.pid}")
    hangs(pipe)


def stuck(pipe):
    """Waits for something else than the pipe, as a process does whose kernel hangs."""
    from tunegen.runner.lifeline import die_with_parent

    die_with_parent(int(sys.argv[4]))
    Path(os.environ["FAKE_WORKER_FILE"]).write_text(str(os.getpid()))
    time.sleep(600)


# --- a GPU by script -----------------------------------------------------------------------------


class Gpu:
    """Kernels take as long as their THREADS say; FAULT says what is wrong with them.

    The source stands in the PTX of what is to be run, for want of better. "gpus" has what is
    different on some of several, by their UUIDs.
    """

    def __init__(self, script, pipe):
        from tunegen.perfmodel import default_chip

        here = script.get("gpus", {}).get(os.environ.get("CUDA_VISIBLE_DEVICES"), {})
        script = {**script, **here}
        self.script, self.pipe = script, pipe
        self.device = default_chip(script.get("arch", "sm_90"))
        if "sm_count" in script:
            self.device = replace(self.device, sm_count=script["sm_count"])
        self.dice = random.Random(script.get("dice", 0) + os.getpid() * script.get("mixed", 0))
        self.prepared = None
        self.entered = {}
        self.energy_mj = 1_000_000
        self.tries = self.blocks = 0

    def serve(self):
        from tunegen.runner import protocol
        from tunegen.runner.lifeline import die_with_parent

        die_with_parent(int(sys.argv[4]))
        while not isinstance(request := self.pipe.receive(), protocol.Close):
            answer = getattr(self, type(request).__name__.lower())(request)
            self.log(type(request).__name__)
            self.pipe.send(answer)
            if isinstance(answer, protocol.Failed) and answer.sticky:
                sys.exit(protocol.CONTEXT_LOST)

    def log(self, text):
        if path := self.script.get("log"):
            with open(path, "a") as file:
                file.write(f"{os.getpid()} {text}\n")

    def once(self, event):
        """Whether this is the first time that an event comes up, over all processes."""
        if event not in self.script:
            return False
        try:
            Path(self.script[event]).touch(exist_ok=False)
        except FileExistsError:
            return False
        return True

    def open(self, request):
        from tunegen.model import Telemetry
        from tunegen.runner.protocol import Failed, Opened

        if "cannot_open" in self.script:
            return Failed(self.script["cannot_open"], False, "device")
        others = tuple(self.script.get("others", ()))
        return Opened(
            self.device, "580.65.06", 1 << 33, os.getpid(), "GPU-fake", (os.getpid(),),
            Telemetry(other_pids=others),
        )  # fmt: skip

    def prepare(self, request):
        from tunegen.runner.protocol import Failed, Prepared

        if "cannot_prepare" in self.script:
            return Failed(self.script["cannot_prepare"], False, "device")
        self.prepared, self.entered = request, {}
        size = sum(array.bytes for array in request.arrays)
        return Prepared(size * request.sets, 0.0)

    def parameters(self, executable):
        text = executable.kernels[0].ptx.decode()
        found = re.findall(r"\b(FAULT|THREADS) = (\d+)[,;]", text)
        return {name: int(value) for name, value in found}

    def us(self, parameters):
        """Microseconds of a call, without noise."""
        table = self.script.get("us", {})
        known = table.get(str(parameters.get("THREADS")), 100.0 + parameters.get("THREADS", 0))
        return known * self.script.get("scale", 1.0)

    def timed(self, us):
        return us * (1 + self.dice.gauss(0, self.script.get("noise", 0.0)))

    def misbehave(self, parameters):
        """Hang or fault where the script says so."""
        from tunegen.runner.protocol import Failed

        if self.once("killed_once"):
            os.kill(os.getpid(), signal.SIGKILL)
        fault = parameters.get("FAULT", 0)
        if fault == 1:
            time.sleep(600)
        if fault == 2:
            return Failed("cuStreamSynchronize: CUDA_ERROR_ILLEGAL_ADDRESS", True, "kernel")
        if parameters.get("THREADS") in self.script.get("refused", ()):
            return Failed("cuLaunchKernelEx: CUDA_ERROR_INVALID_VALUE", False, "kernel")
        return None

    def wrong(self, parameters):
        return {
            3: "y: largest error 2.1 at 4153344",
            4: "y: 2097152 elements were not written, the first at 2097152",
            5: "y: 2097152 elements were not written, the first at 0",
        }.get(parameters.get("FAULT", 0), "")

    def try_(self, request):
        from tunegen.model import Measurement, Outcome
        from tunegen.runner.protocol import Tried

        parameters = self.parameters(request.executable)
        self.log(f"trying {parameters} best {request.best_us}")
        if failed := self.misbehave(parameters):
            return failed
        if reason := self.wrong(parameters):
            return Tried(Outcome("wrong_result", reason=reason), 0.01, 0.0)
        self.tries += 1
        time.sleep(self.script.get("try_seconds", 0))
        us = self.timed(self.us(parameters)) * (1 + self.script.get("drift", 0.0)) ** self.tries
        us = self.script.get("always_us", us)
        measurement = Measurement(us, request.policy, us * 0.995, us * 1.005, 20)
        return Tried(Outcome("measured", measurement), 0.01, 0.02)

    def verify(self, request):
        from tunegen.runner.protocol import Verdict

        parameters = self.parameters(request.executable)
        self.log(f"verifying {parameters} exact {request.exact} {self.prepared.arrays[0].shape}")
        if failed := self.misbehave(parameters):
            return failed
        reason = self.wrong(parameters)
        at_edge = self.prepared.sets == 1 and self.prepared.arrays[0].shape != tuple(
            self.script.get("shape", ())
        )
        if at_edge and parameters.get("THREADS") in self.script.get("wrong_at_edges", ()):
            reason = "y: largest error 1.5 at 36"
        if parameters.get("THREADS") in self.script.get("hangs_in_finals", ()):
            time.sleep(600)
        error = self.script.get("errors", {}).get(str(parameters.get("THREADS")), 3e-8)
        steady = parameters.get("THREADS") not in self.script.get("unsteady", ())
        return Verdict(reason, error, 10 * error, steady)

    def enter(self, request):
        from tunegen.runner.protocol import Entered, Failed

        if request.executable is None:
            vendors = self.script.get("vendors", {})  # by operation, where they differ
            vendor = vendors.get(request.operation, self.script.get("vendor"))
            if not vendor:
                return Failed("torch is not there", False, "device")
            time.sleep(vendor.get("seconds", 0))
            self.entered[request.name] = vendor
            return Entered(vendor.get("error", 3e-8), "a library")
        self.entered[request.name] = self.parameters(request.executable)
        return Entered(3e-8, "")

    def block(self, request):
        from tunegen.model import Telemetry
        from tunegen.runner.protocol import Failed, Timed

        parameters = self.entered[request.name]
        self.blocks += 1
        self.log(f"block {request.name} {request.policy}")
        if request.name == self.script.get("dies_in_block"):
            dead = Path(self.script["log"] + ".dead")
            if self.blocks > 20 or dead.exists():
                dead.touch()
                os.kill(os.getpid(), signal.SIGABRT)
        if request.name == self.script.get("fails_in_block") and self.blocks > 20:
            return Failed("cuStreamSynchronize: CUDA_ERROR_MISALIGNED_ADDRESS", True, "kernel")
        if self.once("interrupted_once"):
            os.kill(os.getppid(), signal.SIGINT)
            time.sleep(600)
        us = parameters.get("us") or self.us(parameters)
        if request.policy == "sustained":
            us *= self.script.get("sustained", {}).get(str(parameters.get("THREADS")), 1.0)
        us *= 1 + self.script.get("heat", 0.0) * self.blocks
        samples = tuple(self.timed(us) for _ in range(24))
        watts = self.script.get("watts", {}).get(str(parameters.get("THREADS")), 500.0)
        others = set(self.script.get("came", ()))
        if "haunted" in self.script:  # workers that were are listed for a while
            lines = Path(self.script["log"]).read_text().splitlines()
            others |= {int(line.split()[0]) for line in lines} - {os.getpid()}
        before = Telemetry(1980, 3201, watts, 40, (), self.energy_mj, None, tuple(others))
        calls = int(request.seconds / us * 1e6) + 1
        self.energy_mj += int(calls * us * watts / 1e3)
        after = Telemetry(1755, 3201, watts, 55, ("power limit",), self.energy_mj)
        return Timed(samples, calls, request.seconds, before, after)


setattr(Gpu, "try", Gpu.try_)  # the request that it serves has a keyword for a name


def main():
    mode, read_fd, write_fd = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
    pipe = Pipe(read_fd, write_fd)
    if mode.startswith("{"):
        Gpu(json.loads(mode), pipe).serve()
    else:
        globals()[mode](pipe)


if __name__ == "__main__":
    main()
