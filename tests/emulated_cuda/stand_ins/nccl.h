// NCCL between processes: communicators, the files that ranks exchange, reductions.
#pragma once
#include <deque>
#include <memory>

#include "runtime.h"

typedef int Result;  // ncclResult_t
constexpr Result SUCCESS = 0, SYSTEM_ERROR = 2, INVALID_USAGE = 5, REMOTE_ERROR = 6;

struct Ticket {  // of the operations of one communicator in one group call
  int left = 0;
};
struct Communicator {
  std::string name;
  int size, rank;
  long operations = 0;  // collectives so far
  std::map<int, long> sent = {}, received = {};
  std::deque<std::shared_ptr<Ticket>> order = {};  // operations run in the order of their calls
  bool aborted = false;
};

// ---- nccl_exchange.cpp
std::string collective_file(const Communicator& group, long operation, int rank);
std::string message_file(const Communicator& group, int from, int to, long number);
void write_file(const std::string& path, const std::string& label, const void* bytes, size_t size);
bool read_file(const std::string& path, std::string& label, std::string& bytes);  // false: not there yet
bool exists(const std::string& path);
void remove_file(const std::string& path);
double deadline();  // seconds that an operation waits for its peers before the process is ended
double now();
// Who waits for what, for the other ranks' report of a deadlock.
void publish_waiting(const Communicator& group, const std::string& text);
std::string waiting_of(const Communicator& group, int rank);

// ---- nccl_reduce.cpp
size_t size_of(int type);
std::string reduced(const std::vector<std::string>& ranks, int type, int operation, size_t from, size_t count);
