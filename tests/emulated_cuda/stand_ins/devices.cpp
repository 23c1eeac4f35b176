// Devices: their number (EMULATED_DEVICES, CUDA_VISIBLE_DEVICES), memory (EMULATED_MEMORY) and properties.
#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <cstring>

#include "runtime.h"

static thread_local int device = 0;

static int device_count() {
  const char *number = getenv("EMULATED_DEVICES"), *visible = getenv("CUDA_VISIBLE_DEVICES");
  int all = number ? atoi(number) : 1;
  if (!visible) return all;
  int count = *visible ? 1 : 0;
  for (; *visible; visible++) count += *visible == ',';
  return std::min(all, count);
}

int current_device() { return device; }

size_t device_memory() {
  const char* bytes = getenv("EMULATED_MEMORY");
  return bytes ? atoll(bytes) : 4ull << 30;
}

API cudaError_t cudaGetDeviceCount(int* count) {
  *count = device_count();
  return cudaSuccess;
}

API cudaError_t cudaGetDevice(int* current) {
  *current = device;
  return cudaSuccess;
}

API cudaError_t cudaSetDevice(int wanted) {
  if (wanted < 0 || wanted >= device_count()) return fail(cudaErrorInvalidDevice);
  device = wanted;
  return cudaSuccess;
}

API cudaError_t cudaGetDeviceProperties(cudaDeviceProp* p, int number) {
  memset(p, 0, sizeof *p);
  strcpy(p->name, "Emulated H100");
  p->uuid.bytes[0] = 1 + number;
  p->totalGlobalMem = device_memory();
  p->major = 9;
  p->minor = 0;
  p->warpSize = 32;
  p->multiProcessorCount = 132;
  p->maxBlocksPerMultiProcessor = 32;
  p->maxThreadsPerMultiProcessor = 2048;
  p->maxThreadsPerBlock = p->maxThreadsDim[0] = p->maxThreadsDim[1] = 1024;
  p->maxThreadsDim[2] = 64;
  p->maxGridSize[0] = 2147483647;
  p->maxGridSize[1] = p->maxGridSize[2] = 65535;
  p->regsPerBlock = p->regsPerMultiprocessor = 65536;
  p->sharedMemPerBlock = 49152;
  p->sharedMemPerBlockOptin = 232448;
  p->sharedMemPerMultiprocessor = 233472;
  p->l2CacheSize = 50 << 20;
  p->textureAlignment = 512;
  p->unifiedAddressing = p->concurrentKernels = p->cooperativeLaunch = 1;
  p->asyncEngineCount = 3;
  return cudaSuccess;
}

API cudaError_t cudaDeviceGetAttribute(int* value, cudaDeviceAttr attribute, int) {
  static const std::map<int, int> VALUES = {{cudaDevAttrComputeCapabilityMajor, 9},
                                            {cudaDevAttrMultiProcessorCount, 132},
                                            {cudaDevAttrWarpSize, 32},
                                            {cudaDevAttrMaxThreadsPerBlock, 1024},
                                            {cudaDevAttrMaxSharedMemoryPerBlockOptin, 232448}};
  auto found = VALUES.find(attribute);
  *value = found == VALUES.end() ? 0 : found->second;
  return cudaSuccess;
}

API cudaError_t cudaDeviceGetStreamPriorityRange(int* least, int* greatest) {
  *least = 0;
  *greatest = -5;
  return cudaSuccess;
}

API cudaError_t cudaDeviceGetPCIBusId(char* text, int size, int number) {
  snprintf(text, size, "0000:%02x:00.0", number + 1);
  return cudaSuccess;
}

API cudaError_t cudaDeviceCanAccessPeer(int* can, int, int) {
  *can = 1;
  return cudaSuccess;
}

API cudaError_t cudaDeviceEnablePeerAccess(int, unsigned) { return cudaSuccess; }

API cudaError_t cudaDeviceReset() { return cudaSuccess; }

API cudaError_t cudaDriverGetVersion(int* version) {
  *version = 13000;
  return cudaSuccess;
}

API cudaError_t cudaRuntimeGetVersion(int* version) { return cudaDriverGetVersion(version); }
