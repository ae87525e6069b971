// Devices: as many H200s as NULLCUDA_DEVICES says, one without it.
#include <dlfcn.h>
#include "nullcuda.h"

static __thread int device = 0;
int current_device(void) { return device; }

cudaError_t cudaGetDeviceCount(int *count) {
  char *asked = getenv("NULLCUDA_DEVICES");
  *count = asked ? atoi(asked) : 1;
  return 0;
}
cudaError_t cudaGetDevice(int *found) { *found = device; return 0; }
cudaError_t cudaSetDevice(int wanted) { device = wanted; return 0; }
cudaError_t cudaGetDeviceProperties(struct cudaDeviceProp *p, int number) {
  *p = (struct cudaDeviceProp){
    .name = "Null H200", .totalGlobalMem = 150754820096ull, .sharedMemPerBlock = 49152, .regsPerBlock = 65536, .warpSize = 32,
    .maxThreadsPerBlock = 1024, .maxThreadsDim = {1024, 1024, 64}, .maxGridSize = {2147483647, 65535, 65535}, .major = 9,
    .multiProcessorCount = 132, .maxThreadsPerMultiProcessor = 2048, .l2CacheSize = 62914560,
    .sharedMemPerMultiprocessor = 233472, .regsPerMultiprocessor = 65536, .sharedMemPerBlockOptin = 232448,
    .textureAlignment = 512, .unifiedAddressing = 1, .canMapHostMemory = 1, .concurrentKernels = 1, .asyncEngineCount = 3,
    .memoryBusWidth = 6144,
  };
  return 0;
}
cudaError_t cudaDeviceGetAttribute(int *value, enum cudaDeviceAttr attribute, int number) {
  switch ((int)attribute) {
    case cudaDevAttrComputeCapabilityMajor: *value = 9; break;
    case cudaDevAttrComputeCapabilityMinor: *value = 0; break;
    case cudaDevAttrMultiProcessorCount: *value = 132; break;
    case cudaDevAttrMaxSharedMemoryPerBlockOptin: *value = 232448; break;
    case cudaDevAttrMaxSharedMemoryPerMultiprocessor: *value = 233472; break;
    case cudaDevAttrMaxThreadsPerBlock: *value = 1024; break;
    case cudaDevAttrWarpSize: *value = 32; break;
    case cudaDevAttrMaxGridDimX: *value = 2147483647; break;
    default: *value = 1;
  }
  return 0;
}
cudaError_t cudaDeviceGetStreamPriorityRange(int *least, int *greatest) {
  if (least) *least = 0;
  if (greatest) *greatest = -5;
  return 0;
}
cudaError_t cudaDriverGetVersion(int *version) { *version = 13000; return 0; }
cudaError_t cudaRuntimeGetVersion(int *version) { *version = 13000; return 0; }
cudaError_t cudaDeviceGetPCIBusId(char *text, int size, int number) { snprintf(text, size, "0000:00:00.%d", number); return 0; }
cudaError_t cudaDeviceCanAccessPeer(int *can, int one, int other) { *can = 0; return 0; }
cudaError_t cudaDeviceSynchronize(void) {
  if (forbids_unsafe_calls()) return illegal(900, 0, "cudaDeviceSynchronize");
  note(DEVICE_SYNC, 0, 0, 0, 0, 0, 0);
  return 0;
}

// What torch looks up in the driver: three functions are there, the rest says "not supported" (801).
static int has_primary_context(int number, unsigned *flags, int *is_active) { *flags = 0; *is_active = 1; return 0; }
static int not_supported() { return 801; }
cudaError_t cudaGetDriverEntryPointByVersion(const char *name, void **function, unsigned version, unsigned long long flags,
                                             enum cudaDriverEntryPointQueryResult *result) {
  if (!strcmp(name, "cuDevicePrimaryCtxGetState")) *function = has_primary_context;
  else if (!strcmp(name, "cuDeviceGet") || !strcmp(name, "cuDeviceGetAttribute"))
    *function = dlsym(dlopen("libcuda.so.1", RTLD_NOW), name);
  else *function = not_supported;
  if (result) *result = cudaDriverEntryPointSuccess;
  return 0;
}
