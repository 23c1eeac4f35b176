"""`hybridflow doctor --cluster`: what every machine of a Ray cluster finds on itself, and whether they reach each
other and one directory."""

from __future__ import annotations

import platform
import secrets
import shutil
import socket
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

from hybridflow.cli.doctor import Finding, devices, memory, shared_memory, versions
from hybridflow.cluster.connection import NodeProbes, Unanswered
from hybridflow.errors import ConfigError

_CONNECT_SECONDS, _AT_ONCE = 5.0, 32


class Probe:
    """On one machine."""

    def look(self) -> list[Finding]:
        """Versions first."""
        return [_versions(), *devices(), memory(), shared_memory(store=False), _name()]

    def listen(self, address: str) -> int:
        """A port at the machine's address in the cluster."""
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        self._server = socket.create_server((address, 0), family=family, backlog=1024)
        return self._server.getsockname()[1]

    def reach(self, own: str, others: Sequence[tuple[str, str, int]]) -> list[str]:
        """Of the others (name, address, port), those to which no connection can be opened from `own` address."""
        with ThreadPoolExecutor(_AT_ONCE) as threads:
            found = threads.map(_unreached, [one for one in others if one[1] != own])
            return [why for why in found if why]

    def meet(self, own: str, directory: str, word: str) -> str:
        """Why the driver's file in `directory` cannot be read here, or that of this address written; else ""."""
        try:
            (Path(directory) / own).write_text((Path(directory) / word).read_text())
        except OSError as error:
            return str(error)
        return ""


def examine_cluster(address: str, shared: str | None) -> Iterator[Finding]:
    """All findings about the cluster at `address`, each machine's by its name; `shared` is a directory that all are
    meant to have. Errors: ConfigError where no cluster answers, or `shared` is no directory here."""
    if shared is not None and not Path(shared).is_dir():
        raise ConfigError(f"--shared {shared} is no directory on this machine: name one that all machines mount.")
    with NodeProbes(address, Probe) as probes:
        count = Counter(machine.name for machine in probes.machines)
        names = [one.name if count[one.name] == 1 else f"{one.name} ({one.address})" for one in probes.machines]
        yield _versions()
        answered = set[int]()
        for at, (name, machine, seen) in enumerate(zip(names, probes.machines, probes.ask("look"))):
            if isinstance(seen, Unanswered):
                cure = "Install hybridflow there as here, and see that Ray's ports are open; or stop Ray on it."
                yield Finding(name, f"no check could run there: {seen.why}", cure)
                continue
            answered.add(at)
            free = ", ".join(f"{left} of {total} {kind}s free" for kind, (left, total) in machine.devices.items())
            yield Finding(name, f"{machine.address}, {free}")
            yield from (replace(one, check=name, found=f"{one.check}: {one.found}") for one in _compared(seen))
        yield from _connections(probes, names, answered)
        if shared is not None:
            yield from _directory(probes, names, answered, Path(shared).resolve())


def _versions() -> Finding:
    found = versions()
    return replace(found, found=f"Python {platform.python_version()}, {found.found}")


def _compared(seen: list[Finding]) -> Iterator[Finding]:
    """The versions of a machine beside the driver's."""
    first, *others = seen
    if first.found != (own := _versions().found) and not first.cure:
        ours, theirs = own.split(", "), first.found.split(", ")
        lacking = ", ".join(one for one in ours if one not in theirs)
        said = ", ".join(one for one in theirs if one not in ours) or f"not {lacking}"
        first = replace(first, cure=f"It has {said}, unlike this machine: install the same versions everywhere.")
    yield from [first, *others]


def _name() -> Finding:
    """To what the machine's name leads: nothing depends on it, and it explains what other programs do."""
    try:
        return Finding("name", f"{socket.gethostname()} is {socket.gethostbyname(socket.gethostname())} there")
    except OSError as error:
        return Finding("name", f"{socket.gethostname()} leads to no address there ({error}), which is fine")


def _connections(probes: NodeProbes, names: Sequence[str], answered: set[int]) -> Iterator[Finding]:
    ports = probes.ask("listen", each="address")
    there = [at for at in sorted(answered) if not isinstance(ports[at], Unanswered)]
    others = [(names[at], probes.machines[at].address, ports[at]) for at in there]
    for at, found in enumerate(probes.ask("reach", others, each="address")):
        if at not in answered:
            continue
        failed = [found.why] if isinstance(found, Unanswered) else list(found)
        failed += [ports[at].why] if isinstance(ports[at], Unanswered) else []
        cure = f"{'; '.join(failed)}. Open all ports between the machines of the cluster: process groups choose theirs."
        yield Finding(names[at], f"connections to {len(others) - (at in there)} others", cure if failed else "")


def _directory(probes: NodeProbes, names: Sequence[str], answered: set[int], shared: Path) -> Iterator[Finding]:
    """Whether the driver and each machine see each other's files in it."""
    word = secrets.token_hex(8)
    own = shared / f".hybridflow-doctor-{word}"
    try:
        own.mkdir()
        (own / word).write_text(word)
        for at, why in enumerate(probes.ask("meet", str(own), word, each="address")):
            if at not in answered:
                continue
            why = why.why if isinstance(why, Unanswered) else why
            if not why and not (own / probes.machines[at].address).is_file():
                why = "what it wrote there is not seen here"
            cure = f"{why}. Mount it there at the same path, writable." if why else ""
            yield Finding(names[at], f"{shared} is {'not ' if why else ''}shared with this machine", cure)
    except OSError as error:
        yield Finding("shared", f"{shared} cannot be written here", f"{error}. Choose a directory that can.")
    finally:
        shutil.rmtree(own, ignore_errors=True)


def _unreached(other: tuple[str, str, int]) -> str:
    name, address, port = other
    try:
        socket.create_connection((address, port), _CONNECT_SECONDS).close()
    except OSError as error:
        return f"none to {name} ({address}:{port}): {error}"
    return ""
