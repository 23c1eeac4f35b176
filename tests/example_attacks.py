# ruff: noqa: E501
"""Programs that attack their judge, other rows or the machine, with the verdict that each must get; and who runs them."""

from __future__ import annotations

import ctypes
import importlib.util
import json
import sys
from concurrent.futures import ThreadPoolExecutor

from hybridflow.errors import RewardError
from hybridflow.rewards.sandbox import sandbox
from hybridflow.rewards.sandbox.sandbox import Limits

TESTS = ["assert f(2) == 4", "assert f(3) == 6"]
HONEST = "def f(x): return 2 * x"
LIMITS = Limits(seconds=30, memory_mb=256)
BRIEF = Limits(seconds=1.5, memory_mb=256)

WRONG = "\ndef f(x): return 0\n"
SEND = (
    "import os, struct, threading, time\ndef send(data):\n    os.write(4, struct.pack('!Q', len(data)))\n"
    "    while data: data = data[os.write(4, data):]\n"
)
LAZY = "class Any:\n    def __eq__(self, other): return True\n    def __ne__(self, other): return False\n"
LAZY += "    __hash__ = None\n"
THREAD = "import threading\ndef test():\n    def run():\n        assert f(0) == 0\n        assert f(2) == 4\n"
THREAD += "    thread = threading.Thread(target=run)\n    thread.start()\n    thread.join()\n"
CASE = "import unittest\nclass T(unittest.TestCase):\n    def test(self): self.assertEqual(f(2), 4)\n"

# Programs that do not solve the task: all must score 0. Tests are TESTS unless given.
UNSOLVED: dict[str, str | tuple[str, list[str] | str]] = {
    # ... and want 1
    "reads the tests in frames": "import sys\ndef f(x):\n    frame = sys._getframe()\n    while frame:\n"
    "        if ''.join(['f(2', ') ==']) in repr(frame.f_locals): return 2 * x\n        frame = frame.f_back\n    return 0",
    "reads the tests in memory": "import gc\ndef f(x):\n    for one in gc.get_referents(*gc.get_objects()):\n"
    "        if isinstance(one, str) and ''.join(['f(2', ') ==']) in one: return 2 * x\n    return 0",
    "reads the tests in /proc": "import glob\ndef f(x):\n    for path in glob.glob('/proc/*/*'):\n"
    "        try: found = b'f(' + b'2) ==' in open(path, 'rb').read(1 << 16)\n        except (OSError, ValueError): continue\n"
    "        if found: return 2 * x\n    return 0",
    "patches what the tests import": "import sys, builtins\nfor name in ('tests', 'unittest', 'json'):\n"
    "    sys.modules[name] = sys\nbuiltins.AssertionError = ValueError\nbuiltins.eval = builtins.exec = lambda *a: 0\n"
    "builtins.compile = lambda *a, **k: 0\n" + WRONG,
    "defines the names of the judge": "__checked__ = __builtins__ = _program_f = lambda *a: True\n"
    "def check(f): pass\ndef test(): pass" + WRONG,
    "an import hook": "import sys\nclass H:\n    def find_spec(self, *a): raise SystemExit(0)\nsys.meta_path.insert(0, H())\n"
    "sys.path_hooks.clear()" + WRONG,
    "a trace function": "import sys, threading\ndef trace(frame, event, arg):\n    frame.f_locals['value'] = 4\n"
    "    return trace\nsys.settrace(trace)\nthreading.settrace(trace)\nsys.setprofile(trace)" + WRONG,
    "an audit hook": "import sys\nsys.addaudithook(lambda *a: None)\ndef f(x):\n    sys.addaudithook(lambda *a: 1 / 0)",
    "an object that equals": LAZY + "def f(x): return Any()",
    "a class that equals": "class M(type):\n    def __eq__(c, o): return True\n    __hash__ = None\n"
    "class A(metaclass=M): pass\ndef f(x): return A",
    "a number that equals": "class N(int):\n    def __eq__(s, o): return True\n    __hash__ = int.__hash__\n"
    "    def __add__(s, o): return 4\ndef f(x): return N(0)",
    "a float that is any int": "class N(float):\n    __class__ = int\n    def __eq__(s, o): return True\n"
    "    def __mul__(s, o): return 4.0\n    __hash__ = float.__hash__\ndef f(x): return N(0)",
    "a text of its own": "class S(str):\n    def __eq__(s, o): return True\n    def __getitem__(s, i): return Any()\n"
    "    __hash__ = lambda s: 4\n" + LAZY + "def f(x): return S()",
    "a list of its own": "class L(list):\n    __iter__ = lambda s: iter([4])\n    __len__ = lambda s: 4\n"
    "    __eq__ = lambda s, o: True\ndef f(x): return L()",
    "an array of its own": "import numpy\nclass A(numpy.ndarray):\n    def __eq__(s, o): return True\n"
    "def f(x): return numpy.zeros(0).view(A)",
    "a descriptor": LAZY + "class Solution:\n    f = property(lambda s: lambda x: Any())",
    "a module that has everything": "import sys, types\nclass M(types.ModuleType):\n    def __getattr__(s, n): return 4\n"
    "sys.modules[__name__].__class__ = M",
    "an exit": "import os" + WRONG + "os._exit(0)",
    "an exit at the end": "import atexit, os\natexit.register(os._exit, 0)" + WRONG,
    "an exit in the call": "import os\ndef f(x): os._exit(0)",
    "another program in its place": "import os\nos.execv('/bin/true', ['true'])",
    "a forged verdict": "import os\nfor end in range(64):\n    try: os.write(end, b'{\"passed\": 2, \"total\": 2, '\n"
    '        b\'"reason": "", "error": "", "ended": false, "unreadable": ""}\')\n    except OSError: pass' + WRONG,
    "a forged report": 'import os\nfor end in (1, 2, 5, 6, 7):\n    try: os.write(end, b\'{"end": "exit", "exit": 0}\\n\')\n'
    "    except OSError: pass\n1 / 0",
    "answers ahead": SEND + "send(b'{\"names\": {\"f\": {\"call\": true}}, \"last\": \"f\"}')\n"
    "for value in (b'4', b'7', b'6'): send(b'{\"value\": ' + value + b'}')\nos.read(3, 1 << 16)",
    "answers from a thread": SEND + "def spam():\n    while True: send(b'{\"value\": true}')\n"
    "threading.Thread(target=spam, daemon=True).start()" + WRONG,
    "another end of the channel": "import os\nfor end in (3, 4):\n    try: os.write(os.open(f'/proc/self/fd/{end}', 2), b'x' * 99)\n"
    "    except OSError: pass" + WRONG,
    "a pickle": "import os\nclass P:\n    def __reduce__(s): return os._exit, (0,)\ndef f(x): return P()",
    "an encoding": "# -*- coding: rot13 -*-\nqrs s(k): erghea 2*k",
    "a skip in pytest's name": "class Skipped(BaseException): pass\nSkipped.__module__ = '_pytest.outcomes'\n"
    "def f(x): raise Skipped('x')",
    "a failure without a text in a thread": ("def f(x):\n    if x: raise ValueError(10 ** 5000)\n    return 0", THREAD),
    "an exit in a thread": ("import os\ndef f(x):\n    if x: os._exit(0)\n    return 0", THREAD),
    "a failure without a text in a TestCase": ("def f(x): raise KeyError(10 ** 5000)", CASE),
    "the patched sender": "import gc\nfor one in gc.get_objects():\n    if getattr(one, '__name__', '') == '_called':\n"
    "        one.__code__ = (lambda names, request: {'value': True}).__code__" + WRONG,
    "an exception that equals": "class E(Exception):\n    __eq__ = lambda s, o: True\ndef f(x): return E()",
    "keys of one hash": "def f(x): return {i * (2 ** 61 - 1): 0 for i in range(3000)}",
    "another limit of recursion": "import sys\nsys.setrecursionlimit(10 ** 6)\ndef f(x):\n    value = 4\n"
    "    for _ in range(90): value = [value]\n    return value",
    # ... and want no verdict
    "no text at the load": "raise ValueError(10 ** 5000)",
    "no text of a key": "raise KeyError(-10 ** 5000)",
    "no text of an errno": "raise OSError(10 ** 5000, 'x')",
    "no text in the call": "def f(x): raise ValueError([10 ** 5000])",
    "no text of the answer": ("def f(x): return 10 ** 5000", ["assert f(2) == 4, f(2)"]),
    "a described object": SEND + 'send(b\'{"names": {"f": {"value": ["opaque", "T", true, true]}}, "last": "f"}\')\nsend(b\'{"value": 0}\')\nwhile os.read(3, 1 << 16): pass',
    "a described exception": SEND + 'send(b\'{"names": {"f": {"raises": ["ValueError"]}}, "last": "f"}\')\nwhile os.read(3, 1 << 16): pass',
    "an empty constant": ("CASES = []" + WRONG, "def test():\n    for x in CASES:\n        assert f(x) == 2 * x\n"),
    "an object in place of an array": ("class A: pass\ndef f(x): return A()", ["assert f(2).tolist() == [4]"]),
    "a type of a plain value": ("import decimal\ndef f(x): return decimal.Decimal(0)\ndef g(x): return 0",
                                ["assert g(type(f(1))) == 4"]),
    "a type of an iterator": ("def f(x): yield 0\ndef g(x): return 0", ["assert g(type(f(1))) == 4"]),
    "a name of half a character": "class M(type):\n    __name__ = property(lambda c: '\\ud800\\x1b[2J\\n' * 9)\n"
    "class A(metaclass=M): pass\ndef f(x): return A()",
    "a text of half characters": "def f(x): raise ValueError('\\ud800' * 9)",
    "a text that is printed wrongly": "import sys\nsys.stdout = sys.stderr = None" + WRONG,
    "texts that raise": "class E(Exception):\n    def __str__(s): raise s\n    __repr__ = __reduce__ = __str__\n"
    "def f(x): raise E(E())",
    "a class that raises": "class A:\n    @property\n    def __class__(s): raise SystemExit(0)\ndef f(x): return A()",
    "an exit at the load": "raise SystemExit(0)",
    "an exit of its own": "class X(SystemExit):\n    @property\n    def code(s): raise KeyboardInterrupt\nraise X",
    "an exit code of its own": "class N(int):\n    def __and__(s, o): raise SystemExit\nraise SystemExit(N(0))",
    "an interrupt": "def f(x): raise KeyboardInterrupt",
    "the end of a generator": "def f(x): raise GeneratorExit",
    "an error of all errors": "raise BaseExceptionGroup('x' * 10 ** 6, [KeyboardInterrupt(), SystemExit(0)])",
    "a long chain of errors": "error = None\nfor i in range(20000):\n    new = ValueError(i)\n    new.__cause__, error = error, new\nraise error",
    "much on stdout": "print('x' * 10 ** 6)" + WRONG,
    "much in the tests": ("def f(x): return 'x' * 10 ** 6", ["print(f(2))\nassert f(2) == 4"]),
    "no descriptors": "import os\nos.closerange(0, 64)" + WRONG,
    "no standard descriptors": "import os\nos.closerange(0, 3)" + WRONG,
    "a crash": "import ctypes\nctypes.string_at(1)",
    "deep recursion": "import sys\nsys.setrecursionlimit(10 ** 9)\ndef f(x): return max(map(f, [x]))",
    "a large source": "x = [" + "1,\n" * 50_000 + "]" + WRONG,
    "a nested source": "x = " + "-" * 50_000 + "1" + WRONG,
    "brackets": "x = " + "(" * 5000,
    "a null byte": "x = '\0'" + WRONG,
    "no builtins": "import builtins\nbuiltins.__dict__.clear()",
    "no modules": "import sys\nsys.modules.clear()" + WRONG,
    "a lock": "import threading\ndef f(x): return {threading.Lock()}",
    "an unhashable key": "class H:\n    __hash__ = None\ndef f(x): return [H(), {(): H()}]",
    "values without an end": "import itertools\ndef f(x): return itertools.count()",
    "values within themselves": "def f(x):\n    value = []\n    value.append(value)\n    return value",
    "a hook of exceptions": "import sys\ndef hook(*a): raise SystemExit(0)\nsys.excepthook = hook\n1 / 0",
    "a function that is none": "class F:\n    __call__ = property(lambda s: 1 / 0)\nf = F()",
    "an order of bases": "class M(type):\n    def mro(c): return [c, Exception, BaseException, object]\n"
    "class f(Exception, metaclass=M): pass",
    "many threads": "import threading, time\nthreading.stack_size(1 << 15)\n"
    "for _ in range(40): threading.Thread(target=time.sleep, args=(99,), daemon=True).start()\ntime.sleep(5)" + WRONG,
    "much memory": "x = bytearray(10 << 30)",
    "a full disk": "for i in range(99): open(str(i), 'wb').write(b'x' * (9 << 20))\nimport time\ntime.sleep(5)" + WRONG,
}  # fmt: skip

REACH = (
    "import ctypes, os, socket, sys\nlibc, reached = ctypes.CDLL(None, use_errno=True), []\n"
    "libc.syscall.restype = ctypes.c_long\nroom = ctypes.create_string_buffer(4096)\n"
    "def call(number, *given):\n"
    "    given = [ctypes.c_long(one) if isinstance(one, int) else one for one in given]\n"
    "    if libc.syscall(ctypes.c_long(number), *given) >= 0: reached.append(number)\n"
    "def attempt(function, *given):\n    try: function(*given)\n    except (OSError, ValueError): return\n"
    "    reached.append(str(function))\n"
    "def f(x): return reached or 2 * x\nOTHERS = ({canary}, {judge}, os.getppid(), 1, -1)\n"
)
# Attempts to reach beyond the row, by numbers of x86_64. The programs are right: they score 1 if all was refused.
REACHING = {
    "sockets": "for family in range(1, 46):\n    for kind in (1, 2, 3, 5): call(41, family, kind, 0)",
    "datagrams to a path": "for kind in (1, 2, 5):\n    one, other = socket.socketpair(1, kind)\n"
    "    attempt(one.sendto, b'x', {path!r})\n    attempt(one.sendto, b'x', b'\\0hybridflow-canary')",
    "a name for a pair of sockets": "one, other = socket.socketpair(1, 2)\nattempt(one.setsockopt, 1, 16, 1)\n"
    "attempt(one.bind, '')\nattempt(one.connect, {path!r})\nattempt(one.sendmsg, [b'x'])",
    "pairs of other sockets": "for family in range(2, 46):\n    for kind in (1, 2, 5): call(53, family, kind, 0, room)",
    "signals": "for other in OTHERS:\n    for number in (62, 200, 234):\n        call(number, other, 0, 0)\n"
    "        call(number, other, other, 9)\n    call(129, other, 9, room)\n    call(297, other, other, 9, room)\n"
    "    call(434, other, 0)\ncall(62, 0, 9)\ncall(62, -os.getpid(), 9)",
    "owners of descriptors": "one, other = socket.socketpair()\nfor end in (one.fileno(), *os.pipe()):\n    for target in OTHERS:\n"
    "        call(72, end, 8, target)\n        call(72, end, 15, (ctypes.c_int * 2)(1, target))\n"
    "        for command in (0x8901, 0x8902): call(16, end, command, ctypes.byref(ctypes.c_int(target)))\n"
    "    call(72, end, 10, 9)\n    call(72, end, 4, 0o20000 | os.O_NONBLOCK)\n    call(16, end, 0x5452, ctypes.byref(ctypes.c_int(1)))",
    "other processes": "for other in OTHERS:\n    for number in (101, 310, 311, 312, 440, 448): call(number, other, other, room, 1, room, 1, 0)\n"
    "    call(101, 16, other, 0, 0)\n    call(101, 0x4206, other, 0, 0)\n    call(302, other, 7, room, 0)",
    "priorities": "for other in (*OTHERS, 0):\n    call(203, other, 8, ctypes.byref(ctypes.c_long(1)))\n    call(141, 0, other, 5)\n"
    "    call(144, other, 3, room)\n    call(314, other, room, 0)\n    call(251, 1, other, 3 << 13)\n    call(256, other, 8, room, room)",
    "a core for itself": "call(157, 62, 1, 0, 1, 0)\ncall(157, 62, 2, {canary}, 1, 0)\ncall(157, 36, 1, 0, 0, 0)\ncall(157, 1, 0, 0, 0, 0)",
    "a dump of its memory": "import resource\nattempt(resource.setrlimit, resource.RLIMIT_CORE, (0, 0))\ncall(160, 4, room)\ncall(157, 4, 1, 0, 0, 0)",
    "System V": "for number in (29, 64, 68): call(number, 0, 1 << 12, 0o1666)\ncall(30, 0, 0, 0)\ncall(71, 0, 0, room)",
    "POSIX messages": "call(240, b'hybridflow-evil', 0o102, 0o666, 0)\ncall(241, b'x')",
    "shared memory": "for path in ('/dev/shm/hybridflow-evil', '/tmp/hybridflow-evil', '/var/tmp/hybridflow-evil', '/run/hybridflow-evil'):\n"
    "    attempt(open, path, 'w')\n    attempt(os.mkdir, path)\n    attempt(os.mkfifo, path)\n    attempt(os.symlink, '/', path)\n"
    "call(319, b'x', 0)\ncall(447, 0)\nattempt(os.open, '/dev/shm', os.O_TMPFILE | os.O_RDWR)",
    "rings": "call(425, 8, room)\ncall(426, 3, 1, 1, 0, 0, 0)\ncall(206, 60000, ctypes.byref(ctypes.c_long(0)))",
    "watches": "for number in (253, 294): call(number, 0)\ncall(254, 3, b'/tmp', 0xfff)\ncall(300, 0, 0)",
    "memory of others": "call(323, 0)\ncall(298, room, -1, 0, -1, 0)\ncall(321, 0, room, 48)\ncall(279, {canary}, 0, 0, 0, 0, 0)",
    "keys": "for number in (248, 249): call(number, b'user', b'x', b'x', 1, -3)\nfor command in range(0, 32): call(250, command, -4, 0, 0, 0)",
    "timers without a limit": "call(222, 1, 0, room)",
    "pages in pipes": "read, write = os.pipe()\ncall(278, write, ctypes.byref(ctypes.c_long(0)), 1, 0)\n"
    "call(275, os.open(os.__file__, 0), 0, write, 0, 1, 0)\ncall(276, read, write, 1, 0)\ncall(72, write, 1031, 1 << 20)",
    "namespaces": "for flag in (0x20000, 0x2000000, 0x4000000, 0x8000000, 0x10000000, 0x20000000, 0x40000000, 0x80, 0x400):\n"
    "    call(272, flag)\n    call(308, 0, flag)\n    call(56, flag | 17, 0, 0, 0, 0)\ncall(435, room, 88)",
    "mounts": "call(165, b'x', b'.', b'tmpfs', 0, 0)\ncall(166, b'/proc', 2)\ncall(161, b'.')\ncall(155, b'.', b'.')\ncall(428, -100, b'.', 1)\n"
    "call(430, b'tmpfs', 0)\ncall(429, -100, b'.', -100, b'/', 0)\ncall(442, -100, b'/', 0, room, 32)\ncall(458, room, room, 64, 0)",
    "the machine": "for number in (103, 162, 163, 164, 167, 168, 169, 170, 171, 172, 173, 175, 176, 179, 227, 246, 305, 306, 313, 320): call(number, 3, 0, 0, 0)",
    "identities": "for number in (105, 106, 122, 123): call(number, 0) if number < 120 else libc.syscall(number, 0)\n"
    "for number in (113, 114, 117, 119): call(number, 0, 0, 0)\ncall(116, 0, 0)\nreached += [0] if 0 in (os.getuid(), os.geteuid()) else []",
    "files of others": "for path in ({secret!r}, '/etc/shadow', '/etc/passwd', '/root/.bashrc', '/root/.ssh/id_rsa', '/proc/1/environ',\n"
    "             '/proc/%d/environ' % {judge}, '/proc/%d/mem' % {judge}, '/sys/kernel/mm/ksm/run', '/dev/kmsg', '/dev/mem', '/dev/vda', '/dev/tty'):\n"
    "    for flags in (os.O_RDONLY, os.O_WRONLY, os.O_RDWR): attempt(os.open, path, flags)\n    attempt(os.link, path, 'link')\n"
    "    attempt(os.rename, path, 'moved')\n    attempt(os.unlink, path)\n    attempt(os.utime, path)\n    attempt(os.chmod, path, 0o777)\n"
    "    attempt(os.truncate, path, 0)\n    call(303, -100, path.encode(), room, room, 0)",
    "links out": "os.symlink({folder!r}, 'out')\nattempt(os.open, 'out/secret', 0)\nattempt(open, 'out/evil', 'w')\nattempt(os.mkdir, 'out/evil')\n"
    "attempt(os.listdir, 'out')\nattempt(os.rename, 'out/secret', 'mine')\nos.mkdir('here')\nattempt(os.rename, 'here', '../hybridflow-evil')",
    "devices": "for kind in (0o020666, 0o060666):\n    attempt(os.mknod, 'device', kind, os.makedev(1, 1))",
    "locks of others": "import fcntl\nfor path in (os.__file__, '/dev/null'):\n    file = open(path, 'rb')\n    attempt(fcntl.flock, file, fcntl.LOCK_EX)\n"
    "    attempt(fcntl.fcntl, file, 1024, 1)\n    attempt(fcntl.fcntl, file, 1026, 1)\n    call(72, file.fileno(), 37, room)",
    "processes": "for function in (os.fork, os.forkpty): attempt(function)\nattempt(os.posix_spawn, '/bin/true', ['true'], dict())\n"
    "call(57)\ncall(58)\nfor flags in (17, 0x8000 | 17, 0x4000 | 0x100 | 17, 0x50F00 & ~0x400): call(56, flags, 0, 0, 0, 0)",
    "secrets of the environment": "found = dict(os.environ)\nreached += [key for key in found if 'SECRET' in key or 'TOKEN' in key or 'SSH' in key]",
    "descriptors of others": "for end in range(5, 256):\n    try: os.fstat(end)\n    except OSError: continue\n    reached.append(end)\n"
    "for number in (438, 304): call(number, 0, 0, 0)",
    "terminals": "for command in (0x5412, 0x540E, 0x5410, 0x5480, 0x541C): [call(16, end, command, room) for end in (0, 1, 2)]",
    "a call of the 32-bit kind": "call(0x40000000 + 41, 2, 1, 0)\ncall(999, 0)",
}  # fmt: skip
# Programs that leave much behind, or take much: whatever their verdict, nothing of it stays and no other row changes.
LEAVING = {
    "a tree": "import os\nfor i in range(300):\n    os.mkdir('d' * 99)\n    os.symlink('/', 'up')\n    os.mkfifo('fifo')\n    os.chdir('d' * 99)",
    "closed directories": "import os\nfor i in range(40):\n    os.mkdir(f'{i}')\n    os.mkdir(f'{i}/in', 0)\nos.mkdir('last', 0)",
    "names": "import os\nfor i in range(1, 900): os.close(os.open(b'\\xff\\n' + bytes([1 + i % 46]) * (i % 200) + b'%d' % i, os.O_CREAT))",
    "sockets and fifos": "import os\nfor i in range(99): os.mknod(f's{i}', 0o140777); os.mkfifo(f'f{i}')",
    "threads that run on": "import threading\ndef spin():\n    while True: pass\n"
    "for _ in range(8): threading.Thread(target=spin, daemon=True).start()",
    "threads that are waited for": "import threading, time\nthreading.Thread(target=time.sleep, args=(99,)).start()",
    "locks": "import fcntl\nfile = open('a', 'w+')\nfor i in range(2000): fcntl.lockf(file, fcntl.LOCK_EX, 1, 2 * i)",
    "pipes that are full": "import os\nends = [os.pipe() for _ in range(25)]\nfor _, end in ends:\n    os.set_blocking(end, False)\n"
    "    try:\n        while True: os.write(end, b'x' * 4096)\n    except BlockingIOError: pass",
    "a session of its own": "import os, signal\nfor number in range(1, 65):\n    try: signal.signal(number, signal.SIG_IGN)\n    except (OSError, ValueError): pass",
}  # fmt: skip
# Minutes rather than seconds: they are stopped by a time limit of 1.5 s.
STOPPED = {
    "takes back the answer": "import os, threading\ndef take():\n"
    "    try: end = os.open('/proc/self/fd/4', os.O_RDONLY)\n    except OSError: return\n"
    "    while True: os.read(end, 8)\nthreading.Thread(target=take, daemon=True).start()\ndef f(x): return 0",
    "stops itself": "import os, signal\nos.kill(os.getpid(), signal.SIGSTOP)" + WRONG,
    "spins in threads": "import threading\ndef f(x):\n    while True: pass\n"
    "for _ in range(20): threading.Thread(target=f, args=(1,)).start()",
    "forks for ever": "import os\nwhile True:\n    try: os.fork()\n    except OSError: pass",
    "answers never": "import time\ndef f(x): time.sleep(99)",
    "a coroutine without an end": "import asyncio\nasync def f(x):\n    while True: await asyncio.sleep(0)",
    "answers in pieces": SEND + "send(b'{\"names\": {\"f\": {\"call\": true}}, \"last\": \"f\"}')\n"
    "while True: os.write(4, b'\\0') and time.sleep(0.01)",
    "exceptions at the exit": "import atexit\ndef again():\n    atexit.register(again)\n    while True:\n"
    "        try: import time; time.sleep(99)\n        except BaseException: pass\natexit.register(again)\nraise SystemExit",
    "ends its first thread": "import ctypes, threading, time\nthreading.Thread(target=time.sleep, args=(99,)).start()\n"
    "ctypes.CDLL(None).syscall(60, 0)",
    "computes without a signal": "def f(x): return 9 ** 9 ** 9",
}  # fmt: skip


def verdicts(mechanism: str, version: int | None, given: dict[str, object], *, slow: bool) -> dict[str, object]:
    """Score, or the reason of a row that is not judged, of every attack, and of honest rows between them.

    `version`: of Landlock, as if the kernel had no later one.
    """
    if version is not None:
        older = f"from hybridflow.rewards.sandbox import containment as c_; c_.landlock_version = lambda: {version}; "
        sandbox._MAIN = sandbox._MAIN.replace("main(c)", older + "main(c)")
    rows: dict[str, tuple[str, list[str] | str, Limits]] = {}
    if slow:
        rows |= {name: (program, TESTS, BRIEF) for name, program in STOPPED.items()}
    else:
        for name, row in UNSOLVED.items():
            if "array" in name and importlib.util.find_spec("numpy") is None:
                continue
            rows[name] = (*(row if isinstance(row, tuple) else (row, TESTS)), LIMITS)
        head = REACH.format(**given)
        for name, program in REACHING.items():
            rows[name] = head + program.format(**given), TESTS, LIMITS
        rows |= {name: (f"{program}\n{HONEST}", TESTS, LIMITS) for name, program in LEAVING.items()}
    everything: dict[str, tuple[str, list[str] | str, Limits]] = {}
    for place, (name, row) in enumerate(rows.items()):
        everything[name] = row
        if name not in UNSOLVED or place % 4 == 0:
            everything[f"honest, {name}"] = HONEST, TESTS, LIMITS
    with sandbox.Sandbox(mechanism) as contained, ThreadPoolExecutor(3) as threads:

        def judged(row: tuple[str, list[str] | str, Limits]) -> object:
            program, tests, limits = row
            read = {"setup": "", "source" if isinstance(tests, str) else "asserts": tests}
            try:
                found = contained.judge(program, read, limits=limits)
            except RewardError as error:
                return f"lost: {error}"
            assert all(part.isprintable() or part == "\n" for part in found.reason), found
            return f"not judged: {found.reason}" if found.status == "unreadable" else float(found.status == "ok")

        return dict(zip(everything, threads.map(judged, everything.values())))


def main() -> None:
    """Run what the arguments say, as a process that can be traced, like any other of its user."""
    mechanism, version, given, slow = json.loads(sys.argv[1])
    if reason := sandbox.unavailable(mechanism):
        print(json.dumps(reason))
        return
    ctypes.CDLL(None).prctl(4, 1, 0, 0, 0)
    print(json.dumps(verdicts(mechanism, version, given, slow=slow)))


if __name__ == "__main__":
    main()
