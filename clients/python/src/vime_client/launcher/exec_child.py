"""`python exec_child.py PARENT PROGRAM ARGUMENT...`: become PROGRAM, killed by the kernel when PARENT dies.

A file of its own, run without site packages, so that it costs milliseconds. Programs that want a gentler end set their
own signal afterwards (`vime_client.parent_watch`), which replaces this one.
"""

import os
import sys


def main() -> None:
    """Arm the kernel, check that the parent is still there, become the program."""
    parent, program = int(sys.argv[1]), sys.argv[2:]
    if sys.platform == "linux":
        import ctypes

        ctypes.CDLL(None).prctl(1, 9, 0, 0, 0)  # PR_SET_PDEATHSIG, SIGKILL; stays over exec
    if os.getppid() != parent:
        sys.exit("the launcher is gone")
    os.execv(program[0], program)


if __name__ == "__main__":
    main()
