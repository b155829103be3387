"""Machines for the tests of several nodes: network namespaces on one bridge, each with its own address, host name and hosts file. Needs root."""

from __future__ import annotations

import contextlib
import functools
import itertools
import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from launching import Ended, ended, environment

_made = itertools.count()


@functools.cache
def can_make_machines() -> bool:
    """Tried once: a container's rules may refuse namespaces, a small kernel may have no bridges, and either tool may be missing."""
    if os.getuid() != 0 or not (shutil.which("ip") and shutil.which("unshare")):
        return False
    try:
        with tempfile.TemporaryDirectory() as folder, machines(Path(folder), 1) as (one,):
            return subprocess.run(one.command("true"), capture_output=True).returncode == 0
    except subprocess.CalledProcessError:
        return False


@dataclass(frozen=True)
class Machine:
    """One node. Its processes see the same disk as everybody, and a network of their own."""

    name: str
    namespace: str
    link: str
    hosts: Path

    def command(self, *words: str) -> list[str]:
        """Runs with the machine's network and host name; the process that is started becomes the command."""
        enter = f'hostname {self.name} && mount --bind "{self.hosts}" /etc/hosts && exec "$@"'
        return ["ip", "netns", "exec", self.namespace, "unshare", "--mount", "--uts", "sh", "-c", enter, "sh", *words]

    def start(self, folder: Path, command: list[str], **more: str) -> subprocess.Popen[str]:
        """Like launching.start; `folder` is the working folder and gets `out` and `err`."""
        folder.mkdir(exist_ok=True)
        known = environment(GLOO_SOCKET_IFNAME="eth0", **more)
        with (folder / "out").open("w") as out, (folder / "err").open("w") as err:
            return subprocess.Popen(self.command(*command), cwd=folder, env=known, stdout=out, stderr=err, text=True)

    def unplug(self) -> None:
        _ip("link", "set", self.link, "down")

    def plug_in(self) -> None:
        _ip("link", "set", self.link, "up")


@contextlib.contextmanager
def machines(folder: Path, count: int) -> Iterator[list[Machine]]:
    """`node0`, `node1`, ... on one network."""
    tag = f"{os.getpid() % 10_000}{next(_made)}"  # new each time: the kernel takes a namespace apart a while after it is gone
    bridge, hosts = f"twb{tag}", folder / "hosts"
    hosts.write_text("127.0.0.1 localhost\n" + "".join(f"10.77.0.{number + 1} node{number}\n" for number in range(count)))
    with contextlib.ExitStack() as stack:
        _ip("link", "add", bridge, "type", "bridge")
        stack.callback(_ip, "link", "del", bridge)
        _ip("link", "set", bridge, "up")
        yield [_machine(stack, number, tag, bridge, hosts) for number in range(count)]


def _machine(stack: contextlib.ExitStack, number: int, tag: str, bridge: str, hosts: Path) -> Machine:
    namespace, link = f"twn{tag}-{number}", f"twl{tag}-{number}"
    _ip("netns", "add", namespace)
    stack.callback(_ip, "netns", "del", namespace)
    _ip("link", "add", link, "type", "veth", "peer", "name", "eth0", "netns", namespace)
    _ip("link", "set", link, "master", bridge, "up")
    for words in (("link", "set", "lo", "up"), ("addr", "add", f"10.77.0.{number + 1}/24", "dev", "eth0"), ("link", "set", "eth0", "up")):
        _ip("-n", namespace, *words)
    return Machine(f"node{number}", namespace, link, hosts)


def all_ended(processes: list[subprocess.Popen[str]], folders: list[Path]) -> list[Ended]:
    return [ended(process, folder) for process, folder in zip(processes, folders, strict=True)]


def _ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True)
