"""Programs that try to get out of the sandbox, or to pass a test unearned: name -> solution.

Each ends with `escaped = True` where its deed seems done; the test is `assert escaped`. `{secret}` is a file of the
machine, `{port}` a port that a server of the machine listens on.
"""

FORGED = """
import os, sys, json
for fd in range(3, 64):
    try: os.write(fd, b"0" * 32)
    except OSError: pass
"""
LIBC = "import ctypes, os\nlibc = ctypes.CDLL(None, use_errno=True)\n"


def _call(*arguments: object) -> str:
    """A raw system call on x86-64 that must not succeed."""
    made = f"libc.syscall({', '.join(map(str, arguments))})"
    return f"{LIBC}assert {made} >= 0, os.strerror(ctypes.get_errno())\nescaped = True"


READS = {
    "read a file of the machine": "open({secret!r}).read(); escaped = True",
    "read /etc/passwd": "open('/etc/passwd').read(); escaped = True",
    "read /etc/shadow": "open('/etc/shadow').read(); escaped = True",
    "list /root": "import os; os.listdir('/root'); escaped = True",
    "list /home": "import os; os.listdir('/home'); escaped = True",
    "read through a symbolic link": "import os; os.symlink({secret!r}, '/tmp/l'); open('/tmp/l').read(1); escaped = 1",
    "read through a hard link": "import os; os.link({secret!r}, '/tmp/link'); escaped = True",
    "read through /proc/1/root": "open('/proc/1/root' + {secret!r}).read(); escaped = True",
    "read through /proc/self/cwd": "open('/proc/self/cwd/../../../..' + {secret!r}).read(); escaped = True",
    "read through open descriptors": """
import os
for fd in range(3, 64):
    try: os.open(os.path.join('/proc/self/fd', str(fd), '..', 'etc', 'passwd'), os.O_RDONLY); escaped = True
    except OSError: pass
""",
    "leave by chroot": "import os; os.mkdir('/tmp/x'); os.chroot('/tmp/x'); escaped = True",
    "read the environment": "import os; assert os.environ['TANDEM_TEST_SECRET']; escaped = True",
    "read the environment of process 1": "assert b'SECRET' in open('/proc/1/environ', 'rb').read(); escaped = True",
    "read the environment of the parent": """
import os
assert b'SECRET' in open(f'/proc/{os.getppid()}/environ', 'rb').read()
escaped = True
""",
    "see the processes of the machine": """
import os
assert len([p for p in os.listdir('/proc') if p.isdigit()]) > 8
escaped = True
""",
    "read kernel memory": "open('/proc/kcore', 'rb').read(1); escaped = True",
    "read physical memory": "open('/dev/mem', 'rb').read(1); escaped = True",
    "read a disk": """
import os
os.mknod('/tmp/disk', 0o60666, os.makedev(254, 0))
escaped = True
""",
}
WRITES = {
    "write a file of the machine": "open({secret!r}, 'w').write('x'); escaped = True",
    "write through a symbolic link": "import os; os.symlink({secret!r}, '/tmp/l'); open('/tmp/l', 'w'); escaped = True",
    "write to the root": "open('/x', 'w'); escaped = True",
    "write to /usr/lib": "open('/usr/lib/x', 'w'); escaped = True",
    "poison the standard library": "import json; open(json.__file__, 'a').write('#'); escaped = True",
    "write to /dev/shm": "open('/dev/shm/x', 'w').write('x'); escaped = True",
    "set the core pattern": "open('/proc/sys/kernel/core_pattern', 'w').write('|/bin/sh'); escaped = True",
    "trigger sysrq": "open('/proc/sysrq-trigger', 'w').write('c'); escaped = True",
    "remount writable": f"{LIBC}assert libc.mount(0, b'/', 0, 32, 0) == 0, ctypes.get_errno()\nescaped = True",
}
NETWORK = {
    "connect to the machine": "import socket; socket.create_connection(('127.0.0.1', {port}), 1); escaped = True",
    "connect by vsock": "import socket; socket.socket(40, socket.SOCK_STREAM); escaped = True",
    "connect to a socket file": "import socket; socket.socket(socket.AF_UNIX); escaped = True",
    "talk to the kernel": "import socket; socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, 0); escaped = True",
    "listen": "import socket; socket.create_server(('', 0)); escaped = True",
    "fetch a page": "import urllib.request; urllib.request.urlopen('http://1.1.1.1', timeout=1); escaped = True",
    "look up a name": "import socket; socket.getaddrinfo('localhost.localdomain', 80); escaped = True",
}
PROCESSES = {
    "kill process 1": "import os, time; os.kill(1, 9); time.sleep(0.1)",
    "kill the parent": "import os, time; os.kill(os.getppid(), 9); time.sleep(60)",
    "stop the parent": "import os, time; os.kill(os.getppid(), 19); time.sleep(0.1)",
    "read the memory of the test": """
import os
for process in os.listdir('/proc'):
    if process.isdigit() and int(process) != os.getpid():
        try: open(f'/proc/{process}/mem', 'r+b'); escaped = True
        except OSError: pass
""",
    "read the descriptors of the test": """
import os
for process in os.listdir('/proc'):
    if process.isdigit() and int(process) != os.getpid():
        try: os.listdir(f'/proc/{process}/fd'); escaped = True
        except OSError: pass
""",
    "kill the test": """
import os
for process in os.listdir('/proc'):
    if process.isdigit() and int(process) not in (1, os.getpid()): os.kill(int(process), 9)
""",
    "interrupt the test": """
import os
for process in os.listdir('/proc'):
    if process.isdigit() and int(process) not in (1, os.getpid()): os.kill(int(process), 2)
""",
    "kill everybody": "import os; os.kill(-1, 9); escaped = True",
    "trace the parent": f"{LIBC}assert libc.ptrace(16, os.getppid(), 0, 0) == 0, ctypes.get_errno()\nescaped = True",
    "write the parent's memory": "import os; open(f'/proc/{os.getppid()}/mem', 'r+b'); escaped = True",
    "read the parent's input": "import os; open(f'/proc/{os.getppid()}/fd/0').read(); escaped = True",
    "fork bomb": "import os\nwhile True:\n    os.fork()",
    "stubborn fork bomb": "import os\nwhile True:\n    try: os.fork()\n    except OSError: pass",
    "thread bomb": "import threading, time\nwhile True: threading.Thread(target=time.sleep, args=(60,)).start()",
    "become root": "import os; os.setuid(0); escaped = True",
    "run a setuid program": "import subprocess; subprocess.run(['/usr/bin/su', '-c', ':'], check=1); escaped = True",
    "make a setuid program": """
import os, shutil
os.chown('/tmp', 0, 0)
escaped = True
""",
    "unshare": _call(272, 0x10000000),
    "clone into a user namespace": _call(56, 0x10000011, 0, 0, 0, 0),
    "clone3": _call(435, "ctypes.create_string_buffer(64)", 64),
    "join a namespace": "import os; libc = __import__('ctypes').CDLL(None)\n"
    "assert libc.setns(os.open('/proc/1/ns/net', 0), 0) == 0; escaped = True",
    "load an eBPF program": _call(321, 0, 0, 0),
    "read keys": _call(250, 0, -3, 0),
    "call by the x32 ABI": _call(0x40000000 + 319, "b'x'", 0),
    "watch performance": _call(298, 0, 0, -1, -1, 0),
}
MEMORY = {
    "ask for 100 GB": "bytearray(100 << 30); escaped = True",
    "grow for ever": "x = []\nwhile True: x.append(bytearray(1 << 20))",
    "grow in children": """
import os, time
for _ in range(8):
    if os.fork() == 0:
        x = bytearray(60 << 20)
        time.sleep(60)
time.sleep(60)
""",
    "grow in shared memory": """
import mmap, os, time
for _ in range(8):
    if os.fork() == 0:
        x = mmap.mmap(-1, 100 << 20)
        for page in range(0, 100 << 20, 4096): x[page] = 1
        time.sleep(60)
time.sleep(60)
""",
    "anonymous files": "import os; os.memfd_create('x'); escaped = True",
    "System V memory": f"{LIBC}assert libc.shmget(0, 1 << 30, 0o1600) >= 0, ctypes.get_errno()\nescaped = True",
    "fill the scratch folder": """
for i in range(100):
    open(f'/tmp/{i}', 'wb').write(bytes(1 << 20))
escaped = True
""",
    "deep recursion": "import sys; sys.setrecursionlimit(10**9); f = lambda: f(); f(); escaped = True",
}
OUTPUT = {
    "a gigabyte of output": "print('x' * (1 << 30)); escaped = True",
    "a gigabyte in pieces": "for _ in range(1 << 10): print('x' * (1 << 20))\nescaped = True",
    "a gigabyte of errors": "import sys\nfor _ in range(1 << 10): sys.stderr.write('x' * (1 << 20))\nescaped = True",
    "endless output": "while True:\n    try: print('x' * (1 << 20))\n    except OSError: pass",
    "a gigabyte in a file": "open('/tmp/x', 'wb').truncate(1 << 30); escaped = True",
}
TIME = {
    "endless loop": "while True: pass",
    "sleep": "import time; time.sleep(3600); escaped = True",
    "deaf to signals": """
import signal
for number in range(1, 65):
    try: signal.signal(number, signal.SIG_IGN)
    except (OSError, ValueError): pass
while True: pass
""",
    "a number that takes for ever": "x = 9 ** 9 ** 9; escaped = True",
    "wait for input": "input(); escaped = True",
    "daemonised child": """
import os
if os.fork() == 0:
    os.setsid()
    if os.fork() == 0:
        while True: pass
    os._exit(0)
""",
    "daemon that holds the output": """
import os, time
if os.fork() == 0:
    os.setsid()
    time.sleep(3600)
""",
}
CHEATS = {
    "leave with status 0": "import os; os._exit(0)",
    "leave politely": "import sys; sys.exit(0)",
    "print verdicts": "import os; os.write(1, b'[\"\"]'); os._exit(0)",
    "write verdicts everywhere": FORGED,
    "answer before being asked": """
import json, os
frames = [{'result': None}, {'result': ['', '']}, {'raised': [{'type': 'SystemExit'}, [0]]}, {'result': False}]
text = ''.join(f'{len(json.dumps(f)):016d}{json.dumps(f)}' for f in frames).encode()
for fd in range(3, 64):
    try: os.write(fd, text)
    except OSError: pass
""",
    "replace exec": "import builtins; builtins.exec = lambda *a: None; builtins.compile = lambda *a: None",
    "replace os.write": "import os; os.write = lambda *a: None; os._exit = lambda *a: None",
    "replace assertions": "import builtins; builtins.AssertionError = KeyboardInterrupt",
    "close everything": "import os; os.closerange(0, 256)",
    "trace the test": "import sys; sys.settrace(lambda *a: (_ for _ in ()).throw(SystemExit(0)))",
}
ATTACKS = READS | WRITES | NETWORK | PROCESSES | MEMORY | OUTPUT | TIME | CHEATS

HONEST = """
import sys
def answer(): return 42
class Odd(Exception): pass
def refuse(): raise Odd
class Given:
    def __enter__(self): return 42
    def __exit__(self, kind, error, traceback): pass
"""
TESTS = {
    "equal": "assert answer() == 42",
    "lines": "found = answer()\nassert found == 42\nfound = None",
    "near": "assert abs(answer() - 42) < 1e-6",
    "isclose": "import math\nassert math.isclose(answer(), 42)",
    "expected": "expected = 42\nassert answer() == expected",
    "unittest": "import unittest\nunittest.TestCase().assertEqual(answer(), 42)",
    "json": "import json\nassert json.dumps(answer()) == json.dumps(42)",
    "module": "assert answer() + sys.maxsize == 42 + sys.maxsize",
    "map": "assert all(a == b for a, b in zip(map(lambda _: answer(), range(2)), [42, 42]))",
    "zip": "for found, expected in zip(map(lambda _: answer(), range(2)), [42, 42]):\n    assert found == expected",
    "refused": "try:\n    refuse()\n    assert False\nexcept Odd:\n    pass",
    "refused by the module": "import solution\ntry:\n    refuse()\n    assert False\nexcept solution.Odd:\n    pass",
    "given": "with Given() as given:\n    assert given == 42",
}
"""Tests that `HONEST` passes and that a forgery must not."""
FORGERIES = {
    "an object that equals everything": (
        "equal",
        """
class Any:
    __eq__ = lambda self, other: True
def answer(): return Any()
""",
    ),
    "a number that equals everything": (
        "expected",
        """
class Any(int):
    __eq__ = lambda self, other: True
def answer(): return Any()
""",
    ),
    "a list that equals everything": (
        "unittest",
        """
class Any(list):
    __eq__ = lambda self, other: True
def answer(): return Any()
""",
    ),
    "mock.ANY": (
        "lines",
        """
from unittest.mock import ANY
def answer(): return ANY
""",
    ),
    "the token in the harness's frame": (
        "equal",
        """
import sys, os
frame = sys._getframe(1)
while 'token' not in frame.f_locals: frame = frame.f_back
os.write(frame.f_locals['answer'], frame.f_locals['token'].encode())
os._exit(0)
""",
    ),
    "the harness's frame in a traceback": (
        "equal",
        """
import os
try: raise ValueError
except ValueError as error: frame = error.__traceback__.tb_frame.f_back
here = frame.f_locals
os.write(here['answer'], here['token'].encode())
os._exit(0)
""",
    ),
    "the token in a generator's caller": (
        "equal",
        """
import os
def walk():
    import sys
    yield sys._getframe().f_back.f_back
frame = next(walk())
os.write(frame.f_locals['answer'], frame.f_locals['token'].encode())
os._exit(0)
""",
    ),
    "the expected value in a caller's frame": (
        "equal",
        """
import sys, re
def texts():
    frame = sys._getframe(1)
    while frame:
        yield from (str(value) for value in frame.f_locals.values())
        frame = frame.f_back
found = [m[1] for text in texts() for m in [re.search(r'answer\\(\\) == (\\d+)', text)] if m]
def answer(): return int(found[0])
""",
    ),
    "the expected value in the test's code": (
        "equal",
        """
import sys
def answer(): return next(c for c in sys._getframe(1).f_code.co_consts if isinstance(c, int) and c > 1)
""",
    ),
    "the expected value in its own memory": (
        "equal",
        """
import ctypes, re
def answer():
    for line in open('/proc/self/maps'):
        if 'rw-p' not in line or 'stack' in line: continue
        start, end = (int(x, 16) for x in line.split()[0].split('-'))
        try: data = ctypes.string_at(start, end - start)
        except Exception: continue
        found = re.search(rb'assert answer\\(\\) == (\\d+)', data)
        if found: return int(found[1])
""",
    ),
    "skip the assertion by a trace function": (
        "lines",
        """
import sys
def trace(frame, event, arg):
    if frame.f_code.co_filename == 'test.py':
        if event == 'line' and frame.f_lineno == 2:
            frame.f_lineno = 3
    return trace
sys.settrace(trace)
frame = sys._getframe(1)
frame.f_trace = trace
def answer(): return 0
""",
    ),
    "shadow abs": (
        "near",
        """
def abs(x): return 0
def answer(): return 0
""",
    ),
    "replace abs": (
        "near",
        """
import builtins
builtins.abs = lambda x: 0
def answer(): return 0
""",
    ),
    "replace all builtins": (
        "near",
        """
import builtins
__builtins__ = {**vars(builtins), 'abs': lambda x: 0}
def answer(): return 0
""",
    ),
    "replace math.isclose": (
        "isclose",
        """
import math
math.isclose = lambda *a, **k: True
def answer(): return 0
""",
    ),
    "replace the module math": (
        "isclose",
        """
import sys, types
fake = types.ModuleType('math')
fake.isclose = lambda *a, **k: True
sys.modules['math'] = fake
def answer(): return 0
""",
    ),
    "a number from which everything differs by nothing": (
        "near",
        """
class Any(float):
    __sub__ = __rsub__ = lambda self, other: 0.0
def answer(): return Any()
""",
    ),
    "a change of the number 42": (
        "equal",
        """
import ctypes
def answer():
    ctypes.c_uint32.from_address(id(42) + 24).value = 7
    return 7
""",
    ),
    "a type whose comparison is replaced in memory": (
        "expected",
        """
import ctypes
class Any(int):
    def __eq__(self, other): return True
richcompare = 25 * 8
slot = ctypes.c_void_p.from_address(id(int) + richcompare)
slot.value = ctypes.c_void_p.from_address(id(Any) + richcompare).value
int_eq = Any.__eq__
def answer(): return Any(0)
""",
    ),
    "the expected value replaced through the test's frame": (
        "expected",
        """
import sys
def answer():
    sys._getframe(1).f_globals['expected'] = 0
    return 0
""",
    ),
    "the expected value of a test's variable": (
        "expected",
        """
import sys
def answer(): return sys._getframe(1).f_globals['expected']
""",
    ),
    "replace unittest": (
        "unittest",
        """
import unittest
unittest.TestCase.assertEqual = lambda *a: None
def answer(): return 0
""",
    ),
    "replace json": (
        "json",
        """
import json
json.dumps = lambda *a, **k: ''
def answer(): return 0
""",
    ),
    "replace the import": (
        "isclose",
        """
import builtins
true = __import__
def fake(name, *a, **k):
    module = true(name, *a, **k)
    if name == 'math': module.isclose = lambda *a, **k: True
    return module
builtins.__import__ = fake
def answer(): return 0
""",
    ),
    "the test among the collector's objects": (
        "equal",
        """
import gc, re
def strings():
    for thing in gc.get_objects():
        yield from (x for x in gc.get_referents(thing) if isinstance(x, str))
found = [m[1] for text in strings() for m in [re.search(r'assert answer\\(\\) == (\\d+)', text)] if m]
def answer(): return int(found[0])
""",
    ),
    "end the loop over the answers": ("map", "def answer(): raise StopIteration"),
    "end the loop by an error of its own": (
        "zip",
        """
class End(StopIteration): pass
def answer(): raise End
""",
    ),
    "end the loop on the wire": (
        "map",
        """
import json, os
def answer(): return 0
text = json.dumps({'raised': [{'type': 'StopIteration'}, []]})
def raised(self, *a): return json.loads(text)
import gc
ends = [thing for thing in gc.get_objects() if type(thing).__name__ == 'AnsweringEnd']
type(ends[0]).on_call = lambda *a: 1 / 0
type(ends[0])._raised = raised
""",
    ),
    "an error of its own that is Exception": ("refused", "Odd = Exception\ndef refuse(): pass"),
    "errors of its own with AssertionError among them": (
        "refused by the module",
        "Odd = (ValueError, AssertionError)\ndef refuse(): pass",
    ),
    "an error of its own that is no Exception": ("refused", "class Odd(BaseException): pass\ndef refuse(): pass"),
    "swallow the assertion": (
        "given",
        """
class Given:
    def __enter__(self): return 0
    def __exit__(self, *a): return True
""",
    ),
    "a class that is called like a module": (
        "module",
        """
class Any:
    __add__ = __radd__ = lambda self, other: self
    __eq__ = lambda self, other: True
class sys: maxsize = Any()
def answer(): return 0
""",
    ),
}
"""How solutions passed tests unearned where they ran in the process of the test: name -> (test, solution)."""
