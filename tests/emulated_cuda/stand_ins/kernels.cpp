// Kernels are refused by name: torch's operators never come here, Python runs them.
#include <dlfcn.h>

#include <cstring>
#include <unordered_map>

#include "runtime.h"

static auto& names = *new std::unordered_map<const void*, std::string>;

static cudaError_t refuse(const void* kernel) {
  auto found = names.find(kernel);
  tell("kernel", found == names.end() ? "unknown" : found->second);
  return fail(cudaErrorNotSupported);
}

API void** __cudaRegisterFatBinary(void*) {
  static void* handle;
  return &handle;
}

API void __cudaRegisterFatBinaryEnd(void**) {}

API void __cudaUnregisterFatBinary(void**) {}

API char __cudaInitModule(void**) { return 1; }

API void __cudaRegisterVar(void**, char*, char*, const char*, int, size_t, int, int) {}

API void __cudaRegisterFunction(void**, const char* host, char*, const char* name, int, void*, void*, void*, void*,
                                int*) {
  names[host] = name;
}

API unsigned __cudaPushCallConfiguration(dim3, dim3, size_t, void*) { return 0; }

API cudaError_t __cudaPopCallConfiguration(dim3*, dim3*, size_t* shared, void* stream) {
  *shared = 0;
  *(void**)stream = nullptr;
  return cudaSuccess;
}

API cudaError_t __cudaGetKernel(void** kernel, const void* function) {
  *kernel = (void*)function;
  return cudaSuccess;
}

API cudaError_t cudaLaunchKernel(const void* kernel, dim3, dim3, void**, size_t, cudaStream_t) {
  return refuse(kernel);
}

API cudaError_t __cudaLaunchKernel(void* kernel, dim3, dim3, void**, size_t, cudaStream_t) { return refuse(kernel); }

API cudaError_t cudaLaunchCooperativeKernel(const void* kernel, dim3, dim3, void**, size_t, cudaStream_t) {
  return refuse(kernel);
}

API cudaError_t cudaLaunchKernelExC(const cudaLaunchConfig_t*, const void* kernel, void**) { return refuse(kernel); }

API cudaError_t cudaFuncGetAttributes(cudaFuncAttributes* attributes, const void*) {
  memset(attributes, 0, sizeof *attributes);
  attributes->maxThreadsPerBlock = 1024;
  attributes->binaryVersion = attributes->ptxVersion = 90;
  return cudaSuccess;
}

API cudaError_t cudaFuncSetAttribute(const void*, cudaFuncAttribute, int) { return cudaSuccess; }

API cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessor(int* blocks, const void*, int, size_t) {
  *blocks = 1;
  return cudaSuccess;
}

API cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(int* blocks, const void*, int, size_t,
                                                                       unsigned) {
  *blocks = 1;
  return cudaSuccess;
}

static int unsupported() { return 801; }  // CUDA_ERROR_NOT_SUPPORTED

API cudaError_t cudaGetDriverEntryPointByVersion(const char* name, void** function, unsigned, unsigned long long,
                                                 cudaDriverEntryPointQueryResult* result) {
  *function = dlsym(RTLD_DEFAULT, name);
  if (!*function) *function = dlsym(RTLD_DEFAULT, (std::string(name) + "_v2").c_str());
  if (!*function) *function = (void*)unsupported;
  if (result) *result = cudaDriverEntryPointSuccess;
  return cudaSuccess;
}
