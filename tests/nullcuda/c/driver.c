// libcuda.so.1, which Triton and torch look up by name: loads modules without looking at them, and logs launches.
#define _GNU_SOURCE
#include <dlfcn.h>
#include <stdlib.h>
#include <string.h>

int cuInit(unsigned flags) { return 0; }
int cuDriverGetVersion(int *version) { *version = 13000; return 0; }
int cuDeviceGetCount(int *count) { char *asked = getenv("NULLCUDA_DEVICES"); *count = asked ? atoi(asked) : 1; return 0; }
int cuDeviceGet(int *device, int ordinal) { *device = ordinal; return 0; }
int cuDeviceGetAttribute(int *value, int attribute, int device) {
  switch (attribute) {
    case 16: *value = 132; break;     // multiprocessors
    case 75: *value = 9; break;       // compute capability
    case 76: *value = 0; break;
    case 97: *value = 232448; break;  // most shared memory of a block
    default: *value = 1;
  }
  return 0;
}
int cuDevicePrimaryCtxGetState(int device, unsigned *flags, int *is_active) { *flags = 0; *is_active = 1; return 0; }
int cuCtxGetCurrent(void **context) { *context = (void *)1; return 0; }
int cuGetErrorString(int error, const char **text) { *text = "an error of the null machine's driver"; return 0; }
int cuModuleLoadData(void **module, const void *image) { *module = (void *)1; return 0; }
int cuModuleGetFunction(void **function, void *module, const char *name) { *function = strdup(name); return 0; }
int cuFuncGetAttribute(int *value, int attribute, void *function) { *value = attribute == 0 ? 1024 : attribute == 4 ? 64 : 0; return 0; }
int cuFuncSetAttribute(void *function, int attribute, int value) { return 0; }
int cuMemGetAddressRange_v2(void **base, size_t *bytes, void *address) { return 1; }

int cuLaunchKernel(void *function, unsigned gx, unsigned gy, unsigned gz, unsigned bx, unsigned by, unsigned bz, unsigned shared_bytes,
                   void *stream, void **arguments, void **extra) {
  void (*log_launch)(void *, unsigned long) = dlsym(RTLD_DEFAULT, "nullcuda_launch");
  if (log_launch) log_launch(stream, (unsigned long)function);
  return 0;
}
typedef struct { unsigned gx, gy, gz, bx, by, bz, shared_bytes; void *stream; } Configuration;
int cuLaunchKernelEx(const Configuration *c, void *function, void **arguments, void **extra) {
  return cuLaunchKernel(function, c->gx, c->gy, c->gz, c->bx, c->by, c->bz, c->shared_bytes, c->stream, arguments, extra);
}

static int not_supported() { return 801; }
int cuGetProcAddress_v2(const char *name, void **function, int version, unsigned long long flags, void *result) {
  void *found = dlsym(RTLD_DEFAULT, name);
  *function = found ? found : dlsym(dlopen("libcuda.so.1", RTLD_NOW), name);
  if (!*function) *function = not_supported;
  return 0;
}
int cuGetProcAddress(const char *name, void **function, int version, unsigned long long flags) { return cuGetProcAddress_v2(name, function, version, flags, 0); }
