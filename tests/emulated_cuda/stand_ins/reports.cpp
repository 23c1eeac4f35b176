// What the stand-ins report to Python, and the last error of the thread.
#include <cstdio>
#include <cstdlib>

#include "runtime.h"

std::recursive_mutex& runtime_lock() {
  static auto& lock = *new std::recursive_mutex;
  return lock;
}

static thread_local int depth = 0;
static thread_local std::vector<std::pair<const char*, std::string>> untold;

Locked::Locked() {
  runtime_lock().lock();
  depth++;
}

static void deliver();

Locked::~Locked() {
  bool outermost = --depth == 0;
  runtime_lock().unlock();
  if (outermost && !untold.empty()) deliver();
}

typedef void (*Listener)(const char* kind, const char* detail);
static Listener listener = nullptr;
static thread_local int quiet = 0;  // inside copies of the emulation's own
static thread_local cudaError_t last_error = cudaSuccess;

API void emu_listen(Listener function) { listener = function; }

API void emu_quiet(int on) { quiet = on; }

static void deliver() {
  auto reports = std::move(untold);
  untold.clear();
  quiet = 1;
  for (auto& [kind, detail] : reports)
    if (listener) listener(kind, detail.c_str());
  quiet = 0;
}

void tell(const char* kind, const std::string& detail) {
  if (!listener || quiet) return;
  untold.emplace_back(kind, detail);
  if (!depth) deliver();
}

void write_log(const char* kind, std::string text) {
  const char* path = getenv("EMULATED_LOG");
  FILE* file = path ? fopen(path, "a") : nullptr;
  if (!file) return;
  for (size_t at = 0; (at = text.find('\n', at)) != std::string::npos; at += 2) text.replace(at, 1, "\n ");
  fprintf(file, "%s: %s\n", kind, text.c_str());
  fclose(file);
}

std::string shared_folder() {
  const char* folder = getenv("EMULATED_SHARED");
  return folder ? folder : "/dev/shm";
}

cudaError_t fail(cudaError_t error) { return last_error = error; }

API cudaError_t cudaGetLastError() {
  cudaError_t error = last_error;
  last_error = cudaSuccess;
  return error;
}

API cudaError_t cudaPeekAtLastError() { return last_error; }

static const std::map<cudaError_t, std::pair<const char*, const char*>> ERRORS = {
    {cudaSuccess, {"cudaSuccess", "no error"}},
    {cudaErrorMemoryAllocation, {"cudaErrorMemoryAllocation", "out of memory"}},
    {cudaErrorInvalidValue, {"cudaErrorInvalidValue", "invalid argument"}},
    {cudaErrorInvalidDevice, {"cudaErrorInvalidDevice", "invalid device ordinal"}},
    {cudaErrorNotReady, {"cudaErrorNotReady", "device not ready"}},
    {cudaErrorNotSupported, {"cudaErrorNotSupported", "a kernel that is not emulated was launched"}},
    {cudaErrorStreamCaptureUnsupported,
     {"cudaErrorStreamCaptureUnsupported", "operation not permitted when stream is capturing"}},
    {cudaErrorStreamCaptureInvalidated,
     {"cudaErrorStreamCaptureInvalidated", "operation failed due to a previous error during capture"}},
    {cudaErrorStreamCaptureUnjoined,
     {"cudaErrorStreamCaptureUnjoined", "capturing stream has unjoined work"}},
    {cudaErrorStreamCaptureIsolation,
     {"cudaErrorStreamCaptureIsolation", "dependency created on uncaptured work in another stream"}},
    {cudaErrorCapturedEvent,
     {"cudaErrorCapturedEvent", "operation not permitted on an event last recorded in a capturing stream"}},
};

API const char* cudaGetErrorName(cudaError_t error) {
  auto found = ERRORS.find(error);
  return found == ERRORS.end() ? "cudaErrorUnknown" : found->second.first;
}

API const char* cudaGetErrorString(cudaError_t error) {
  auto found = ERRORS.find(error);
  return found == ERRORS.end() ? "unknown error" : found->second.second;
}
