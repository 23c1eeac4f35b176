// Device and pinned memory: host memory, with the device's size as its limit. Device memory starts as 0xFF.
#include <cstdlib>
#include <cstring>
#include <unordered_map>

#include "runtime.h"

static auto& used = *new std::unordered_map<int, size_t>;

std::map<char*, Block>& device_blocks() {
  static auto& blocks = *new std::map<char*, Block>;
  return blocks;
}

std::map<char*, Block>& pinned_blocks() {
  static auto& blocks = *new std::map<char*, Block>;
  return blocks;
}

Block* block_of(std::map<char*, Block>& blocks, const void* pointer) {
  auto it = blocks.upper_bound((char*)pointer);
  if (it == blocks.begin()) return nullptr;
  --it;
  return (char*)pointer < it->first + it->second.size ? &it->second : nullptr;
}

bool take_memory(int device, size_t size) {
  if (used[device] + size > device_memory()) return false;
  used[device] += size;
  return true;
}

void give_memory(int device, size_t size) { used[device] -= size; }

static void* allocate(size_t size) {
  void* pointer = nullptr;
  if (posix_memalign(&pointer, 512, size ? size : 512)) return nullptr;
  memset(pointer, 0xFF, size);
  return pointer;
}

API cudaError_t cudaMalloc(void** pointer, size_t size) {
  LOCKED;
  int device = current_device();
  if (!take_memory(device, size)) return fail(cudaErrorMemoryAllocation);
  *pointer = allocate(size);
  device_blocks()[(char*)*pointer] = {size, device};
  return cudaSuccess;
}

API cudaError_t cudaFree(void* pointer) {
  if (!pointer) return cudaSuccess;
  wait_for(all_needs(), true);
  LOCKED;
  auto it = device_blocks().find((char*)pointer);
  if (it == device_blocks().end()) return fail(cudaErrorInvalidValue);
  forget_accesses(pointer, it->second.size);
  give_memory(it->second.device, it->second.size);
  device_blocks().erase(it);
  free(pointer);
  return cudaSuccess;
}

API cudaError_t cudaMallocAsync(void** pointer, size_t size, cudaStream_t) { return cudaMalloc(pointer, size); }

API cudaError_t cudaFreeAsync(void* pointer, cudaStream_t) { return cudaFree(pointer); }

API cudaError_t cudaHostAlloc(void** pointer, size_t size, unsigned) {
  LOCKED;
  *pointer = allocate(size);
  pinned_blocks()[(char*)*pointer] = {size, current_device()};
  return cudaSuccess;
}

API cudaError_t cudaFreeHost(void* pointer) {
  wait_for(all_needs(), true);
  LOCKED;
  pinned_blocks().erase((char*)pointer);
  free(pointer);
  return cudaSuccess;
}

API cudaError_t cudaHostRegister(void* pointer, size_t size, unsigned) {
  LOCKED;
  pinned_blocks()[(char*)pointer] = {size, current_device()};
  return cudaSuccess;
}

API cudaError_t cudaHostUnregister(void* pointer) {
  LOCKED;
  pinned_blocks().erase((char*)pointer);
  return cudaSuccess;
}

API cudaError_t cudaHostGetDevicePointer(void** device_pointer, void* pointer, unsigned) {
  *device_pointer = pointer;
  return cudaSuccess;
}

API cudaError_t cudaMemGetInfo(size_t* available, size_t* total) {
  LOCKED;
  *total = device_memory();
  *available = *total - used[current_device()];
  return cudaSuccess;
}

API cudaError_t cudaPointerGetAttributes(cudaPointerAttributes* attributes, const void* pointer) {
  LOCKED;
  memset(attributes, 0, sizeof *attributes);
  Block *device = block_of(device_blocks(), pointer), *pinned = block_of(pinned_blocks(), pointer);
  attributes->type = device   ? cudaMemoryTypeDevice
                     : pinned ? cudaMemoryTypeHost
                              : cudaMemoryTypeUnregistered;
  attributes->device = device ? device->device : pinned ? pinned->device : -2;
  attributes->devicePointer = device || pinned ? (void*)pointer : nullptr;
  attributes->hostPointer = pinned ? (void*)pointer : nullptr;
  return cudaSuccess;
}
