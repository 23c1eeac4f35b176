// Copies. Those to pinned memory arrive when the host has waited for them (0xFF until then: not a number); pinned
// memory that a copy reads must not change until then. The device sees its own copies at once.
#include <algorithm>
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

// What the device reads in pinned memory: the host's bytes, and over them copies that have not arrived, of the first
// `count` of `lates`.
static std::string device_view(const char* pointer, size_t size, size_t count) {
  std::string bytes(pointer, size);
  for (size_t i = 0; i < count; i++) {
    const Late& late = lates[i];
    const char *start = std::max(pointer, (const char*)late.host);
    const char *stop = std::min(pointer + size, (const char*)late.host + late.bytes.size());
    if (late.arrives && start < stop) memcpy(&bytes[start - pointer], &late.bytes[start - late.host], stop - start);
  }
  return bytes;
}

static void check_unchanged(size_t index) {
  const Late& late = lates[index];
  if (device_view(late.host, late.bytes.size(), index) != late.bytes)
    tell("race", "the host changed " + std::to_string(late.bytes.size()) + " pinned bytes that a copy was reading");
}

// Remove those that `is_over`, in order; `finish` may look at the ones before.
template <typename IsOver, typename Finish>
static void remove_lates(IsOver is_over, Finish finish) {
  for (size_t i = 0; i < lates.size();) {
    if (!is_over(lates[i])) {
      i++;
      continue;
    }
    finish(i);
    lates.erase(lates.begin() + i);
  }
}

void host_knows(const Clock& clock) {
  Clock& host = clock_of(HOST);
  join(host, clock);
  remove_lates([&](const Late& late) { return host[late.stream] >= late.launch; },
               [&](size_t i) {
                 if (lates[i].arrives) {
                   memcpy(lates[i].host, lates[i].bytes.data(), lates[i].bytes.size());
                 } else {
                   check_unchanged(i);
                 }
               });
}

// From now on the device writes these pinned bytes: what read them before is done.
static void overwrite(char* to, size_t size) {
  auto overlaps = [=](const Late& late) {
    return !late.arrives && late.host < to + size && to < late.host + late.bytes.size();
  };
  remove_lates(overlaps, check_unchanged);
  memset(to, 0xFF, size);
}

// A copy that does not block the host. `arrives`: in pinned memory; `reads`: from pinned memory.
static void copy_later(void* to, const void* from, size_t size, int stream, long count, bool arrives, bool reads) {
  bool recorded = capturing(stream);  // runs again, in replays, on their streams; only those reach the host's memory
  if (arrives && !recorded) overwrite((char*)to, size);
  submit(stream, [=](int on) {
    long now = recorded ? clock_of(on)[on] : count;
    if (arrives) {
      if (capturing(on)) return;
      if (recorded) overwrite((char*)to, size);
      lates.push_back({(char*)to, std::string((const char*)from, size), on, now, true});
    } else if (reads) {
      std::string bytes = device_view((const char*)from, size, lates.size());
      memcpy(to, bytes.data(), size);
      if (!capturing(on)) lates.push_back({(char*)from, std::move(bytes), on, now, false});
    } else {
      memmove(to, from, size);
    }
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
  if (on_device && pinned) {
    memcpy(to, device_view((const char*)from, size, lates.size()).data(), size);
  } else {
    memmove(to, from, size);
  }
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
