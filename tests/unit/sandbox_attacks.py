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
    "replace exec": "import builtins; builtins.exec = lambda *a: None; builtins.compile = lambda *a: None",
    "replace os.write": "import os; os.write = lambda *a: None; os._exit = lambda *a: None",
    "replace assertions": "import builtins; builtins.AssertionError = KeyboardInterrupt",
    "close everything": "import os; os.closerange(0, 256)",
    "trace the test": "import sys; sys.settrace(lambda *a: (_ for _ in ()).throw(SystemExit(0)))",
}
ATTACKS = READS | WRITES | NETWORK | PROCESSES | MEMORY | OUTPUT | TIME | CHEATS
