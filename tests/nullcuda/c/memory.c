// Memory: a block of the device is reserved address space that nothing writes but small copies, so 150 GB fit anywhere.
//
// Logged: MALLOC (object: address; bytes), FREE (address), PIN (address; bytes), COPY (object: target; source, bytes,
// kind, whether the host need not wait), FILL (object: target; bytes).
#include <pthread.h>
#include <sys/mman.h>
#include "nullcuda.h"

#define CAPACITY 150000000000ull
#define PAGE (1ull << 21)
#define MAX_BLOCKS (1 << 16)
#define FEW_BYTES (1 << 20)
typedef struct { char *start; size_t bytes; int device; } Block;
typedef struct { Block blocks[MAX_BLOCKS]; int count; } Blocks;
static Blocks on_device, pinned;
static uint64_t used[16];
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;

static void add(Blocks *all, void *start, size_t bytes) {
  if (all->count == MAX_BLOCKS) { fprintf(stderr, "nullcuda: too many blocks of memory\n"); abort(); }
  all->blocks[all->count++] = (Block){start, bytes, current_device()};
}
static Block *find(Blocks *all, const void *at) {
  for (Block *block = all->blocks; block < all->blocks + all->count; block++)
    if ((char *)at >= block->start && (char *)at < block->start + block->bytes) return block;
  return 0;
}
static Block take_out(Blocks *all, const void *start) {
  Block *found = find(all, start), block = found ? *found : (Block){0};
  if (found) *found = all->blocks[--all->count];
  return block;
}
static int is_reachable(const void *at) {
  pthread_mutex_lock(&lock);
  int found = find(&on_device, at) || find(&pinned, at);
  pthread_mutex_unlock(&lock);
  return found;
}

// CUDA refuses to allocate in a capture, unless the thread has relaxed its mode, as torch's allocator does.
cudaError_t cudaMalloc(void **address, size_t bytes) {
  if (forbids_unsafe_calls()) return illegal(900, 0, "cudaMalloc");
  if (used[current_device()] + bytes > CAPACITY) { cudaGetLastError(); return cudaErrorMemoryAllocation; }
  // Aligned to 2 MiB, and a guard page more than asked for.
  uintptr_t start = (uintptr_t)mmap(0, bytes + 2 * PAGE, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  *address = (void *)((start + PAGE - 1) / PAGE * PAGE);
  pthread_mutex_lock(&lock);
  add(&on_device, *address, bytes);
  used[current_device()] += bytes;
  pthread_mutex_unlock(&lock);
  note(MALLOC, 0, (uint64_t)*address, bytes, 0, 0, 0);
  return 0;
}
// It waits for the device.
cudaError_t cudaFree(void *address) {
  if (!address) return 0;
  pthread_mutex_lock(&lock);
  Block block = take_out(&on_device, address);
  used[block.device] -= block.bytes;
  pthread_mutex_unlock(&lock);
  if (block.start) munmap(block.start, block.bytes);
  note(FREE, 0, (uint64_t)address, 0, 0, 0, 0);
  note(DEVICE_SYNC, 0, 0, 0, 0, 0, 0);
  return 0;
}
cudaError_t cudaMallocAsync(void **address, size_t bytes, cudaStream_t stream) { return cudaMalloc(address, bytes); }
cudaError_t cudaFreeAsync(void *address, cudaStream_t stream) { return cudaFree(address); }
cudaError_t cudaMemGetInfo(size_t *available, size_t *total) {
  *available = CAPACITY - used[current_device()];
  *total = CAPACITY;
  return 0;
}

cudaError_t cudaHostRegister(void *address, size_t bytes, unsigned flags) {
  pthread_mutex_lock(&lock);
  add(&pinned, address, bytes);
  pthread_mutex_unlock(&lock);
  note(PIN, 0, (uint64_t)address, bytes, 0, 0, 0);
  return 0;
}
cudaError_t cudaHostUnregister(void *address) {
  pthread_mutex_lock(&lock);
  take_out(&pinned, address);
  pthread_mutex_unlock(&lock);
  return 0;
}
cudaError_t cudaHostAlloc(void **address, size_t bytes, unsigned flags) {
  *address = aligned_alloc(4096, (bytes + 4095) / 4096 * 4096);
  return cudaHostRegister(*address, bytes, flags);
}
cudaError_t cudaFreeHost(void *address) { cudaHostUnregister(address); free(address); return 0; }
cudaError_t cudaPointerGetAttributes(struct cudaPointerAttributes *found, const void *address) {
  pthread_mutex_lock(&lock);
  Block *device = find(&on_device, address), *host = find(&pinned, address);
  *found = (struct cudaPointerAttributes){
    .type = device ? cudaMemoryTypeDevice : host ? cudaMemoryTypeHost : cudaMemoryTypeUnregistered,
    .device = device ? device->device : host ? host->device : -1,
    .devicePointer = (void *)address, .hostPointer = (void *)address,
  };
  pthread_mutex_unlock(&lock);
  return 0;
}

void move_bytes(void *to, const void *from, size_t bytes) {
  if (bytes <= FEW_BYTES) memmove(to, from, bytes);
}
// A copy that has pageable memory at one end is over when the call returns: the host waits.
cudaError_t cudaMemcpyAsync(void *to, const void *from, size_t bytes, enum cudaMemcpyKind kind, cudaStream_t stream) {
  move_bytes(to, from, bytes);
  note(COPY, stream, (uint64_t)to, (uint64_t)from, bytes, kind, is_reachable(from) && is_reachable(to));
  return 0;
}
cudaError_t cudaMemcpy(void *to, const void *from, size_t bytes, enum cudaMemcpyKind kind) {
  if (forbids_unsafe_calls()) return illegal(900, 0, "cudaMemcpy");
  move_bytes(to, from, bytes);
  note(COPY, 0, (uint64_t)to, (uint64_t)from, bytes, kind, 0);
  note(STREAM_SYNC, 0, 0, 0, 0, 0, 0);
  return 0;
}
cudaError_t cudaMemsetAsync(void *to, int value, size_t bytes, cudaStream_t stream) {
  if (bytes <= FEW_BYTES) memset(to, value, bytes);
  note(FILL, stream, (uint64_t)to, bytes, 0, 0, 0);
  return 0;
}
cudaError_t cudaMemset(void *to, int value, size_t bytes) { return cudaMemsetAsync(to, value, bytes, 0); }
