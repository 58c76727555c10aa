"""What honest programs miss in a jail: system calls that its filter refused to them, by name.

    python -m loadtests.system_calls [--python /path/to/python3.8 ...]

Runs programs that use what Python's standard library, bash, the usual Unix tools and, where an
interpreter has them, numpy and pytest need, with each interpreter, in the best tier of this host.
Prints one flat JSON object: `programs`; `refused`, program by program; `failed`, with how it ended.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import sys
from typing import Any

from common.api.sandbox import JailSettings
from common.base.clock import SystemClock
from common.mesh.process.host import SystemHost
from services.sandbox.isolation.jail_launcher import JailLauncher
from services.sandbox.isolation.jails.program import Program
from services.sandbox.isolation.outer_jail.interpreters import interpreter_of
from services.sandbox.isolation.resources import cgroups
from services.sandbox.isolation.resources.limits import MIB, JailLimits

LIMITS = JailLimits(wall_s=60.0, cpu_s=60.0, memory_bytes=1024 * MIB, processes=64, open_files=256)
NOTHING_TO_DO = 42  # exit status of a program whose library this interpreter does not have

PROGRAMS = {
    "threads": """
import threading, queue, concurrent.futures as futures
found = queue.Queue()
thread = threading.Thread(target=found.put, args=(1,), name="one")
thread.start()
thread.join()
with futures.ThreadPoolExecutor(4) as pool:
    assert list(pool.map(abs, [-1, 2])) == [1, 2] and found.get() == 1
""",
    "processes": """
import multiprocessing, concurrent.futures as futures
def double(x):
    return 2 * x
if __name__ == "__main__":
    fork = multiprocessing.get_context("fork")
    with fork.Pool(2) as pool:
        assert pool.map(double, [1, 2]) == [2, 4]
    queue, (one, other) = fork.Queue(), fork.Pipe()
    process = fork.Process(target=queue.put, args=(3,))
    process.start()
    assert queue.get() == 3
    process.join()
    one.send([4])
    assert other.recv() == [4]
    value, numbers, lock = fork.Value("i", 1), fork.Array("d", 4), fork.Lock()
    with lock, futures.ProcessPoolExecutor(2, mp_context=fork) as pool:
        assert list(pool.map(double, range(3))) == [0, 2, 4]
    from multiprocessing import shared_memory
    shared = shared_memory.SharedMemory(create=True, size=100)
    shared.close()
    shared.unlink()
""",
    "subprocess": """
import os, pty, signal, subprocess, sys
done = subprocess.run([sys.executable, "-c", "print(5)"], capture_output=True, timeout=50)
assert done.stdout == b"5\\n", done
done = subprocess.run("cat | tr a b", shell=True, input=b"a", capture_output=True, timeout=50)
assert done.stdout == b"b"
child = subprocess.Popen(["sleep", "9"], start_new_session=True)
os.killpg(child.pid, signal.SIGTERM)
assert child.wait() == -signal.SIGTERM
pid = os.fork()
if not pid:
    os.nice(1)
    os._exit(3)
assert os.waitpid(pid, 0)[1] >> 8 == 3
""",
    "asyncio": """
import asyncio, signal, socket, time
async def main():
    await asyncio.sleep(0.001)
    pipe = asyncio.subprocess.PIPE
    child = await asyncio.create_subprocess_exec("cat", stdin=pipe, stdout=pipe)
    assert (await child.communicate(b"x"))[0] == b"x"
    loop = asyncio.get_running_loop()
    await loop.run_in_executor(None, time.sleep, 0.001)
    loop.add_signal_handler(signal.SIGUSR1, lambda: None)
    one, other = socket.socketpair()
    reader, writer = await asyncio.open_connection(sock=one)
    writer.write(b"y")
    await writer.drain()
    assert other.recv(1) == b"y"
    other.sendall(b"z")
    assert await reader.read(1) == b"z"
    writer.close()
    other.close()
asyncio.run(main())
""",
    "files": """
import bz2, fcntl, glob, gzip, lzma, mmap, os, shutil, tarfile, tempfile, zipfile
with tempfile.TemporaryDirectory() as folder:
    path = os.path.join(folder, "a")
    with open(path, "w") as file:
        file.write("x" * 100000)
        os.fsync(file.fileno())
    fcntl.lockf(os.open(path, os.O_RDWR), fcntl.LOCK_EX)
    shutil.copy2(path, path + "b")
    shutil.copytree(folder, folder + "c")
    shutil.rmtree(folder + "c")
    os.rename(path + "b", path + "d")
    os.symlink(path, path + "l")
    os.link(path, path + "h")
    os.chmod(path, 0o600)
    os.utime(path)
    os.truncate(path, 10)
    os.mkfifo(path + "f")
    shutil.disk_usage(folder)
    os.unlink(path + "f")
    shutil.make_archive(folder + "z", "gztar", folder)
    with zipfile.ZipFile(path + ".zip", "w") as archive:
        archive.write(path, "a")
    block = mmap.mmap(os.open(path, os.O_RDWR), 10)
    block[:1] = b"y"
    block.flush()
    assert len(glob.glob(folder + "/*")) > 3
anonymous = mmap.mmap(-1, 1 << 20)
tempfile.TemporaryFile().write(b"x")
""",
    "sqlite": """
import sqlite3, tempfile
with tempfile.TemporaryDirectory() as folder:
    for settings in ("journal_mode=delete", "journal_mode=truncate", "synchronous=full"):
        base = sqlite3.connect(folder + "/base")
        base.execute("pragma " + settings)
        base.execute("create table if not exists t(a)")
        base.execute("insert into t values(1)")
        base.commit()
        base.close()
    base = sqlite3.connect(folder + "/base")
    assert base.execute("select count(*) from t").fetchone() == (3,)
""",
    "system": """
import ctypes, faulthandler, getpass, locale, os, platform, pwd, random, resource, selectors
import signal, sys, time, uuid
ctypes.CDLL(None).getpid()
faulthandler.enable()
os.cpu_count(), os.getloadavg(), platform.platform(), uuid.uuid4(), random.SystemRandom().random()
os.sched_setaffinity(0, os.sched_getaffinity(0))
os.sched_setaffinity(os.getpid(), os.sched_getaffinity(os.getpid()))
try:
    pwd.getpwuid(os.getuid())
except KeyError:
    pass
resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
resource.prlimit(os.getpid(), resource.RLIMIT_CORE)
signal.signal(signal.SIGALRM, lambda *_: None)
signal.setitimer(signal.ITIMER_REAL, 0.001)
time.sleep(0.01)
signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGUSR1])
os.kill(os.getpid(), signal.SIGUSR1)
assert signal.sigtimedwait([signal.SIGUSR1], 1)
selectors.DefaultSelector().close()
""",
    "numpy": f"""
import os, sys
os.environ.update(OPENBLAS_NUM_THREADS="4", OMP_NUM_THREADS="4")
try:
    import numpy
except ImportError:
    sys.exit({NOTHING_TO_DO})
matrix = numpy.random.rand(300, 300)
assert (matrix @ matrix).sum() > 0
numpy.linalg.svd(matrix)
numpy.save("/tmp/matrix.npy", matrix)
assert numpy.load("/tmp/matrix.npy", mmap_mode="r").shape == (300, 300)
""",
    "pytest": f"""
import sys
try:
    import pytest
except ImportError:
    sys.exit({NOTHING_TO_DO})
with open("/tmp/test_it.py", "w") as file:
    file.write("def test_it(tmp_path, capfd):\\n    (tmp_path / 'a').write_text('b')\\n")
sys.exit(pytest.main(["-q", "/tmp/test_it.py"]))
""",
}
SHELL = r"""
set -e
cd "$(mktemp -d)"; echo a > a; cp a b; cp -a a c; mv c e; ln -s a l; ln a h; ls -la . > z
stat a >> z; cat a b | sort | uniq | wc >> z; head -1 a; tail -1 a; seq 1000 | shuf | sort -n
du -s . >> z; df . >> z; touch x; rm x; mkdir y; rmdir y; chmod 600 a; chown $(id -u) a; date >> z
timeout 5 true; nproc; uname -a >> z; id >> z; dd if=/dev/zero of=y bs=1k count=10 2>> z
truncate -s 5 y; split -l 1 a; tee q < a; find . -name a; grep -r a b; sed -i s/a/b/ b
awk '{print}' a; tar czf t.tgz a b; tar xzf t.tgz; gzip -k b; diff a e; xargs echo < a
readlink -f l; realpath l; install a i; cat <(echo x); mkfifo p; (echo x > p &) ; cat p
trap 'echo t' USR1; kill -USR1 $$; ulimit -a >> z; nice -n 1 true; nohup true 2>> z; sync
sleep 0.01 & wait; od a; comm a e; cut -c1 a; tr a b < a; paste a b; expr 1 + 1; env >> z
"""


async def measured(pythons: list[str]) -> dict[str, Any]:
    refused: list[str] = []
    failed: list[str] = []
    count = 0
    for python in pythons:
        clock = SystemClock()
        interpreter = interpreter_of(JailSettings(python=python))
        launcher = JailLauncher(SystemHost(), clock, "bwrap", interpreter, cgroups.find())
        work = [(name, Program(text)) for name, text in PROGRAMS.items()]
        try:
            for name, program in [*work, ("shell", Program(SHELL, "shell"))]:
                ran = await launcher.run(program, LIMITS)
                if ran.exit == NOTHING_TO_DO:
                    continue
                count += 1
                key = f"{python} {name}"
                if ran.refused:
                    refused.append(f"{key}: {' '.join(ran.refused)}")
                if ran.status != "ok" or ran.exit:
                    said = ran.stderr.decode(errors="replace")[-300:]
                    failed.append(f"{key}: {ran.status} {ran.exit} {ran.error} {said}")
        finally:
            await launcher.stop()
    return {"programs": count, "refused": refused, "failed": failed}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--python", nargs="*", default=[os.path.realpath(sys.executable)])
    figures = asyncio.run(measured(parser.parse_args().python))
    print(json.dumps(figures))
    sys.exit(bool(figures["refused"] or figures["failed"]))


if __name__ == "__main__":
    main()
