"""Memory of named tensors that goes and comes: shared storages, storages of others, host copies."""

from __future__ import annotations

import os
from dataclasses import replace

import pytest
import torch

from hybridflow.engine3d.copy_stream import CopyStream
from hybridflow.engine3d.offloadable import HostImages, Residency
from hybridflow.engine3d.transfer.peer_memory import PeerMemory, read, read_announced
from hybridflow.engines.train_states import wait_by_layer

CPU = torch.device("cpu")


def fused() -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    """q, k and v in one buffer, and a norm of its own."""
    buffer = torch.arange(12.0)
    tensors = {name: buffer[4 * i : 4 * i + 4] for i, name in enumerate("qkv")}
    return {**tensors, "norm": torch.ones(3)}, buffer


def test_memory_goes_and_comes_behind_the_same_tensors_and_views():
    weight = torch.nn.Parameter(torch.zeros(1000, 10))
    view = weight.detach()[5:7]
    memory = Residency({"w": weight}, CPU)
    for i in range(30):
        memory.release()
        assert (memory.resident_bytes, weight.untyped_storage().nbytes(), memory.resident("w")) == (0, 0, False)
        assert memory.acquire() == {"w"}
        assert (memory.resident_bytes, weight.untyped_storage().nbytes(), memory.resident("w")) == (40000, 40000, True)
        view.fill_(i)
        assert weight[5:7].eq(i).all()
        assert weight.shape == (1000, 10)


def test_a_shared_storage_goes_with_its_last_name_and_comes_with_the_first():
    tensors, buffer = fused()
    memory = Residency(tensors, CPU)
    assert memory.total_bytes == memory.resident_bytes == 48 + 12
    memory.release(["q", "k"])
    assert buffer.sum() == 66
    assert memory.resident("q")
    memory.release(["v"])
    assert not memory.resident("q")
    assert memory.resident_bytes == 12
    assert memory.acquire(["k"]) == {"q", "k", "v"}
    assert memory.acquire(["v"]) == set()
    tensors["q"].fill_(1)
    memory.release(["v"])
    assert memory.resident("q")
    memory.release(["k"])
    assert not memory.resident("q")


def test_releasing_and_acquiring_twice_changes_nothing():
    tensors, _ = fused()
    memory = Residency(tensors, CPU)
    assert memory.acquire() == set()
    assert tensors["q"].tolist() == [0, 1, 2, 3]
    memory.release()
    memory.release()
    assert memory.resident_bytes == 0
    memory.acquire()
    memory.acquire()
    assert memory.resident_bytes == memory.total_bytes == 60


def test_kept_names_and_all_that_shares_their_storage_stay():
    tensors, buffer = fused()
    memory = Residency(tensors, CPU, kept=["k", "a name of somebody else"])
    assert memory.total_bytes == 12
    memory.release()
    assert buffer.sum() == 66
    assert memory.resident("q")
    assert not memory.resident("norm")
    assert memory.acquire(["q", "norm"]) == {"norm"}


def test_unknown_names_and_storages_that_cannot_be_resized_are_left_alone():
    import numpy as np

    foreign = torch.from_numpy(np.ones(4, dtype=np.float32))
    memory = Residency({"foreign": foreign}, CPU)
    assert memory.total_bytes == 0
    memory.release(["foreign", "nobody"])
    assert foreign.sum() == 4
    assert memory.resident("foreign")


@pytest.mark.parametrize("names", [None, ["q", "k", "v", "norm"]])
def test_offloaded_values_come_back(names):
    tensors, buffer = fused()
    memory = Residency(tensors, CPU)
    for _ in range(3):
        memory.offload(names)
        assert memory.resident_bytes == 0
        assert memory.acquire(names) == set()
        assert buffer.tolist() == list(range(12))
        assert tensors["norm"].tolist() == [1, 1, 1]


def test_content_that_has_not_changed_is_not_copied_again():
    tensors, buffer = fused()
    memory = Residency(tensors, CPU)
    for _ in range(3):
        memory.offload()
        assert memory.acquire() == set()
    assert (memory.images.copied_out, memory.images.copied_in) == (60, 180)
    buffer.add_(1)
    memory.changed()
    memory.offload()
    assert memory.images.copied_out == 120
    memory.acquire()
    assert buffer.tolist() == list(range(1, 13))
    memory.zero(["norm"])
    memory.offload()
    assert memory.images.copied_out == 132
    memory.acquire()
    assert tensors["norm"].tolist() == [0, 0, 0]
    memory.release(["norm"])
    assert memory.acquire() == {"norm"}
    tensors["norm"].fill_(5)
    memory.offload()
    assert memory.images.copied_out == 144
    memory.acquire()
    assert tensors["norm"].tolist() == [5, 5, 5]


def test_offloading_part_of_a_shared_storage_waits_for_the_rest():
    tensors, buffer = fused()
    memory = Residency(tensors, CPU)
    memory.offload(["q"])
    assert memory.resident_bytes == 60
    buffer.add_(1)
    memory.offload(["k", "v"])
    assert memory.resident_bytes == 12
    assert memory.acquire(["v"]) == set()
    assert buffer.tolist() == list(range(1, 13))
    memory.release(["v"])  # q and k are still away, so the buffer goes back to the host
    assert memory.resident_bytes == 12
    assert memory.acquire(["q"]) == set()
    assert tensors["q"].tolist() == [1, 2, 3, 4]


def test_releasing_what_was_offloaded_forgets_the_host_copy():
    tensors, _ = fused()
    memory = Residency(tensors, CPU)
    memory.offload()
    memory.release(["norm"])
    assert memory.acquire() == {"norm"}
    assert tensors["v"].tolist() == [8, 9, 10, 11]


def test_what_one_name_offloaded_survives_the_release_of_the_others():
    tensors, _ = fused()
    memory = Residency(tensors, CPU)
    memory.offload(["q"])
    memory.release(["k", "v"])
    assert memory.resident_bytes == 12
    assert memory.acquire(["q"]) == set()
    assert tensors["q"].tolist() == [0, 1, 2, 3]
    memory.offload()
    memory.release(["k"])
    memory.acquire(["q"])
    assert tensors["q"].tolist() == [0, 1, 2, 3]


def test_what_waits_elsewhere_stays_there():
    """Parameters of a model on CUDA that FSDP2 keeps in host memory are nothing that device memory could be had from,
    and their storage is not resized: it is pinned, and belongs to whoever copies from it."""
    waiting, here = torch.ones(4), torch.ones(3, device="meta")
    memory = Residency({"waiting": waiting, "here": here}, torch.device("meta"))
    assert memory.total_bytes == 12
    memory.release()
    assert waiting.untyped_storage().nbytes() == 16
    assert memory.resident("waiting")
    assert not memory.resident("here")
    memory = Residency({"waiting": waiting}, torch.device("cuda"))
    memory.offload()
    assert memory.total_bytes == memory.resident_bytes == 0
    assert memory.acquire() == set()
    assert waiting.eq(1).all()


class Recorded(CopyStream):
    """A stream whose marks are how many copies came before them."""

    def __init__(self) -> None:
        super().__init__(CPU)
        self.copied: list[int] = []
        self.waited: list[int] = []

    def copy(self, destination: torch.Tensor, source: torch.Tensor) -> None:
        super().copy(destination, source)
        self.copied.append(len(destination))

    def mark(self) -> int:
        return len(self.copied)

    def wait(self, mark: int) -> None:
        self.waited.append(mark)


class Stack(torch.nn.Module):
    """Layers of growing sizes, made in another order, and a head outside of them."""

    def __init__(self) -> None:
        super().__init__()
        self.head = torch.nn.Linear(1, 1)
        self.layers = torch.nn.ModuleList(torch.nn.Linear(1, 1) for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


def test_layers_come_in_their_order_and_each_waits_for_its_own():
    model, seen = Stack(), list[tuple[str, int]]()
    buffers = {"head": torch.zeros(10), **{f"layers.{i}": torch.zeros(2 + i) for i in reversed(range(3))}}
    tensors = {}
    for name, buffer in buffers.items():
        module = model.get_submodule(name)
        for at, part in enumerate(("weight", "bias")):
            tensors[f"{name}.{part}"] = buffer[at : at + 1]
            setattr(module, part, torch.nn.Parameter(buffer[at : at + 1].view(getattr(module, part).shape)))
    stream = Recorded()
    memory = Residency(tensors, CPU, images=HostImages(stream))
    names = {module: name for name, module in model.named_modules()}
    wait_by_layer(model, memory, lambda module, mark: seen.append((names[module], mark)))
    model(torch.ones(1, 1))
    assert not stream.waited
    memory.offload()
    stream.copied.clear()
    memory.fetch()
    assert stream.copied == [40, 8, 12, 16]
    model(torch.ones(1, 1))
    assert seen == [("", 1), ("layers.0", 2), ("layers.1", 3), ("layers.2", 4)]
    model(torch.ones(1, 1))
    assert len(stream.waited) == 4
    memory.offload()
    memory.acquire()  # all at once
    assert stream.waited[4:] == [8]
    memory.offload()
    memory.fetch()
    memory.offload()  # memory that is still being written is not freed before
    assert memory.arrive() is None
    assert (memory.images.copied_out, memory.images.copied_in) == (76, 3 * 76)


def test_content_that_is_saved_before_it_leaves_is_not_copied_again():
    tensors, _ = fused()
    memory = Residency(tensors, CPU)
    memory.offload()
    memory.acquire()
    memory.changed(["norm"])
    memory.save(["norm", "q"])
    assert memory.images.copied_out == 60 + 12
    memory.offload()
    assert memory.images.copied_out == 60 + 12


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
