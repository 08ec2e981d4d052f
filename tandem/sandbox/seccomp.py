"""The system calls that a sandboxed program does without, as a seccomp filter (classic BPF, see seccomp(2)).

Namespaces and resource limits leave doors open: sockets that no network namespace holds (vsock), memory that no limit
counts (memfd, System V), tracing, keys, and the parts of the kernel where most escapes were found.
"""

import platform
import struct
from functools import cache

from tandem.errors import UserError

DENIED = {
    "socket": (41, 198), "ptrace": (101, 117), "process_vm_readv": (310, 270), "process_vm_writev": (311, 271),
    "pidfd_getfd": (438, 438), "memfd_create": (319, 279), "memfd_secret": (447, 447), "shmget": (29, 194),
    "semget": (64, 190), "msgget": (68, 186), "unshare": (272, 97), "setns": (308, 268), "mount": (165, 40),
    "umount2": (166, 39), "pivot_root": (155, 41), "chroot": (161, 51), "open_tree": (428, 428),
    "move_mount": (429, 429), "fsopen": (430, 430), "add_key": (248, 217), "request_key": (249, 218),
    "keyctl": (250, 219), "bpf": (321, 280), "perf_event_open": (298, 241), "userfaultfd": (323, 282),
    "io_uring_setup": (425, 425), "kexec_load": (246, 104), "open_by_handle_at": (304, 265),
}  # fmt: skip
"""Name to its numbers on x86-64 and on 64-bit ARM: these fail with EPERM."""
_CLONE, _CLONE3 = (56, 220), 435
_NEW_NAMESPACES = 0x7E020000
"""The CLONE_NEW* flags of clone(2)."""
_MACHINES = {"x86_64": (0, 0xC000003E), "aarch64": (1, 0xC00000B7)}
"""Column in the tables above, and AUDIT_ARCH_*."""
_LOAD, _EQUAL, _AT_LEAST, _ANY_BIT, _RETURN = 0x20, 0x15, 0x35, 0x45, 0x06
_ALLOW, _KILL, _EPERM, _ENOSYS = 0x7FFF0000, 0x80000000, 0x00050001, 0x00050026
_NUMBER, _ARCH, _FIRST_ARGUMENT = 0, 4, 16
_X32 = 0x40000000
"""Numbers from here on are another ABI of the same calls."""


@cache
def denying_filter(machine: str = platform.machine()) -> bytes:
    """The filter for this machine, as bubblewrap reads it. Raises UserError for other machines."""
    if machine not in _MACHINES:
        raise UserError(f"the sandbox knows {', '.join(_MACHINES)}, not {machine}; use sandbox_fusion_url instead")
    column, arch = _MACHINES[machine]
    checks = [(_AT_LEAST, _X32), *((_EQUAL, numbers[column]) for numbers in DENIED.values())]
    code = [(_LOAD, 0, 0, _ARCH), (_EQUAL, 1, 0, arch), (_RETURN, 0, 0, _KILL), (_LOAD, 0, 0, _NUMBER)]
    # Each jumps over the checks after it, and the five instructions of clone and _ALLOW, to EPERM.
    code += [(test, len(checks) - i + 4, 0, number) for i, (test, number) in enumerate(checks)]
    code += [(_EQUAL, 5, 0, _CLONE3), (_EQUAL, 0, 2, _CLONE[column])]
    code += [(_LOAD, 0, 0, _FIRST_ARGUMENT), (_ANY_BIT, 1, 0, _NEW_NAMESPACES)]
    code += [(_RETURN, 0, 0, end) for end in (_ALLOW, _EPERM, _ENOSYS)]
    return b"".join(struct.pack("HBBI", *instruction) for instruction in code)
