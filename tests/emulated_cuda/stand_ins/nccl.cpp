// NCCL: a call queues its operation on its stream; it is done when all ranks have come to it. Operations of one
// communicator run in the order of their calls. A rank that waits too long reports who waits for what, and ends.
#include "nccl.h"

#include <unistd.h>

#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <random>
#include <set>

struct UniqueId {
  char bytes[128];
};
struct Part {  // one call
  Communicator* group;
  std::string name;
  bool collective;
  std::function<bool()> advance;         // true when done
  std::function<std::string()> missing;  // the ranks that have not come
  std::shared_ptr<Ticket> ticket = nullptr;
  bool done = false;
};
struct Call {
  Part part;
  int stream;
};

static auto& communicators = *new std::set<Communicator*>;
static thread_local int depth = 0;
static thread_local std::vector<Call> calls;  // of the open group

// ---- waiting in vain
static std::string described(const Part& part) {
  auto& group = *part.group;
  return part.name + " of communicator " + group.name + ", rank " + std::to_string(group.rank) + " of " +
         std::to_string(group.size);
}

static void end_deadlock(const Part& part, double waited) {
  auto& group = *part.group;
  std::string text = "emulated CUDA: after " + std::to_string((int)waited) + " s, " + described(part) +
                     " still waits for ranks " + part.missing() + ". Queued in this process:\n" + queued_operations();
  for (int rank = 0; rank < group.size; rank++)
    if (rank != group.rank) text += "Queued by rank " + std::to_string(rank) + ":\n" + waiting_of(group, rank);
  text += "Ranks must call the operations of communicators that wait for each other in the same order.\n";
  fputs(text.c_str(), stderr);
  write_log("deadlock", text);
  abort();
}

// ---- queue
static bool advance(std::vector<Part>& parts, double& began, bool& published) {
  std::set<Communicator*> busy;  // collectives of one group call run one after the other
  bool all = true;
  for (auto& part : parts) {
    if (part.done) continue;
    auto& order = part.group->order;
    if (!part.group->aborted && (order.front() != part.ticket || (part.collective && busy.count(part.group)))) {
      all = false;
      continue;
    }
    if (!began) began = now();
    part.done = part.group->aborted || part.advance();
    if (part.done && --part.ticket->left == 0) {
      for (auto it = order.begin(); it != order.end(); ++it)
        if (*it == part.ticket) {
          order.erase(it);
          break;
        }
    }
    if (!part.done) busy.insert(part.group);
    all &= part.done;
  }
  if (all || !began) return all;
  double waited = now() - began, limit = deadline();
  if (waited > limit / 2 && !published) {
    published = true;
    for (auto* group : communicators) publish_waiting(*group, queued_operations());
  }
  if (waited > limit)
    for (auto& part : parts)
      if (!part.done && part.group->order.front() == part.ticket) end_deadlock(part, waited);
  return false;
}

static void queue_parts(int stream, std::vector<Part> parts) {
  std::map<Communicator*, std::shared_ptr<Ticket>> messages;
  for (auto& part : parts) {
    auto& shared = messages[part.group];
    if (part.collective || !shared) {
      part.ticket = std::make_shared<Ticket>();
      part.group->order.push_back(part.ticket);
      if (!part.collective) shared = part.ticket;
    } else {
      part.ticket = shared;
    }
    part.ticket->left++;
  }
  auto kept = std::make_shared<std::vector<Part>>(std::move(parts));
  auto began = std::make_shared<double>(0);
  auto published = std::make_shared<bool>(false);
  auto describe = [=] {
    std::string text;
    for (auto& part : *kept)
      if (!part.done) text += (text.empty() ? "" : ", ") + described(part);
    return text;
  };
  enqueue(stream, {[=] { return advance(*kept, *began, *published); }, describe});
}

static Result start(Part part, int stream) {
  if (part.group->aborted) return INVALID_USAGE;
  if (depth) {
    calls.push_back({std::move(part), stream});
  } else {
    queue_parts(stream, {std::move(part)});
  }
  return SUCCESS;
}

API Result ncclGroupStart() {
  depth++;
  return SUCCESS;
}

API Result ncclGroupEnd() {
  if (--depth) return SUCCESS;
  LOCKED;
  std::map<int, std::vector<Part>> by_stream;
  for (auto& call : calls) by_stream[call.stream].push_back(std::move(call.part));
  calls.clear();
  for (auto& [stream, parts] : by_stream) queue_parts(stream, std::move(parts));
  return SUCCESS;
}

// ---- collectives
typedef std::vector<std::string> Contributions;
typedef std::function<void(Contributions& ranks)> Finish;

struct Exchange {
  Communicator* group;
  long operation;
  std::string label;
  const void* from;
  size_t size;
  Finish finish;
  Contributions ranks;
  std::vector<bool> came;

  bool advance() {
    auto& g = *group;
    if (!came[g.rank]) {
      if (g.size > 1) write_file(collective_file(g, operation, g.rank), label, from, size);
      ranks[g.rank].assign((const char*)from, size);
      came[g.rank] = true;
    }
    std::string theirs;
    bool all = true;
    for (int rank = 0; rank < g.size; rank++) {
      if (came[rank]) continue;
      came[rank] = read_file(collective_file(g, operation, rank), theirs, ranks[rank]);
      all &= came[rank];
      if (came[rank] && theirs != label)
        tell("collective", "rank " + std::to_string(g.rank) + " calls " + label + ", rank " + std::to_string(rank) +
                               " calls " + theirs);
    }
    if (!all) return false;
    if (operation && g.size > 1) remove_file(collective_file(g, operation - 1, g.rank));  // all have read it
    finish(ranks);
    return true;
  }

  std::string missing() const {
    std::string text;
    for (int rank = 0; rank < group->size; rank++)
      if (!came[rank]) text += (text.empty() ? "" : ", ") + std::to_string(rank);
    return text;
  }
};

static Part collective_part(Communicator* group, const std::string& label, const void* from, size_t size,
                            Finish finish) {
  auto exchange = std::make_shared<Exchange>(
      Exchange{group, group->operations++, label, from, size, std::move(finish), Contributions(group->size),
               std::vector<bool>(group->size)});
  std::string name = label + ", operation " + std::to_string(exchange->operation);
  return {group, name, true, [=] { return exchange->advance(); }, [=] { return exchange->missing(); }};
}

struct Buffers {
  const void* from;
  size_t from_size;
  void* to;
  size_t to_size;
};

static Result collective(Communicator* group, const std::string& label, const Buffers& b, cudaStream_t handle,
                         Finish finish) {
  LOCKED;
  int stream = id_of(handle);
  launch(stream);
  std::string name = label.substr(0, label.find(' '));
  access(b.from, b.from_size, stream, false, name.c_str());
  access(b.to, b.to_size, stream, true, name.c_str());
  auto run = [=](int on) { return start(collective_part(group, label, b.from, b.from_size, finish), on); };
  if (capturing(stream)) record(stream, run, true);
  return run(stream);
}

static std::string label_of(const char* name, size_t count, int type, int extra = 0) {
  return std::string(name) + " of " + std::to_string(count) + " elements of type " + std::to_string(type) + " (" +
         std::to_string(extra) + ")";
}

API Result ncclAllReduce(const void* from, void* to, size_t count, int type, int operation, Communicator* group,
                         cudaStream_t stream) {
  size_t size = count * size_of(type);
  return collective(group, label_of("ncclAllReduce", count, type, operation), {from, size, to, size}, stream,
                    [=](Contributions& ranks) {
                      auto out = reduced(ranks, type, operation, 0, count);
                      memcpy(to, out.data(), out.size());
                    });
}

API Result ncclReduce(const void* from, void* to, size_t count, int type, int operation, int root, Communicator* group,
                      cudaStream_t stream) {
  size_t size = count * size_of(type);
  bool receives = group->rank == root;
  return collective(group, label_of("ncclReduce", count, type, operation), {from, size, to, receives ? size : 0},
                    stream, [=](Contributions& ranks) {
                      if (!receives) return;
                      auto out = reduced(ranks, type, operation, 0, count);
                      memcpy(to, out.data(), out.size());
                    });
}

API Result ncclReduceScatter(const void* from, void* to, size_t count, int type, int operation, Communicator* group,
                             cudaStream_t stream) {
  size_t size = count * size_of(type);
  return collective(group, label_of("ncclReduceScatter", count, type, operation), {from, size * group->size, to, size},
                    stream, [=](Contributions& ranks) {
                      auto out = reduced(ranks, type, operation, count * group->rank, count);
                      memcpy(to, out.data(), out.size());
                    });
}

API Result ncclAllGather(const void* from, void* to, size_t count, int type, Communicator* group, cudaStream_t stream) {
  size_t size = count * size_of(type);
  return collective(group, label_of("ncclAllGather", count, type), {from, size, to, size * group->size}, stream,
                    [=](Contributions& ranks) {
                      for (size_t rank = 0; rank < ranks.size(); rank++)
                        memcpy((char*)to + rank * size, ranks[rank].data(), std::min(size, ranks[rank].size()));
                    });
}

API Result ncclBroadcast(const void* from, void* to, size_t count, int type, int root, Communicator* group,
                         cudaStream_t stream) {
  size_t size = count * size_of(type), sent = group->rank == root ? size : 0;
  return collective(group, label_of("ncclBroadcast", count, type, root), {from, sent, to, size}, stream,
                    [=](Contributions& ranks) { memcpy(to, ranks[root].data(), std::min(size, ranks[root].size())); });
}

API Result ncclBcast(void* buffer, size_t count, int type, int root, Communicator* group, cudaStream_t stream) {
  return ncclBroadcast(buffer, buffer, count, type, root, group, stream);
}

API Result ncclAlltoAll(const void* from, void* to, size_t count, int type, Communicator* group, cudaStream_t stream) {
  size_t size = count * size_of(type), whole = size * group->size;
  return collective(group, label_of("ncclAlltoAll", count, type), {from, whole, to, whole}, stream,
                    [=](Contributions& ranks) {
                      for (size_t rank = 0; rank < ranks.size(); rank++)
                        if (ranks[rank].size() == whole)
                          memcpy((char*)to + rank * size, ranks[rank].data() + group->rank * size, size);
                    });
}

// ---- messages: a send is done when its receiver has taken it
static Part send_part(Communicator* group, const void* from, size_t size, int peer) {
  std::string path = message_file(*group, group->rank, peer, group->sent[peer]++);
  auto written = std::make_shared<bool>(false);
  auto advance = [=] {
    if (!*written) write_file(path, "ncclSend", from, size);
    *written = true;
    return !exists(path);
  };
  std::string name = "ncclSend of " + std::to_string(size) + " bytes to rank " + std::to_string(peer);
  return {group, name, false, advance, [=] { return std::to_string(peer); }};
}

static Part receive_part(Communicator* group, void* to, size_t size, int peer) {
  std::string path = message_file(*group, peer, group->rank, group->received[peer]++);
  auto advance = [=] {
    std::string label, bytes;
    if (!read_file(path, label, bytes)) return false;
    if (bytes.size() != size)
      tell("collective",
           "ncclRecv of " + std::to_string(size) + " bytes, " + std::to_string(bytes.size()) + " were sent");
    memcpy(to, bytes.data(), std::min(size, bytes.size()));
    remove_file(path);
    return true;
  };
  std::string name = "ncclRecv of " + std::to_string(size) + " bytes from rank " + std::to_string(peer);
  return {group, name, false, advance, [=] { return std::to_string(peer); }};
}

static Result message(std::function<Part()> part, const void* memory, size_t size, bool write, cudaStream_t handle) {
  LOCKED;
  int stream = id_of(handle);
  launch(stream);
  access(memory, size, stream, write, write ? "ncclRecv" : "ncclSend");
  auto run = [=](int on) { return start(part(), on); };
  if (capturing(stream)) record(stream, run, true);
  return run(stream);
}

API Result ncclSend(const void* from, size_t count, int type, int peer, Communicator* group, cudaStream_t stream) {
  size_t size = count * size_of(type);
  return message([=] { return send_part(group, from, size, peer); }, from, size, false, stream);
}

API Result ncclRecv(void* to, size_t count, int type, int peer, Communicator* group, cudaStream_t stream) {
  size_t size = count * size_of(type);
  return message([=] { return receive_part(group, to, size, peer); }, to, size, true, stream);
}

// ---- communicators
static Result exchange_now(Communicator* group, const char* label, const void* from, size_t size, Contributions& all) {
  Part part = collective_part(group, label, from, size, [&](Contributions& ranks) { all = ranks; });
  for (double began = now(); !part.advance(); usleep(200))
    if (now() - began > deadline()) {
      fprintf(stderr, "emulated CUDA: %s waits for ranks %s\n", described(part).c_str(), part.missing().c_str());
      return SYSTEM_ERROR;
    }
  return SUCCESS;
}

static Communicator* made(const std::string& name, int size, int rank) {
  auto* group = new Communicator{name, size, rank};
  LOCKED;
  communicators.insert(group);
  return group;
}

API Result ncclGetUniqueId(UniqueId* id) {
  std::random_device random;
  memset(id, 0, sizeof *id);
  snprintf(id->bytes, sizeof id->bytes, "nccl-%08x%08x", random(), random());
  return SUCCESS;
}

API Result ncclCommInitRank(Communicator** group, int size, UniqueId id, int rank) {
  *group = made(id.bytes, size, rank);
  Contributions all;
  return exchange_now(*group, "ncclCommInitRank", "", 0, all);
}

API Result ncclCommInitRankConfig(Communicator** group, int size, UniqueId id, int rank, void*) {
  return ncclCommInitRank(group, size, id, rank);
}

API Result ncclCommInitRankScalable(Communicator** group, int size, int rank, int, UniqueId* id, void*) {
  return ncclCommInitRank(group, size, *id, rank);
}

API Result ncclCommSplit(Communicator* group, int color, int key, Communicator** out, void*) {
  int mine[2] = {color, key};
  Contributions all;
  if (auto error = exchange_now(group, "ncclCommSplit", mine, sizeof mine, all)) return error;
  int rank = 0, size = 0;
  for (int r = 0; r < group->size; r++) {
    auto* other = (const int*)all[r].data();
    if (other[0] != color) continue;
    size++;
    rank += other[1] < key || (other[1] == key && r < group->rank);
  }
  std::string name = group->name + "-" + std::to_string(group->operations) + "c" + std::to_string(color);
  *out = color < 0 ? nullptr : made(name, size, rank);
  return SUCCESS;
}

// Its queued operations end without a result; who waits for them goes on, as when a kernel is aborted.
API Result ncclCommAbort(Communicator* group) {
  LOCKED;
  if (group) group->aborted = true;  // NCCL takes none, too: torch aborts twice
  return SUCCESS;
}

API Result ncclCommDestroy(Communicator* group) {
  LOCKED;
  communicators.erase(group);  // its last file stays: other ranks may still read it
  return SUCCESS;
}

API Result ncclCommFinalize(Communicator*) { return SUCCESS; }

API Result ncclCommGetAsyncError(Communicator* group, Result* error) {
  *error = group->aborted ? REMOTE_ERROR : SUCCESS;
  return SUCCESS;
}

API Result ncclCommCount(Communicator* group, int* size) {
  *size = group->size;
  return SUCCESS;
}

API Result ncclCommUserRank(Communicator* group, int* rank) {
  *rank = group->rank;
  return SUCCESS;
}

API Result ncclGetVersion(int* version) {
  *version = 22907;
  return SUCCESS;
}

API const char* ncclGetErrorString(Result error) { return error ? "emulated NCCL error" : "no error"; }

API const char* ncclGetLastError(Communicator*) { return ""; }

API Result ncclCommRegister(Communicator*, void*, size_t, void** handle) {
  *handle = nullptr;
  return SUCCESS;
}

API Result ncclCommDeregister(Communicator*, void*) { return SUCCESS; }

API Result ncclMemAlloc(void** pointer, size_t size) { return cudaMalloc(pointer, size) ? INVALID_USAGE : SUCCESS; }

API Result ncclMemFree(void* pointer) { return cudaFree(pointer) ? INVALID_USAGE : SUCCESS; }

API Result ncclRedOpCreatePreMulSum(int*, void*, int, int, Communicator*) { return INVALID_USAGE; }
