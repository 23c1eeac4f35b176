// Vector clocks: each stream counts its launches, events carry counts to other streams and to the host. Two accesses
// of the same bytes, one of them a write, must be ordered by them, or they are a race on a GPU.
#include "runtime.h"

struct Access {
  int stream;
  long launch;
  bool write;
};
struct Range {
  char* stop;
  std::vector<Access> accesses;
};

static auto& ranges = *new std::map<char*, Range>;  // by start; disjoint
static auto& clocks = *new std::map<int, Clock>;
static bool checked = true;

API void emu_check_order(int on) {
  LOCKED;
  checked = on;
  ranges.clear();
}

void join(Clock& clock, const Clock& other) {
  for (auto& [stream, count] : other)
    if (clock[stream] < count) clock[stream] = count;
}

Clock& clock_of(int stream) { return clocks[stream]; }

Clock joined_clocks() {
  Clock all;
  for (auto& [stream, clock] : clocks) join(all, clock);
  return all;
}

long launch(int stream) {
  join(clocks[stream], clocks[HOST]);
  return ++clocks[stream][stream];
}

static void split(char* at) {
  auto it = ranges.upper_bound(at);
  if (it == ranges.begin()) return;
  --it;
  if (it->first < at && at < it->second.stop) {
    ranges[at] = it->second;
    it->second.stop = at;
  }
}

void forget_accesses(const void* pointer, size_t size) {
  char *start = (char*)pointer, *stop = start + size;
  split(start);
  split(stop);
  ranges.erase(ranges.lower_bound(start), ranges.lower_bound(stop));
}

static std::string described(const char* operation, int stream, bool write, const Access& other, size_t size) {
  return std::string(operation) + (write ? " writes" : " reads") + " on stream " + std::to_string(stream) +
         " bytes that stream " + std::to_string(other.stream) + (other.write ? " writes, " : " reads, ") +
         std::to_string(size) + " bytes";
}

static void note(std::vector<Access>& accesses, int stream, long count, bool write) {
  if (write) accesses.clear();
  for (auto& seen : accesses)
    if (seen.stream == stream && !seen.write) {
      seen.launch = count;
      return;
    }
  accesses.push_back({stream, count, write});
}

void access(const void* pointer, size_t size, int stream, bool write, const char* operation) {
  if (!size || !block_of(device_blocks(), pointer)) return;
  if (capturing(stream)) record_access(pointer, size, stream, write, operation);
  if (!checked) return;
  char *start = (char*)pointer, *stop = start + size, *at = start;
  Clock& clock = clocks[stream];
  std::string race;
  split(start);
  split(stop);
  for (auto it = ranges.lower_bound(start); it != ranges.end() && it->first < stop; ++it) {
    if (at < it->first) ranges[at] = {it->first, {{stream, clock[stream], write}}};
    at = it->second.stop;
    for (auto& seen : it->second.accesses)
      if ((write || seen.write) && seen.stream != stream && clock[seen.stream] < seen.launch && race.empty())
        race = described(operation, stream, write, seen, size);
    note(it->second.accesses, stream, clock[stream], write);
  }
  if (at < stop) ranges[at] = {stop, {{stream, clock[stream], write}}};
  if (!race.empty()) tell("race", race);
}

API void emu_access(void* pointer, size_t size, cudaStream_t stream, int write, const char* operation) {
  LOCKED;
  access(pointer, size, id_of(stream), write, operation);
}
