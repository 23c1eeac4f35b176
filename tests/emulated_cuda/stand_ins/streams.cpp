// Streams and events. Work that needs other processes is queued on its stream; a thread advances it.
#include <unistd.h>

#include <chrono>
#include <condition_variable>
#include <cstdlib>
#include <deque>
#include <thread>

#include "runtime.h"

struct Stream {
  int id;
};
struct Event {
  Clock clock;
  Needs needs;
  unsigned long long capture = 0;
};

static int next_stream = 64;  // below: each device's own default stream
static long next_operation = 1;
static auto& queues = *new std::map<int, std::deque<Operation>>;
static auto& needed = *new std::map<int, Needs>;  // by stream: before its next operation
static auto& asleep = *new std::mutex;
static auto& changed = *new std::condition_variable;  // work was queued

int id_of(cudaStream_t stream) { return (size_t)stream < 16 ? current_device() : ((Stream*)stream)->id; }

// ---- queued work
bool is_done(int stream, long number) {
  auto it = queues.find(stream);
  return it == queues.end() || it->second.empty() || it->second.front().number > number;
}

static bool reached(Needs& needs) {
  for (auto it = needs.begin(); it != needs.end();) it = is_done(it->first, it->second) ? needs.erase(it) : ++it;
  return needs.empty();
}

static bool advance_queues() {
  bool left = false;
  for (auto& [stream, queue] : queues) {
    while (!queue.empty() && reached(queue.front().needs) && queue.front().advance()) queue.pop_front();
    left |= !queue.empty();
  }
  return left;
}

static void advance_always() {
  for (int idle = 0;; idle++) {
    bool left;
    {
      LOCKED;
      left = advance_queues();
    }
    if (!left) {
      std::unique_lock<std::mutex> guard(asleep);
      changed.wait_for(guard, std::chrono::seconds(1));
      idle = 0;
    }
    usleep(idle < 100 ? 50 : 500);
  }
}

void enqueue(int stream, Operation operation) {
  static bool started = false;
  if (!started) std::thread(advance_always).detach();
  started = true;
  operation.number = next_operation++;
  operation.needs = needed[stream];
  queues[stream].push_back(std::move(operation));
  advance_queues();
  changed.notify_all();
}

Needs needs_of(int stream) {
  Needs all = needed[stream];
  auto it = queues.find(stream);
  if (it != queues.end() && !it->second.empty()) all[stream] = it->second.back().number;
  return all;
}

Needs all_needs() {
  LOCKED;
  Needs all;
  for (auto& [stream, queue] : queues)
    if (!queue.empty()) all[stream] = queue.back().number;
  return all;
}

bool wait_for(Needs needs, bool block) {
  for (int waited = 0; !needs.empty(); waited++) {
    {
      LOCKED;
      advance_queues();
      if (reached(needs)) return true;
    }
    if (!block) return false;
    usleep(waited < 200 ? 50 : 500);
  }
  return true;
}

std::string queued_operations() {  // for a report of a deadlock
  std::string all;
  for (auto& [stream, queue] : queues)
    for (auto& operation : queue)
      all += "  on stream " + std::to_string(stream) + ": " + operation.describe() + "\n";
  return all;
}

void await_stream(int stream) {
  Needs needs;
  {
    LOCKED;
    needs = needs_of(stream);
  }
  wait_for(needs, true);
  LOCKED;
  reached(needed[stream]);
}

void submit(int stream, std::function<void(int)> work) {
  if (capturing(stream)) record(stream, work);
  Needs needs = needs_of(stream);
  if (reached(needs)) return work(stream);
  enqueue(stream, {[=] { return work(stream), true; }, [] { return std::string("a copy"); }});
}

// A kernel runs now: after the stream's queued work. Returns whether the stream is captured.
API int emu_launch(cudaStream_t handle) {
  int stream = id_of(handle);
  await_stream(stream);
  LOCKED;
  launch(stream);
  return capturing(stream);
}

// ---- streams
API cudaError_t cudaStreamCreateWithPriority(cudaStream_t* stream, unsigned, int) {
  LOCKED;
  *stream = (cudaStream_t) new Stream{next_stream++};
  return cudaSuccess;
}

API cudaError_t cudaStreamCreateWithFlags(cudaStream_t* stream, unsigned flags) {
  return cudaStreamCreateWithPriority(stream, flags, 0);
}

API cudaError_t cudaStreamCreate(cudaStream_t* stream) { return cudaStreamCreateWithPriority(stream, 0, 0); }

API cudaError_t cudaStreamDestroy(cudaStream_t) { return cudaSuccess; }

API cudaError_t cudaStreamGetPriority(cudaStream_t, int* priority) {
  *priority = 0;
  return cudaSuccess;
}

static cudaError_t synchronize(const std::string& what, const Needs& needs, const Clock& clock) {
  if (!what.empty()) tell("synchronize", what);
  wait_for(needs, true);
  LOCKED;
  host_knows(clock);
  return cudaSuccess;
}

API cudaError_t cudaStreamSynchronize(cudaStream_t handle) {
  int stream = id_of(handle);
  std::string what = "stream " + std::to_string(stream);
  Needs needs;
  Clock clock;
  {
    LOCKED;
    if (auto error = refuse_in_capture(stream)) return error;
    needs = needs_of(stream);
    clock = clock_of(stream);
    if (has_waited(stream)) what = "";  // torch synchronises after such a copy: one wait
  }
  return synchronize(what, needs, clock);
}

API cudaError_t cudaDeviceSynchronize() {
  Needs needs;
  Clock clock;
  {
    LOCKED;
    if (auto error = refuse_in_any_capture()) return error;
    needs = all_needs();
    clock = joined_clocks();
  }
  return synchronize("device", needs, clock);
}

API cudaError_t cudaStreamQuery(cudaStream_t handle) {
  LOCKED;
  int stream = id_of(handle);
  if (auto error = refuse_in_capture(stream)) return error;
  if (!wait_for(needs_of(stream), false)) return cudaErrorNotReady;
  host_knows(clock_of(stream));
  return cudaSuccess;
}

// ---- events
API cudaError_t cudaEventCreateWithFlags(cudaEvent_t* event, unsigned) {
  *event = (cudaEvent_t) new Event;
  return cudaSuccess;
}

API cudaError_t cudaEventCreate(cudaEvent_t* event) { return cudaEventCreateWithFlags(event, 0); }

API cudaError_t cudaEventDestroy(cudaEvent_t event) {
  LOCKED;
  delete (Event*)event;
  return cudaSuccess;
}

API cudaError_t cudaEventRecord(cudaEvent_t handle, cudaStream_t on) {
  LOCKED;
  int stream = id_of(on);
  Event* event = (Event*)handle;
  launch(stream);
  event->clock = clock_of(stream);
  event->needs = needs_of(stream);
  event->capture = capture_id(stream);
  return cudaSuccess;
}

API cudaError_t cudaEventRecordWithFlags(cudaEvent_t event, cudaStream_t stream, unsigned) {
  return cudaEventRecord(event, stream);
}

API cudaError_t cudaStreamWaitEvent(cudaStream_t on, cudaEvent_t handle, unsigned) {
  LOCKED;
  int stream = id_of(on);
  Event* event = (Event*)handle;
  if (event->capture) {
    join_capture(stream, event->capture);
  } else if (capturing(stream) && !event->clock.empty()) {
    refuse_in_capture(stream);
    return fail(cudaErrorStreamCaptureIsolation);
  }
  join(clock_of(stream), event->clock);
  for (auto& [other, number] : event->needs)
    if (other != stream && needed[stream][other] < number) needed[stream][other] = number;
  reached(needed[stream]);
  return cudaSuccess;
}

API cudaError_t cudaEventSynchronize(cudaEvent_t handle) {
  Event event;
  {
    LOCKED;
    event = *(Event*)handle;
  }
  if (event.capture) return fail(cudaErrorCapturedEvent);
  return synchronize("event", event.needs, event.clock);
}

API cudaError_t cudaEventQuery(cudaEvent_t handle) {
  LOCKED;
  Event* event = (Event*)handle;
  if (event->capture) return fail(cudaErrorCapturedEvent);
  if (!wait_for(event->needs, false)) return cudaErrorNotReady;
  host_knows(event->clock);
  return cudaSuccess;
}

API cudaError_t cudaEventElapsedTime(float* milliseconds, cudaEvent_t, cudaEvent_t) {
  *milliseconds = 1;
  return cudaSuccess;
}

API cudaError_t cudaLaunchHostFunc(cudaStream_t on, cudaHostFn_t function, void* data) {
  LOCKED;
  submit(id_of(on), [=](int) { function(data); });
  return cudaSuccess;
}
