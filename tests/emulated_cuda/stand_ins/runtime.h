// Shared by the stand-ins for CUDA's libraries: reports, memory blocks, vector clocks, streams and their queued work.
//
// "Device" memory is host memory. A launch runs at once, on the calling thread; operations that need other processes
// (NCCL), and copies behind them, are queued on their stream. The host waits for queued work where it, or a launch,
// needs the result.
#pragma once
#include <cuda_runtime_api.h>

#include <functional>
#include <map>
#include <mutex>
#include <string>
#include <vector>

#define API extern "C" __attribute__((visibility("default")))
#define LOCKED Locked locked

// ---- reports.cpp
std::recursive_mutex& runtime_lock();
struct Locked {  // holds the lock; what was told meanwhile is reported when it is free: Python may wait for it
  Locked();
  ~Locked();
};
void tell(const char* kind, const std::string& detail);  // to Python; nothing inside `emu_quiet(1)`
void write_log(const char* kind, std::string text);      // where Python cannot be asked: the process ends
cudaError_t fail(cudaError_t error);                     // remembered for cudaGetLastError
std::string shared_folder();                             // where processes of one run exchange files

// ---- devices.cpp
int current_device();
size_t device_memory();  // bytes of each device

// ---- memory.cpp
struct Block {
  size_t size;
  int device;
};
std::map<char*, Block>& device_blocks();
std::map<char*, Block>& pinned_blocks();
Block* block_of(std::map<char*, Block>& blocks, const void* pointer);
bool take_memory(int device, size_t size);  // false: the device has too little
void give_memory(int device, size_t size);

// ---- order.cpp: which launches happen before which, and who accessed which bytes
typedef std::map<int, long> Clock;  // launches by stream
constexpr int HOST = -1;
void join(Clock& clock, const Clock& other);
Clock& clock_of(int stream);
Clock joined_clocks();    // of all streams
long launch(int stream);  // one more launch, after all that the host knows of
void access(const void* pointer, size_t size, int stream, bool write, const char* operation);
void forget_accesses(const void* pointer, size_t size);  // the memory is given back

// ---- copies.cpp
void host_knows(const Clock& clock);  // copies to pinned memory arrive
bool has_waited(int stream);          // this thread, in a copy, after all launches of the stream

// ---- streams.cpp
int id_of(cudaStream_t stream);
typedef std::map<int, long> Needs;  // by stream: number of the last queued operation that must be done before
struct Operation {                  // queued work
  std::function<bool()> advance;    // true when done; called with the lock
  std::function<std::string()> describe;
  long number = 0;
  Needs needs = {};
};
bool is_done(int stream, long number);
void enqueue(int stream, Operation operation);
bool wait_for(Needs needs, bool block);  // false: not yet. Without the lock
Needs needs_of(int stream);              // all that was queued on it or that it waits for
Needs all_needs();
std::string queued_operations();
// Run `work` now, or after the queued work of the stream; a capture records it, too.
void submit(int stream, std::function<void(int stream)> work);
void await_stream(int stream);  // before a launch whose kernel runs now. Without the lock

// ---- graphs.cpp
bool capturing(int stream);
// `queues`: the node queues work of its own.
void record(int stream, std::function<void(int stream)> node, bool queues = false);
void record_access(const void* pointer, size_t size, int stream, bool write, const char* operation);
cudaError_t refuse_in_capture(int stream);  // an unsafe call: success where the stream does not capture
cudaError_t refuse_in_any_capture();
unsigned long long capture_id(int stream);  // 0: none
void join_capture(int stream, unsigned long long id);
