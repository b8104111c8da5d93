"""The process that runs one generated program: gives up its rights, runs the program and its tests, reports.

Started by `sandbox.py` as `python -I sandbox_child.py REPORT_FD`, with the job as JSON on standard input. Standard
library only.
"""

import ctypes
import errno
import json
import os
import platform
import resource
import struct
import sys
from typing import Any

# Refused system calls: (x86_64, aarch64), None where the machine has no such call. Together they reach other machines,
# start or disturb other processes, change files without opening them, or leave something behind.
REFUSED: dict[str, tuple[int | None, int | None]] = {
    "socket": (41, 198), "io_uring_setup": (425, 425),
    "fork": (57, None), "vfork": (58, None), "execve": (59, 221), "execveat": (322, 281),
    "kill": (62, 129), "tkill": (200, 130), "tgkill": (234, 131), "rt_sigqueueinfo": (129, 138),
    "rt_tgsigqueueinfo": (297, 240), "pidfd_send_signal": (424, 424), "ptrace": (101, 117),
    "process_vm_writev": (311, 271), "prlimit64": (302, 261), "setpriority": (141, 140), "ioprio_set": (251, 30),
    "sched_setaffinity": (203, 122), "sched_setscheduler": (144, 119), "sched_setattr": (314, 274),
    "truncate": (76, 45), "chmod": (90, None), "fchmod": (91, 52), "fchmodat": (268, 53), "fchmodat2": (452, 452),
    "chown": (92, None), "fchown": (93, 55), "lchown": (94, None), "fchownat": (260, 54),
    "setxattr": (188, 5), "lsetxattr": (189, 6), "fsetxattr": (190, 7), "setxattrat": (463, 463),
    "removexattr": (197, 14), "lremovexattr": (198, 15), "fremovexattr": (199, 16), "removexattrat": (466, 466),
    "utime": (132, None), "utimes": (235, None), "futimesat": (261, None), "utimensat": (280, 88),
    "memfd_create": (319, 279), "shmget": (29, 194), "msgget": (68, 186), "semget": (64, 190),
    "add_key": (248, 217), "keyctl": (250, 219), "unshare": (272, 97), "setns": (308, 268),
    "mount": (165, 40), "umount2": (166, 39),
}  # fmt: skip
MACHINES = {"x86_64": (0, 0xC000003E, 56), "aarch64": (1, 0xC00000B7, 220)}  # column above, audit name, clone
CLONE3, CLONE_THREAD = 435, 0x10000
ALLOW, KILL, DENY = 0x7FFF0000, 0x80000000, 0x00050000  # the errno is added to DENY
LOAD, EQUAL, AT_LEAST, ANY_BIT, RETURN = 0x20, 0x15, 0x35, 0x45, 0x06

libc = ctypes.CDLL(None, use_errno=True)


def refuse_system_calls() -> bool:
    """A seccomp filter: no sockets, no new processes, no signals to others. Threads may start."""
    if platform.machine() not in MACHINES:
        return False
    column, audit, clone = MACHINES[platform.machine()]
    refused = [numbers[column] for numbers in REFUSED.values() if numbers[column] is not None]
    program: list[tuple[int, int, int, int]] = [
        (LOAD, 0, 0, 4),
        (EQUAL, 1, 0, audit),
        (RETURN, 0, 0, KILL),
        (LOAD, 0, 0, 0),
        (AT_LEAST, 0, 1, 0x40000000),  # the calls of x32 have other numbers
        (RETURN, 0, 0, DENY | errno.EPERM),
    ]
    for number in refused:
        program += [(EQUAL, 0, 1, number or 0), (RETURN, 0, 0, DENY | errno.EPERM)]
    program += [
        (EQUAL, 0, 1, CLONE3),  # its arguments cannot be read: the C library tries clone instead
        (RETURN, 0, 0, DENY | errno.ENOSYS),
        (EQUAL, 0, 3, clone),
        (LOAD, 0, 0, 16),
        (ANY_BIT, 1, 0, CLONE_THREAD),
        (RETURN, 0, 0, DENY | errno.EPERM),
        (RETURN, 0, 0, ALLOW),
    ]
    code = b"".join(struct.pack("=HBBI", *step) for step in program)
    buffer = ctypes.create_string_buffer(code, len(code))
    header = ctypes.create_string_buffer(struct.pack("@HP", len(program), ctypes.addressof(buffer)))
    return libc.prctl(22, 2, header, 0, 0) == 0  # PR_SET_SECCOMP, SECCOMP_MODE_FILTER


def forbid_writing(folder: str) -> bool:
    """Landlock: no file outside `folder` can be opened for writing, made, renamed or removed, except /dev/null."""
    version = libc.syscall(444, None, 0, 1)
    if version < 1:
        return False
    content = 1 << 1 | (1 << 14 if version >= 3 else 0)  # write, truncate
    rights = content | sum(1 << bit for bit in range(4, 13)) | (1 << 13 if version >= 2 else 0)
    # Files, network ports (seccomp refuses sockets), signals and sockets of processes outside.
    attributes = struct.pack("=QQQ", rights, 0, 3)[: 24 if version >= 6 else 8]
    rules = libc.syscall(444, attributes, len(attributes), 0)
    for path, allowed in ((folder, rights), ("/dev/null", content)):
        handle = os.open(path, os.O_PATH | os.O_CLOEXEC)
        if libc.syscall(445, rules, 1, struct.pack("=Qi", allowed, handle), 0) != 0:
            return False
        os.close(handle)
    return libc.syscall(446, rules, 0) == 0


def restrict(job: dict[str, Any]) -> list[str]:
    """Limits and rights of this process; returns the protections that this kernel does not have."""
    limits = {
        resource.RLIMIT_CPU: job["cpu_seconds"],
        resource.RLIMIT_AS: job["memory_bytes"],
        resource.RLIMIT_FSIZE: job["file_bytes"],
        resource.RLIMIT_NOFILE: 64,
        resource.RLIMIT_CORE: 0,
    }
    for limit, value in limits.items():
        hard = resource.getrlimit(limit)[1]  # of this shell or job; it cannot be raised
        value = value if hard == resource.RLIM_INFINITY else min(value, hard)
        resource.setrlimit(limit, (value, value))
    if not hasattr(os, "O_PATH"):  # not Linux
        return ["files", "network and processes"]
    libc.prctl(38, 1, 0, 0, 0)  # PR_SET_NO_NEW_PRIVS: needed by both of what follows
    libc.prctl(1, 9, 0, 0, 0)  # PR_SET_PDEATHSIG: the kernel ends this process with the evaluation
    missing = [] if forbid_writing(job["folder"]) else ["files"]
    libc.capset(struct.pack("=Ii", 0x20080522, 0), bytes(24))  # of root in a container
    if not refuse_system_calls():
        missing.append("network and processes")
        resource.setrlimit(resource.RLIMIT_NPROC, (0, 0))  # does not bind root
    return missing


def main() -> None:
    job = json.load(sys.stdin)
    report_to = int(sys.argv[1])
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    missing = restrict(job)

    def report(**values: Any) -> None:
        os.write(report_to, json.dumps({**values, "missing": missing}).encode())

    if missing and not job["weak"]:
        report(reason="not run")
        return
    names = {"__name__": "__main__", "__builtins__": __builtins__}
    try:
        for part, text in (("program", job["program"]), ("tests", job["tests"])):
            exec(compile(text, f"<{part}>", "exec", dont_inherit=True), names)
    except BaseException as error:
        reason = "ended before its tests" if isinstance(error, SystemExit) else type(error).__name__
        report(reason=reason, message=str(error)[:200])
    else:
        report(reason="passed", token=job["token"])
    # Threads and exit handlers of the program are not waited for.
    os._exit(0)


if __name__ == "__main__":
    main()
