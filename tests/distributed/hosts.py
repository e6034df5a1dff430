"""Two hosts on one machine: each has its own network, name and loopback; a wire joins them, names resolve as in DNS.

    host-a  10.77.0.1  ------ veth ------  10.77.0.2  host-b

They are namespaces of the kernel, which an ordinary user may make where user namespaces are allowed.
"""

import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

ADDRESSES = {"host-a": "10.77.0.1", "host-b": "10.77.0.2"}
_HOSTS = "127.0.0.1 localhost\n" + "".join(f"{address} {name}\n" for name, address in ADDRESSES.items())
_ENTER = ("nsenter", "--preserve-credentials", "--user", "--mount", "--net", "--uts", "--target")


@contextmanager
def two_hosts(folder: Path) -> Iterator[list[list[str]]]:
    """The words to put before a command, so that it runs on the first host, and on the second.

    Raises: OSError or subprocess.CalledProcessError where the kernel or its tools do not allow it.
    """
    hosts = folder / "hosts"
    hosts.write_text(_HOSTS)
    unshared = ["unshare", "--map-root-user", "--net", "--uts", "--mount"]
    with (
        _holding(unshared, f"mount --bind '{hosts}' /etc/hosts") as first,
        _holding([*_ENTER, str(first), "unshare", "--net", "--uts"], ":") as second,
    ):
        entered = [[*_ENTER, str(process)] for process in (first, second)]
        _run(entered[0], f"ip link add wire type veth peer name wire netns {second}")
        for (name, address), prefix in zip(ADDRESSES.items(), entered, strict=True):
            _run(
                prefix, f"hostname {name}; ip link set lo up; ip address add {address}/24 dev wire; ip link set wire up"
            )
        yield entered


@contextmanager
def _holding(prefix: list[str], first_command: str) -> Iterator[int]:
    """The id of a process that does nothing but hold namespaces of its own, after `first_command` in them."""
    words = [*prefix, "sh", "-ec", f"{first_command}; echo ready; exec sleep infinity"]
    with subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None and process.stderr is not None
        try:
            if process.stdout.readline() != "ready\n":
                raise subprocess.CalledProcessError(process.wait(), words, stderr=process.stderr.read())
            yield process.pid
        finally:
            process.kill()


def _run(prefix: list[str], commands: str) -> None:
    subprocess.run([*prefix, "sh", "-ec", commands], check=True, capture_output=True, text=True)
