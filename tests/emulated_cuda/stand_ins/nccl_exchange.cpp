// Files in shared memory through which ranks exchange what they send.
#include <fcntl.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

#include <cstdlib>
#include <memory>

#include "nccl.h"

static std::string path_of(const Communicator& group, const std::string& rest) {
  return shared_folder() + "/" + group.name + "." + rest;
}

std::string collective_file(const Communicator& group, long operation, int rank) {
  return path_of(group, std::to_string(operation) + "." + std::to_string(rank));
}

std::string message_file(const Communicator& group, int from, int to, long number) {
  return path_of(group, std::to_string(from) + "-" + std::to_string(to) + "." + std::to_string(number));
}

static bool write_all(int file, const char* bytes, size_t size) {
  for (size_t at = 0; at < size;) {
    ssize_t done = write(file, bytes + at, size - at);
    if (done <= 0) return false;
    at += done;
  }
  return true;
}

void write_file(const std::string& path, const std::string& label, const void* bytes, size_t size) {
  std::string part = path + "~", line = label + "\n";
  int file = open(part.c_str(), O_CREAT | O_WRONLY | O_TRUNC, 0600);
  if (file < 0 || !write_all(file, line.data(), line.size()) || !write_all(file, (const char*)bytes, size)) {
    fprintf(stderr, "emulated CUDA: %s cannot be written\n", part.c_str());
    abort();
  }
  close(file);
  rename(part.c_str(), path.c_str());
}

bool read_file(const std::string& path, std::string& label, std::string& bytes) {
  int file = open(path.c_str(), O_RDONLY);
  if (file < 0) return false;
  struct stat status;
  fstat(file, &status);
  std::string all(status.st_size, 0);
  for (size_t at = 0; at < all.size();) {
    ssize_t done = read(file, &all[at], all.size() - at);
    if (done <= 0) break;
    at += done;
  }
  close(file);
  size_t line = all.find('\n');
  label = all.substr(0, line);
  bytes = all.substr(line + 1);
  return true;
}

bool exists(const std::string& path) { return access(path.c_str(), R_OK) == 0; }

void remove_file(const std::string& path) { unlink(path.c_str()); }

double deadline() {
  const char* seconds = getenv("EMULATED_DEADLINE");
  return seconds ? atof(seconds) : 120;
}

double now() {
  struct timespec time;
  clock_gettime(CLOCK_MONOTONIC, &time);
  return time.tv_sec + time.tv_nsec * 1e-9;
}

void publish_waiting(const Communicator& group, const std::string& text) {
  write_file(path_of(group, "waiting." + std::to_string(group.rank)), "", text.data(), text.size());
}

std::string waiting_of(const Communicator& group, int rank) {
  std::string label, text;
  bool found = read_file(path_of(group, "waiting." + std::to_string(rank)), label, text);
  return found ? text : "  nothing that is known here: it has not come, or it has ended\n";
}
