// The driver's virtual memory: an allocation is a part of one memory file, mapped into reserved addresses (vLLM's sleep
// mode, expandable segments). Addresses that are not mapped cannot be touched.
#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <cstring>

#include "runtime.h"

constexpr int INVALID_VALUE = 1, OUT_OF_MEMORY = 2;
constexpr size_t GRANULARITY = 2 << 20;

struct Allocation {
  size_t size;
  off_t offset;
  int device, mappings;
  bool released, filled;
};
struct Properties {  // the first fields of CUmemAllocationProp
  int type, handle_types, location, device;
};

static auto& allocations = *new std::map<unsigned long long, Allocation>;
static auto& mapped = *new std::map<char*, unsigned long long>;
static unsigned long long next_handle = 1;
static off_t end_of_file = 0;

static int memory_file() {
  static int file = memfd_create("device memory", MFD_CLOEXEC);
  return file;
}

static void free_if_unused(unsigned long long handle) {
  Allocation& found = allocations[handle];
  if (!found.released || found.mappings) return;
  fallocate(memory_file(), FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, found.offset, found.size);
  give_memory(found.device, found.size);
  allocations.erase(handle);
}

API int cuMemGetAllocationGranularity(size_t* granularity, const void*, int) {
  *granularity = GRANULARITY;
  return 0;
}

API int cuMemAddressReserve(void** pointer, size_t size, size_t, void*, unsigned long long) {
  *pointer = mmap(nullptr, size, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  return *pointer == MAP_FAILED ? OUT_OF_MEMORY : 0;
}

API int cuMemAddressFree(void* pointer, size_t size) { return munmap(pointer, size) ? INVALID_VALUE : 0; }

API int cuMemCreate(unsigned long long* handle, size_t size, const Properties* properties, unsigned long long) {
  LOCKED;
  if (size % GRANULARITY) return INVALID_VALUE;
  if (!take_memory(properties->device, size)) return OUT_OF_MEMORY;
  *handle = next_handle++;
  allocations[*handle] = {size, end_of_file, properties->device, 0, false, false};
  end_of_file += size;
  return ftruncate(memory_file(), end_of_file) ? OUT_OF_MEMORY : 0;
}

API int cuMemRelease(unsigned long long handle) {
  LOCKED;
  auto it = allocations.find(handle);
  if (it == allocations.end() || it->second.released) return INVALID_VALUE;
  it->second.released = true;
  free_if_unused(handle);
  return 0;
}

API int cuMemMap(void* pointer, size_t size, size_t offset, unsigned long long handle, unsigned long long) {
  LOCKED;
  auto it = allocations.find(handle);
  if (it == allocations.end() || offset || size != it->second.size) return INVALID_VALUE;
  if (mapped.count((char*)pointer)) return INVALID_VALUE;
  int flags = MAP_SHARED | MAP_FIXED;
  if (mmap(pointer, size, PROT_READ | PROT_WRITE, flags, memory_file(), it->second.offset) == MAP_FAILED)
    return OUT_OF_MEMORY;
  if (!it->second.filled) memset(pointer, 0xFF, size);
  it->second.filled = true;
  it->second.mappings++;
  mapped[(char*)pointer] = handle;
  device_blocks()[(char*)pointer] = {size, it->second.device};
  return 0;
}

API int cuMemSetAccess(void*, size_t, const void*, size_t) { return 0; }

API int cuMemUnmap(void* pointer, size_t size) {
  wait_for(all_needs(), true);
  LOCKED;
  char *start = (char*)pointer, *stop = start + size;
  auto first = mapped.lower_bound(start), last = mapped.lower_bound(stop);
  if (first == last || first->first != start) return INVALID_VALUE;
  for (auto it = first; it != last; ++it) {
    device_blocks().erase(it->first);
    allocations[it->second].mappings--;
    free_if_unused(it->second);
  }
  mapped.erase(first, last);
  forget_accesses(pointer, size);
  int flags = MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_FIXED;
  return mmap(pointer, size, PROT_NONE, flags, -1, 0) == MAP_FAILED ? INVALID_VALUE : 0;
}

// ---- the rest of the driver, as far as torch and vLLM ask it
API int cuGetProcAddress_v2(const char*, void** function, int, unsigned long long, int* found) {
  *function = nullptr;
  if (found) *found = 1;
  return 500;  // CUDA_ERROR_NOT_FOUND
}

API int cuCtxGetCurrent(void** context) {
  *context = (void*)64;
  return 0;
}

API int cuCtxSetCurrent(void*) { return 0; }

API int cuDeviceGet(int* device, int number) {
  *device = number;
  return 0;
}

API int cuDeviceGetAttribute(int* value, int attribute, int) {
  constexpr int PROCESSORS = 16, MAJOR = 75;
  *value = attribute == MAJOR ? 9 : attribute == PROCESSORS ? 132 : 0;
  return 0;
}

API int cuDevicePrimaryCtxRetain(void** context, int) { return cuCtxGetCurrent(context); }

API int cuDevicePrimaryCtxGetState(int, unsigned* flags, int* active) {
  *flags = 0;
  *active = 1;
  return 0;
}

API int cuGetErrorString(int error, const char** text) {
  *text = error == OUT_OF_MEMORY ? "out of memory" : "emulated driver error";
  return 0;
}
