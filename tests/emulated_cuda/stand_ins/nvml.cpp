// NVML, as far as torch and vLLM ask it. Links no other stand-in: it is loaded where CUDA is not initialised, too.
#include <cstdio>
#include <cstdlib>

#define API extern "C" __attribute__((visibility("default")))
constexpr int NOT_SUPPORTED = 3;

struct Memory {
  unsigned long long total, free, used;
};
struct MemoryV2 {
  unsigned version;
  unsigned long long total, reserved, free, used;
};

static unsigned device_count() {
  const char* number = getenv("EMULATED_DEVICES");
  return number ? atoi(number) : 1;
}

static unsigned long long device_memory() {
  const char* bytes = getenv("EMULATED_MEMORY");
  return bytes ? atoll(bytes) : 4ull << 30;
}

API int nvmlInit() { return 0; }
API int nvmlInit_v2() { return 0; }
API int nvmlInitWithFlags(unsigned) { return 0; }
API int nvmlShutdown() { return 0; }
API const char* nvmlErrorString(int) { return "emulated"; }

API int nvmlDeviceGetCount_v2(unsigned* count) {
  *count = device_count();
  return 0;
}
API int nvmlDeviceGetCount(unsigned* count) { return nvmlDeviceGetCount_v2(count); }

API int nvmlSystemGetDriverVersion(char* text, unsigned size) {
  snprintf(text, size, "580.00");
  return 0;
}
API int nvmlSystemGetCudaDriverVersion(int* version) {
  *version = 13000;
  return 0;
}
API int nvmlSystemGetCudaDriverVersion_v2() { return NOT_SUPPORTED; }

API int nvmlDeviceGetHandleByIndex_v2(unsigned number, void** device) {
  *device = (void*)(size_t)(number + 1);
  return 0;
}
API int nvmlDeviceGetHandleByUUID(const char*, void** device) { return nvmlDeviceGetHandleByIndex_v2(0, device); }
API int nvmlDeviceGetHandleByPciBusId_v2(const char*, void** device) {
  return nvmlDeviceGetHandleByIndex_v2(0, device);
}

API int nvmlDeviceGetName(void*, char* text, unsigned size) {
  snprintf(text, size, "Emulated H100");
  return 0;
}
API int nvmlDeviceGetUUID(void* device, char* text, unsigned size) {
  snprintf(text, size, "GPU-%02zx000000-0000-0000-0000-000000000000", (size_t)device);
  return 0;
}
API int nvmlDeviceGetCudaComputeCapability(void*, int* major, int* minor) {
  *major = 9;
  *minor = 0;
  return 0;
}
API int nvmlDeviceGetMemoryInfo(void*, Memory* memory) {
  memory->total = memory->free = device_memory();
  memory->used = 0;
  return 0;
}
API int nvmlDeviceGetMemoryInfo_v2(void*, MemoryV2* memory) {
  memory->total = memory->free = device_memory();
  memory->used = memory->reserved = 0;
  return 0;
}
API int nvmlDeviceGetP2PStatus(void*, void*, int, int* status) {
  *status = 1;
  return 0;
}
API int nvmlDeviceGetComputeRunningProcesses(void*, unsigned* count, void*) {
  *count = 0;
  return 0;
}
API int nvmlDeviceGetGpuFabricInfoV() { return 0; }  // the caller's zeros: no fabric
API int nvmlDeviceGetNvLinkRemoteDeviceType() { return NOT_SUPPORTED; }
API int nvmlDeviceGetNvLinkRemotePciInfo_v2() { return NOT_SUPPORTED; }
