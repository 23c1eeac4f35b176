"""Reading a peer's memory: this process stands for the peer, whose memory the kernel reads the same way."""

from __future__ import annotations

import os
from dataclasses import replace

import pytest
import torch

from hybridflow.engine3d.transfer.peer_memory import PeerMemory, read, read_announced


def test_what_is_announced_is_read_bit_by_bit():
    memory, sent = PeerMemory(), [torch.randint(256, (n,), dtype=torch.uint8) for n in (1, 300, (3 << 20) + 7)]
    note = torch.empty(len(sent) + 2, dtype=torch.int64)
    memory.announce(sent, note)
    found = [torch.zeros_like(tensor) for tensor in sent]
    read_announced(os.getpid(), note, found)
    assert all(torch.equal(a, b) for a, b in zip(found, sent, strict=True))


def test_bytes_of_a_sender_that_has_ended_its_run_are_refused():
    memory, sent, note = PeerMemory(), torch.ones(8, dtype=torch.uint8), torch.empty(3, dtype=torch.int64)
    memory.announce([sent], note)
    memory.advance()
    with pytest.raises(OSError, match=f"process {os.getpid()} has ended this transfer"):
        read_announced(os.getpid(), note, [torch.zeros_like(sent)])


def test_memory_that_is_gone_is_an_error():
    into = torch.zeros(8, dtype=torch.uint8)
    with pytest.raises(OSError, match="read -1 of 8 bytes"):
        read(os.getpid(), 4096, into.data_ptr(), 8)
    with pytest.raises(OSError, match="No such process"):
        read(2**22 + 1, into.data_ptr(), into.data_ptr(), 8)  # beyond the largest process id


def test_a_process_is_readable_where_its_number_is_found(monkeypatch):
    memory = PeerMemory()
    own = memory.process()
    assert own is not None
    assert own.readable()
    assert not replace(own, number=own.number + 1).readable()  # another process that has the same id elsewhere
    assert not replace(own, pid=2**22 + 1).readable()
    monkeypatch.setenv("HYBRIDFLOW_PEER_MEMORY", "0")
    assert memory.process() is None
