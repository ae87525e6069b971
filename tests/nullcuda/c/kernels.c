// Kernels: a launch is an entry in the log. Logged: LAUNCH (object: function; blocks), GRAPH.
#include "nullcuda.h"

typedef struct { dim3 grid, block; size_t shared_bytes; void *stream; } Configuration;
static __thread Configuration pushed;

// CUDA refuses a launch on the legacy stream while anything is captured (906), and a grid that is out of bounds.
cudaError_t launch(const void *function, dim3 grid, cudaStream_t stream) {
  if (stream == 0 && active_capture()) return illegal(906, stream, "a launch on the legacy stream");
  if (grid.x == 0 || grid.x > 2147483647u || grid.y > 65535 || grid.z > 65535) return illegal(9, stream, "a launch with such a grid");
  note(LAUNCH, stream, (uint64_t)function, (uint64_t)grid.x * grid.y * grid.z, 0, 0, 0);
  return 0;
}
// For the driver of Triton, and for ../accesses.py.
void nullcuda_launch(void *stream, uint64_t function) { launch((void *)function, (dim3){1, 1, 1}, stream); }

// What nvcc makes of `kernel<<<grid, block>>>(...)`, and of the list of a program's kernels.
unsigned __cudaPushCallConfiguration(dim3 grid, dim3 block, size_t shared_bytes, void *stream) {
  pushed = (Configuration){grid, block, shared_bytes, stream};
  return 0;
}
cudaError_t __cudaPopCallConfiguration(dim3 *grid, dim3 *block, size_t *shared_bytes, void *stream) {
  *grid = pushed.grid;
  *block = pushed.block;
  *shared_bytes = pushed.shared_bytes;
  *(void **)stream = pushed.stream;
  return 0;
}
void **__cudaRegisterFatBinary(void *binary) { static void *handle; return &handle; }
void __cudaRegisterFatBinaryEnd(void **handle) {}
void __cudaUnregisterFatBinary(void **handle) {}
char __cudaInitModule(void **handle) { return 1; }
void __cudaRegisterFunction() {}
void __cudaRegisterVar() {}
cudaError_t __cudaGetKernel(void **kernel, const void *function) { *kernel = (void *)function; return 0; }

cudaError_t __cudaLaunchKernel(void *kernel, dim3 grid, dim3 block, void **arguments, size_t shared_bytes, cudaStream_t stream) { return launch(kernel, grid, stream); }
cudaError_t cudaLaunchKernel(const void *function, dim3 grid, dim3 block, void **arguments, size_t shared_bytes, cudaStream_t stream) { return launch(function, grid, stream); }
cudaError_t cudaLaunchCooperativeKernel(const void *function, dim3 grid, dim3 block, void **arguments, size_t shared_bytes, cudaStream_t stream) { return launch(function, grid, stream); }
cudaError_t cudaLaunchKernelExC(const cudaLaunchConfig_t *configuration, const void *function, void **arguments) { return launch(function, configuration->gridDim, configuration->stream); }

cudaError_t cudaFuncGetAttributes(struct cudaFuncAttributes *found, const void *function) {
  *found = (struct cudaFuncAttributes){.maxThreadsPerBlock = 1024, .numRegs = 32, .ptxVersion = 90, .binaryVersion = 90};
  return 0;
}
cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessor(int *count, const void *function, int block, size_t shared_bytes) { *count = 2; return 0; }
cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(int *count, const void *function, int block, size_t shared_bytes, unsigned flags) { *count = 2; return 0; }
cudaError_t cudaGetSymbolAddress(void **address, const void *symbol) { static char memory[1 << 16]; *address = memory; return 0; }

cudaError_t cudaGraphInstantiateWithFlags(cudaGraphExec_t *executable, cudaGraph_t graph, unsigned long long flags) { *executable = (cudaGraphExec_t)1; return 0; }
cudaError_t cudaGraphLaunch(cudaGraphExec_t executable, cudaStream_t stream) { note(GRAPH, stream, 0, 0, 0, 0, 0); return 0; }
cudaError_t cudaGraphGetNodes(cudaGraph_t graph, cudaGraphNode_t *nodes, size_t *count) { *count = 1; return 0; }
