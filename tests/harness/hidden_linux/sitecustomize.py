"""With this directory on ``PYTHONPATH``, Python and what it starts find nothing that only Linux has.

``sys.platform`` is ``darwin``; ``/proc``, ``/sys`` and ``/dev/shm`` are not there for Python code; functions and
constants that CPython has on Linux and not on macOS are gone, and so is ``prctl``. ``os.fork``, which macOS has and
advises against, ends with an error. What this cannot show: other kernels, compilers, builds of torch and file systems,
and what compiled code does, such as torch's, which sees Linux.
"""

import ctypes
import ctypes.util
import errno
import fcntl
import importlib.util
import os
import resource
import select
import signal
import socket
import sys
import sysconfig
import time
import urllib.request  # noqa: F401 - its part for macOS is compiled

GONE = {
    os: """eventfd eventfd_read eventfd_write memfd_create pidfd_open pipe2 posix_fadvise posix_fallocate
        copy_file_range splice sched_getaffinity sched_setaffinity sched_getscheduler sched_setscheduler sched_getparam
        getrandom
        getxattr setxattr listxattr removexattr unshare setns waitid setresuid getresuid setresgid getresgid
        O_DIRECT O_TMPFILE O_PATH O_NOATIME MFD_CLOEXEC P_PIDFD""",
    signal: "SIGRTMIN SIGRTMAX SIGPWR SIGSTKFLT SIGPOLL sigtimedwait sigwaitinfo pidfd_send_signal",
    select: "epoll EPOLLIN EPOLLOUT EPOLLERR EPOLLHUP EPOLLEXCLUSIVE EPOLL_CLOEXEC",
    socket: """AF_NETLINK AF_PACKET AF_VSOCK SOCK_CLOEXEC SOCK_NONBLOCK SO_PEERCRED SO_BINDTODEVICE SO_MARK
        SO_INCOMING_CPU TCP_USER_TIMEOUT TCP_QUICKACK TCP_INFO MSG_CMSG_CLOEXEC""",
    fcntl: "F_OFD_GETLK F_OFD_SETLK F_OFD_SETLKW F_SETPIPE_SZ F_GETPIPE_SZ F_ADD_SEALS F_GET_SEALS F_NOTIFY F_SETSIG",
    resource: "prlimit RUSAGE_THREAD RLIMIT_SIGPENDING RLIMIT_MSGQUEUE RLIMIT_NICE RLIMIT_RTPRIO RLIMIT_RTTIME",
    time: "CLOCK_BOOTTIME CLOCK_TAI pthread_getcpuclockid",
}
HIDDEN = ("/proc", "/sys", "/dev/shm")

# These take a part by the platform, and there is only that of Linux here; so does `ctypes.util`.
sysconfig.get_config_vars()

if importlib.util.find_spec("psutil"):
    import psutil  # noqa: F401

for module, names in GONE.items():
    for name in names.split():
        if hasattr(module, name):
            delattr(module, name)


def is_hidden(path):
    text = os.fsdecode(path) if isinstance(path, str | bytes | os.PathLike) else ""
    return any(text == place or text.startswith(f"{place}/") for place in HIDDEN)


def without_hidden(function):
    def found(path=".", *args, **options):
        if is_hidden(path):
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), path)
        return function(path, *args, **options)

    return found


for name in ("stat", "lstat", "statvfs", "access", "readlink", "scandir", "listdir", "mkdir", "chdir"):
    setattr(os, name, without_hidden(getattr(os, name)))


def refuse_hidden(event, arguments):
    if event == "open" and is_hidden(arguments[0]):
        raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), arguments[0])


sys.addaudithook(refuse_hidden)


def no_fork():
    raise OSError(errno.ENOSYS, "this test has no fork")


os.fork = no_fork
of_library = ctypes.CDLL.__getattr__


def without_prctl(library, name):
    if name == "prctl":
        raise AttributeError("dlsym(RTLD_DEFAULT, prctl): symbol not found")
    return of_library(library, name)


ctypes.CDLL.__getattr__ = without_prctl
sys.platform = "darwin"
