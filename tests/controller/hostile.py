"""What hostile agents leave behind: scripts for `sh -c` in a workspace, and what a grader then finds there."""

from __future__ import annotations

import os
import sys
from dataclasses import dataclass

NEST = "import os\nfor _ in range({n}):\n os.mkdir('{name}')\n os.chdir('{name}')\n"


@dataclass(frozen=True, slots=True)
class Leftover:
    """`files` is how many entries the grader's working folder has. `root`: only root can leave it."""

    script: str
    files: int = 0
    root: bool = False

    @property
    def possible(self) -> bool:
        return not self.root or os.getuid() == 0


LEFTOVERS = (
    Leftover(f'exec {sys.executable} -c "{NEST.format(n=1500, name="d")}"', 1),
    Leftover(f'exec {sys.executable} -c "{NEST.format(n=40, name="d" * 200)}"', 1),
    Leftover("rm -rf $PWD"),
    Leftover("d=$PWD; cd /; rm -rf $d; echo x > $d"),
    Leftover("d=$PWD; cd /; rm -rf $d; ln -s /etc $d"),
    Leftover("d=$PWD; cd /; rm -rf $d; mkfifo $d"),
    Leftover("touch a; chmod 0 .", 1),
    Leftover("touch a; chmod 0300 .", 1),
    Leftover("mkdir -p a/b/c; chmod 300 a/b/c a/b a", 1),
    Leftover("mkdir -p a/b/c; chmod 0 a/b/c a/b a; chmod 0 ..", 1),
    Leftover("mkfifo a; ln -s /dev/zero b; ln -s . c; ln -s nowhere d", 4),
    Leftover("echo x > ../grade"),
    Leftover("ln -s /etc ../grade"),
    Leftover("mkdir ../exit.json ../kill.json; touch ../exit.json/x"),
    Leftover("mkdir ../grade; echo '[]' > ../grade/exit.json"),
    Leftover("rm ../task.json"),
    Leftover("echo '{' > ../task.json"),
    Leftover("rm ../task.json; mkdir -p ../task.json/x"),
    Leftover("rm ../harness.log; ln -s /dev/zero ../harness.log; touch ../settled"),
    Leftover("d=$(dirname $PWD); cd /; rm -rf $d"),
    Leftover("d=$(dirname $PWD); cd /; rm -rf $d; echo x > $d"),
    Leftover("d=$(dirname $PWD); cd /; rm -rf $d; ln -s /etc $d"),
    Leftover("d=$(dirname $PWD); cd $d/..; rm -rf $d; cd ..; rmdir $OLDPWD; ln -s /etc $OLDPWD"),
    Leftover("mkdir ../exit.json.tmp$PPID; ln -s /etc/none ../exit.json.$PPID"),
    Leftover("touch a; chattr +i a . ..", 1, root=True),
)
"""Each harness ends, and is graded once."""

LAUNCHER = "$(ps -o ppid= -p $PPID)"
NEVER_STARTED = '{"exit_code": null, "signal": null, "started": 1, "ended": 2, "error": "x", "final": true}'
CANCEL = '{"reason": "cancelled", "grace_s": 0}'
KILLERS = (
    "kill -9 $PPID; sleep 300",
    "kill $PPID; sleep 300",
    f"echo '{CANCEL}' > ../kill.json; kill $PPID; sleep 300",
    f"echo '{NEVER_STARTED}' > ../exit.json; kill -9 $PPID; sleep 300",
    "setsid sleep 300 & kill -9 $PPID $$",
)
"""Harnesses that kill what watches them."""

KILL_BOTH = (
    f"kill -9 {LAUNCHER} $PPID; sleep 300",
    f"echo '{NEVER_STARTED}' > ../exit.json; kill -9 {LAUNCHER} $PPID; sleep 300",
    f"echo '{NEVER_STARTED}' > ../exit.json; rm -r ../../../../launcher/jobs; kill -9 {LAUNCHER} $PPID; sleep 300",
)
"""And the launcher too."""

STAYS = (
    "kill -STOP $PPID; sleep 300",
    "(while :; do kill -STOP $PPID; sleep 0.01; done) & sleep 300",
    f"kill {LAUNCHER}; sleep 300",
    f"kill -STOP {LAUNCHER}; kill -STOP $PPID; sleep 300",
    "setsid sh -c 'kill -STOP $$' & kill -STOP $PPID $$",
    f"exec {sys.executable} -c 'import os\nfor _ in range(7): os.fork()\nimport time; time.sleep(300)'",
    # Processes that exist for a moment each: every one leaves a child in a session of its own, and ends.
    f"exec {sys.executable} -c 'import os, time\nif all(os.fork() for _ in range(8)): time.sleep(300)\n"
    "while True: os._exit(0) if os.fork() else os.setsid()  # moving-target'",
    "trap '' TERM INT HUP; setsid sh -c 'trap \"\" TERM; sleep 300' & sleep 300",
)
"""Harnesses that only their time-out ends."""
