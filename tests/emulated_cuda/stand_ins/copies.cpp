// Copies. Those to pinned memory arrive when the host has waited for them (0xA5 until then); pinned memory that a copy
// reads must not change until then.
#include <cstring>

#include "runtime.h"

struct Late {
  char* host;
  std::string bytes;
  int stream;
  long launch;
  bool arrives;  // else: the copy reads `host`
};
static auto& lates = *new std::vector<Late>;
static thread_local std::pair<int, long> waited = {HOST, 0};  // stream and launch of the last copy to pageable memory

bool has_waited(int stream) { return waited == std::make_pair(stream, clock_of(stream)[stream]); }

void host_knows(const Clock& clock) {
  Clock& host = clock_of(HOST);
  join(host, clock);
  std::vector<Late> waiting;
  for (auto& late : lates) {
    size_t size = late.bytes.size();
    if (host[late.stream] < late.launch) {
      waiting.push_back(std::move(late));
    } else if (late.arrives) {
      memcpy(late.host, late.bytes.data(), size);
    } else if (memcmp(late.host, late.bytes.data(), size)) {
      tell("race", "the host changed " + std::to_string(size) + " pinned bytes that a copy was reading");
    }
  }
  lates = std::move(waiting);
}

static bool overlap(const Late& late, const void* pointer, size_t size) {
  return late.host < (char*)pointer + size && (char*)pointer < late.host + late.bytes.size();
}

// What a stream finds: in pinned memory also what copies before it have brought, though the host does not know of them.
static std::string bytes_at(const void* pointer, size_t size, int stream) {
  std::string bytes((const char*)pointer, size);
  char* start = (char*)pointer;
  for (auto& late : lates) {
    if (!late.arrives || !overlap(late, pointer, size)) continue;
    if (clock_of(stream)[late.stream] < late.launch) {
      tell("race", "a copy reads pinned memory that another stream is copying to");
      continue;
    }
    char *from = std::max(start, late.host), *to = std::min(start + size, late.host + late.bytes.size());
    memcpy(&bytes[from - start], &late.bytes[from - late.host], to - from);
  }
  return bytes;
}

// A copy to pinned memory comes: those before it in the order of streams have read what they wanted.
static void have_read(const void* pointer, size_t size, int stream) {
  std::vector<Late> others;
  for (auto& late : lates) {
    if (late.arrives || !overlap(late, pointer, size) || clock_of(stream)[late.stream] < late.launch) {
      others.push_back(late);
    } else if (bytes_at(late.host, late.bytes.size(), stream) != late.bytes) {
      tell("race", "the host changed " + std::to_string(late.bytes.size()) + " pinned bytes that a copy was reading");
    }
  }
  lates = std::move(others);
}

static auto& coming = *new std::multimap<const void*, size_t>;  // copies to pinned memory that are queued

static bool is_coming(const void* pointer, size_t size) {
  for (auto& [to, count] : coming)
    if ((char*)to < (char*)pointer + size && (char*)pointer < (char*)to + count) return true;
  return false;
}

// A copy that does not block the host. `arrives`: in pinned memory; `reads`: from pinned memory.
static void copy_later(void* to, const void* from, size_t size, int stream, long count, bool arrives, bool reads) {
  bool recorded = capturing(stream);  // runs again, in replays, on their streams; only those reach the host's memory
  bool later = recorded || is_coming(from, size);  // what it reads is not there yet
  if (reads && !later) lates.push_back({(char*)from, bytes_at(from, size, stream), stream, count, false});
  if (arrives && !recorded) {
    have_read(to, size, stream);
    memset(to, 0xA5, size);
    coming.insert({to, size});
  }
  submit(stream, [=](int on) {
    long now = recorded ? clock_of(on)[on] : count;
    std::string bytes = reads || arrives ? bytes_at(from, size, on) : std::string();
    if (!arrives) memmove(to, reads ? bytes.data() : from, size);
    if (arrives && !recorded) coming.erase(coming.find(to));
    if (later && !capturing(on) && reads) lates.push_back({(char*)from, bytes, on, now, false});
    if (arrives && !capturing(on)) lates.push_back({(char*)to, bytes, on, now, true});
  });
}

static cudaError_t copy(void* to, const void* from, size_t size, cudaStream_t handle, bool blocking, const char* name) {
  if (!size) return cudaSuccess;
  int stream = id_of(handle);
  bool on_device, from_device, pinned;
  {
    LOCKED;
    on_device = block_of(device_blocks(), to), from_device = block_of(device_blocks(), from);
    pinned = block_of(pinned_blocks(), on_device ? from : to);
    if (blocking)
      if (auto error = refuse_in_capture(stream)) return error;
    long count = launch(stream);
    access(from, size, stream, false, name);
    access(to, size, stream, true, name);
    if (!blocking && (pinned || on_device == from_device || capturing(stream))) {
      bool crosses = on_device != from_device;
      copy_later(to, from, size, stream, count, crosses && from_device, crosses && on_device && pinned);
      return cudaSuccess;
    }
  }
  await_stream(stream);
  LOCKED;
  memmove(to, from, size);
  if (on_device == from_device) return cudaSuccess;
  if (blocking) {
    tell("blocking copy", std::to_string(size));
  } else {
    tell(on_device ? "pageable copy" : "pageable copy to the host", std::to_string(size) + " bytes");
  }
  if (blocking || !on_device) {
    host_knows(clock_of(stream));
    waited = {stream, clock_of(stream)[stream]};
  }
  return cudaSuccess;
}

API cudaError_t cudaMemcpyAsync(void* to, const void* from, size_t size, cudaMemcpyKind, cudaStream_t stream) {
  return copy(to, from, size, stream, false, "cudaMemcpyAsync");
}

API cudaError_t cudaMemcpy(void* to, const void* from, size_t size, cudaMemcpyKind) {
  return copy(to, from, size, 0, true, "cudaMemcpy");
}

API cudaError_t cudaMemcpyPeerAsync(void* to, int, const void* from, int, size_t size, cudaStream_t stream) {
  return copy(to, from, size, stream, false, "cudaMemcpyPeerAsync");
}

API cudaError_t cudaMemcpy2DAsync(void* to, size_t to_pitch, const void* from, size_t from_pitch, size_t width,
                                  size_t height, cudaMemcpyKind, cudaStream_t stream) {
  for (size_t row = 0; row < height; row++)
    copy((char*)to + row * to_pitch, (const char*)from + row * from_pitch, width, stream, false, "cudaMemcpy2DAsync");
  return cudaSuccess;
}

API cudaError_t cudaMemsetAsync(void* to, int value, size_t size, cudaStream_t handle) {
  LOCKED;
  int stream = id_of(handle);
  launch(stream);
  access(to, size, stream, true, "cudaMemsetAsync");
  submit(stream, [=](int) { memset(to, value, size); });
  return cudaSuccess;
}

API cudaError_t cudaMemset(void* to, int value, size_t size) { return cudaMemsetAsync(to, value, size, 0); }
